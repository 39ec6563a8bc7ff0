"""Search by mesh axes: exact over the whole graph for two axes at a time, the others as they are.

This is the recursive search, and what meshes of more than three axes take: the strategies of two
axes are few, however many axes there are.  It ends where no pair of axes can do better.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from msrun.parallel.search.solve.build import Focus
from msrun.parallel.search.solve.eliminate import solve
from msrun.parallel.search.solve.problem import Problem

Picked = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Descent:
    """Where a descent ended.

    Args:
        seconds: What it costs, with memory at its price.
        picked: Node -> its choice on every axis.
        problem: The last problem.
        chosen: Its strategies.
        steps: Problems that were solved.
    """

    seconds: float
    picked: Picked
    problem: Problem
    chosen: list[int]
    steps: int


def descend(make: Callable[[Focus], Problem], axes: int, weight: float = 0.0) -> Descent:
    """Return the best end of two descents: axes from the first on, and from the last on.

    Args:
        make: Builds the problem that looks at some axes.
        axes: Of the mesh.
        weight: Seconds that a byte of memory counts.
    """
    orders = [list(range(axes)), list(range(axes))[::-1]]
    ends = [_descend(make, order, weight) for order in orders[: 2 if axes > 1 else 1]]
    return min(ends, key=lambda end: end.seconds)


def _descend(make: Callable[[Focus], Problem], order: list[int], weight: float) -> Descent:
    picked: Picked = {}
    end: Descent | None = None
    pairs: list[tuple[int, ...]] = list(itertools.combinations(order, 2)) or [(0,)]
    schedule: list[tuple[int, ...]] = [(axis,) for axis in order]
    steps = 0
    while True:
        before = end.seconds if end else float("inf")
        for group in schedule:
            problem = make(Focus(axes=frozenset(group), others=picked))
            seconds, chosen = solve(problem, weight)
            picked = {
                node.name: tuple(node.rows[at].tolist())
                for node, at in zip(problem.nodes, chosen, strict=True)
            }
            steps += 1
            end = Descent(seconds, picked, problem, chosen, steps)
        if end is None or (schedule == pairs and end.seconds > before * (1 - 1e-7)):
            break
        schedule = pairs
    return end  # type: ignore[return-value]  # there is at least one axis
