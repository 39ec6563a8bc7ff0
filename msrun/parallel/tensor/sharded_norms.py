"""Norms over a last dim that ranks share: they add up one or two numbers a row.

torch gathers the whole row on every rank.  A layer norm needs its mean and variance, each one
all-reduce of a number a row; a second one for the variance, since sums of squares alone would lose
precision where the mean is large.  An RMS norm needs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from msrun.parallel import torch_compat
from msrun.parallel.collectives import all_reduce
from msrun.parallel.tensor.placements import on_mesh, part_of
from msrun.parallel.tensor.shard_functions import is_even
from msrun.parallel.torch_compat import parts_before, strided_shard


def layer_norm(
    x: DTensor,
    normalized_shape: Sequence[int],
    weight: DTensor | None = None,
    bias: DTensor | None = None,
    eps: float = 1e-5,
) -> DTensor | None:
    """Return the layer norm of `x`; None unless ranks share the one dim that it is over."""
    row = _NormedRows.of(x, normalized_shape)
    if row is None:
        return None
    centered = row.values - row.total(row.values) / row.width
    variance = row.total(centered.square()) / row.width
    return row.result(centered * torch.rsqrt(variance + eps), weight, bias)


def rms_norm(
    x: DTensor,
    normalized_shape: Sequence[int],
    weight: DTensor | None = None,
    eps: float | None = None,
) -> DTensor | None:
    """Return the RMS norm of `x`, of whole rows or of parts; None for several dims or summands."""
    row = _NormedRows.of(x, normalized_shape, may_be_whole=True)
    if row is None:
        return None
    least = torch.finfo(x.dtype).eps if eps is None else eps
    if row.is_whole:
        return row.result(functional.rms_norm(row.values, [row.width], None, least), weight, None)
    mean = row.total(row.values.square()) / row.width
    return row.result(row.values * torch.rsqrt(mean + least), weight, None)


class _NormedRows:
    """The part of each row that a rank has.

    Args:
        x: Rows, of which ranks of `axes` share the last dim.
        axes: Mesh axes that shard it.
    """

    def __init__(self, x: DTensor, axes: Sequence[int]) -> None:
        self._x, self._axes = x, axes
        local = part_of(x)
        self.values = local.to(torch.promote_types(local.dtype, torch.float32))
        self.width = x.shape[-1]
        self._group = _group(x, axes) if axes else None

    @classmethod
    def of(
        cls, x: Any, normalized_shape: Sequence[int], *, may_be_whole: bool = False
    ) -> _NormedRows | None:
        """Return the rows of `x`, if ranks share equal parts of the last dim, the one to norm."""
        if not isinstance(x, DTensor) or len(normalized_shape) != 1:
            return None
        if x.shape[-1] != normalized_shape[0] or not is_even(x):
            return None
        last = x.dim() - 1
        axes = [axis for axis, p in enumerate(x.placements) if _dim(p, x.dim()) == last]
        return cls(x, axes) if axes or may_be_whole else None

    @property
    def is_whole(self) -> bool:
        """Whether each rank has whole rows."""
        return self._group is None

    def total(self, values: Tensor) -> Tensor:
        """Return the sums of rows of `values`."""
        sums = values.sum(-1, keepdim=True)
        return sums if self._group is None else all_reduce(sums, self._group)

    def result(self, values: Tensor, weight: DTensor | None, bias: DTensor | None) -> DTensor:
        """Return `values` times weight plus bias, placed as the rows."""
        x = self._x
        # Autocast leaves norms in float32.
        is_autocast = torch.is_autocast_enabled(x.device.type)
        dtype = values.dtype if is_autocast else x.dtype
        if weight is not None:
            values = values * self._part(weight)
        if bias is not None:
            values = values + self._part(bias)
        return on_mesh(values.to(dtype), x.device_mesh, x.placements)

    def _part(self, param: DTensor) -> Tensor:
        """Return this rank's part of a weight, whose gradient is a summand over other axes."""
        wanted: list[Placement] = []
        summands: list[Placement] = []
        for axis, placement in enumerate(self._x.placements):
            parts = parts_before(placement) or 1
            own = strided_shard(0, parts) if parts > 1 else Shard(0)
            wanted.append(own if axis in self._axes else Replicate())
            is_of_rows = axis not in self._axes and not placement.is_replicate()
            summands.append(Partial() if is_of_rows else wanted[-1])
        placed = (
            param if param.placements == tuple(wanted) else param.redistribute(placements=wanted)
        )
        return part_of(placed, summands)


def _dim(placement: Placement, dims: int) -> int | None:
    """Return the dim that `placement` shards; None if it shards none."""
    if parts_before(placement) is None:
        return None
    return int(placement.dim) % dims  # type: ignore[attr-defined]


def _group(x: DTensor, axes: Sequence[int]) -> dist.ProcessGroup:
    mesh = x.device_mesh
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    names = tuple((mesh.mesh_dim_names or ())[axis] for axis in axes)
    name = "+".join(names)
    try:
        return mesh.get_group(name)  # in less time than to slice the mesh
    except KeyError:
        return torch_compat.joined(mesh[names], name).get_group()
