"""Repeated blocks solved as a chain: one block becomes one table, which serves for all of them.

The problem.  A transformer is a hundred equal layers between an embedding and a head.  Eliminating
the whole program repeats the same work a hundred times, and a search over pipelines needs the cost
of many numbers of blocks.  Yet a plan must be free to treat layers differently: the first and the
last meet other layouts than those inside, and under a memory limit only some may save more.

The idea.  Blocks hand each other exactly one value (`graph.repeat`), whose layout node is called a
cut node here.  A program of two blocks holds all that ever differs, in three parts: the head, which
is what comes before the blocks and the first block; the middle, which is the second block; and the
tail behind the last block.  Elimination down to the cut nodes leaves

- of the head a vector: the least seconds for each layout of the first cut,
- of the middle a matrix: from each layout of one cut to each layout of the next,
- of the tail a vector: from each layout of the last cut.

The best plan of n blocks is a shortest path through n cuts (Viterbi, `shortest`): each step adds
the one matrix, and the path says which strategies every block takes.  Where only the cost of a run
of blocks matters, the matrix is multiplied with itself in the (min, +) algebra (`through`): a
pipeline stage of n blocks takes log n products.

Invariants.

- A cut node belongs to the part that makes it, a parameter to the part that reads it first.  Any
  other edge between two neighbouring parts is refused in `__post_init__`.
- Parts joined by the head and the tail alone, such as an embedding that is also the weight of the
  output, are `tied`: they stay as a dim of both tables, and every strategy of them is tried.
- Each cost counts in one part: what a cut node costs by itself, and edges among what is `given`,
  are left out where it is given.  So the three tables add up to the cost of the whole program.
- `Chain.in_flight` scales saved memory alone, so without a price of memory the tables of all stages
  of a pipeline are the same.

What was tried and lost.  Making all three tables for every stage: a stage that is not the first
needs no head, and often its bound alone rules a layout out, so the head is made when it is asked
for.  One set of strategies for all blocks is what `descent` still does, with `modes.equal_blocks`;
it cannot fill a memory limit by letting blocks differ.
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
        problem: Of a shortened program, built with layout nodes at its two cuts.
        block_of: Step -> number of its block, 0 or 1.
        cuts: The values that the two blocks hand on.
        cells_max: As of `eliminate`.

    Attributes:
        cut_nodes: The layout nodes of the cuts.
        parts: Nodes of head, middle and tail.
        tied: Nodes of the head that the tail reads too.
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
                # Nodes of the head are listed first, so the smaller index is the shared one.
                tied.add(min(ends))
            elif b - a == 1 and not ends & set(self.cut_nodes):
                raise ValueError("blocks share more than the values between them")
        self.tied = tuple(sorted(tied))

    def _divide(self) -> dict[int, int]:
        """Return node -> its part: 0 is the head, 1 the middle, 2 the tail."""
        part: dict[int, int] = {}
        producers = {edge.target: edge.source for edge in self.problem.edges}
        consumers: dict[int, list[int]] = {}
        for edge in self.problem.edges:
            consumers.setdefault(edge.source, []).append(edge.target)
        # Operators come in the order of execution: outside of blocks, 0 until the blocks begin.
        outside = 0
        for at, node in enumerate(self.problem.nodes):
            if node.kind == "op":
                part[at] = self.block_of.get(node.name, outside)
                outside = 2 if node.name in self.block_of else outside
            elif node.kind == "out":
                part[at] = 2
            elif node.kind == "layout" and producers[at] in part:
                part[at] = part[producers[at]]
        # Parameters and their layout nodes, last ones first, as their consumers have parts by then.
        for at in reversed(range(len(self.problem.nodes))):
            if at not in part:
                part[at] = min(part[consumer] for consumer in consumers[at])
        return part

    def in_flight(self, batches: int) -> Chain:
        """Return the chain with so many micro-batches in flight instead of one."""
        problem = self.problem.in_flight(batches)
        return Chain(problem, self.block_of, self.cuts, self.cells_max)

    def tables(self, weight: float = 0.0) -> ChainTables:
        """Return the parts as tables, with memory at a price of `weight` seconds a byte."""
        total = costs(self.problem, weight)
        head_nodes, block, tail_nodes = self.parts
        first, second = self.cut_nodes

        @cache
        def head() -> Elimination:
            return self._eliminate(total, head_nodes, (first, *self.tied), frozenset())

        middle = self._eliminate(total, block | {first}, (first, second), frozenset({first}))
        given = frozenset({second, *self.tied})
        tail = self._eliminate(total, tail_nodes | given, (second, *self.tied), given)
        return ChainTables(self, middle, tail, head)

    def _eliminate(
        self,
        total: Costs,
        nodes: frozenset[int],
        keep: tuple[int, ...],
        given: frozenset[int],
    ) -> Elimination:
        """Eliminate `nodes` but `keep`; costs among those `given` are counted by another part."""
        own = {at: np.zeros_like(total.own[at]) if at in given else total.own[at] for at in nodes}
        part = Costs(own)
        for (a, b), table in total.pairs.items():
            if a in nodes and b in nodes and not (a in given and b in given):
                part.pairs[a, b] = table
        return eliminate(part, keep, self.cells_max)


@dataclass(slots=True)
class ChainTables:
    """What elimination leaves of the three parts of a chain.

    Args:
        chain: The chain.
        middle: Over two cuts, one block apart.
        tail: Over the last cut and what is tied.
        make_head: Makes the table over the first cut and what is tied, when it is needed.
    """

    chain: Chain
    middle: Elimination
    tail: Elimination
    make_head: Callable[[], Elimination]

    @property
    def head(self) -> Elimination:
        """The table over the first cut and what is tied."""
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
        """Return the least cost, the strategies of what is tied, and those of the cuts."""
        heads, tails = flat(self.head.value), flat(self.tail.value)
        paths = []
        for tie in range(heads.shape[1]):
            value, path = shortest(heads[:, tie], self.middle.value, tails[:, tie], count)
            paths.append((value, tie, path))
        value, tie, path = min(paths, key=lambda one: one[0])
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
                block = self.middle.complete({first: pair[0], second: pair[1]})
                del block[first]  # the block before has it
                blocks[pair] = block
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
        head: Node -> strategy, of what comes before the blocks and of the first block.
        blocks: The same of each further block, by the nodes of the second.
        tail: The same of what comes behind them.
    """

    head: dict[int, int]
    blocks: list[dict[int, int]]
    tail: dict[int, int]

    def pieces(self, chain: Chain, entry: int = 0) -> Iterator[tuple[Chosen, Collection[int]]]:
        """Yield head, each block, and tail: strategies, and the nodes that are its own.

        The strategies include those of nodes that edges come from.

        Args:
            chain: Whose nodes these are.
            entry: Strategy of the cut node at which it begins, where there is no head.
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
        """Return the bytes on one rank, without tied nodes that another stage owns."""
        problem = chain.problem
        known: dict[tuple[int, int | None], float] = {}
        copies = [edge for edge in problem.edges if edge.memory is not None]
        total = 0.0
        for chosen, own in self.pieces(chain, entry):
            # Equal blocks are one and the same dict: their bytes are computed once.
            key = (id(own), chosen.get(chain.cut_nodes[0]))
            if key not in known:
                known[key] = _memory(problem, copies, chosen, own)
            total += known[key]
        return total

    def borrowed(self, chain: Chain) -> float:
        """Return the bytes of tied nodes that another stage owns, of which this one has a copy."""
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
    matrix: FloatArray = table.reshape(len(table), -1)
    return matrix


def through(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the (min, +) product: least sums over what is between `a`'s rows and `b`'s columns."""
    # Loop over the shorter side: each pass is one vectorised sum.
    if b.shape[1] < len(a):
        return np.stack([(a + column).min(axis=1) for column in b.T], axis=1)
    return np.stack([(row[:, None] + b).min(axis=0) for row in a])
