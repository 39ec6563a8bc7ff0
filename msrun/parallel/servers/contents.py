"""Slices of whole parameters and of their optimizer state, and whole ones from slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Divides evenly among 1, 2, 3, 4, 6 and 12 servers.
_SLICES = 12
# A server steps slice by slice: its temporary memory is a few of them.
_SLICES_OF_LARGE = 24
_LARGE_BYTES = 32 << 20
_SMALL_BYTES = 4 << 10
_SLICE_BYTES_MAX = 1 << 30
# State of a whole parameter, not of each element.
_OF_ALL = frozenset({"step", "mu_product", "eta", "mu"})


def slices_for(rows: int, row_bytes: int, servers: int = 0) -> int:
    """Return into how many slices a parameter is cut; at least for so many servers, if given."""
    total = rows * row_bytes
    servers = servers or (_SLICES_OF_LARGE if total >= _LARGE_BYTES else _SLICES)
    if total <= _SMALL_BYTES:
        return 1
    return min(rows, max(servers, -(-total // _SLICE_BYTES_MAX)), 1 << 16)


def cut_state(weight: Tensor, state: Mapping[str, Any], index: int, count: int) -> list[Any]:
    """Return rows and state of one slice, as servers have them."""
    rows = weight.reshape(1) if weight.dim() == 0 else weight
    return [
        rows[index::count].contiguous(),
        {name: _cut(name, value, weight, index, count) for name, value in state.items()},
    ]


def _cut(name: str, value: Any, weight: Tensor, index: int, count: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    if name in _OF_ALL or value.shape != weight.shape:
        return value
    return value.reshape(1) if value.dim() == 0 else value[index::count].contiguous()


def joined(slices: Mapping[int, Tensor], count: int) -> Tensor:
    """Return all rows of slices by their numbers."""
    if count == 1:
        return slices[0]
    parts = [slices[index] for index in range(count)]
    whole = torch.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=parts[0].dtype)
    for index, part in enumerate(parts):
        whole[index::count] = part
    return whole
