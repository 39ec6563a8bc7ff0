"""Gives each rank rows of a divided image that other ranks have: halos, and all that moves rows.

One operator moves the rows of a dim, an all-to-all in which most pairs of ranks send nothing.  So
its order cannot differ between ranks, rows may come from behind the next rank, and a recomputation
can save its result.  The gradient of a row that was received goes back to the rank that has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from msrun.parallel.notation.image_parts import RowPiece, Spans, pieces
from msrun.parallel.torch_compat import begin_collective


class RowMove(NamedTuple):
    """Rows that move along one dim.

    Args:
        dim: The dim.
        group: Ranks of its axis.
        rank: Index of this rank among them.
        have: Rows of each rank.
        plan: What each rank gets.
    """

    dim: int
    group: dist.ProcessGroup
    rank: int
    have: Spans
    plan: tuple[tuple[RowPiece, ...], ...]

    @property
    def first(self) -> int:
        """First row of this rank."""
        return self.have[self.rank][0]

    @property
    def own(self) -> tuple[RowPiece, ...]:
        """What this rank gets."""
        return self.plan[self.rank]

    @property
    def is_still(self) -> bool:
        """Whether every rank gets just what it has."""
        return all(
            len(got) == 1 and got[0] == (rank, *self.have[rank])
            for rank, got in enumerate(self.plan)
        )

    @property
    def is_local(self) -> bool:
        """Whether every rank gets only rows that it has."""
        return all(piece.source == rank for rank, got in enumerate(self.plan) for piece in got)

    def from_others(self, rank: int, source: int) -> list[RowPiece]:
        """Return what `rank` gets from another rank."""
        return [] if rank == source else [p for p in self.plan[rank] if p.source == source]


def move_rows(
    x: Tensor,
    dim: int,
    ranks: tuple[dist.ProcessGroup, int],
    have: Spans,
    needs: tuple[Spans, ...],
) -> Tensor:
    """Return the rows along `dim` that this rank needs; all ranks of the axis call it.

    Args:
        x: This rank's rows.
        dim: Non-negative.
        ranks: Those of the axis, and the index of this one.
        have: Rows of each rank.
        needs: Rows that each rank needs.
    """
    move = RowMove(dim, *ranks, have, pieces(have, needs))
    if move.is_still:
        return x
    if move.is_local:
        parts = [_rows(x, move, piece) for piece in move.own]
        return parts[0] if len(parts) == 1 else torch.cat(parts or [x.narrow(dim, 0, 0)], dim)
    moved: Tensor = _MoveRows.apply(x, move)  # type: ignore[no-untyped-call]
    return moved


class _MoveRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: RowMove) -> Tensor:
        ctx.move = move
        return torch.cat(received(x, move) or [x.narrow(move.dim, 0, 0)], move.dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _ReturnRows.apply(gradient, ctx.move), None  # type: ignore[no-untyped-call]


class _ReturnRows(Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, move: RowMove) -> Tensor:
        ctx.move = move
        return sent_back(gradient, move)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _MoveRows.apply(gradient, ctx.move), None  # type: ignore[no-untyped-call]


def received(x: Tensor, move: RowMove) -> list[Tensor]:
    """Return the pieces that this rank gets, in order."""
    return begin_to_receive(x, move)()


def begin_to_receive(
    x: Tensor, move: RowMove, cut: Callable[[RowPiece], Tensor] | None = None
) -> Callable[[], list[Tensor]]:
    """Start `received`, and return what waits for it and returns its result.

    Args:
        x: This rank's rows.
        move: How they move.
        cut: Returns rows of this rank that are sent; None takes them from `x`, of which otherwise
            the shape alone counts.
    """
    ranks = range(len(move.have))
    sent = [_lengths(move.from_others(rank, move.rank)) for rank in ranks]
    got = [_lengths(move.from_others(move.rank, rank)) for rank in ranks]
    away = [piece for rank in ranks for piece in move.from_others(rank, move.rank)]
    parts = [cut(piece) if cut else _rows(x, move, piece) for piece in away]
    rows_sent, rows_got = map(sum, sent), map(sum, got)
    arrived = _begin_exchange(x, move, parts, [*rows_sent], [*rows_got])

    def finish() -> list[Tensor]:
        queues = [
            iter(_unpacked(x, move.dim, flat, sizes))
            for flat, sizes in zip(arrived(), got, strict=True)
        ]
        return [
            _rows(x, move, piece) if piece.source == move.rank else next(queues[piece.source])
            for piece in move.own
        ]

    return finish


def sent_back(gradient: Tensor, move: RowMove) -> Tensor:
    """Return the gradient of this rank's rows, from that of what all ranks got."""
    return begin_to_send_back(gradient, move)()


def begin_to_send_back(gradient: Tensor, move: RowMove) -> Callable[[], Tensor]:
    """Start `sent_back`, and return what waits for it and returns its result."""
    own: list[tuple[RowPiece, Tensor]] = []
    others = []
    parts = gradient.split(_lengths(move.own), move.dim)
    for piece, part in zip(move.own, parts, strict=True):
        if piece.source == move.rank:
            own.append((piece, part))
        else:
            others.append(part)
    returned = begin_to_return(others, move, gradient)
    first, end = move.have[move.rank]

    def finish() -> Tensor:
        if [(piece.first, piece.end) for piece, _ in own] == [(first, end)]:
            total = own[0][1].clone()
        else:
            shape = list(gradient.shape)
            shape[move.dim] = end - first
            total = gradient.new_zeros(shape)
            for piece, part in own:
                _rows(total, move, piece).add_(part)
        add_rows(total, move, returned())
        return total

    return finish


def begin_to_return(
    gradients: Sequence[Tensor], move: RowMove, like: Tensor
) -> Callable[[], list[tuple[RowPiece, Tensor]]]:
    """Start to send gradients of the rows that this rank got from others to where they are from.

    What is returned waits, and returns gradients of rows that this rank has.

    Args:
        gradients: Of the pieces from other ranks, in order.
        move: How they got here.
        like: A tensor of the same sizes in other dims.
    """
    ranks = range(len(move.have))
    away: list[list[Tensor]] = [[] for _ in ranks]
    pieces_got = (piece for piece in move.own if piece.source != move.rank)
    for piece, gradient in zip(pieces_got, gradients, strict=True):
        away[piece.source].append(gradient)
    back = [move.from_others(rank, move.rank) for rank in ranks]
    sizes = [sum(part.size(move.dim) for part in parts) for parts in away]
    parts = [part for of_rank in away for part in of_rank]
    arrived = _begin_exchange(like, move, parts, sizes, [sum(_lengths(p)) for p in back])

    def finish() -> list[tuple[RowPiece, Tensor]]:
        return [
            pair
            for found, flat in zip(back, arrived(), strict=True)
            for pair in zip(found, _unpacked(like, move.dim, flat, _lengths(found)), strict=True)
        ]

    return finish


def add_rows(total: Tensor, move: RowMove, found: Iterable[tuple[RowPiece, Tensor]]) -> None:
    """Add to rows of `total`, which has those of this rank."""
    for piece, part in found:
        _rows(total, move, piece).add_(part)


def _rows(x: Tensor, move: RowMove, piece: RowPiece) -> Tensor:
    """Return rows of `x`, which has those of this rank."""
    return x.narrow(move.dim, piece.first - move.first, piece.end - piece.first)


def _begin_exchange(
    x: Tensor, move: RowMove, parts: list[Tensor], sent: list[int], got: list[int]
) -> Callable[[], tuple[Tensor, ...]]:
    """Return what waits for all that arrives and returns it, flat, by rank.

    `sent` and `got` count rows by rank.
    """
    row = _row(x, move.dim)
    flat = torch.cat([x.new_empty(0), *(part.reshape(-1) for part in parts)])
    sizes = [rows * row for rows in got]
    arrived = begin_collective(
        "all_to_all_single", flat, sizes, [rows * row for rows in sent], group=move.group
    )
    return lambda: arrived().split(sizes)


def _unpacked(x: Tensor, dim: int, flat: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return rows that were sent one after the other, with so many of them in each piece."""
    shape = list(x.shape)
    row = _row(x, dim)
    found = []
    for size, part in zip(sizes, flat.split([size * row for size in sizes]), strict=True):
        shape[dim] = size
        found.append(part.view(shape))
    return found


def _row(x: Tensor, dim: int) -> int:
    """Return the numbers of one row; of a tensor without rows, too."""
    return math.prod(size for at, size in enumerate(x.shape) if at != dim)


def _lengths(found: Sequence[RowPiece]) -> list[int]:
    return [piece.end - piece.first for piece in found]
