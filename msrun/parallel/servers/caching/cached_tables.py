"""The cached tables of a rank, and the rows of its next batch, asked for while this one computes.

`rt.loader` tells the next batch.  Which tensor of a batch has the ids of which table is learned
from the first step: it is one all of whose numbers were looked up.  After as many lookups as in the
step before, the forward pass has what it needs, so the rows of the next batch are asked for; they
come into the cache while the rank computes.  A wrong guess costs bytes and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from msrun.cluster.servers.ownership import Table
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.servers.caching.cache import RowCache
from msrun.parallel.servers.client import PulledRows, ServersClient
from msrun.parallel.servers.recipe import Recipe
from msrun.parallel.servers.routing import places_by_server
from msrun.parallel.servers.rows import RowGradients

_COLUMNS_MAX = 64
_DIMS_OF_COLUMNS = 2
# Tensor of a batch, and its column; None is all of it.
_Source = tuple[int, int | None]


class CachedTable(Protocol):
    """A table of the rank; `remote` has them."""

    name: str
    table: Table
    shape: torch.Size
    dtype: torch.dtype
    is_sparse: bool


class CachedTables:
    """The caches of all tables of a rank.

    Args:
        size: Rows of each cache, at most.
        tables: The tables.
    """

    def __init__(self, size: int, tables: Iterable[CachedTable]) -> None:
        self._size = size
        self._tables = {each.name: each for each in tables}
        self._caches: dict[str, RowCache] = {}
        self._ahead = _LookAhead()
        # What was asked for and has not come: table -> its ids.
        self._pending: dict[str, Tensor] = {}

    def begin(self, recipe: Recipe) -> None:
        """Keep nothing of before: servers begin with other contents."""
        self._caches = {
            name: RowCache(
                min(self._size, each.table.rows),
                each.shape[1:],
                each.dtype,
                kind=recipe.kind,
                options=recipe.options[name],
                is_sparse=each.is_sparse,
            )
            for name, each in self._tables.items()
        }

    def pull(self, client: ServersClient, name: str, ids: Tensor) -> Tensor:
        """Return rows of a table, from the cache where they are the servers'."""
        rows = self._take(name, ids, client.pull(self._ask({name: ids})))
        if torch.is_grad_enabled() and self._ahead.saw(name, ids):
            self._pending = self._ahead.guess({n: t.table.rows for n, t in self._tables.items()})
            if self._pending:
                client.ask(self._ask(self._pending))
        return rows

    def settle(self, client: ServersClient) -> None:
        """Take what was asked for ahead; before the rank asks or sends anything else."""
        if self._pending:
            pending, self._pending = self._pending, {}
            pulled = client.answer()
            for name, ids in pending.items():
                self._take(name, ids, pulled)

    def step(self, gradients: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]) -> None:
        """Do the step of the gradients that were pushed, with all rows that are here."""
        for name, cache in self._caches.items():
            pushed = gradients.get(name)
            cache.step(pushed if isinstance(pushed, RowGradients) else None, options[name])
        self._ahead.end_step()

    def announce(self, batch: object, following: object) -> None:
        """Take note of the batch that the script gets now, and of the one after it."""
        self._ahead.batch, self._ahead.following = _numbers(batch), _numbers(following)

    def _ask(self, ids: Mapping[str, Tensor]) -> dict[str, Any]:
        return {name: [each, self._caches[name].versions(each)] for name, each in ids.items()}

    def _take(self, name: str, ids: Tensor, pulled: PulledRows) -> Tensor:
        cache, parts = self._caches[name], pulled.rows(name)
        rows = cache.rows(ids)
        for server, places in places_by_server(ids, pulled.owners[name]).items():
            if server in parts:
                version, fresh, changed, state, of_all = parts[server]
                others = places[~fresh]
                rows[others] = changed
                cache.take(ids[others], changed, state, of_all, version)
        return rows


class _LookAhead:
    """What the next batch will look up.

    Attributes:
        batch: The whole numbers of this batch, as the loader gave it.
        following: Those of the next one.
    """

    def __init__(self) -> None:
        self.batch: list[Tensor] = []
        self.following: list[Tensor] = []
        self._used: dict[str, list[Tensor]] = {}
        self._sources: dict[str, list[_Source]] | None = None
        self._lookups, self._expected = 0, 0

    def saw(self, name: str, ids: Tensor) -> bool:
        """Note a lookup; return whether it was the last one of the step, as far as is known."""
        self._lookups += 1
        if self._sources is None and self.batch:
            self._used.setdefault(name, []).append(ids)
        return self._lookups == self._expected and bool(self._sources and self.following)

    def end_step(self) -> None:
        """Learn from the step."""
        self._expected, self._lookups = self._lookups, 0
        if self._used:
            self._sources = {
                name: _sources(self.batch, torch.cat(used)) for name, used in self._used.items()
            }
            self._used = {}
        self.batch = []

    def guess(self, rows: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the ids that the next batch needs: table -> distinct and ascending ones."""
        found = {}
        for name, sources in (self._sources or {}).items():
            parts = [_part(self.following, source) for source in sources]
            ids = torch.cat([each for each in parts if each is not None] or [torch.empty(0)])
            ids = ids.long().unique()
            ids = ids[(ids >= 0) & (ids < rows[name])]
            if len(ids):
                found[name] = ids
        self.following = []
        return found


def _numbers(batch: object) -> list[Tensor]:
    """Return the tensors of a batch that may be ids, on the host."""
    tensors = tensors_in(batch)
    return [each for each in tensors if each.dim() and not each.is_floating_point() and each.is_cpu]


def _sources(batch: Sequence[Tensor], used: Tensor) -> list[_Source]:
    """Return the tensors and columns all of whose numbers were used."""
    found: list[_Source] = []
    for index, each in enumerate(batch):
        if each.is_complex() or each.dtype == torch.bool:
            continue
        if torch.isin(each, used).all():
            found.append((index, None))
        elif each.dim() == _DIMS_OF_COLUMNS:
            columns = range(min(each.shape[1], _COLUMNS_MAX))
            found += [(index, n) for n in columns if torch.isin(each[:, n], used).all()]
    return found


def _part(batch: Sequence[Tensor], source: _Source) -> Tensor | None:
    index, column = source
    if index >= len(batch):
        return None
    each = batch[index]
    if column is None:
        return each.flatten()
    return each[:, column] if each.dim() == _DIMS_OF_COLUMNS and column < each.shape[1] else None
