"""Norms over a last dim that ranks share: they add up one or two numbers a row.

torch gathers the whole row on every rank.  A layer norm needs its mean and variance: one all-gather
brings the mean and the variance of each part, and those of the row follow.  Sums of squares alone
would lose precision where the mean is large, and all-reduces of first the mean and then the
variance take twice as long.  An RMS norm needs an all-reduce of one number a row.  Backward adds up
as many numbers, in one all-reduce.

Each is one function of autograd, which keeps its input and the numbers of rows: a chain of small
functions took longer, and kept the normed rows, too.  Its backward calls functions that autograd
knows, so that gradients of gradients are right.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from msrun.parallel import torch_compat
from msrun.parallel.collectives import all_gather, all_reduce
from msrun.parallel.tensor.placements import (
    Like,
    gradient_of,
    on_mesh,
    part_in,
    part_of,
    placed_on,
)
from msrun.parallel.tensor.shard_functions import is_even
from msrun.parallel.torch_compat import parts_before, strided_shard

# Layouts that are known at a time; a program may have any number.
_ROWS_MAX = 1000

Placements = tuple[Placement, ...]


def layer_norm(
    x: DTensor,
    normalized_shape: Sequence[int],
    weight: DTensor | None = None,
    bias: DTensor | None = None,
    eps: float = 1e-5,
) -> DTensor | None:
    """Return the layer norm of `x`; None unless ranks share the one dim that it is over."""
    rows = _rows(x, normalized_shape)
    if rows is None or not rows.axes:
        return None
    return _normed(rows, x, weight, bias, eps)


def rms_norm(
    x: DTensor,
    normalized_shape: Sequence[int],
    weight: DTensor | None = None,
    eps: float | None = None,
) -> DTensor | None:
    """Return the RMS norm of `x`, of whole rows or of parts; None for several dims or summands."""
    rows = _rows(x, normalized_shape)
    if rows is None:
        return None
    least = torch.finfo(x.dtype).eps if eps is None else eps
    if rows.axes:
        return _normed(rows, x, weight, None, least, is_centered=False)
    values = functional.rms_norm(_wide(part_of(x)), [rows.width], None, least)
    dtype = values.dtype if torch.is_autocast_enabled(x.device.type) else x.dtype
    if weight is not None:
        values = values * part_of(_placed(weight, rows), rows.summands)
    return on_mesh(values.to(dtype), x.device_mesh, x.placements)


def _rows(x: Any, normalized_shape: Sequence[int]) -> _SharedRows | None:
    """Return the rows of `x`, if ranks have equal parts of the last dim, the one to norm."""
    if not isinstance(x, DTensor) or len(normalized_shape) != 1:
        return None
    if x.shape[-1] != normalized_shape[0] or not is_even(x):
        return None
    return _rows_of(x.placements, x.dim(), x.shape[-1])


class _SharedRows(NamedTuple):
    """The part of each row that a rank has.

    Args:
        axes: Mesh axes that shard the last dim.
        width: Of a whole row.
        placed: Placements of the rows.
        of_weight: Of a weight that multiplies them.
        summands: Of its gradient, which is a summand over axes that shard other dims.
    """

    axes: tuple[int, ...]
    width: int
    placed: Placements
    of_weight: Placements
    summands: Placements


@functools.lru_cache(_ROWS_MAX)
def _rows_of(placed: Placements, dims: int, width: int) -> _SharedRows:
    axes = tuple(axis for axis, p in enumerate(placed) if _dim(p, dims) == dims - 1)
    wanted: list[Placement] = []
    summands: list[Placement] = []
    for axis, placement in enumerate(placed):
        parts = parts_before(placement) or 1
        own = strided_shard(0, parts) if parts > 1 else Shard(0)
        wanted.append(own if axis in axes else Replicate())
        is_of_rows = axis not in axes and not placement.is_replicate()
        summands.append(Partial() if is_of_rows else wanted[-1])
    return _SharedRows(axes, width, placed, tuple(wanted), tuple(summands))


def _normed(
    rows: _SharedRows,
    x: DTensor,
    weight: DTensor | None,
    bias: DTensor | None,
    eps: float,
    *,
    is_centered: bool = True,
) -> DTensor:
    """Return the rows of `x` divided by their length, times weight plus bias, placed as they are.

    Args:
        rows: Which part of them a rank has.
        x: All rows.
        weight: Of the norm.
        bias: Of the norm.
        eps: Is added to the mean of squares.
        is_centered: Whether their mean is subtracted first.
    """
    params = [None if param is None else _placed(param, rows) for param in (weight, bias)]
    norm = _Norm(
        rows=rows,
        mesh=x.device_mesh,
        group=_group(x, rows.axes),
        eps=eps,
        is_centered=is_centered,
        # Autocast leaves norms in float32.
        is_autocast=torch.is_autocast_enabled(x.device.type),
    )
    found: DTensor = _NormRows.apply(norm, x, *params)  # type: ignore[no-untyped-call]
    return found


def _placed(param: DTensor, rows: _SharedRows) -> DTensor:
    is_right = param.placements == rows.of_weight
    return param if is_right else param.redistribute(placements=rows.of_weight)


class _Norm(NamedTuple):
    """How rows are normed; see `_normed`.

    Args:
        rows: The rows.
        mesh: Their mesh.
        group: Ranks that share a row.
        eps: Is added to the mean of squares.
        is_centered: Whether the mean is subtracted.
        is_autocast: Whether the result stays in float32.
    """

    rows: _SharedRows
    mesh: DeviceMesh
    group: dist.ProcessGroup
    eps: float
    is_centered: bool
    is_autocast: bool

    def mean(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the means of rows of each of `values`, which ranks add up at once."""
        sums = [each.sum(-1, keepdim=True) for each in values]
        total = all_reduce(torch.cat(sums, -1) if len(sums) > 1 else sums[0], self.group)
        means: tuple[Tensor, ...] = (total / self.rows.width).split(1, -1)
        return means

    def normed(self, values: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return normed rows of `values`, their mean and one over their length without it."""
        if not self.is_centered:
            (square,) = self.mean(values.square())
            scale = torch.rsqrt(square + self.eps)
            return values * scale, None, scale
        own = values.mean(-1, keepdim=True)
        centered = values - own  # `var_mean` takes four times as long on a CPU
        pair = torch.stack([own, centered.square().mean(-1, keepdim=True)])
        means, inside = all_gather(pair.unsqueeze(0), self.group).unbind(1)
        mean = means.mean(0)
        between = (means - mean).square()
        scale = torch.rsqrt((inside + between).mean(0) + self.eps)
        return torch.addcmul((own - mean) * scale, centered, scale), mean, scale


class _NormRows(Function):
    @staticmethod
    def forward(
        ctx: Any, norm: _Norm, x: DTensor, weight: DTensor | None, bias: DTensor | None
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.bias = norm, None if bias is None else (Like.of(bias), bias.dtype)
        values, mean, scale = norm.normed(_wide(part_of(x)))
        ctx.save_for_backward(x, weight, mean, scale)
        dtype = values.dtype if norm.is_autocast else x.dtype
        if weight is not None:
            values = values * part_of(weight)
        if bias is not None:
            values = values + part_of(bias)
        return placed_on(values.to(dtype), norm.mesh, norm.rows.placed)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        norm, rows = ctx.norm, ctx.norm.rows
        x, weight, mean, scale = ctx.saved_tensors
        _, *is_wanted = ctx.needs_input_grad
        found: list[Tensor | None] = [None, None, None]
        part, values = _wide(part_in(gradient, rows.placed)), _wide(part_of(x))
        if torch.is_grad_enabled():  # it is to be differentiated again
            values, _, scale = norm.normed(values)
        else:
            values = values * scale if mean is None else (values - mean) * scale
        if is_wanted[2]:
            like, dtype = ctx.bias
            sums = _total(part).to(dtype)
            found[2] = gradient_of(sums, rows.summands, like)
        if is_wanted[1]:
            sums = _total(part * values).to(weight.dtype)
            found[1] = gradient_of(sums, rows.summands, Like.of(weight))
        if is_wanted[0]:
            if weight is not None:
                part = part * part_of(weight, rows.summands)
            *middle, along = norm.mean(*[part] * norm.is_centered, part * values)
            part = part - values * along
            for each in middle:
                part = part - each
            found[0] = gradient_of((part * scale).to(x.dtype), rows.placed, Like.of(x))
        return None, *found


def _total(values: Tensor) -> Tensor:
    """Return the sum of the rows of `values`."""
    return values.reshape(-1, values.shape[-1]).sum(0)


def _wide(values: Tensor) -> Tensor:
    """Return `values` in float32, or a wider type."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


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
