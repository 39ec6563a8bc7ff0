"""Attention over sequences of which each rank has consecutive tokens, by heads (Ulysses).

One all-to-all gives each rank all tokens of some heads, attention runs there as in one process, and
another one returns to some tokens of all heads.  Heads of keys that the ranks do not divide are
repeated as far as it takes.  A rank sends, forward and the same backward, `(n - 1) / n` of its
query, key, value and output.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme
Long Sequence Transformer Models", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from msrun.parallel.collectives import all_gather, all_to_all
from msrun.parallel.context.documents import Documents

_HEADS = 1
_TOKENS = 2
# Queries of a window that are computed at once, if it is not wider.
_QUERIES_MIN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What a call of `scaled_dot_product_attention` asks for.

    Args:
        group: Ranks of the axis `cp`.
        is_causal: Whether a token sees only itself and those before.
        scale: Factor of the scores; None is that of torch.
        keys: Of (samples, 1 or heads, 1, tokens of this rank): the keys that may be seen, or what
            is added to their scores; None for all.
        rows: The same of pairs, (samples or 1, 1 or heads, tokens of this rank, all tokens).
        documents: Of which tokens see those of their own document alone; None has one of all.
        distance: To the farthest token that a token sees; None if none is too far.
    """

    group: dist.ProcessGroup
    is_causal: bool
    scale: float | None
    keys: Tensor | None
    rows: Tensor | None = None
    documents: Documents | None = None
    distance: int | None = None


def attention_arguments(  # noqa: PLR0917 - as of torch
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - as of torch
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool]:
    """Return the arguments of a call, in the order of torch."""
    return query, key, value, attn_mask, dropout_p, is_causal


def by_heads(ask: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention of (samples, heads, tokens of this rank, width); see the module."""
    ranks = ask.group.size()
    key, value = (_repeated(x, ranks) for x in (key, value))
    shares = [_by_rank(x.transpose(_HEADS, _TOKENS), ranks) for x in (query, key, value)]
    if query.shape[-1] == value.shape[-1]:
        whole = all_to_all(torch.cat(shares, -2), ask.group, 0, 0).flatten(0, 1)
        arrived = whole.split([x.shape[-2] for x in shares], -2)
    else:
        arrived = [all_to_all(x.contiguous(), ask.group, 0, 0).flatten(0, 1) for x in shares]
    parts = [x.permute(1, 2, 0, 3) for x in arrived]
    if ask.documents:
        output = _of_documents(ask, ask.documents, parts)
    else:
        output = _attention(ask, parts, _given(ask))
    return _all_heads(output, ask.group)


def _attention(ask: Attention, parts: Sequence[Tensor], given: Tensor | None = None) -> Tensor:
    """Return attention of all tokens, of which `given` says which keys or pairs may be seen."""
    length = parts[0].shape[_TOKENS]
    if ask.distance is not None and ask.distance < length - 1:
        return _in_window(ask, ask.distance, parts, given)
    if given is None or not ask.is_causal:
        return _of_torch(ask, parts, given)
    every = range(length)
    return _of_torch(ask, parts, _both(given, seen(ask, every, every, given.device)))


def _in_window(
    ask: Attention, distance: int, parts: Sequence[Tensor], keys: Tensor | None
) -> Tensor:
    """Return attention to tokens nearby: some queries at a time, with the keys around them."""
    query, *others = parts
    length = query.shape[_TOKENS]
    size = max(_QUERIES_MIN, distance)
    found = []
    for first in range(0, length, size):
        queries = range(first, min(first + size, length))
        near = near_keys(ask, queries, range(length))
        mask = seen(ask, queries, near, query.device)
        if keys is not None:
            mask = _both(keys[..., near.start : near.stop], mask)
        own = query[:, :, first : queries.stop]
        found.append(
            _of_torch(ask, [own, *(x[:, :, near.start : near.stop] for x in others)], mask)
        )
    return torch.cat(found, _TOKENS)


def near_keys(ask: Attention, queries: range, keys: range) -> range:
    """Return those of `keys` that are in the window of some of `queries`."""
    if ask.distance is None:
        return keys
    behind = 0 if ask.is_causal else ask.distance
    start = max(keys.start, queries.start - ask.distance)
    return range(start, max(start, min(keys.stop, queries.stop + behind)))


def seen(ask: Attention, queries: range, keys: range, device: torch.device) -> Tensor:
    """Return for each of (queries, keys), by their numbers, whether it is in the window."""
    rows, columns = (torch.arange(x.start, x.stop, device=device) for x in (queries, keys))
    back = rows.unsqueeze(-1) - columns
    if ask.distance is None:
        return back >= 0
    return (back <= ask.distance) & (back >= (0 if ask.is_causal else -ask.distance))


def _both(given: Tensor, is_seen: Tensor) -> Tensor:
    """Return a mask, or what is added to scores, for keys that are seen as well."""
    return given & is_seen if given.dtype == torch.bool else given.masked_fill(~is_seen, -math.inf)


def _of_torch(ask: Attention, parts: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    query, key, value = parts
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=ask.is_causal and mask is None,
        scale=ask.scale,
        enable_gqa=query.shape[_HEADS] != key.shape[_HEADS],
    )


def _of_documents(ask: Attention, documents: Documents, parts: Sequence[Tensor]) -> Tensor:
    """Return attention of each document by itself, which needs no mask of pairs."""
    samples = []
    for at, sizes in enumerate(documents.sizes):
        of_sample = [x[at : at + 1].split(sizes, _TOKENS) for x in parts]
        found = [_attention(ask, document) for document in zip(*of_sample, strict=True)]
        samples.append(torch.cat(found, _TOKENS))
    return torch.cat(samples)


def _repeated(x: Tensor, ranks: int) -> Tensor:
    """Return keys or values with as many heads as `ranks` divide, each repeated equally often."""
    times = ranks // math.gcd(x.shape[_HEADS], ranks)
    return x if times == 1 else x.repeat_interleave(times, _HEADS)


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """From (samples, tokens, heads, width): (ranks, tokens, samples, heads of a rank, width).

    Tokens of all ranks then follow each other in what arrives, and nothing has to be copied there.
    """
    parts: Tensor = x.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4)
    return parts


def _all_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back, from (samples, heads of this rank, all tokens, width)."""
    parts = x.transpose(_HEADS, _TOKENS).unflatten(1, (group.size(), -1)).permute(1, 2, 0, 3, 4)
    arrived = all_to_all(parts.contiguous(), group, 0, 0)
    # Heads behind tokens, as torch's own attention leaves them, and as models go on with them.
    return arrived.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(_HEADS, _TOKENS)


def _given(ask: Attention) -> Tensor | None:
    """Return the mask of all keys or pairs, for the heads of this rank; None without one."""
    given = ask.keys if ask.rows is None else ask.rows
    if given is None:
        return None
    keys = all_gather(given, ask.group, -1 if ask.rows is None else _TOKENS)
    if keys.shape[_HEADS] > 1:
        keys = keys.tensor_split(ask.group.size(), _HEADS)[ask.group.rank()]
    return keys


def bytes_by_heads(shapes: tuple[tuple[int, int, int, int], int], ranks: int, width: int) -> int:
    """Return the bytes that a rank gives to the two all-to-alls of one forward.

    Args:
        shapes: (samples, heads, tokens of this rank, width) of query, and heads of keys.
        ranks: Of the axis.
        width: Bytes of a number.
    """
    (samples, heads, tokens, size), key_heads = shapes
    repeated = key_heads * (ranks // math.gcd(key_heads, ranks))
    return samples * tokens * size * width * (2 * heads + 2 * repeated)
