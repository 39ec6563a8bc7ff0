"""Translates between axis names of each tensor dim, as configurations have them, and placements.

torch lists one placement for each mesh axis; configurations list axis names for each tensor dim,
the most significant first.  torch applies placements in mesh order, so if a later mesh axis is the
more significant one of a dim, the earlier axis needs a strided shard: it splits each part that the
later axis made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from msrun.errors import ConfigError
from msrun.parallel.copies import turns
from msrun.parallel.notation.dims import axes_of_dims, dim_of
from msrun.parallel.settings.plan_rules import Dim
from msrun.parallel.torch_compat import parts_before, strided_shard


def placements(dims: Sequence[Dim], mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """Return the placements of a tensor of `ndim` dims that is sharded as `dims` says.

    Args:
        dims: Axis names of each dim; one `...` stands for as many unsharded dims as fit.
        mesh: Mesh with axes of these names; the tensor is replicated over axes without a name here.
        ndim: Dims of the tensor.

    Raises:
        ConfigError: `dims` has another length, or an axis is unknown or named twice.
    """
    names = mesh.mesh_dim_names or ()
    placed: list[Placement] = [Replicate()] * mesh.ndim
    for dim, axes in enumerate(axes_of_dims(dims, ndim, names)):
        before: list[int] = []
        for index in map(names.index, axes):
            parts = math.prod(mesh.size(other) for other in before if other > index)
            placed[index] = strided_shard(dim, parts) if parts > 1 else Shard(dim)
            before.append(index)
    return tuple(placed)


def packed(placed: Sequence[Placement], parts: int) -> tuple[Placement, ...]:
    """Return `placed` for a tensor whose sharded dim holds `parts` equal tensors, one by one.

    A rank then has its shard of each of them, such as its heads of query, key and value.
    """
    if parts == 1:
        return tuple(placed)
    return tuple(strided_shard(p.dim, parts) if isinstance(p, Shard) else p for p in placed)


def packed_axis(placed: Sequence[Placement]) -> int | None:
    """Return the mesh axis of `packed` in `placed`; None if nothing is packed.

    Where a later axis shards the same dim, a strided shard stands for the order of the axes.
    """
    for axis, placement in enumerate(placed):
        if (parts_before(placement) or 1) > 1:
            dim = getattr(placement, "dim", None)
            later = placed[axis + 1 :]
            if not any(parts_before(p) and getattr(p, "dim", None) == dim for p in later):
                return axis
    return None


def on_mesh(part: Tensor, mesh: DeviceMesh, placed: Sequence[Placement]) -> DTensor:
    """Return the DTensor whose part on this rank is `part`; gradients of gradients are right, too.

    torch alone drops gradients of gradients where the first gradient is partial, without an error
    if others flow.

    Args:
        part: This rank's part, of the size that the placements give.
        mesh: Mesh of the tensor.
        placed: Placements; none is partial.
    """
    tensor = DTensor.from_local(part, mesh, placed, run_check=False)
    if tensor.requires_grad:
        # Other copies compute in backward, too, while the gradient is on its way.
        tensor.register_hook(partial(_as_placed, tuple(placed), turns.is_in_copy()))
    return tensor


def _as_placed(placed: tuple[Placement, ...], is_async: bool, gradient: DTensor) -> DTensor:  # noqa: FBT001
    """Return the gradient in the placements of the tensor."""
    if gradient.placements == placed:
        return gradient
    return gradient.redistribute(placements=placed, async_op=is_async)


def dims_of(placed: Sequence[Placement], mesh: DeviceMesh, ndim: int) -> list[Dim]:
    """Return the axis names of each of `ndim` dims: the inverse of `placements`.

    Raises:
        ConfigError: Axis names cannot express it: a placement is partial, or a strided shard fits
            no order of the axes.
    """
    names = mesh.mesh_dim_names or ()
    orders: list[list[int]] = [[] for _ in range(ndim)]
    # From the last axis on: a strided shard counts only parts of later axes.
    for index in reversed(range(mesh.ndim)):
        placement = placed[index]
        if placement.is_replicate():
            continue
        parts = parts_before(placement)
        if parts is None:
            raise ConfigError(f"{placement} over axis {names[index]} has no axis names")
        order = orders[getattr(placement, "dim", 0) % ndim]
        order.insert(_position(order, parts, mesh, placement), index)
    return [dim_of(tuple(names[index] for index in order)) for order in orders]


def _position(order: list[int], parts: int, mesh: DeviceMesh, placement: Placement) -> int:
    """Return the position in `order` before which the axes make `parts` parts."""
    for position in range(len(order) + 1):
        if math.prod(mesh.size(index) for index in order[:position]) == parts:
            return position
    raise ConfigError(f"{placement}: no order of the axes after it makes {parts} parts")
