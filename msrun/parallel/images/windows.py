"""A part with the rows around it that windows read: rows of other ranks, and padding.

The rows of an output are divided like those of every image, so a rank knows by arithmetic which
input rows its windows read: its own, some of other ranks, and padding at the border of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from msrun.parallel.images.image_tensor import ImageTensor
from msrun.parallel.images.rows import RowMove, begin_to_receive, begin_to_send_back
from msrun.parallel.notation.image_parts import RowPiece, Span, Split, Window, pieces, split

# Rows of other ranks along one dim: the pieces before a part, and after it.
Arrived = tuple[list[Tensor], list[Tensor]]


class Reach(NamedTuple):
    """The rows of one dim that windows of this rank read.

    Args:
        move: How they get here.
        before: Rows of padding before them.
        after: And after them.
        window: The windows.
        out: The rows of the output of this rank.
    """

    move: RowMove
    before: int
    after: int
    window: Window
    out: Span

    def split(self) -> Split | None:
        """Return how the windows are split between own rows and others."""
        have = self.move.have
        return split(self.window, have[-1][1], have[self.move.rank], self.out)


def reach(x: ImageTensor, dim: int, window: Window, count: int) -> Reach:
    """Return what windows along a divided dim of `x` read, of which there are `count`."""
    axis, rows = x.axes[x.placed()[dim]], x.shape[dim]
    made = axis.spans(count)
    wanted = [window.rows(out) for out in made]
    inside: list[Span] = [(min(max(a, 0), rows), min(max(b, 0), rows)) for a, b in wanted]
    first, end = wanted[axis.rank]
    found, last = inside[axis.rank]
    plan = pieces(axis.spans(rows), tuple((span,) if span[1] > span[0] else () for span in inside))
    move = RowMove(dim, axis.group, axis.rank, axis.spans(rows), plan)
    out = made[axis.rank]
    if found >= last:  # all of it is padding
        return Reach(move, end - first, 0, window, out)
    return Reach(move, found - first, end - last, window, out)


class Extended(NamedTuple):
    """A part with the rows around it.

    Args:
        x: All of them.
        arrived: For each dim what is not of the part itself.
    """

    x: Tensor
    arrived: list[Arrived]


def extended(x: Tensor, reaches: Sequence[Reach], value: float = 0.0) -> Extended:
    """Return `x` with the rows that windows read, and padding of `value`."""
    arrived = []
    for one in reaches:
        others = begin_to_arrive(x, one.move)()
        x = _joined(x, one, others, value)
        arrived.append(others)
    return Extended(x, arrived)


def begin_to_arrive(
    x: Tensor, move: RowMove, cut: Callable[[RowPiece], Tensor] | None = None
) -> Callable[[], Arrived]:
    """Start an exchange of rows, and return what waits for it and returns those of others.

    Args:
        x: A part.
        move: Of its rows.
        cut: As of `begin_to_receive`.
    """
    if move.is_still:
        return lambda: ([], [])
    pending = begin_to_receive(x, move, cut)
    own = [at for at, piece in enumerate(move.own) if piece.source == move.rank]

    def finish() -> Arrived:
        parts = pending()
        at = own[0] if own else len(parts)
        return parts[:at], parts[at + 1 :]

    return finish


class Strips(NamedTuple):
    """A part with the rows around it along one dim, of which only strips are joined.

    Args:
        x: The part.
        one: What windows read along the dim.
        arrived: Rows of other ranks.
    """

    x: Tensor
    one: Reach
    arrived: Arrived

    def like(self) -> Tensor:
        """Return a tensor of the shape of all, in no memory."""
        shape = list(self.x.shape)
        shape[self.one.move.dim] = sum(self._lengths())
        return self.x.new_empty(1).expand(shape)

    def cut(self, move: RowMove, piece: RowPiece) -> Tensor:
        """Return rows along another dim, joined."""
        at = (move.dim, piece.first - move.first, piece.end - piece.first)
        before, after = ([part.narrow(*at) for part in side] for side in self.arrived)
        return _joined(self.x.narrow(*at), self.one, (before, after), 0.0)

    def add(
        self,
        total: Tensor,
        others: Sequence[Tensor],
        move: RowMove,
        found: Iterable[tuple[RowPiece, Tensor]],
    ) -> None:
        """Add gradients of strips to those of the part and of the rows of other ranks.

        Args:
            total: Of the part.
            others: Of the rows, in their order.
            move: Along the dim in which strips were cut.
            found: Of strips.
        """
        dim, (first, count) = self.one.move.dim, self._own()
        before = len(self.arrived[0])
        own = total.narrow(dim, first, count)
        targets = [*others[:before], own, *others[before:]]
        for piece, gradient in found:
            _, *parts, _ = gradient.split(self._lengths(), dim)
            at = (move.dim, piece.first - move.first, piece.end - piece.first)
            for target, part in zip(targets, parts, strict=True):
                target.narrow(*at).add_(part)

    def _own(self) -> tuple[int, int]:
        """Return the first own row that windows read, and how many they read."""
        move = self.one.move
        own = [piece for piece in move.own if piece.source == move.rank]
        return (own[0].first - move.first, own[0].end - own[0].first) if own else (0, 0)

    def _lengths(self) -> list[int]:
        """Return the rows of padding, others, this rank, others, and padding."""
        before, after = ([part.size(self.one.move.dim) for part in side] for side in self.arrived)
        return [self.one.before, *before, self._own()[1], *after, self.one.after]


def again(x: Tensor, reaches: Sequence[Reach], arrived: Sequence[Arrived]) -> Tensor:
    """Return what `extended` returned, from what arrived then."""
    for one, others in zip(reaches, arrived, strict=True):
        x = _joined(x, one, others, 0.0)
    return x


def _joined(x: Tensor, one: Reach, others: Arrived, value: float) -> Tensor:
    move = one.move
    own = [
        x.narrow(move.dim, p.first - move.first, p.end - p.first)
        for p in move.own
        if p.source == move.rank
    ]
    parts = [_padding(x, move.dim, one.before, value), *others[0], *own, *others[1]]
    parts.append(_padding(x, move.dim, one.after, value))
    parts = [part for part in parts if part.size(move.dim)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, move.dim)


def _padding(x: Tensor, dim: int, rows: int, value: float) -> Tensor:
    shape = list(x.shape)
    shape[dim] = rows
    return x.new_full(shape, value)


def drawn_in(gradient: Tensor, reaches: Sequence[Reach]) -> Tensor:
    """Return the gradient of a part, from that of the part with the rows around it."""
    return begin_to_draw_in(gradient, reaches)()


def begin_to_draw_in(gradient: Tensor, reaches: Sequence[Reach]) -> Callable[[], Tensor]:
    """Start the first exchange of `drawn_in`, and return what ends it and returns the result."""
    if not reaches:
        return lambda: gradient
    *others, last = reaches
    dim = last.move.dim
    gradient = gradient.narrow(dim, last.before, gradient.size(dim) - last.before - last.after)
    if not last.move.is_still:
        pending = begin_to_send_back(gradient, last.move)
        return lambda: drawn_in(pending(), others)
    return begin_to_draw_in(gradient, others)


class _Extend(Function):
    """`extended` with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reaches: Sequence[Reach], value: float) -> Tensor:
        ctx.reaches = reaches
        return extended(x, reaches, value).x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _DrawIn.apply(gradient, ctx.reaches), None, None  # type: ignore[no-untyped-call]


class _DrawIn(Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, reaches: Sequence[Reach]) -> Tensor:
        ctx.reaches = reaches
        return drawn_in(gradient, reaches).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Extend.apply(gradient, ctx.reaches, 0.0), None  # type: ignore[no-untyped-call]


def extend(x: Tensor, reaches: Sequence[Reach], value: float = 0.0) -> Tensor:
    """Return `x` with the rows that windows read."""
    if all(one.move.is_still and not (one.before or one.after) for one in reaches):
        return x
    result: Tensor = _Extend.apply(x, reaches, value)  # type: ignore[no-untyped-call]
    return result
