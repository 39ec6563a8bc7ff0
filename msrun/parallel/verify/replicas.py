"""Whether ranks that have copies of a gradient have the same one.

What is gathered on rank 0 of a tensor that every rank has is the copy of rank 0.  Another rank may
have computed something else, by a hook of the script for one, and would train another model from
then on.  So each rank computes two numbers of each of its gradients, its norm and its product with
numbers that depend on the place, and ranks with copies compare them: two small collectives for each
group of ranks, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS
from msrun.parallel.exchange.messages import gather_all
from msrun.parallel.layout import EXPERT_COPIES
from msrun.parallel.local import is_sharded, local_part
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS
from msrun.parallel.rank_context import RankContext
from msrun.parallel.uneven_rows.rows import rows_of
from msrun.parallel.verify.comparison import Gap

# Axes of the meshes of some tensors -> the axis that they divide.
_WITHIN = {
    "dp_shard": DATA_AXIS,
    "dp_replicate": DATA_AXIS,
    EXPERT_COPIES: DATA_AXIS,
    EXPERT_AXIS: DATA_AXIS,
}
_STEP = 12.9898  # of the angles whose sines are the numbers of the places


class _Found(msgspec.Struct, frozen=True):
    """What ranks have in other values: by name the difference, the norm, and the elements."""

    gaps: dict[str, tuple[float, float, int]]


def between_replicas(
    context: RankContext, named: Sequence[tuple[str, Parameter, Tensor]]
) -> dict[str, Gap]:
    """Return, on all ranks, by how much copies of gradients differ; all ranks call it alike.

    Args:
        context: This rank.
        named: Name, parameter and gradient, in the same order on all ranks of a stage.
    """
    numbers = [_numbers(gradient) for _, _, gradient in named]
    rows: dict[dist.ProcessGroup, list[int]] = {}
    for index, (_, param, _) in enumerate(named):
        for group in _groups(context, param):
            rows.setdefault(group, []).append(index)
    own: dict[str, tuple[float, float, int]] = {}
    for group, indices in rows.items():
        most = torch.stack([numbers[index] for index in indices])
        least = most.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        for index, off, norm in zip(indices, (most - least).tolist(), most.tolist(), strict=True):
            name, _, gradient = named[index]
            if any(off) and (name not in own or own[name][0] < max(off)):
                own[name] = max(off), norm[0], gradient.numel()
    found: dict[str, Gap] = {}
    for each in gather_all(_Found(own), _Found, None, context.device):
        for name, (off, norm, count) in each.gaps.items():
            if name not in found or found[name].gap < off:
                found[name] = Gap(
                    name=name, gap=off, norm=norm, count=count, factor=1.0, is_between_ranks=True
                )
    return found


def with_replicas(gaps: Sequence[Gap], replicas: dict[str, Gap]) -> list[Gap]:
    """Return `gaps`, in place of those between ranks that are larger."""
    pairs = ((gap, replicas.get(gap.name, gap)) for gap in gaps)
    return [other if other.gap > gap.gap else gap for gap, other in pairs]


def _numbers(gradient: Tensor) -> Tensor:
    """Return two numbers of this rank's part of a gradient."""
    part = local_part(gradient).detach()
    part = part.to_dense() if part.is_sparse else part
    part = torch.view_as_real(part) if part.is_complex() else part
    flat = part.reshape(-1).double().nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
    places = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64)
    return torch.stack([flat.norm(), flat @ (places * _STEP).sin()])


def _groups(context: RankContext, param: Parameter) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that have copies of what this rank has of a parameter."""
    axes = {axis for axis, size in context.layout.axes.items() if size > 1}
    axes.discard(PIPELINE_AXIS)
    groups = []
    if rows := rows_of(param):
        axes.discard(rows.axis)
    elif is_sharded(param):
        mesh = param.device_mesh
        placed = enumerate(param.placements)
        groups = [
            mesh.get_group(dim) for dim, p in placed if p.is_replicate() and mesh.size(dim) > 1
        ]
        # An axis that the tensor's own mesh lacks has a copy of it on every rank.
        names = mesh.mesh_dim_names
        axes -= {_WITHIN.get(name, name) for name in names} if names else axes.copy()
    return groups + [context.group(axis) for axis in context.layout.axes if axis in axes]
