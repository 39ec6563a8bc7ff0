"""Which server owns which slice of which parameter, in one epoch.

A parameter is cut into *slices* of rows: row `r` of a table of `n` slices is in slice `r % n`.
Frequent ids have small numbers in most vocabularies, so neighbouring rows go to different slices.
Every optimizer that servers offer treats elements alone, so a slice is stepped as the whole is.
A slice moves as one, with its optimizer state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
# A move must lessen the difference between two servers by this share of the mean, or it is
# not worth its bytes.
_WORTH = 0.02
# Bounds of the time that a decision takes: exchanges, and slices of a server to choose from.
_EXCHANGES_MAX = 256
_LOOKED_AT = 32


class Slice(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A part of a table: every `slices`-th row, from row `index` on."""

    table: str
    index: Count


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter that servers own.

    Args:
        name: Its name in the model.
        rows: Its first dimension; 1 for a scalar.
        row_bytes: Bytes of a row with its optimizer state.
        slices: Into how many parts it is cut, at most one a row.
    """

    name: str
    rows: Annotated[int, msgspec.Meta(ge=1, le=(1 << 53) - 1)]
    row_bytes: Count
    slices: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1

    def bytes_of(self, index: int) -> int:
        """Return the bytes of one slice; the first ones have a row more where it does not fit."""
        return (self.rows - index + self.slices - 1) // self.slices * self.row_bytes


class Ownership(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who owns what from one step boundary to another.

    Args:
        epoch: Counts the ownerships of a job; 1 first.
        version: The version of all rows at its beginning.
        clocks: Worker -> how many of its pushes those rows hold, or it was given for free.
        done: Worker -> the clock at which it left.
        owners: Table -> the server of each of its slices.
        branch: The first epoch with these workers: what was computed with others is another curve.
        copies: Table -> the server that steps a hot copy of each of its slices; empty without any.
    """

    epoch: Count
    version: Count
    clocks: dict[int, Count]
    done: dict[int, Count] = {}
    owners: dict[str, list[Count]]
    branch: Count = 1
    copies: dict[str, list[Count]] = {}

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers, in the order in which their gradients are added."""
        return tuple(sorted(self.clocks))

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers that own something, or have copies."""
        both = (*self.owners.values(), *self.copies.values())
        return tuple(sorted({server for servers in both for server in servers}))

    def slices_of(self, server: int) -> list[Slice]:
        """Return what `server` owns or has copies of, in a fixed order."""
        return [
            Slice(table, index)
            for table, owners in sorted(self.owners.items())
            for index, owner in enumerate(owners)
            if server in {owner, *self.copies.get(table, ())[index : index + 1]}
        ]

    def peer_of(self, piece: Slice, server: int) -> int:
        """Return which other server has a slice that `server` has."""
        owner = self.owner_of(piece)
        return self.copies[piece.table][piece.index] if owner == server else owner

    def owner_of(self, piece: Slice) -> int:
        """Return the server of a slice."""
        return self.owners[piece.table][piece.index]


def balance(
    tables: Iterable[Table],
    servers: Iterable[int],
    *,
    before: Mapping[str, list[int]] | None = None,
    traffic: Mapping[Slice, float] | None = None,
) -> dict[str, list[int]]:
    """Return an owner for every slice, with equal bytes, equal traffic and few moves.

    Slices that have an owner in `before` keep it until a move from the fullest server to the
    emptiest brings both nearer.  `traffic` is the bytes of the rows of each slice that were pulled
    and pushed, where that was measured: slices of about the same size change places until it is
    about the same everywhere, so bytes stay equal.
    """
    tables = list(tables)
    load = {
        Slice(table.name, index): float(table.bytes_of(index))
        for table in tables
        for index in range(table.slices)
    }
    loads = dict.fromkeys(servers, 0.0)
    owner: dict[Slice, int] = {}
    for piece, size in load.items():
        kept = (before or {}).get(piece.table, [])
        if piece.index < len(kept) and kept[piece.index] in loads:
            owner[piece] = kept[piece.index]
            loads[owner[piece]] += size
    moved = traffic or {}
    homeless = [piece for piece in load if piece not in owner]
    for piece in sorted(homeless, key=lambda piece: (-load[piece], -moved.get(piece, 0.0), piece)):
        owner[piece] = min(loads, key=lambda server: (loads[server], server))
        loads[owner[piece]] += load[piece]
    _level(owner, load, loads)
    if moved:
        _exchange(owner, load, moved, sorted(loads))
    return {
        table.name: [owner[Slice(table.name, index)] for index in range(table.slices)]
        for table in tables
    }


def mirrored(owners: Mapping[str, list[int]], nodes: Mapping[int, int]) -> dict[str, list[int]]:
    """Return who has the copy of each slice; nobody where there is one server alone.

    The copy is on another node than the slice wherever there is one.  Each server has the copies of
    one other server.  Only where one node has more than half of the servers those of other nodes
    have more, and divide the slices.

    Args:
        owners: As `balance` returns it.
        nodes: Server -> its node.
    """
    holders = _holders(nodes)
    if not holders:
        return {}
    turns = dict.fromkeys(nodes, 0)
    found: dict[str, list[int]] = {}
    for table, each in sorted(owners.items()):
        found[table] = []
        for owner in each:
            among = holders[owner]
            found[table].append(among[turns[owner] % len(among)])
            turns[owner] += 1
    return found


def _holders(nodes: Mapping[int, int]) -> dict[int, list[int]]:
    """Return which servers take turns with the copies of each; empty for one server alone."""
    ring = sorted(nodes, key=lambda server: (nodes[server], server))
    crowds = Counter(nodes.values())
    crowd = max(crowds.values())
    if len(ring) < 2:  # noqa: PLR2004 - a copy beside its original is none
        return {}
    if len(crowds) > 1 and crowd * 2 > len(ring):
        return {
            server: others[place % len(others) :] + others[: place % len(others)]
            for place, server in enumerate(ring)
            for others in [[other for other in ring if nodes[other] != nodes[server]]]
        }
    # A node's servers are neighbours in the ring, so that none is as far from another as this.
    step = crowd if len(crowds) > 1 else 1
    return {server: [ring[(at + step) % len(ring)]] for at, server in enumerate(ring)}


def _level(owner: dict[Slice, int], load: dict[Slice, float], loads: dict[int, float]) -> None:
    """Move slices from the fullest server to the emptiest, while that is worth it."""
    mean = sum(loads.values()) / len(loads)
    while True:
        fullest = max(loads, key=lambda server: (loads[server], -server))
        emptiest = min(loads, key=lambda server: (loads[server], server))
        gap = loads[fullest] - loads[emptiest]
        # Moving a slice of load l changes the gap by 2 l, so the best one is half the gap.
        fits = [
            piece
            for piece, server in owner.items()
            if server == fullest and 0 < load[piece] < gap and load[piece] * 2 >= _WORTH * mean
        ]
        best = min(fits, key=lambda piece: (abs(load[piece] - gap / 2), piece), default=None)
        if best is None or gap - abs(gap - 2 * load[best]) < _WORTH * mean:
            return
        owner[best] = emptiest
        loads[fullest] -= load[best]
        loads[emptiest] += load[best]


def _exchange(
    owner: dict[Slice, int],
    load: Mapping[Slice, float],
    traffic: Mapping[Slice, float],
    servers: list[int],
) -> None:
    """Have slices of about one size change places, until all servers have the same traffic."""
    busy = dict.fromkeys(servers, 0.0)
    for piece, server in owner.items():
        busy[server] += traffic.get(piece, 0.0)
    worth = _WORTH * sum(busy.values()) / len(busy)
    slack = _WORTH * sum(load.values()) / len(busy)
    for _ in range(_EXCHANGES_MAX):
        hottest = max(servers, key=lambda server: (busy[server], -server))
        coldest = min(servers, key=lambda server: (busy[server], server))
        gap = busy[hottest] - busy[coldest]
        key = partial(_by_traffic, traffic)
        hot = sorted((p for p in owner if owner[p] == hottest), key=key)[-_LOOKED_AT:]
        cold = sorted((p for p in owner if owner[p] == coldest), key=key)[:_LOOKED_AT]
        pairs = [
            (abs(gap / 2 - (traffic.get(one, 0.0) - traffic.get(other, 0.0))), one, other)
            for one in hot
            for other in cold
            if abs(load[one] - load[other]) <= slack
        ]
        rest, one, other = min(pairs, default=(gap, None, None))
        if one is None or other is None or gap - 2 * rest < worth:
            return
        change = traffic.get(one, 0.0) - traffic.get(other, 0.0)
        owner[one], owner[other] = coldest, hottest
        busy[hottest] -= change
        busy[coldest] += change


def _by_traffic(traffic: Mapping[Slice, float], piece: Slice) -> tuple[float, Slice]:
    return traffic.get(piece, 0.0), piece
