"""A convolution of a part of an image, whose windows read rows of other ranks around it.

For the backward pass it keeps the part, which the layer before keeps too, and the few rows that
arrived; a copy of all would cost the memory that the division saves.

A convolution is linear in its input.  So large parts are not joined with what is around them: own
rows are convolved with zeros in place of the others, while these are on their way, and a small
convolution computes what the others add to few rows of the output.  The gradients of the input and
of the weights are such sums too.  With two such dims, the rows of others along the second have
those along the first around them, so the corners are in these few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from msrun.parallel.autocast.casts import wide
from msrun.parallel.images.rows import add_rows, begin_to_return
from msrun.parallel.images.windows import (
    Arrived,
    Reach,
    Strips,
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
# Divided dims in which own rows are convolved alone.
_PARTED_MAX = 2
_Parted = tuple[Reach, Split]


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
    parted: list[_Parted] = []
    for one in reversed(reaches if is_large else ()):
        cut = one.split()
        if cut is None or len(parted) == _PARTED_MAX:
            break
        parted.insert(0, (one, cut))
    if not parted:
        found = _Convolve.apply(x, weight, bias, reaches, options)  # type: ignore[no-untyped-call]
    else:
        others = reaches[: len(reaches) - len(parted)]
        found = _ConvolveParted.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, others, parted, options
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
    """Adds up what own rows and those of others give in the last divided dim, or the last two.

    Rows of others in the last dim are strips that have those of the dim before around them.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - as of autograd
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        reaches: Sequence[Reach],
        parted: Sequence[_Parted],
        options: Options,
    ) -> Tensor:
        joined = extended(x, reaches)
        x_all = joined.x
        (first, cut), *rest = parted
        pending = begin_to_arrive(x_all, first.move)
        out = _padded(options, parted).convolution(x_all, weight, bias)
        arrived = [pending()]
        later = None
        if rest:
            strips, move = Strips(x_all, first, arrived[0]), rest[0][0].move
            later = begin_to_arrive(strips.like(), move, partial(strips.cut, move))
        _add_borders(out, (first, cut), arrived[0], weight, _padded(options, rest))
        if later:
            arrived.append(later())
            _add_borders(out, rest[0], arrived[1], weight, options)
        _keep(ctx, (x, weight, bias), [*joined.arrived, *arrived])
        ctx.reaches, ctx.parted, ctx.options = reaches, parted, options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, bias), arrived = _kept(ctx)
        parted, options = ctx.parted, ctx.options
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        others, arrived = arrived[: len(ctx.reaches)], arrived[len(ctx.reaches) :]
        x = again(x, ctx.reaches, others)
        needs = [needs_x, needs_weight, False]
        (first, _), *rest = parted
        strips = Strips(x, first, arrived[0])
        of_kernels, returned = [], None
        for one, came in zip(rest, arrived[1:], strict=True):
            away, found = _of_borders(gradient, one, came, weight, (options, needs))
            of_kernels += found
            if needs_x and not one[0].move.is_still:
                returned = begin_to_return(away, one[0].move, strips.like())
        away, found = _of_borders(
            gradient, parted[0], arrived[0], weight, (_padded(options, rest), needs)
        )
        of_kernels += found
        is_sent = needs_x and not first.move.is_still
        pending = begin_to_return(away, first.move, x) if is_sent and not rest else None
        # All the rest is computed while rows are on their way back.
        needs = [needs_x, needs_weight, bool(needs_bias and bias is not None)]
        own = _padded(options, parted)
        of_x, of_weight, of_bias = own.gradients(gradient, x, weight, needs)
        for border, dim, of_kernel in of_kernels:
            if of_weight is not None and of_kernel is not None:
                _kernels(border, of_weight, dim).add_(of_kernel)
        if returned:
            strips.add(of_x, away, rest[0][0].move, returned())
        if is_sent:
            pending = pending or begin_to_return(away, first.move, x)
            add_rows(of_x, first.move, pending())
        return (
            None if of_x is None else drawn_in(of_x, ctx.reaches),
            of_weight,
            of_bias,
            None,
            None,
            None,
        )


def _padded(options: Options, parted: Sequence[_Parted]) -> Options:
    """Return the options with zeros in place of rows of others."""
    for one, cut in parted:
        options = options.padded(one.move.dim, cut.padding)
    return options


def _add_borders(
    out: Tensor, parted: _Parted, arrived: Arrived, weight: Tensor, options: Options
) -> None:
    """Add to an output what rows of others give."""
    one, cut = parted
    dim = one.move.dim
    for border, parts in _borders(cut, arrived):
        rows, kernels = _read(border, parts, dim), _kernels(border, weight, dim)
        _of(border, out, dim).add_(options.convolution(rows, kernels, None))


def _of_borders(
    gradient: Tensor,
    parted: _Parted,
    arrived: Arrived,
    weight: Tensor,
    how: tuple[Options, list[bool]],
) -> tuple[list[Tensor], list[tuple[HaloWindows, int, Tensor | None]]]:
    """Return the gradients of the rows of others, and those of the weights that read them."""
    (one, cut), (options, needs) = parted, how
    dim = one.move.dim
    away: list[Tensor] = []
    of_kernels = []
    for border, parts in _borders(cut, arrived):
        rows, kernels = _read(border, parts, dim), _kernels(border, weight, dim)
        of_rows, of_kernel, _ = options.gradients(_of(border, gradient, dim), rows, kernels, needs)
        of_kernels.append((border, dim, of_kernel))
        if of_rows is not None:
            of_parts = _resized(of_rows, dim, -border.before, -border.after)
            away += of_parts.split([part.size(dim) for part in parts], dim)
    return away, of_kernels


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
