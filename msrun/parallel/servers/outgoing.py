"""The gradients of one step of a rank, as each server gets its part.

They are copied once, into memory that servers of this node read in place.  The rank keeps them
until all servers have them on disk, and so long no part of them changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from msrun.cluster.servers.ownership import Table
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
    """

    def __init__(
        self,
        gradients: dict[str, RowGradients | dict[int, Tensor]],
        options: Mapping[str, Any],
        empty: Empty,
    ) -> None:
        self._gradients = gradients
        self._options = options
        self._empty = empty
        self._divided: tuple[int, dict[int, Any]] = (0, {})

    def part(self, server: int, epoch: int, owners: Mapping[str, list[int]]) -> dict[str, Any]:
        """Return what is for one server under an ownership."""
        if self._divided[0] != epoch:
            self._divided = (epoch, self._divide(owners))
        return {"gradients": self._divided[1].get(server, {}), "options": self._options}

    def _divide(self, owners: Mapping[str, list[int]]) -> dict[int, dict[str, Any]]:
        parts: dict[int, dict[str, Any]] = {}
        for table, gradient in self._gradients.items():
            if isinstance(gradient, dict):
                for index, server in enumerate(owners[table]):
                    parts.setdefault(server, {}).setdefault(table, {})[index] = gradient[index]
                continue
            ordered, counts = self._ordered(gradient, owners[table])
            self._gradients[table] = ordered
            ids, values = ordered.ids.split(counts), ordered.values.split(counts)
            for server in sorted(set(owners[table])):
                mine = [ids[server], values[server], gradient.is_sparse]
                parts.setdefault(server, {})[table] = mine
        return parts

    def _ordered(self, rows: RowGradients, owners: list[int]) -> tuple[RowGradients, list[int]]:
        """Return gradients in the order of the servers, and how many each gets."""
        if len(set(owners)) == 1:
            return rows, [len(rows.ids) if n == owners[0] else 0 for n in range(owners[0] + 1)]
        server = torch.as_tensor(owners)[rows.ids % len(owners)]
        order = server.argsort(stable=True)
        values = self._empty(rows.values.shape, rows.values.dtype)
        torch.index_select(rows.values, 0, order, out=values)
        ordered = RowGradients(ids=rows.ids[order], values=values, is_sparse=rows.is_sparse)
        return ordered, server.bincount(minlength=max(owners) + 1).tolist()


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
