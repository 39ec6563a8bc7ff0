"""Rows of a table that a rank keeps, with the optimizer's state of them, where servers are sync.

A cached row is not only read again: the rank steps it as its server does.  After each push it
gives all cached rows its own gradients, zeros for those that it did not use, and torch's optimizer
does the step.  So a row that no other rank has used is the server's to the bit, however long it was
not asked for, and its values need not travel.

A rank asks for rows with the version at which it got each.  A server answers which of them no other
rank has used since (`touches.py`), and sends the others, with their state.

The cache is direct-mapped: row `id` has the place `id % rows`, and goes when another takes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from msrun.parallel.servers.recipe import Value, build_optimizer
from msrun.parallel.servers.rows import RowGradients, added

_NONE = -1


class RowCache:
    """The rows of one table that this rank keeps.

    Args:
        size: Places.
        shape: Of a row.
        dtype: Of the rows.
        kind: Of the optimizer.
        options: Its options.
        is_sparse: Whether the optimizer sees used rows only.
    """

    def __init__(
        self,
        size: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        kind: str,
        options: Mapping[str, Value],
        is_sparse: bool,
    ) -> None:
        self._ids = torch.full((size,), _NONE, dtype=torch.int64)
        self._at = torch.full((size,), _NONE, dtype=torch.int64)
        self._rows = nn.Parameter(torch.zeros((size, *shape), dtype=dtype))
        self._optimizer = build_optimizer(kind, self._rows, options)
        self._is_sparse = is_sparse

    def versions(self, ids: Tensor) -> Tensor:
        """Return of which version rows are here; -1 of one that is not."""
        places = ids % len(self._ids)
        return torch.where(self._ids[places] == ids, self._at[places], _NONE)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows that are here."""
        return self._rows.detach()[ids % len(self._ids)]

    def take(
        self,
        ids: Tensor,
        rows: Tensor,
        state: Mapping[str, Any],
        of_all: Mapping[str, Any],
        at: int,
    ) -> None:
        """Keep rows.

        Args:
            ids: Their numbers.
            rows: They.
            state: The optimizer's state of them.
            of_all: Its state of the table.
            at: Version of the server.
        """
        places = ids % len(self._ids)
        # Of several rows for one place the last one stays.
        self._ids[places] = ids
        stays = self._ids[places] == ids
        places, rows = places[stays], rows[stays]
        self._at[places] = at
        self._rows.detach()[places] = rows
        here = self._optimizer.state[self._rows]
        for name, values in state.items():
            if name not in here:
                here[name] = torch.zeros_like(self._rows, requires_grad=False)
            here[name][places] = values[stays]
        for name, value in of_all.items():
            here[name] = value.clone() if isinstance(value, Tensor) else value

    def step(self, gradients: RowGradients | None, options: Mapping[str, Value]) -> None:
        """Step all rows as servers do, if no other rank had a gradient for them."""
        if gradients is None:  # servers step if another rank has some, which nobody says
            self._ids.fill_(_NONE)
            return
        places = gradients.ids % len(self._ids)
        is_here = self._ids[places] == gradients.ids
        part = (places[is_here], gradients.values[is_here])
        self._rows.grad = added(self._rows, [part], is_sparse=self._is_sparse)
        self._optimizer.param_groups[0].update(options)
        self._optimizer.step()
        self._rows.grad = None
