"""The best plan of one program on one mesh, by any of the three modes.

Up to three axes are searched at once (`exact`): a program of repeated blocks as a chain, any other
by elimination alone; with a memory limit by prices of memory, then refined over the whole program.
More axes, a graph that is too wide, and mode `recursive` are searched two axes at a time.  Mode
`propagation` spreads the placements that the user has fixed (`propagate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.graph.repeat import Blocks, find_blocks, shortened
from msrun.parallel.search.solve.build import Focus, Pin, build
from msrun.parallel.search.solve.chain import Chain, ChainPlan
from msrun.parallel.search.solve.descent import descend
from msrun.parallel.search.solve.eliminate import CELLS_MAX, TooWideError, solve
from msrun.parallel.search.solve.memory import PricedPlan, bounded, refine
from msrun.parallel.search.solve.problem import Edge, Problem, Setting, layout_node, named_by
from msrun.parallel.search.solve.propagate import propagate

Mode = Literal["exact", "recursive", "propagation"]
# The names of MindSpore's `search_mode` mean the same algorithms.
MODES: dict[str, Mode] = {
    "exact": "exact",
    "dynamic_programming": "exact",
    "recursive": "recursive",
    "recursive_programming": "recursive",
    "propagation": "propagation",
    "sharding_propagation": "propagation",
}
EXACT_AXES_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The plan that a search of one mesh found, and how good it is.

    Args:
        chosen: Node of the whole program -> its strategy: a choice of its rule on each axis.
        seconds: Of one step of training.
        memory: Bytes on one rank.
        bound: Seconds that no plan within the memory limit can undercut; None if none is known.
        unknown: Operators without a rule, which run replicated.
    """

    chosen: dict[str, tuple[int, ...]]
    seconds: float
    memory: float
    bound: float | None
    unknown: tuple[str, ...] = ()

    @property
    def gap(self) -> float | None:
        """How much slower than the best of all plans this one can be; 0 if it is the best."""
        if self.bound is None or not self.seconds:
            return None
        return max(0.0, self.seconds / self.bound - 1) if self.bound else None


def search(
    program: Program,
    setting: Setting,
    *,
    mode: Mode = "exact",
    pins: Sequence[Pin] = (),
    limit: float | None = None,
) -> SearchResult:
    """Return the fastest plan.

    Args:
        program: The forward pass.
        setting: Mesh, machine, and how a step is run.
        mode: `exact` looks at all axes at once, as long as they are three at most; `recursive` at
            two at a time; `propagation` spreads from `pins`, and is no worse than data parallel.
        pins: Placements that the user has fixed.
        limit: Bytes that a rank has; None is any.

    Raises:
        ConfigError: No strategy has a placement that the user has fixed.
        OutOfMemoryError: No plan fits.
    """
    if mode == "propagation":
        problem = whole_problem(program, setting, pins)
        plan = propagate(problem, setting, pinned={pin.node for pin in pins}, limit=limit)
        return _result(problem, plan, None)
    blocks = _blocks(program, pins)
    axes = sum(size > 1 for size in setting.sizes)
    if mode == "exact" and axes <= EXACT_AXES_MAX:
        try:
            return _exact(program, setting, blocks, pins, limit)
        except TooWideError:
            pass
    return _by_axes(program, setting, blocks, pins, limit)


def _blocks(program: Program, pins: Sequence[Pin]) -> Blocks | None:
    """Return the repeated blocks; None if there are none, or a pin concerns one of them alone."""
    blocks = find_blocks(program)
    if blocks is None:
        return None
    inside = blocks.block_of(program)
    names = set(inside)
    for step in program.steps:
        if step.name in inside:
            names.update(step.inputs.values())
            names.update(layout_node(name) for name in (*step.inputs.values(), *step.outputs))
    return None if any(pin.node in names for pin in pins) else blocks


def whole_problem(program: Program, setting: Setting, pins: Sequence[Pin]) -> Problem:
    """Return the problem in which every block is a part of its own."""
    found = find_blocks(program) if setting.recompute else None
    if found is None:
        return build(program, setting, pins=pins)
    inside = found.block_of(program)
    return build(program, setting, cuts=found.cuts, block_of=inside, pins=pins)


# All axes at once.


def _exact(
    program: Program,
    setting: Setting,
    blocks: Blocks | None,
    pins: Sequence[Pin],
    limit: float | None,
) -> SearchResult:
    if blocks is None:
        return search_problem(whole_problem(program, setting, pins), limit)
    # Two blocks are enough to solve all: see `chain`.
    short, two = shortened(program, blocks)
    problem = build(short, setting, cuts=two.cuts, block_of=two.block_of(short), pins=pins)
    chain = Chain(problem, two.block_of(short), two.cuts, CELLS_MAX)

    def solve_at(weight: float) -> PricedPlan[ChainPlan]:
        value, plan = chain.tables(weight).solve(blocks.count)
        memory = plan.memory(chain)
        return PricedPlan(value - weight * memory, memory, plan)

    if limit is None:
        unlimited = solve_at(0.0)
        result = bounded(solve_at, unlimited.memory)
    else:
        result = bounded(solve_at, limit)
    names = BlockNodes(program, short, blocks)
    if result.exceeds is None or limit is None:
        best = result.fits
        chosen = names.expand(problem, best.plan)
        return SearchResult(
            chosen=chosen,
            seconds=best.seconds,
            memory=best.memory,
            bound=best.seconds,
            unknown=problem.unknown,
        )
    whole = build(program, setting, cuts=blocks.cuts, block_of=blocks.block_of(program), pins=pins)
    # Single tensors of single blocks are exchanged, so all blocks must be nodes.
    fits = indices(whole, names.expand(problem, result.fits.plan))
    exceeds = indices(whole, names.expand(problem, result.exceeds.plan))
    groups = _groups(program, blocks, whole)
    plan = refine(whole, fits, exceeds, groups, limit)
    return _result(whole, plan, result.bound)


def search_problem(problem: Problem, limit: float | None) -> SearchResult:
    """Return the fastest plan of a problem that is built already.

    Raises:
        OutOfMemoryError: No plan fits.
        TooWideError: Too many tensors are alive at once for all axes together.
    """

    def solve_at(weight: float) -> PricedPlan[list[int]]:
        _, plan = solve(problem, weight)
        return PricedPlan(problem.seconds(plan), problem.memory(plan), plan)

    if limit is None:
        plan = solve(problem)[1]
        return _result(problem, plan, problem.seconds(plan))
    result = bounded(solve_at, limit)
    if result.exceeds is None:
        return _result(problem, result.fits.plan, result.bound)
    plan = refine(problem, result.fits.plan, result.exceeds.plan, _order(problem), limit)
    return _result(problem, plan, result.bound)


def _result(problem: Problem, plan: Sequence[int], bound: float | None) -> SearchResult:
    chosen = {
        node.name: tuple(node.rows[at].tolist())
        for node, at in zip(problem.nodes, plan, strict=True)
    }
    return SearchResult(
        chosen=chosen,
        seconds=problem.seconds(plan),
        memory=problem.memory(plan),
        bound=bound,
        unknown=problem.unknown,
    )


def indices(problem: Problem, chosen: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Return the number of each node's strategy, given its choices on the axes."""
    return [
        int(np.flatnonzero((node.rows == np.array(chosen[node.name])).all(axis=1))[0])
        for node in problem.nodes
    ]


# Two axes at a time.


def _by_axes(
    program: Program,
    setting: Setting,
    blocks: Blocks | None,
    pins: Sequence[Pin],
    limit: float | None,
) -> SearchResult:
    """Search two axes at a time, with the same strategies in all blocks after the first."""
    axes = len(setting.sizes)
    if blocks is None:
        blocks_map = None

        def make(focus: Focus) -> Problem:
            return build(program, setting, pins=pins, focus=focus)
    else:
        short, two = shortened(program, blocks)
        inside = two.block_of(short)
        blocks_map = BlockNodes(program, short, blocks)

        def make(focus: Focus) -> Problem:
            problem = build(short, setting, cuts=two.cuts, block_of=inside, pins=pins, focus=focus)
            return equal_blocks(Chain(problem, inside, two.cuts, CELLS_MAX), blocks.count)

    def solve_at(weight: float) -> PricedPlan[dict[str, tuple[int, ...]]]:
        end = descend(make, axes, weight)
        return PricedPlan(
            end.problem.seconds(end.chosen), end.problem.memory(end.chosen), end.picked
        )

    best = solve_at(0.0) if limit is None else bounded(solve_at, limit, tolerance=1e-3).fits
    chosen = blocks_map.repeat(best.plan) if blocks_map else best.plan
    unknown = make(Focus(axes=frozenset(), others={})).unknown
    return SearchResult(
        chosen=chosen, seconds=best.seconds, memory=best.memory, bound=None, unknown=unknown
    )


def equal_blocks(chain: Chain, count: int) -> Problem:
    """Return the problem in which the second block of `chain` stands for all but the first.

    The values at both cuts have the same layout.
    """
    inside = chain.parts[1]
    problem = chain.problem
    times = float(count - 1)
    nodes = [
        replace(
            node,
            seconds=node.seconds * (times if at in inside else 1.0),
            memory=node.memory * (times if at in inside else 1.0),
        )
        for at, node in enumerate(problem.nodes)
    ]
    edges = [
        replace(e, seconds=e.seconds * times, memory=None if e.memory is None else e.memory * times)
        if e.target in inside
        else e
        for e in problem.edges
    ]
    first, second = chain.cut_nodes
    same = (nodes[first].rows[:, None] == nodes[second].rows[None]).all(axis=2)
    edges.append(Edge(first, second, np.where(same, 0.0, np.inf)))
    return Problem(nodes=nodes, edges=edges, fixed=problem.fixed, unknown=problem.unknown)


# From two blocks to all.


class BlockNodes:
    """Maps nodes of the second block to those of every other block.

    Args:
        program: The whole program.
        short: The program of two blocks.
        blocks: Of the whole program.
    """

    def __init__(self, program: Program, short: Program, blocks: Blocks) -> None:
        first, period = blocks.first, blocks.period
        template = short.steps[first + period : first + 2 * period]
        self._blocks = blocks
        self._maps: list[dict[str, str]] = []
        for number in range(1, blocks.count):
            start = first + number * period
            names = {layout_node(blocks.cuts[1]): layout_node(blocks.cuts[number])}
            for step, other in zip(template, program.steps[start : start + period], strict=True):
                names[step.name] = other.name
                pairs = zip(
                    (*step.inputs.values(), *step.outputs),
                    (*other.inputs.values(), *other.outputs),
                    strict=True,
                )
                for name, theirs in pairs:
                    if name != blocks.cuts[0]:
                        names[name] = theirs
                        names[layout_node(name)] = layout_node(theirs)
            self._maps.append(names)

    def expand(self, problem: Problem, plan: ChainPlan) -> dict[str, tuple[int, ...]]:
        """Return the choices of every node of the whole program."""

        def choices(chosen: Mapping[int, int]) -> dict[str, tuple[int, ...]]:
            return {
                problem.nodes[node].name: tuple(problem.nodes[node].rows[at].tolist())
                for node, at in chosen.items()
            }

        rows = choices(plan.head) | choices(plan.tail)
        for block, names in zip(plan.blocks, self._maps, strict=True):
            rows |= {names.get(name, name): row for name, row in choices(block).items()}
        return rows

    def repeat(self, picked: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the choices of every node when all blocks choose what the second does."""
        rows = dict(picked)
        for names in self._maps:
            rows |= {names[name]: row for name, row in picked.items() if name in names}
        return rows


def _groups(program: Program, blocks: Blocks, problem: Problem) -> list[int]:
    """Return the number of the block of each node; before and behind the blocks are groups too."""
    group: dict[str, int] = {}
    end = blocks.first + blocks.period * blocks.count
    for at, step in enumerate(program.steps):
        block = max(0, min(at, end) - blocks.first) // blocks.period
        number = block + (at >= blocks.first)
        group[step.name] = number
        for name in step.outputs:
            group[name] = number
        for name in step.inputs.values():
            group.setdefault(name, number)
    return [group.get(named_by(node.name), blocks.count + 1) for node in problem.nodes]


def _order(problem: Problem) -> list[int]:
    """Return a number for each node that follows the order of execution."""
    order = {at: at for at in range(len(problem.nodes))}
    for edge in problem.edges:
        if problem.nodes[edge.source].kind == "param":
            # A parameter comes when it is read, not where the program lists it.
            order[edge.source] = min(order[edge.target], len(problem.nodes))
    return [order[at] for at in range(len(problem.nodes))]
