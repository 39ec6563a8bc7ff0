"""Seconds of collectives and of redistribution.

All of it is latency plus bytes over bandwidth (alpha-beta model), so the cost of a redistribution
is two numbers, seconds and seconds a byte, that hold for tensors of any size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from msrun.parallel.search.cost.redistribution import MoveKind, impossible, moves
from msrun.parallel.search.cost.topology import Wire
from msrun.parallel.search.graph.axis_placement import FloatArray, IntArray


def collective(kind: MoveKind, wire: Wire) -> tuple[float, float]:
    """Return seconds, and seconds a byte of the full tensor, of one collective over `wire`.

    Measured ones go before formulas; for other numbers of ranks they grow as `estimate` does.
    """
    known = [one for one in wire.measured if one.kind == kind.name.lower()]
    latency, per_byte = estimate(kind, wire)
    if not known:
        return latency, per_byte
    near = min(known, key=lambda one: abs(math.log(one.ranks / wire.size)))
    if near.ranks == wire.size:
        return near.start, near.per_byte
    there = estimate(kind, msgspec.structs.replace(wire, size=near.ranks))
    growth = latency / there[0] if there[0] else 1.0
    return near.start * growth, near.per_byte * per_byte / there[1]


def estimate(kind: MoveKind, wire: Wire) -> tuple[float, float]:
    """Return the seconds of `collective`, from bandwidth and latency alone.

    n ranks, r = (n - 1) / n, latency a = start + ceil(log2 n) hops:

    - gather and scatter: a + r bytes / bandwidth (recursive doubling and halving),
    - reduce: both, one after the other,
    - move, pairwise: start + (n - 1) hops / 2 + r bytes / (n bandwidth).

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations
    in MPICH", IJHPCA 19(1), 2005; halved hops of the exchange since links are used both ways.
    """
    n = wire.size
    latency = wire.start + math.ceil(math.log2(n)) * wire.hop
    per_byte = (n - 1) / n / wire.bandwidth
    match kind:
        case MoveKind.GATHER | MoveKind.SCATTER:
            return latency, per_byte
        case MoveKind.REDUCE:
            return 2 * latency, 2 * per_byte
        case MoveKind.MOVE:
            return wire.start + (n - 1) * wire.hop / 2, per_byte / n
        case _:
            return 0.0, 0.0


class RedistributionCosts:
    """Costs of redistribution on one mesh; each table is computed once.

    Args:
        wires: What the axes run over.
    """

    def __init__(self, wires: Sequence[Wire]) -> None:
        self.wires = tuple(wires)
        self.sizes = tuple(wire.size for wire in wires)
        self._tables: dict[tuple[bytes, bytes], tuple[FloatArray, FloatArray]] = {}

    def seconds(self, source: IntArray, target: IntArray, nbytes: float) -> FloatArray:
        """Return the seconds from each row of `source` to each row of `target`.

        Args:
            source: Placements, (sources, axes).
            target: Placements, (targets, axes).
            nbytes: Of the full tensor.

        Returns:
            (sources, targets); infinite where redistribution is impossible.
        """
        key = (source.tobytes(), target.tobytes())
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._table(source, target)
        latency, per_byte = table
        return latency + nbytes * per_byte

    def _table(self, source: IntArray, target: IntArray) -> tuple[FloatArray, FloatArray]:
        latency: FloatArray = np.where(impossible(source, target), np.inf, 0.0)
        per_byte = np.zeros_like(latency)
        for move in moves(source, target, self.sizes):
            start, rate = collective(move.kind, self.wires[move.axis])
            if start or rate:
                latency += np.where(move.where, start, 0.0)
                per_byte += np.where(move.where, rate / move.parts, 0.0)
        return latency, per_byte
