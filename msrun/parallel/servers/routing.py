"""Which rows a worker asks of which server, and what it sends where.  Vectorised: no row is a loop.

Rows that occur several times in a batch are asked for once, and their gradients are added before
they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from msrun.parallel.servers.rows import RowGradients


def places_by_server(ids: Tensor, owners: Sequence[int]) -> dict[int, Tensor]:
    """Return for each server the places in `ids` of the rows that it owns."""
    server = torch.as_tensor(owners, device=ids.device)[ids % len(owners)]
    return {each: (server == each).nonzero().flatten() for each in sorted(set(owners))}


def place_rows(
    weight: Tensor, ids: Tensor, rows: Mapping[int, Tensor], owners: Sequence[int]
) -> None:
    """Write the rows that servers sent for `ids` into a weight on this rank."""
    with torch.no_grad():
        for server, places in places_by_server(ids, owners).items():
            weight[ids[places]] = rows[server].to(weight.dtype)


def gradients_of(weight: Tensor, ids: Tensor) -> RowGradients | None:
    """Return the gradients of a weight, of which only the rows `ids` were used.

    None where the weight has no gradient.  A sparse gradient stays one.
    """
    gradient = weight.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return RowGradients(ids=gradient.indices()[0], values=gradient.values(), is_sparse=True)
    return RowGradients(ids=ids, values=gradient[ids])


def split_gradients(gradients: RowGradients, owners: Sequence[int]) -> dict[int, RowGradients]:
    """Return for each server the gradients of the rows that it owns."""
    return {
        server: RowGradients(
            ids=gradients.ids[places],
            values=gradients.values[places],
            is_sparse=gradients.is_sparse,
        )
        for server, places in places_by_server(gradients.ids, owners).items()
    }


def divided_ask(
    ask: Mapping[str, Any], owners: Mapping[str, Sequence[int]]
) -> dict[int, dict[str, Any]]:
    """Return for each server what a pull asks of it; `client` says what a pull may ask."""
    parts: dict[int, dict[str, Any]] = {}
    for table, words in ask.items():
        if isinstance(words, str):
            for server in set(owners[table]):
                parts.setdefault(server, {})[table] = words
            continue
        is_rows = isinstance(words, Tensor)
        ids = words if is_rows else words["ids"] if isinstance(words, dict) else words[0]
        for server, places in places_by_server(ids, owners[table]).items():
            if is_rows or len(places):
                parts.setdefault(server, {})[table] = _at(words, places)
    return parts


def _at(words: Any, places: Tensor) -> Any:
    """Return what is asked of some of the rows."""
    if isinstance(words, dict):
        return {**words, "ids": words["ids"][places]}
    return words[places] if isinstance(words, Tensor) else [each[places] for each in words]
