"""Exact least cost of a problem by bucket elimination.

Nodes are removed one after the other.  What is left of a removed node is one table over its
neighbours: for each of their strategies the cost of the node's own best strategy, which is noted
too, so that the plan can be read off backwards (`Elimination.complete`).  Nodes with one or two
neighbours go first.  The graph of a transformer is series-parallel once masks are constants and
each shared tensor has a layout node; then no table has more than two dims, and the work is cubic
in the strategies of a node.

Memory with a price in seconds a byte is one more cost of nodes and pairs, so every search of
`memory` runs through here.  `keep` leaves some nodes standing: `chain` makes one table of a block.

A wider graph needs larger tables.  Above `CELLS_MAX` cells `TooWideError` says so before anything
is allocated, and two axes are searched at a time instead (`descent`).  Sums are made in blocks that
a core's cache holds, and never over tables of zeros: one of the changes that took the search for a
mesh on 1,024 devices from 104 s of CPU time to 29 s.

Source: Dechter, "Bucket elimination: A unifying framework for reasoning", AIJ 113, 1999.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from msrun.errors import ModelError
from msrun.parallel.search.graph.axis_placement import FloatArray, IntArray
from msrun.parallel.search.solve.problem import Problem

# Cells of the largest table of one elimination; above it a mesh is solved by pairs of axes.
CELLS_MAX = 60_000_000
# Cells that are summed at a time: half a megabyte, which the cache of a core holds.
_BLOCK = 1 << 16


class TooWideError(ModelError):
    """The graph is too wide for an exact plan with so many strategies.

    Args:
        cells: Of the table that would be needed.
        cells_max: Cells that it may have.
    """

    def __init__(self, cells: int, cells_max: int) -> None:
        super().__init__(
            f"parallel.mode: auto: so many tensors of the model meet in one step that the search "
            f"would need a table of {cells} cells (at most {cells_max})",
            hint="name mesh and plan without mode: auto",
        )
        self.cells = cells


@dataclass(slots=True)
class Costs:
    """Costs as elimination takes them: of nodes, and one table for each pair of neighbours.

    Args:
        own: Node -> cost of each strategy.
        pairs: Two nodes -> cost of each pair of strategies.
    """

    own: dict[int, FloatArray]
    pairs: dict[tuple[int, int], FloatArray] = field(default_factory=dict)

    def join(self, a: int, b: int, table: FloatArray) -> None:
        """Add `table` to what the pair costs."""
        if (b, a) in self.pairs:
            self.pairs[b, a] = self.pairs[b, a] + table.T
        else:
            self.pairs[a, b] = self.pairs[a, b] + table if (a, b) in self.pairs else table


def costs(problem: Problem, weight: float = 0.0) -> Costs:
    """Return the costs of `problem`, with bytes of memory at `weight` seconds each."""
    own = {
        at: node.seconds + weight * node.memory if weight else node.seconds
        for at, node in enumerate(problem.nodes)
    }
    total = Costs(own)
    # Edges between equal nodes share their tables, so each is weighed once.
    priced: dict[tuple[int, int], FloatArray] = {}
    for edge in problem.edges:
        table = edge.seconds
        if weight and edge.memory is not None:
            key = (id(edge.seconds), id(edge.memory))
            if key not in priced:
                priced[key] = edge.seconds + weight * edge.memory
            table = priced[key]
        total.join(edge.source, edge.target, table)
    return total


@dataclass(slots=True)
class Elimination:
    """What is left when all nodes but some are eliminated.

    Args:
        value: Least cost as a table over the nodes kept, in their order; no dims if none.
        best: Node, its neighbours then, and its best strategy for each of theirs, in the order of
            elimination.
        cells: Of the largest table.
    """

    value: FloatArray
    best: list[tuple[int, tuple[int, ...], IntArray]]
    cells: int

    def complete(self, chosen: dict[int, int]) -> dict[int, int]:
        """Add the best strategies of all other nodes to those of the nodes kept."""
        for node, scope, best in reversed(self.best):
            chosen[node] = int(best[tuple(chosen[other] for other in scope)])
        return chosen


def eliminate(total: Costs, keep: Sequence[int] = (), cells_max: int = CELLS_MAX) -> Elimination:
    """Eliminate every node but those in `keep`.

    Raises:
        TooWideError: A table would have more than `cells_max` cells.
    """
    return _Eliminator(total, keep, cells_max).run()


class _Eliminator:
    def __init__(self, total: Costs, keep: Sequence[int], cells_max: int) -> None:
        self._keep, self._cells_max = tuple(keep), cells_max
        self._size = {node: len(table) for node, table in total.own.items()}
        self._tables: dict[int, tuple[tuple[int, ...], FloatArray]] = {}
        self._at: dict[int, set[int]] = defaultdict(set)
        self._near: dict[int, set[int]] = {node: set() for node in total.own}
        self._constant = 0.0
        self._made = 0
        for node, table in total.own.items():
            self._put((node,), table)
        for pair, table in total.pairs.items():
            self._put(pair, table)
        self._cells = 0

    def _put(self, scope: tuple[int, ...], table: FloatArray) -> None:
        number = self._made
        self._made += 1
        self._tables[number] = (scope, table)
        for node in scope:
            self._at[node].add(number)
            self._near[node].update(other for other in scope if other != node)

    def _order(self, node: int) -> tuple[int, int]:
        """Return what nodes are sorted by: few neighbours first, then few cells."""
        near = self._near[node]
        return max(len(near), 1), self._size[node] * math.prod(self._size[w] for w in near)

    def run(self) -> Elimination:
        left = set(self._size) - set(self._keep)
        queue = [(self._order(node), node) for node in left]
        heapq.heapify(queue)
        eliminated = []
        while left:
            order, node = heapq.heappop(queue)
            if node not in left:
                continue
            # Its neighbours may have changed since it was queued.
            now = self._order(node)
            if now != order:
                heapq.heappush(queue, (now, node))
                continue
            self._cells = max(self._cells, now[1])
            if now[1] > self._cells_max:
                raise TooWideError(now[1], self._cells_max)
            scope = tuple(sorted(self._near[node]))
            eliminated.append((node, scope, self._remove(node, scope)))
            left.discard(node)
            for other in scope:
                if other in left:
                    heapq.heappush(queue, (self._order(other), other))
        shape = [self._size[node] for node in self._keep]
        value = np.broadcast_to(self._sum(self._keep, self._tables.values()), shape)
        return Elimination(value + self._constant, eliminated, self._cells)

    def _remove(self, node: int, scope: tuple[int, ...]) -> IntArray:
        """Eliminate one node and return its best strategies."""
        numbers = self._at.pop(node)
        taken = [self._tables.pop(number) for number in numbers]
        for number, (others, _) in zip(numbers, taken, strict=True):
            for other in others:
                self._at[other].discard(number)
        for other in scope:
            self._near[other].discard(node)
        best, table = self._best(node, scope, taken)
        if scope:
            self._put(scope, table)
        else:
            self._constant += float(table)
        return best

    def _best(
        self,
        node: int,
        scope: tuple[int, ...],
        taken: Collection[tuple[tuple[int, ...], FloatArray]],
    ) -> tuple[IntArray, FloatArray]:
        """Return the best strategy, and its cost, for each choice of the neighbours in `scope`.

        The sums are made a block of the first neighbour's choices at a time, which the cache holds.
        """
        full = (*scope, node)
        if not scope:
            sums = self._sum(full, taken)
            best: IntArray = np.asarray(sums.argmin())
            return best, np.asarray(sums.min())
        first = scope[0]
        shape = [self._size[w] for w in full]
        # Tables without the first neighbour are the same in every block of its choices.
        constant = [item for item in taken if first not in item[0]]
        varying = [item for item in taken if first in item[0]]
        rest = self._sum(full[1:], constant)
        best = np.empty(shape[:-1], dtype=np.int64)
        values = np.empty(shape[:-1])
        step = max(1, _BLOCK // math.prod(shape[1:]))
        room = np.empty((min(step, shape[0]), *shape[1:]))
        for start in range(0, shape[0], step):
            block = slice(start, min(start + step, shape[0]))
            part = [(s, np.moveaxis(t, s.index(first), 0)[block]) for s, t in varying]
            part = [((first, *(w for w in s if w != first)), t) for s, t in part]
            sums = np.add(rest, self._sum(full, part), out=room[: block.stop - start])
            best[block] = sums.argmin(axis=-1)
            values[block] = np.take_along_axis(sums, best[block][..., None], axis=-1)[..., 0]
        return best, values

    def _sum(
        self, scope: tuple[int, ...], tables: Collection[tuple[tuple[int, ...], FloatArray]]
    ) -> FloatArray:
        """Return the sum of `tables`, with a dim for each of `scope`: of one where none has it."""
        place = {node: at for at, node in enumerate(scope)}
        total: FloatArray = np.zeros([1] * len(scope))
        # Small tables first: the sum grows to its full size as late as possible.
        for nodes, table in sorted(tables, key=lambda item: item[1].size):
            order = sorted(range(len(nodes)), key=lambda at: place[nodes[at]])
            wide = [1] * len(scope)
            for at in order:
                wide[place[nodes[at]]] = table.shape[at]
            total = total + np.transpose(table, order).reshape(wide)
        return total


def solve(problem: Problem, weight: float = 0.0) -> tuple[float, list[int]]:
    """Return the least cost of `problem`, and the strategy of every node.

    Args:
        problem: What to solve.
        weight: Price of memory, in seconds a byte.

    Raises:
        TooWideError: Its graph is too wide for so many strategies.
    """
    elimination = eliminate(costs(problem, weight))
    chosen = elimination.complete({})
    return float(elimination.value) + problem.fixed, [
        chosen[at] for at in range(len(problem.nodes))
    ]
