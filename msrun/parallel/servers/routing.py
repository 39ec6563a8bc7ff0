"""Which rows a worker asks of which server, and what it sends where.  Vectorised: no row is a loop.

Rows that occur several times in a batch are asked for once, and their gradients are added before
they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
