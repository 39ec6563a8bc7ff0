"""A convolution of a part of an image, whose windows read rows of other ranks around it.

For the backward pass it keeps the part, which the layer before keeps too, and the few rows that
arrived; a copy of all would cost the memory that the division saves.

A convolution is linear in its input.  So large parts are not joined with what is around them: own
rows are convolved with zeros in place of the others, while these are on their way, and a small
convolution computes what the others add to few rows of the output.  The gradients of the input and
of the weights are such sums too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from msrun.parallel.autocast.casts import wide
from msrun.parallel.images.rows import RowMove, begin_to_return
from msrun.parallel.images.windows import (
    Arrived,
    Reach,
    again,
    begin_to_arrive,
    begin_to_draw_in,
    drawn_in,
    extended,
)
from msrun.parallel.notation.image_parts import HaloWindows, Split

# Numbers of a part for each of the weights from which on two convolutions are faster than copies:
# measured on a CPU, with 21 by 16 %, and not with 3.
_LARGE = 4


class Options(NamedTuple):
    """Options of a convolution, for each dim of the image."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def padded(self, dim: int, rows: int) -> Options:
        """Return the options with so many rows of padding in a dim of the input."""
        padding = [*self.padding]
        padding[dim - 2] = rows
        return self._replace(padding=padding)

    def convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of `x`."""
        return torch.convolution(
            x,
            weight,
            bias,
            self.stride,
            self.padding,
            self.dilation,
            False,  # noqa: FBT003
            [0] * len(self.stride),
            self.groups,
        )

    def gradients(self, gradient: Tensor, x: Tensor, weight: Tensor, needs: list[bool]) -> Any:
        """Return the gradients of `x`, weight and bias; None for those that are not needed."""
        return torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            [weight.size(0)],
            self.stride,
            self.padding,
            self.dilation,
            False,  # noqa: FBT003
            [0] * len(self.stride),
            self.groups,
            needs,
        )


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, reaches: Sequence[Reach], options: Options
) -> Tensor:
    """Return the convolution of a part.

    Args:
        x: The part.
        weight: As of torch.
        bias: As of torch.
        reaches: What windows read, for each divided dim.
        options: Without padding in these dims.
    """
    # A small convolution reads about all weights, for which a copy of a small part takes less time.
    # Narrow numbers are joined too: a sum of rounded ones would be rounded more often than alone.
    is_large = x.numel() > _LARGE * weight.numel() and x.dtype == wide(x)
    parted = reaches[-1].split() if reaches and is_large else None
    if parted is None:
        found = _Convolve.apply(x, weight, bias, reaches, options)  # type: ignore[no-untyped-call]
    else:
        *others, last = reaches
        found = _ConvolveParted.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, others, (last.move, parted), options
        )
    result: Tensor = found
    return result


class _Convolve(Function):
    """Joins the part and the rows around it."""

    @staticmethod
    def forward(  # noqa: PLR0917 - as of autograd
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        reaches: Sequence[Reach],
        options: Options,
    ) -> Tensor:
        found = extended(x, reaches)
        _keep(ctx, (x, weight, bias), found.arrived)
        ctx.reaches, ctx.options = reaches, options
        return options.convolution(found.x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, bias), arrived = _kept(ctx)
        options: Options = ctx.options
        x = again(x, ctx.reaches, arrived)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_x = of_weight = of_bias = None
        if needs_x:
            here, _, _ = options.gradients(gradient, x, weight, [True, False, False])
            of_x = begin_to_draw_in(here, ctx.reaches)
        # The gradient of the weights is computed while rows are on their way back.
        if needs_weight or needs_bias:
            if gradient.size(-1) == 1 and options.stride[-1] > 1:
                # Of these, oneDNN adds up bfloat16 numbers that nothing wrote.
                gradient, x, weight = (one.to(wide(one)) for one in (gradient, x, weight))
            needs = [False, needs_weight, bool(needs_bias and bias is not None)]
            _, of_weight, of_bias = options.gradients(gradient, x, weight, needs)
        return of_x and of_x(), of_weight, of_bias, None, None


class _ConvolveParted(Function):
    """Adds up what own rows and those of others give in the last divided dim."""

    @staticmethod
    def forward(  # noqa: PLR0917 - as of autograd
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        reaches: Sequence[Reach],
        last: tuple[RowMove, Split],
        options: Options,
    ) -> Tensor:
        move, parted = last
        found = extended(x, reaches)
        pending = begin_to_arrive(found.x, move)
        out = options.padded(move.dim, parted.padding).convolution(found.x, weight, bias)
        arrived = pending()
        for border, parts in _borders(parted, arrived):
            rows, kernels = _read(border, parts, move.dim), _kernels(border, weight, move.dim)
            _of(border, out, move.dim).add_(options.convolution(rows, kernels, None))
        _keep(ctx, (x, weight, bias), [*found.arrived, arrived])
        ctx.reaches, ctx.last, ctx.options = reaches, last, options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, bias), (*others, arrived) = _kept(ctx)
        (move, parted), options = ctx.last, ctx.options
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        away, of_kernels = [], []
        for border, parts in _borders(parted, arrived):
            rows, kernels = _read(border, parts, move.dim), _kernels(border, weight, move.dim)
            part, needs = _of(border, gradient, move.dim), [needs_x, needs_weight, False]
            of_rows, of_kernel, _ = options.gradients(part, rows, kernels, needs)
            of_kernels.append((border, of_kernel))
            if of_rows is not None:
                of_parts = _resized(of_rows, move.dim, -border.before, -border.after)
                away += of_parts.split([one.size(move.dim) for one in parts], move.dim)
        x = again(x, ctx.reaches, others)
        pending = begin_to_return(away, move, x) if needs_x and not move.is_still else None
        # All the rest is computed while rows are on their way back.
        options = options.padded(move.dim, parted.padding)
        needs = [needs_x, needs_weight, bool(needs_bias and bias is not None)]
        of_x, of_weight, of_bias = options.gradients(gradient, x, weight, needs)
        for border, of_kernel in of_kernels:
            if of_weight is not None:
                _kernels(border, of_weight, move.dim).add_(of_kernel)
        if pending:
            pending(of_x)
        return (
            None if of_x is None else drawn_in(of_x, ctx.reaches),
            of_weight,
            of_bias,
            None,
            None,
            None,
        )


def _keep(ctx: Any, factors: tuple[Tensor | None, ...], arrived: Sequence[Arrived]) -> None:
    """Keep what a backward pass reads."""
    ctx.save_for_backward(*factors, *(part for pair in arrived for side in pair for part in side))
    ctx.counts = [tuple(map(len, pair)) for pair in arrived]


def _kept(ctx: Any) -> tuple[tuple[Tensor, ...], list[Arrived]]:
    x, weight, bias, *flat = ctx.saved_tensors
    left = iter(flat)
    arrived = [
        ([next(left) for _ in range(before)], [next(left) for _ in range(after)])
        for before, after in ctx.counts
    ]
    return (x, weight, bias), arrived


def _borders(parted: Split, arrived: Arrived) -> list[tuple[HaloWindows, list[Tensor]]]:
    """Return the borders that there are, and the rows of others that they read."""
    sides = zip((parted.before, parted.after), arrived, strict=True)
    return [(border, parts) for border, parts in sides if border]


def _read(border: HaloWindows, parts: list[Tensor], dim: int) -> Tensor:
    rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return _resized(rows, dim, border.before, border.after)


def _resized(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Return `x` with zeros before and after it; negative numbers take rows away."""
    if not (before or after):
        return x
    return functional.pad(x, [0] * (2 * (x.dim() - 1 - dim)) + [before, after])


def _kernels(border: HaloWindows, weight: Tensor, dim: int) -> Tensor:
    return weight.narrow(dim, border.kernel, border.kernels)


def _of(border: HaloWindows, out: Tensor, dim: int) -> Tensor:
    return out.narrow(dim, border.first, border.rows)
