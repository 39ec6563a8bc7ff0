"""The same problems for an integer solver (HiGHS, in scipy): what our answers are held against.

One variable for each strategy, and one for each pair of strategies that differ for an edge.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from scipy.optimize import (  # type: ignore[import-untyped]  # it has no types
    Bounds,
    LinearConstraint,
    milp,
)
from scipy.sparse import coo_matrix  # type: ignore[import-untyped]  # as above

from msrun.parallel.search.solve.problem import Edge, Problem

# HiGHS takes costs below about 1e-7 for nothing.
_SCALE = 1e3
Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class _Rows:
    """Linear constraints, as they are added."""

    def __init__(self) -> None:
        self.cells: list[tuple[Indices, Indices, Numbers]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, columns: Indices, values: Numbers, low: float, high: float) -> None:
        rows = np.full(len(columns), len(self.low))
        self.cells.append((rows, columns, values))
        self.low.append(low)
        self.high.append(high)

    def constraint(self, variables: int) -> LinearConstraint:
        rows, columns, values = (np.concatenate(part) for part in zip(*self.cells, strict=True))
        shape = (len(self.low), variables)
        return LinearConstraint(coo_matrix((values, (rows, columns)), shape), self.low, self.high)


def solve(
    problem: Problem, *, memory: float | None = None, seconds_max: float = 120.0
) -> tuple[float, list[int]]:
    """Return the least cost of `problem`, and the strategies.

    Args:
        problem: What to solve.
        memory: Bytes that a rank has; None is any.
        seconds_max: After which the best so far is taken.

    Raises:
        RuntimeError: There is no answer, or none was found in time.
    """
    starts = np.cumsum([0, *(len(node.rows) for node in problem.nodes)])
    count = int(starts[-1])
    prices = [np.concatenate([node.seconds for node in problem.nodes])]
    held = [np.concatenate([node.memory for node in problem.nodes])]
    rows = _Rows()
    for at, node in enumerate(problem.nodes):
        rows.add(starts[at] + np.arange(len(node.rows)), np.ones(len(node.rows)), 1, 1)
    for edge in problem.edges:
        seconds, copied = _add_edge(rows, edge, starts, count)
        prices.append(seconds)
        held.append(copied)
        count += len(seconds)
    if memory is not None:
        rows.add(np.arange(count), np.concatenate(held) / 1e9, -np.inf, memory / 1e9)
    integral = np.zeros(count)
    integral[: starts[-1]] = 1
    result = milp(
        np.concatenate(prices) * _SCALE,
        constraints=rows.constraint(count),
        integrality=integral,
        bounds=Bounds(0, 1),
        options={"time_limit": seconds_max, "mip_rel_gap": 1e-7},
    )
    if result.x is None:
        raise RuntimeError(result.message)
    chosen = [int(np.argmax(result.x[start:end])) for start, end in itertools.pairwise(starts)]
    return problem.seconds(chosen), chosen


def _add_edge(rows: _Rows, edge: Edge, starts: Indices, first: int) -> tuple[Numbers, Numbers]:
    """Add the variables of an edge, from number `first` on, and return their seconds and bytes.

    Each class of equal rows has one variable for each class of equal columns; their sums are
    those of the strategies in the class.
    """
    table = edge.seconds
    copied = np.zeros_like(table) if edge.memory is None else edge.memory
    _, row_at, row_of = np.unique(
        np.hstack([table, copied]), axis=0, return_index=True, return_inverse=True
    )
    _, column_at, column_of = np.unique(
        np.vstack([table, copied]), axis=1, return_index=True, return_inverse=True
    )
    small, bytes_of = (part[np.ix_(row_at, column_at)] for part in (table, copied))
    number = first + np.arange(small.size).reshape(small.shape)
    barred = number[np.isinf(small)]
    if len(barred):
        rows.add(barred, np.ones(len(barred)), 0, 0)
    for node, variables, classes in (
        (edge.source, number, row_of.ravel()),
        (edge.target, number.T, column_of.ravel()),
    ):
        for at, own in enumerate(variables):
            members = starts[node] + np.flatnonzero(classes == at)
            columns = np.concatenate([own, members])
            rows.add(columns, np.concatenate([np.ones(len(own)), -np.ones(len(members))]), 0, 0)
    return np.where(np.isinf(small), 0.0, small).ravel(), bytes_of.ravel()
