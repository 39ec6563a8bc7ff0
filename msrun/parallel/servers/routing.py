"""Which rows a worker asks of which server.  Vectorised: no row is a loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def places_by_server(ids: Tensor, owners: Sequence[int]) -> dict[int, Tensor]:
    """Return for each server the places in `ids` of the rows that it owns."""
    server = torch.as_tensor(owners, device=ids.device)[ids % len(owners)]
    return {each: (server == each).nonzero().flatten() for each in sorted(set(owners))}
