"""Tokens on their way to the experts of other ranks and back, with their gradients.

A call of experts has rows of hidden states, and of each row `k` experts with a weight.  Each pair
of a row and an expert is sent as a row of its own:

1. `route` sorts the pairs by expert.  Ranks own runs of experts, so this is also by rank.  Ranks
   tell each other how many rows of each expert they will send: one all-to-all of a number for each
   expert, and the only wait of the host, which needs the sizes of what follows.
2. `taken` puts the rows in that order; `sent` exchanges them, and their weights, by one all-to-all.
3. The experts of the rank compute.  `sent_back` brings the results back the same way.
4. `summed` adds up the `k` results of each row.

The gradient of an exchange is the exchange the other way round, so it has as many bytes.  The
gradients of `taken` and `summed` are each other: each row is written once, so sums have one order
and results are the same in every run, which they are not with `index_add_` on accelerators.

All ranks of the group call these functions equally often, forward and backward.  A rank that gets
no row still takes part: its tensors have 0 rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from msrun.parallel.collectives import apply_function
from msrun.parallel.torch_compat import functional_collective

# Ranks, the rows that go to each, and the rows that come from each.
_Peers = tuple[dist.ProcessGroup, list[int], list[int]]


class Route(NamedTuple):
    """Where the rows of one call of experts go.

    Args:
        order: Of the pairs of a row and an expert, sorted by expert.
        choices: Experts of each row.
        rows: Rows of the call.
        sent: Pairs that go to each rank.
        received: Pairs that come from each rank.
        experts: Expert of each received pair, counted from the first of this rank.
    """

    order: Tensor
    choices: int
    rows: int
    sent: list[int]
    received: list[int]
    experts: Tensor


def route(index: Tensor, experts: int, group: dist.ProcessGroup) -> Route:
    """Return the way of each pair, after telling the other ranks of it.

    Args:
        index: Experts of each row, of shape (rows, k).  Pairs with the number `experts`, one more
            than there are, are dropped: routers with a capacity mark them so.
        experts: Experts of all ranks.
        group: Ranks that share them.
    """
    ranks = group.size()
    own = experts // ranks
    flat = index.reshape(-1)
    # The host needs no number of this before `tolist` below.
    counts = flat.new_zeros(experts + 1, dtype=torch.long).scatter_add_(
        0, flat.long(), torch.ones_like(flat, dtype=torch.long)
    )[:experts]
    rows = [own] * ranks
    arriving = functional_collective("all_to_all_single", counts, rows, rows, group=group)
    order = flat.argsort(stable=True)
    sizes = torch.stack([counts.view(ranks, own).sum(1), arriving.view(ranks, own).sum(1)])
    sent, received = sizes.tolist()
    of_pairs = torch.arange(own, device=flat.device).repeat(ranks)
    return Route(
        order=order[: sum(sent)],
        choices=index.size(1),
        rows=index.size(0),
        sent=sent,
        received=received,
        experts=of_pairs.repeat_interleave(arriving, output_size=sum(received)),
    )


def taken(x: Tensor, way: Route) -> Tensor:
    """Return the row of `x` of each pair, in the order in which pairs are sent."""
    found: Tensor = apply_function(_Taken, x, way.order, way.rows, way.choices)
    return found


def summed(x: Tensor, way: Route) -> Tensor:
    """Return the sum of the pairs of each row, given in the order in which they were sent."""
    found: Tensor = apply_function(_Summed, x, way.order, way.rows, way.choices)
    return found


def sent(
    x: Tensor, weights: Tensor, way: Route, group: dist.ProcessGroup, share: float
) -> tuple[Tensor, Tensor]:
    """Return the rows and weights of pairs that other ranks send.

    Args:
        x: Row of each pair that this rank sends.
        weights: Weight of each.
        way: Of the pairs.
        group: Ranks that share the experts.
        share: Factor that gradients have got by `sent_back`, which they lose here.
    """
    peers = group, way.sent, way.received
    if weights.element_size() % x.element_size():
        return apply_function(_Sent, peers, 1 / share, x), apply_function(
            _Sent, peers, 1 / share, weights
        )
    arrived, factors = apply_function(_SentTogether, peers, 1 / share, x, weights)
    return arrived, factors


def sent_back(x: Tensor, way: Route, group: dist.ProcessGroup, share: float) -> Tensor:
    """Return the rows of the pairs that this rank has sent, after other ranks computed them.

    Args:
        x: Results.
        way: Of the pairs.
        group: Ranks that share the experts.
        share: Factor of the gradients that the experts get.  There are fewer rows than weights.
    """
    found: Tensor = apply_function(_Sent, (group, way.received, way.sent), share, x)
    return found


class _Taken(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, rows: int, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.sizes = rows, choices
        return x.index_select(0, order // choices if choices > 1 else order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return apply_function(_Summed, gradient, order, *ctx.sizes), None, None, None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, rows: int, choices: int) -> Tensor:
        # A recomputation ends with the last tensor that it has to save.  This one comes after the
        # exchange, so no rank ends before, such as one whose experts got no row.
        ctx.save_for_backward(order)
        ctx.sizes = rows, choices
        room = x.new_empty if len(order) == rows * choices else x.new_zeros
        pairs = room(rows * choices, *x.shape[1:]).index_copy_(0, order, x)
        return pairs.view(rows, choices, *x.shape[1:]).sum(1) if choices > 1 else pairs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return apply_function(_Taken, gradient, order, *ctx.sizes), None, None, None


class _Sent(Function):
    @staticmethod
    def forward(ctx: Any, peers: _Peers, factor: float, x: Tensor) -> Tensor:
        group, away, here = peers
        ctx.back, ctx.factor = (group, here, away), factor
        return functional_collective("all_to_all_single", x.contiguous(), here, away, group=group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _times(apply_function(_Sent, ctx.back, 1.0, gradient), ctx.factor)


class _SentTogether(Function):
    """As `_Sent` for rows with a number each, whose bits are further columns of the rows."""

    @staticmethod
    def forward(
        ctx: Any, peers: _Peers, factor: float, x: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        group, away, here = peers
        ctx.back, ctx.factor = (group, here, away), factor
        packed = torch.cat([x, weights.unsqueeze(1).view(x.dtype)], 1)
        arrived = functional_collective("all_to_all_single", packed, here, away, group=group)
        width = x.size(1)
        rows, bits = arrived[:, :width].contiguous(), arrived[:, width:].contiguous()
        return rows, bits.view(weights.dtype).squeeze(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_weights: Tensor) -> tuple[Tensor | None, ...]:
        both = apply_function(_SentTogether, ctx.back, 1.0, gradient, of_weights.contiguous())
        return None, None, *(_times(part, ctx.factor) for part in both)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor
