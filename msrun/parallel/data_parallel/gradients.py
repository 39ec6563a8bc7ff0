"""Clipping of gradients by their global norm, of plain and sharded parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from msrun.parallel.local import is_sharded, local_gradient

Groups = tuple[dist.ProcessGroup, ...]


def clip_gradients(
    params: Iterable[Parameter],
    max_norm: float,
    *,
    unreduced: Mapping[Parameter, dist.ProcessGroup] | None = None,
    counted_elsewhere: Collection[Parameter] = (),
    pipeline: tuple[dist.ProcessGroup, torch.device] | None = None,
) -> Tensor:
    """Scale the gradients of `params` to a global 2-norm of at most `max_norm`; return the norm.

    Like `torch.nn.utils.clip_grad_norm_`, but over all ranks: every element of the model counts
    once, on whichever rank it is.

    Args:
        params: Parameters of this rank.
        max_norm: Largest norm that is left as it is.
        unreduced: Parameters that each rank of a group has for itself; all of them count.
        counted_elsewhere: Parameters that another pipeline stage counts.
        pipeline: Ranks of the other pipeline stages, and the device of this one.
    """
    trained = [param for param in params if param.requires_grad]
    norm = _global_norm(
        [p for p in trained if p not in set(counted_elsewhere)], unreduced or {}, pipeline
    )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # The factor is at most 1 and applied without a condition on the norm, for which the host would
    # wait for the device.
    for param in trained:
        if (gradient := local_gradient(param)) is not None:
            gradient.mul_(scale.to(gradient.device))
    return norm


def _global_norm(
    params: Iterable[Parameter],
    unreduced: Mapping[Parameter, dist.ProcessGroup],
    pipeline: tuple[dist.ProcessGroup, torch.device] | None,
) -> Tensor:
    """Return the 2-norm over all ranks.

    Squares are summed on the rank for all parameters that the same groups shard, then all-reduced
    over these groups: few collectives, and none over ranks that hold copies.  A parameter without
    a gradient counts as 0 and still takes part, since it may have one on other ranks.
    """
    squares: dict[tuple[Groups, torch.device], list[Tensor]] = {}
    for param in params:
        groups = _sharding_groups(param) + ((unreduced[param],) if param in unreduced else ())
        square = _square(param)
        squares.setdefault((groups, square.device), []).append(square)
    total = torch.zeros(())
    for (groups, _), parts in squares.items():
        part = torch.stack(parts).sum()
        for group in groups:
            dist.all_reduce(part, group=group)
        total = total.to(part.device) + part
    if pipeline is not None:
        group, device = pipeline
        # Stages may have parameters of different types, or on the host alone, but must reduce in
        # one type on one device; HCCL has no float64.
        dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        common_total = total.to(device, dtype)
        dist.all_reduce(common_total, group=group)
        total = common_total.to(total.dtype)
    return total.sqrt()


def _square(param: Parameter) -> Tensor:
    """Return the squared norm of this rank's part of the gradient of `param`."""
    gradient = local_gradient(param)
    # Squares of bfloat16 or float16 would lose most digits in a sum.
    dtype = torch.promote_types(param.dtype, torch.float32)
    if gradient is None:
        return torch.zeros((), dtype=dtype, device=param.device)
    # A row may stand several times in a sparse gradient; the norm is that of the sum.
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=dtype)
    return norm.square()


def _sharding_groups(param: Parameter) -> Groups:
    """Return the groups over which `param` is sharded."""
    if not is_sharded(param):
        return ()
    mesh = param.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(param.placements)
        if not placement.is_replicate()
    )
