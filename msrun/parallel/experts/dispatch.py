"""Tokens on their way to the experts of other ranks and back, with their gradients.

A call of experts has rows of hidden states, and of each row `k` experts with a weight.  Each pair
of a row and an expert is sent as a row of its own:

1. `route` sorts the pairs by expert.  Ranks own runs of experts, so this is also by rank.  Ranks
   tell each other how many rows of each expert they will send: one all-to-all of a number for each
   expert, and the only wait of the host, which needs the sizes of what follows.
2. `taken` puts the rows in that order; `sent` exchanges them, and their weights, by one all-to-all.
3. The experts of the rank compute.  Before that a shared expert does (`shared_path`), while rows
   travel.  `sent_back` brings the results back the same way.
4. `summed` adds up the `k` results of each row.

Where the rows are many bytes, each rank's experts are two pieces with exchanges of their own: the
rows of the second travel while the first computes, and the results of the first while the second
does.  So do their gradients (`travel`).  Each expert is in one piece, so its weights are read once.

The gradient of an exchange is the exchange the other way round, so it has as many bytes.  The
gradients of `taken` and `summed` are each other: each row is written once, so sums have one order
and results are the same in every run, which they are not with `index_add_` on accelerators.

All ranks of the group call these functions equally often, forward and backward.  A rank that gets
no row still takes part: its tensors have 0 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from msrun.parallel.collectives import apply_function
from msrun.parallel.experts.travel import travelling
from msrun.parallel.torch_compat import functional_collective

# From these bytes of a rank's rows on, an exchange between nodes takes longer than to begin the
# work of the experts a second time.
PIECES_FROM = 8 * 2**20


class ExpertPiece(NamedTuple):
    """Where the rows for some experts of each rank go.

    Args:
        size: Number of these experts on this rank, which follow those of the piece before.
        sent: Pairs that go to each rank.
        received: Pairs that come from each rank.
        experts: Expert of each received pair, counted from the first of this piece.
    """

    size: int
    sent: list[int]
    received: list[int]
    experts: Tensor


class Route(NamedTuple):
    """Where the rows of one call of experts go.

    Args:
        order: Of the pairs of a row and an expert, sorted by piece and expert.
        choices: Experts of each row.
        rows: Rows of the call.
        pieces: One after the other.
        agreed: The number that all ranks have offered; 0 if they have not the same.
    """

    order: Tensor
    choices: int
    rows: int
    pieces: list[ExpertPiece]
    agreed: int

    def split(self, pairs: Tensor) -> tuple[Tensor, ...]:
        """Return the part of each piece of what has a row for each pair that is sent."""
        if len(self.pieces) == 1:
            return (pairs,)
        parts: tuple[Tensor, ...] = pairs.split([sum(piece.sent) for piece in self.pieces])
        return parts


def route(
    index: Tensor, experts: int, group: dist.ProcessGroup, row: int, *, offered: int = 0
) -> Route:
    """Return the way of each pair, after telling the other ranks of it.

    Args:
        index: Experts of each row, of shape (rows, k).  Pairs with the number `experts`, one more
            than there are, are dropped: routers with a capacity mark them so.
        experts: Experts of all ranks.
        group: Ranks that share them.
        row: Bytes of a row.
        offered: A number that counts if all ranks have it.
    """
    ranks = group.size()
    own = experts // ranks
    flat = index.reshape(-1)
    # The host needs no number of this before `tolist` below.
    counts = flat.new_zeros(experts + 1, dtype=torch.long).scatter_add_(
        0, flat.long(), torch.ones_like(flat, dtype=torch.long)
    )[:experts]
    # All ranks have to agree on the pieces, so each also learns of how many bytes the others send.
    beside = [counts.new_full((ranks, 1), number) for number in (len(flat) * row, offered)]
    told = torch.cat([counts.view(ranks, own), *beside], 1)
    lengths = [told.size(1)] * ranks
    heard = functional_collective("all_to_all_single", told.view(-1), lengths, lengths, group=group)
    arriving = heard.view(told.shape)
    first = own - own // 2
    sums = [told[:, :first], told[:, first:own], arriving[:, :first], arriving[:, first:own]]
    columns = [*(x.sum(1) for x in sums), *arriving[:, own:].unbind(1)]
    *numbers, most, offers = torch.stack(columns).tolist()
    if max(most) < PIECES_FROM or own == 1:
        sizes, numbers = [own], [_added(*numbers[:2]), _added(*numbers[2:])]
        order = flat.argsort(stable=True)
    else:
        sizes, numbers = [first, own - first], [numbers[0], numbers[2], numbers[1], numbers[3]]
        order = _by_piece(flat, (ranks, own), first).argsort(stable=True)
    pieces, begin = [], 0
    for size, sent_, received in zip(sizes, numbers[::2], numbers[1::2], strict=True):
        of_pairs = torch.arange(size, device=flat.device).repeat(ranks)
        counted = arriving[:, begin : begin + size].reshape(-1)
        numbered = of_pairs.repeat_interleave(counted, output_size=sum(received))
        pieces.append(ExpertPiece(size, sent_, received, numbered))
        begin += size
    return Route(
        order=order[: sum(sum(piece.sent) for piece in pieces)],
        choices=index.size(1),
        rows=index.size(0),
        pieces=pieces,
        agreed=offered if {offered} == {*offers} else 0,
    )


def _added(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _by_piece(flat: Tensor, shape: tuple[int, int], first: int) -> Tensor:
    """Return the place of each pair's expert, where the first experts of all ranks come first."""
    ranks, own = shape
    numbers = torch.arange(ranks * own, device=flat.device).view(shape)
    order = torch.cat([numbers[:, :first].reshape(-1), numbers[:, first:].reshape(-1)])
    places = torch.full((ranks * own + 1,), ranks * own, device=flat.device)  # of dropped pairs
    places[order] = numbers.view(-1)
    return places[flat.long()]


def taken(x: Tensor, way: Route) -> Tensor:
    """Return the row of `x` of each pair, in the order in which pairs are sent."""
    found: Tensor = apply_function(_Taken, x, way.order, way.rows, way.choices)
    return found


def summed(parts: Sequence[Tensor], way: Route) -> Tensor:
    """Return the sum of the pairs of each row, given for each piece as they were sent."""
    found: Tensor = apply_function(_Summed, way.order, way.rows, way.choices, *parts)
    return found


def sent(
    x: Tensor, weights: Tensor, piece: ExpertPiece, group: dist.ProcessGroup, share: float
) -> Callable[[], tuple[Tensor, ...]]:
    """Begin to send, and return what waits for the rows and weights that other ranks send.

    Args:
        x: Row of each pair that this rank sends.
        weights: Weight of each.
        piece: Of the pairs.
        group: Ranks that share the experts.
        share: Factor that gradients have got by `sent_back`, which they lose here.
    """
    peers = group, piece.sent, piece.received
    is_packed = weights.element_size() % x.element_size() == 0
    return travelling(peers, 1 / share, x, weights, is_packed=is_packed)


def sent_back(
    x: Tensor, piece: ExpertPiece, group: dist.ProcessGroup, share: float
) -> Callable[[], tuple[Tensor, ...]]:
    """Begin to send back, and return what waits for the rows of the pairs that this rank has sent.

    Args:
        x: Results.
        piece: Of the pairs.
        group: Ranks that share the experts.
        share: Factor of the gradients that the experts get.  There are fewer rows than weights.
    """
    return travelling((group, piece.received, piece.sent), share, x)


class _Taken(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, rows: int, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.sizes = rows, choices
        return x.index_select(0, order // choices if choices > 1 else order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return apply_function(_Summed, order, *ctx.sizes, gradient), None, None, None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, order: Tensor, rows: int, choices: int, *parts: Tensor) -> Tensor:
        # A recomputation ends with the last tensor that it has to save.  This one comes after the
        # exchange, so no rank ends before, such as one whose experts got no row.
        ctx.save_for_backward(order)
        ctx.sizes, ctx.lengths = (rows, choices), [len(part) for part in parts]
        x = parts[0]
        room = x.new_empty if len(order) == rows * choices else x.new_zeros
        pairs = room(rows * choices, *x.shape[1:])
        for places, part in zip(order.split(ctx.lengths), parts, strict=True):
            pairs.index_copy_(0, places, part)
        return pairs.view(rows, choices, *x.shape[1:]).sum(1) if choices > 1 else pairs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        pairs = apply_function(_Taken, gradient, order, *ctx.sizes)
        return None, None, None, *pairs.split(ctx.lengths)
