"""Attention around a ring: keys and values travel from rank to rank, queries stay.

Theory of operation.  Softmax over all keys is put together from blocks of keys: a block gives its
output and the logarithm of the sum of the exponentials of its scores (`lse`), and two blocks make
one with weights `exp(lse - joint lse)`.  So a rank needs the keys of one other rank at a time.  The
next block is on its way while this one is computed.

With the `lse` of all keys, a block's weights in the backward pass are `exp(scores - lse)` at once,
so the gradients of each block are exact and only add up.  Those of keys and values travel on with
them and arrive at their owner after the last step.

Balance.  With `is_causal` the last rank would have n times the work of the first.  So before the
first step ranks exchange halves of their parts: of 2 n chunks in order rank r computes r and
2 n - 1 - r, and each step costs all of them the same.  Outputs go back the same way.  The model
itself sees consecutive tokens: positions are a range, and a cut into parts stays one.

Types.  Queries, keys and values that autocast or the model has in bfloat16 travel so; scores,
softmax statistics, outputs and gradients are added up in float32, and gradients travel so.

Bytes that a rank sends: forward (n - 1) (K + V), backward (n - 1) (K + V) + n (K + V); with
`is_causal` also up to Q + K + V + O for the halves, forward and backward.

Sources: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023;
Dao, "FlashAttention-2", 2023 (backward from `lse`); Brandon et al., "Striped Attention", 2023, and
Zhu's zigzag order for the balance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from msrun.parallel.autocast.casts import uncast, wide
from msrun.parallel.collectives import all_gather
from msrun.parallel.context.attention import Attention, near_keys, seen
from msrun.parallel.torch_compat import functional_collective

_TOKENS = 2
# Scores that are in memory at once, for each head of each sample: rows of queries times keys.
_SCORES_MAX = 1 << 20


def around(ask: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention of (samples, heads, tokens of this rank, width), around the ring."""
    keys = None if ask.keys is None else all_gather(ask.keys, ask.group, -1)
    keys = keys if ask.rows is None else ask.rows
    if keys is not None and keys.dtype == torch.bool:
        added = torch.zeros(keys.shape, dtype=wide(query), device=keys.device)
        keys = added.masked_fill(~keys, -math.inf)
    tensors = [query, key, value]
    if ask.is_causal:
        tensors = [_apply(_Halves, x, ask.group, False) for x in tensors]  # noqa: FBT003
    scale = 1 / math.sqrt(query.shape[-1]) if ask.scale is None else ask.scale
    numbers = ask.documents and ask.documents.of_tokens
    output = _apply(_Ring, *tensors, keys, numbers, ask, scale)
    return _apply(_Halves, output, ask.group, True) if ask.is_causal else output  # noqa: FBT003


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


class _Halves(Function):
    """Exchange halves of the parts between order of tokens and balanced order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, is_back: bool) -> Tensor:  # noqa: FBT001
        ctx.group, ctx.is_back = group, is_back
        return _exchange_halves(x, group, is_back=is_back)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange_halves(gradient, ctx.group, is_back=not ctx.is_back), None, None


def chunks_of(rank: int, ranks: int, *, is_causal: bool) -> tuple[int, ...]:
    """Return the numbers of the chunks whose queries `rank` computes, in order."""
    return (rank, 2 * ranks - 1 - rank) if is_causal else (rank,)


def _exchange_halves(x: Tensor, group: dist.ProcessGroup, *, is_back: bool) -> Tensor:
    """Return the halves of this rank in balanced order, or the way back.

    One all-to-all in which most pairs of ranks send nothing.
    """
    ranks, rank = group.size(), group.rank()
    ordered = [(2 * at, 2 * at + 1) for at in range(ranks)]
    balanced = [chunks_of(at, ranks, is_causal=True) for at in range(ranks)]
    source, target = (balanced, ordered) if is_back else (ordered, balanced)
    halves = dict(zip(source[rank], x.chunk(2, _TOKENS), strict=True))
    sent = [[half for half in source[rank] if half in target[at]] for at in range(ranks)]
    received = [[half for half in source[at] if half in target[rank]] for at in range(ranks)]
    size = x.numel() // 2
    flat = torch.cat([halves[half].reshape(-1) for part in sent for half in part])
    arrived = functional_collective(
        "all_to_all_single",
        flat,
        [size * len(part) for part in received],
        [size * len(part) for part in sent],
        group=group,
    ).split(size)
    found = dict(zip((half for part in received for half in part), arrived, strict=True))
    shape = x.chunk(2, _TOKENS)[0].shape
    return torch.cat([found[half].view(shape) for half in target[rank]], _TOKENS)


class _Block(NamedTuple):
    """Queries of some chunk, and keys that they see.

    Args:
        rows: Where the queries are in this rank's part.
        columns: Where the keys are in the part that arrived.
        is_diagonal: Whether queries see only keys up to their own place.
        first: Number of the first of these keys in the sequence.
        start: Number of the first of the queries in the sequence.
    """

    rows: slice
    columns: slice
    is_diagonal: bool
    first: int
    start: int


def blocks_of(rank: int, source: int, ranks: int, tokens: int, *, is_causal: bool) -> list[_Block]:
    """Return the blocks that `rank` computes with the keys of `source`, of parts of `tokens`."""
    mine = chunks_of(rank, ranks, is_causal=is_causal)
    theirs = chunks_of(source, ranks, is_causal=is_causal)
    size = tokens // len(mine)
    return [
        _Block(
            slice(at * size, (at + 1) * size),
            slice(of * size, (of + 1) * size),
            is_causal and chunk == other,
            other * size,
            chunk * size,
        )
        for at, chunk in enumerate(mine)
        for of, other in enumerate(theirs)
        if not is_causal or other <= chunk
    ]


def _blocks(ask: Attention, source: int, key: Tensor) -> list[_Block]:
    """Return the blocks that this rank computes with keys such as `key`, but of `source`."""
    group = ask.group
    return blocks_of(
        group.rank(), source, group.size(), key.shape[_TOKENS], is_causal=ask.is_causal
    )


class _Ring(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - of a Function
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor | None,
        numbers: Tensor | None,
        ask: Attention,
        scale: float,
    ) -> Tensor:
        output = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=wide(query))
        lse = output.new_full(query.shape[:-1], -math.inf)
        for source, (k, v) in _travelling((key, value), ask.group):
            for block in _blocks(ask, source, key):
                for rows, columns, hidden in _pieces(ask, block, keys, numbers, query):
                    with uncast(query):  # scores are as wide as what they are added up to
                        scores = _scores(query[:, :, rows], k[:, :, columns], scale, hidden)
                        _join(output[:, :, rows], lse[:, :, rows], scores, v[:, :, columns])
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, keys, numbers, result, lse)
        ctx.how = ask, scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keys, numbers, output, lse = ctx.saved_tensors
        ask, scale = ctx.how
        kind = wide(query)
        delta = (gradient.to(kind) * output.to(kind)).sum(-1, keepdim=True)
        of_query = torch.zeros_like(query, dtype=kind)
        sums = [torch.zeros_like(x, dtype=kind) for x in (key, value)]
        for source, (k, v) in _travelling((key, value), ask.group):
            for block in _blocks(ask, source, key):
                for rows, columns, hidden in _pieces(ask, block, keys, numbers, query):
                    part = (query[:, :, rows], k[:, :, columns], v[:, :, columns])
                    seen = (lse[:, :, rows], delta[:, :, rows], gradient[:, :, rows].to(kind))
                    with uncast(query):
                        found = _gradients(part, seen, scale, hidden)
                    of_query[:, :, rows] += found[0]
                    sums[0][:, :, columns] += found[1]
                    sums[1][:, :, columns] += found[2]
            # Gradients follow their keys, and after the last step go home.
            sums = _Transfer(sums, ask.group).wait()
        of_inputs = (x.to(query.dtype) for x in (of_query, *sums))
        return (*of_inputs, None, None, None, None)


class _Transfer:
    """Tensors on their way to the next rank of a ring, and those from the one before."""

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        ranks, rank = group.size(), group.rank()
        before, behind = ((rank + step) % ranks for step in (-1, 1))
        self._shapes = [x.shape for x in tensors]
        self._sent = torch.cat([x.reshape(-1) for x in tensors])
        self._received = torch.empty_like(self._sent)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, group_peer=behind),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=before),
            ]
        )

    def wait(self) -> list[Tensor]:
        """Return what arrived."""
        for work in self._works:
            work.wait()
        parts = self._received.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _travelling(
    tensors: tuple[Tensor, Tensor], group: dist.ProcessGroup
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield each rank of the ring and its tensors, this one first; the next are under way."""
    ranks, rank = group.size(), group.rank()
    here = list(tensors)
    for step in range(ranks):
        transfer = _Transfer(here, group) if step + 1 < ranks else None
        yield (rank - step) % ranks, here
        if transfer:
            here = transfer.wait()


def _pieces(
    ask: Attention, block: _Block, keys: Tensor | None, numbers: Tensor | None, query: Tensor
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield queries, keys and what is added to their scores, a bounded number at a time.

    Args:
        ask: The attention.
        block: Queries and keys.
        keys: What is added to the scores of all keys, for all queries or for those of this rank.
        numbers: Of the document of each token in the sequence.
        query: Of this rank.
    """
    start, stop = block.rows.start, block.rows.stop
    width = block.columns.stop - block.columns.start
    size = max(1, _SCORES_MAX // max(width, 1))
    for first in range(start, stop, size):
        last = min(first + size, stop)
        own = range(block.start + first - start, block.start + last - start)
        end = own.stop if block.is_diagonal else block.first + width
        near = near_keys(ask, own, range(block.first, end))
        if not near:
            continue
        at = slice(near.start, near.stop)
        added = None if keys is None else keys[..., at]
        if added is not None and added.shape[_TOKENS] > 1:
            added = added[:, :, first:last]
        if numbers is not None:
            of_rows = numbers[:, own.start : own.stop]
            others = of_rows[:, None, :, None] != numbers[:, None, None, at]
            added = _hidden(added, others)
        if block.is_diagonal or ask.distance is not None:
            added = _hidden(added, ~seen(ask, own, near, query.device))
        moved = block.columns.start - block.first
        yield slice(first, last), slice(near.start + moved, near.stop + moved), added


def _hidden(added: Tensor | None, others: Tensor) -> Tensor:
    """Return what is added to scores, with -inf for the keys of `others`."""
    base = torch.zeros(others.shape, device=others.device) if added is None else added
    return base.masked_fill(others, -math.inf)


def _grouped(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return (samples, heads of keys, queries of each, tokens, width), and keys to multiply by."""
    return query.unflatten(1, (key.shape[1], -1)), key.unsqueeze(2)


def _scores(query: Tensor, key: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    """Return scores of (samples, heads, queries, keys)."""
    queries, keys = _grouped(query.to(wide(query)), key.to(wide(key)))
    scores = (queries @ keys.mT).flatten(1, 2) * scale
    return scores if hidden is None else scores + hidden.to(scores)


def _join(output: Tensor, lse: Tensor, scores: Tensor, value: Tensor) -> None:
    """Add a block of keys to the output and `lse` so far, in place."""
    own = scores.logsumexp(-1)
    joint = torch.logaddexp(lse, own)
    # Of a query that has seen no key yet, and sees none here.
    base = joint.masked_fill(joint == -math.inf, 0.0)
    weights = (scores - base.unsqueeze(-1)).exp()
    grouped, values = _grouped(weights, value.to(weights.dtype))
    output.mul_((lse - base).exp().unsqueeze(-1)).add_((grouped @ values).flatten(1, 2))
    lse.copy_(joint)


def _gradients(
    part: tuple[Tensor, Tensor, Tensor],
    seen: tuple[Tensor, Tensor, Tensor],
    scale: float,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of one block."""
    query, key, value = (x.to(wide(x)) for x in part)
    lse, delta, gradient = seen
    base = lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
    weights = (_scores(query, key, scale, hidden) - base).exp()
    grouped, values = _grouped(gradient, value)
    of_scores = weights * ((grouped @ values.mT).flatten(1, 2) - delta) * scale
    scores, keys = _grouped(of_scores, key)
    of_query = (scores @ keys).flatten(1, 2)
    of_key = (scores.mT @ query.unflatten(1, (key.shape[1], -1))).sum(2)
    of_value = (weights.unflatten(1, (key.shape[1], -1)).mT @ grouped).sum(2)
    return of_query, of_key, of_value
