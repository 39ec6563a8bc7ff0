"""Axis names of each tensor dim, as configurations write them, and the placements of torch.

Torch lists one placement for each mesh axis; we list axis names for each tensor dim, the first
of several names being the most significant.
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
from msrun.parallel.config import Dim
from msrun.parallel.notation.dims import axes_of_dims, dim_of
from msrun.parallel.torch_compat import parts_before, strided_shard


def placements(dims: Sequence[Dim], mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """Return the placements of a tensor of `ndim` dims whose dims are cut as `dims` says.

    Args:
        dims: Axis names of each dim; one `...` stands for as many whole dims as fit.
        mesh: Its axes have those names; axes that are not named replicate.
        ndim: Dims of the tensor.

    Raises:
        ConfigError: The dims are not as many, or an axis is unknown or stands there twice.
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


def on_mesh(part: Tensor, mesh: DeviceMesh, placed: Sequence[Placement]) -> DTensor:
    """Return the tensor of which `part` lies here; gradients of gradients flow through, too.

    torch alone drops those where the first gradient is still a sum over ranks.

    Args:
        part: Of the size that the placements say, on every rank.
        mesh: Where the whole lies.
        placed: How; nothing of it is a pending sum.
    """
    tensor = DTensor.from_local(part, mesh, placed, run_check=False)
    if tensor.requires_grad:
        tensor.register_hook(partial(_as_placed, tuple(placed)))
    return tensor


def _as_placed(placed: tuple[Placement, ...], gradient: DTensor) -> DTensor:
    """Return the gradient as the tensor lies."""
    return gradient if gradient.placements == placed else gradient.redistribute(placements=placed)


def dims_of(placed: Sequence[Placement], mesh: DeviceMesh, ndim: int) -> list[Dim]:
    """Return the axis names of each of `ndim` dims: the inverse of `placements`.

    Raises:
        ConfigError: No axis names say it: a sum over ranks is pending, or the cut is none that
            axes in some order make.
    """
    names = mesh.mesh_dim_names or ()
    orders: list[list[int]] = [[] for _ in range(ndim)]
    # From the last axis on, as a split parts counts only the axes that follow.
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
    """Return where in `order` so many parts, `parts`, have been made before."""
    for position in range(len(order) + 1):
        if math.prod(mesh.size(index) for index in order[:position]) == parts:
            return position
    raise ConfigError(f"{placement}: no order of the axes after it makes {parts} parts")
