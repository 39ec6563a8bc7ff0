"""Coordinate descent over mesh axes: exact over the whole graph for two axes at a time.

This is mode `recursive`, and what meshes of more than three axes and graphs too wide for all axes
at once take: two axes have few strategies, however many axes there are.  Each axis is searched
alone first, then each pair with the others fixed, until no pair improves the plan.  It has no
bound: a plan may be the best for each pair of axes, and not for all together.
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
    """The result of a descent.

    Args:
        seconds: Of a step, with memory at its price.
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
    """Return the better of two descents: from the first axis on, and from the last one on.

    Args:
        make: Builds the problem in which some axes are free.
        axes: Of the mesh.
        weight: Price of memory, in seconds a byte.
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
