"""The gradients of one step of a rank, as each server gets its part.

They are copied once, into memory that servers of this node read in place.  The rank keeps them
until all servers have them on disk, and so long no part of them changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from msrun.cluster.servers.ownership import Ownership, Table
from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.servers.rows import Empty, RowGradients


class Pushed(Protocol):
    """A parameter of the rank; `remote` has them."""

    name: str
    table: Table
    dtype: torch.dtype
    is_table: bool
    is_sparse: bool


class OutgoingPush:
    """The gradients of one step.

    Args:
        gradients: Parameter -> gradients of some rows, or of each of its slices.
        options: Parameter -> the options of its group.
        empty: Makes tensors.
        order: Of the norms that are asked for; None is for a step.
    """

    def __init__(
        self,
        gradients: dict[str, RowGradients | dict[int, Tensor]],
        options: Mapping[str, Any],
        empty: Empty,
        *,
        order: float | None = None,
    ) -> None:
        self._order = order
        self._gradients = gradients
        self._options = options
        self._empty = empty
        self._divided: tuple[int, dict[int, Any]] = (0, {})

    def part(self, server: int, ownership: Ownership) -> dict[str, Any]:
        """Return what is for one server: of its slices, and of those it has copies of."""
        if self._divided[0] != ownership.epoch:
            self._divided = (ownership.epoch, self._divide(ownership))
        gradients = self._divided[1].get(server, {})
        if self._order is not None:
            return {"gradients": gradients, "order": self._order}
        return {"gradients": gradients, "options": self._options}

    def _divide(self, ownership: Ownership) -> dict[int, dict[str, Any]]:
        parts: dict[int, dict[str, Any]] = {}
        for table, gradient in self._gradients.items():
            owners = [*filter(None, (ownership.owners[table], ownership.copies.get(table)))]
            if isinstance(gradient, dict):
                for each in owners:
                    for index, server in enumerate(each):
                        parts.setdefault(server, {}).setdefault(table, {})[index] = gradient[index]
                continue
            for server in sorted({server for each in owners for server in each}):
                mine = self._rows_of(gradient, server, owners)
                parts.setdefault(server, {})[table] = [mine.ids, mine.values, mine.is_sparse]
        return parts

    def _rows_of(self, rows: RowGradients, server: int, owners: list[list[int]]) -> RowGradients:
        """Return the gradients for one server."""
        if any(set(each) == {server} for each in owners):
            return rows
        slices = rows.ids % len(owners[0])
        is_mine = torch.tensor([[n == server for n in each] for each in owners]).any(0)
        places = is_mine[slices].nonzero().flatten()
        values = self._empty((len(places), *rows.values.shape[1:]), rows.values.dtype)
        torch.index_select(rows.values, 0, places, out=values)
        return RowGradients(ids=rows.ids[places], values=values, is_sparse=rows.is_sparse)


@dataclass(frozen=True, slots=True)
class Commit:
    """A step whose gradients servers have measured.

    Args:
        options: Parameter -> the options of its group.
        factors: Parameter -> by what its gradient is multiplied; 1 where it has no entry.
    """

    options: Mapping[str, Any]
    factors: Mapping[str, float]

    def part(self, _server: int, _ownership: Ownership) -> dict[str, Any]:
        """Return what is for one server."""
        return {"options": self.options, "factors": self.factors}


def outgoing(
    each: Pushed, gradient: Tensor, scale: float, empty: Empty
) -> RowGradients | dict[int, Tensor]:
    """Return a gradient as it is pushed."""
    if not each.is_table:
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        rows, count = gradient.reshape(1) if gradient.dim() == 0 else gradient, each.table.slices
        return {
            index: _scaled(rows[index::count], scale, each.dtype, empty) for index in range(count)
        }
    if not gradient.is_sparse:
        raise ModelError(
            f"{ROOT}.servers: {each.name} was used beside its lookups, and a rank has those rows "
            "alone",
            hint="keep it out of the patterns, or look it up alone",
        )
    gradient = gradient.coalesce()
    return RowGradients(
        ids=gradient.indices()[0].cpu(),
        values=_scaled(gradient.values(), scale, gradient.dtype, empty),
        is_sparse=each.is_sparse,
    )


def _scaled(values: Tensor, scale: float, dtype: torch.dtype, empty: Empty) -> Tensor:
    """Return `values` times `scale` in new memory on the host."""
    found = empty(values.shape, dtype)
    if scale == 1.0:
        return found.copy_(values)
    if values.dtype == dtype and values.device.type == "cpu":
        return torch.mul(values, scale, out=found)
    return found.copy_(values * scale)
