"""Where tensors have their samples that are written at an index, such as `x[:, :k] = y`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msrun.parallel.losses.calls.marks import Mark, Outcome, TorchCall

_ALL = slice(None)


def written_at_index(call: TorchCall) -> Outcome:
    """Return what is known of a tensor after `__setitem__`: it is that, and what was written."""
    target, index, value = call.args
    own = call.mark(target)
    given = call.mark(value) if isinstance(value, Tensor) else None
    statistic = next((mark.statistic for mark in (own, given) if mark and mark.statistic), "")
    if _is_choice(index):
        return own and Mark(own.dim, statistic)
    if given is None or given.dim is None:
        return Mark(own and own.dim, statistic) if own or statistic else None
    kept = _written_dims(index, target.dim())
    if kept is None:
        return None
    place = given.dim + len(kept) - value.dim()
    if not 0 <= place < len(kept):
        return None
    dim, item = kept[place]
    is_whole = item == _ALL and target.shape[dim] == call.samples
    is_other = own is not None and own.dim not in (None, dim)
    return Mark(dim, statistic) if is_whole and not is_other else None


def _is_choice(index: Any) -> bool:
    """Return whether `index` chooses elements by a mask: each has its place in all samples."""
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _written_dims(index: Any, count: int) -> list[tuple[int, Any]] | None:
    """Return the dims of a tensor of `count` dims that an index keeps, each with its item.

    None where it is no index of slices, numbers, None and one `...`.
    """
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if not all(item is None or type(item) in (int, slice, type(...)) for item in items):
        return None
    used = sum(item is not None and item is not ... for item in items)
    at = next((place for place, item in enumerate(items) if item is ...), len(items))
    items[at : at + 1] = [_ALL] * (count - used)
    return list(_kept(items))


def _kept(items: Sequence[Any]) -> list[tuple[int, Any]]:
    found, dim = [], 0
    for item in items:
        if item is None:
            found.append((-1, item))
            continue
        if not isinstance(item, int):
            found.append((dim, item))
        dim += 1
    return found
