"""Repeated blocks solved as a chain: one block becomes a table, and the table answers for all.

The first block and what stands before it, one block, and what stands behind the last are
eliminated down to the values between blocks.  A shortest path over these then is exact, each
block is free to differ from the others, and a hundred blocks take no longer than two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np

from msrun.parallel.search.graph.axis_placement import FloatArray, IntArray
from msrun.parallel.search.solve.eliminate import Costs, Elimination, costs, eliminate
from msrun.parallel.search.solve.problem import Edge, Problem, layout_node

Chosen = Mapping[int, int]


@dataclass(slots=True)
class Chain:
    """A problem of two blocks that stands for one of many.

    Args:
        problem: Of a shortened program, built with hubs at its two cuts.
        block_of: Step -> number of its block, 0 or 1.
        cuts: The values that the two blocks hand on.
        cells_max: As of `eliminate`.
    """

    problem: Problem
    block_of: Mapping[str, int]
    cuts: tuple[str, ...]
    cells_max: int
    cut_nodes: tuple[int, int] = field(init=False)
    parts: tuple[frozenset[int], frozenset[int], frozenset[int]] = field(init=False)
    tied: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = {node.name: at for at, node in enumerate(self.problem.nodes)}
        self.cut_nodes = (names[layout_node(self.cuts[0])], names[layout_node(self.cuts[1])])
        part = self._divide()
        self.parts = tuple(  # type: ignore[assignment]  # there are three
            frozenset(at for at, number in part.items() if number == wanted) for wanted in range(3)
        )
        tied: set[int] = set()
        for edge in self.problem.edges:
            a, b = sorted((part[edge.source], part[edge.target]))
            ends = {edge.source, edge.target}
            if (a, b) == (0, 2):
                # Such as an embedding that is the output's weight too.
                tied.add(min(ends))
            elif b - a == 1 and not ends & set(self.cut_nodes):
                raise ValueError("blocks share more than the values between them")
        self.tied = tuple(sorted(tied))

    def _divide(self) -> dict[int, int]:
        """Return node -> its part: before and the first block, the second block, behind.

        Hubs stand with what makes them, parameters with what reads them first.
        """
        part: dict[int, int] = {}
        makers = {edge.target: edge.source for edge in self.problem.edges}
        readers: dict[int, list[int]] = {}
        for edge in self.problem.edges:
            readers.setdefault(edge.source, []).append(edge.target)
        outside = 0
        for at, node in enumerate(self.problem.nodes):
            if node.kind == "op":
                part[at] = self.block_of.get(node.name, outside)
                outside = 2 if node.name in self.block_of else outside
            elif node.kind == "out":
                part[at] = 2
            elif node.kind == "layout" and makers[at] in part:
                part[at] = part[makers[at]]
        for at in reversed(range(len(self.problem.nodes))):
            if at not in part:
                part[at] = min(part[reader] for reader in readers[at])
        return part

    def in_flight(self, batches: int) -> Chain:
        """Return the chain with so many micro-batches kept instead of one."""
        problem = self.problem.in_flight(batches)
        return Chain(problem, self.block_of, self.cuts, self.cells_max)

    def tables(self, weight: float = 0.0) -> Tables:
        """Return the blocks as tables, with bytes of memory at `weight` seconds each."""
        found = costs(self.problem, weight)
        before, block, behind = self.parts
        first, second = self.cut_nodes

        @cache
        def head() -> Elimination:
            return self._eliminate(found, before, (first, *self.tied), frozenset())

        middle = self._eliminate(found, block | {first}, (first, second), frozenset({first}))
        kept = frozenset({second, *self.tied})
        tail = self._eliminate(found, behind | kept, (second, *self.tied), kept)
        return Tables(self, middle, tail, head)

    def _eliminate(
        self,
        found: Costs,
        nodes: frozenset[int],
        keep: tuple[int, ...],
        given: frozenset[int],
    ) -> Elimination:
        """Eliminate `nodes` but `keep`; what those `given` cost by themselves counts elsewhere."""
        own = {at: np.zeros_like(found.own[at]) if at in given else found.own[at] for at in nodes}
        part = Costs(own)
        for (a, b), table in found.pairs.items():
            if a in nodes and b in nodes and not (a in given and b in given):
                part.pairs[a, b] = table
        return eliminate(part, keep, self.cells_max)


@dataclass(slots=True)
class Tables:
    """What elimination left of a chain.

    Args:
        chain: The chain.
        middle: Over two cuts, one block apart.
        tail: Over the last cut and what is tied.
        make_head: Makes that over the first cut and what is tied, which not all have to know.
    """

    chain: Chain
    middle: Elimination
    tail: Elimination
    make_head: Callable[[], Elimination]

    @property
    def head(self) -> Elimination:
        """What is left over the first cut and what is tied."""
        return self.make_head()

    def solve(self, count: int) -> tuple[float, ChainPlan]:
        """Return the least cost of `count` blocks, and the strategies."""
        value, tie, path = self._shortest(count)
        ties = np.unravel_index(tie, self.head.value.shape[1:]) if self.chain.tied else ()
        return value, self.plan(path, [int(at) for at in ties])

    def least(self, count: int) -> float:
        """Return the least cost of `count` blocks."""
        return self._shortest(count)[0]

    def _shortest(self, count: int) -> tuple[float, int, list[int]]:
        """Return the least cost, what is tied then, and the strategies of the cuts."""
        heads, tails = flat(self.head.value), flat(self.tail.value)
        found = []
        for tie in range(heads.shape[1]):
            value, path = shortest(heads[:, tie], self.middle.value, tails[:, tie], count)
            found.append((value, tie, path))
        value, tie, path = min(found, key=lambda one: one[0])
        return value + self.chain.problem.fixed, tie, path

    def plan(self, path: list[int], ties: list[int]) -> ChainPlan:
        """Return all strategies that follow from those of the cuts, and of what is tied."""
        first, second = self.chain.cut_nodes
        tied = dict(zip(self.chain.tied, ties, strict=True))
        head = self.head.complete({first: path[0], **tied})
        blocks: dict[tuple[int, int], dict[int, int]] = {}
        steps = []
        for pair in pairwise(path):
            if pair not in blocks:
                made = self.middle.complete({first: pair[0], second: pair[1]})
                del made[first]
                blocks[pair] = made
            steps.append(blocks[pair])
        tail = self.tail.complete({second: path[-1], **tied})
        del tail[second]
        return ChainPlan(
            head=head, blocks=steps, tail={k: v for k, v in tail.items() if k not in tied}
        )


@dataclass(slots=True)
class ChainPlan:
    """Strategies of a chain.

    Args:
        head: Node -> strategy, of what stands before and the first block.
        blocks: The same of each further block, in terms of the second.
        tail: The same of what stands behind.
    """

    head: dict[int, int]
    blocks: list[dict[int, int]]
    tail: dict[int, int]

    def pieces(self, chain: Chain, entry: int = 0) -> Iterator[tuple[Chosen, Collection[int]]]:
        """Yield head, each block, and tail: strategies, and the nodes that are its own.

        Those that edges come from are among the strategies too.

        Args:
            chain: Whose nodes these are.
            entry: Strategy of the value that is given where there is no head.
        """
        first, second = chain.cut_nodes
        at = self.head.get(first, entry)
        if first in self.head:
            yield self.head, self.head
        for block in self.blocks:
            yield {first: at, **block}, block
            at = block[second]
        if self.tail:
            tied = {node: self.head[node] for node in chain.tied if node in self.head}
            yield {second: at, **tied, **self.tail}, self.tail

    def memory(self, chain: Chain, entry: int = 0) -> float:
        """Return the bytes on one rank, but for what is tied and stands in another stage."""
        problem = chain.problem
        known: dict[tuple[int, int | None], float] = {}
        copies = [edge for edge in problem.edges if edge.memory is not None]
        total = 0.0
        for chosen, own in self.pieces(chain, entry):
            key = (id(own), chosen.get(chain.cut_nodes[0]))
            if key not in known:
                known[key] = _memory(problem, copies, chosen, own)
            total += known[key]
        return total

    def borrowed(self, chain: Chain) -> float:
        """Return the bytes of what is tied and stands in another stage."""
        if chain.cut_nodes[0] in self.head:
            return 0.0
        return _memory(chain.problem, [], self.head, self.head)


def _memory(
    problem: Problem, copies: Iterable[Edge], chosen: Chosen, own: Collection[int]
) -> float:
    total = sum(float(problem.nodes[node].memory[chosen[node]]) for node in own)
    for edge in copies:
        if edge.target in own and edge.source in chosen and edge.memory is not None:
            total += float(edge.memory[chosen[edge.source], chosen[edge.target]])
    return total


def shortest(
    head: FloatArray, middle: FloatArray, tail: FloatArray, count: int
) -> tuple[float, list[int]]:
    """Return the least sum of a path through `count` cuts, and the path (Viterbi)."""
    value = head
    backs: list[IntArray] = []
    for _ in range(count - 1):
        sums = value[:, None] + middle
        backs.append(sums.argmin(axis=0))
        value = sums.min(axis=0)
    total = value + tail
    path = [int(total.argmin())]
    for back in reversed(backs):
        path.append(int(back[path[-1]]))
    return float(total.min()), path[::-1]


def flat(table: FloatArray) -> FloatArray:
    """Return a table over a cut and what is tied, with all that is tied as one dim."""
    found: FloatArray = table.reshape(len(table), -1)
    return found


def through(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the least sums over what is between: (rows, between) with (between, columns)."""
    if b.shape[1] < len(a):
        return np.stack([(a + column).min(axis=1) for column in b.T], axis=1)
    return np.stack([(row[:, None] + b).min(axis=0) for row in a])
