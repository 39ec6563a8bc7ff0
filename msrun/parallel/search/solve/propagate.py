"""Sharding propagation: layouts spread from what the user has fixed to everything else.

The problem.  The user has rules for a few parameters, inputs and outputs, and wants the rest to
follow them.  The exact search asks which plan is fastest of all that keep the rules; on wide graphs
and many mesh axes that takes long, and the plan may look like nothing the user wrote.

The idea, in three steps, all on the graph of costs of `build`:

1. Breadth first from the fixed nodes, each node that is reached takes the strategy with the least
   redistribution to its neighbours that have one, computation included.  Where two fixed nodes meet
   with different layouts, the edge between them pays for the redistribution.  Along data axes, a
   node keeps the layout that data parallel gives it: there the samples decide, not the rules.
2. What no fixed node reaches is data parallel: along data axes every operator reads the samples as
   they come, along the others it runs replicated.
3. Single nodes, and pairs of neighbours, change to whatever is faster, until none does.

Step 2 for all nodes, fixed ones apart, is the default.  It is improved like the propagated plan,
and the better of the two is taken, so the result is never worse than the default.  With a memory
limit bytes get a price, which grows until a plan fits.

What was tried and lost.  Redistribution alone, without computation: an operator that runs
replicated next to replicated neighbours costs no redistribution, so nothing was ever divided where
the rules did not reach.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from msrun.parallel.search.graph.axis_placement import BoolArray, FloatArray
from msrun.parallel.search.solve.memory import PROHIBITIVE_PRICE, OutOfMemoryError, polish
from msrun.parallel.search.solve.problem import Edge, Problem, Setting

# Prices of a byte, from the least that matters to one that no time is worth.
_PRICES = (0.0, *np.geomspace(1e-14, PROHIBITIVE_PRICE, 23).tolist())
# Nodes of which single ones and pairs are changed; beyond, propagation alone decides.
_POLISHED_MAX = 20_000


def propagate(
    problem: Problem, setting: Setting, *, pinned: Collection[str], limit: float | None
) -> list[int]:
    """Return the strategy of every node: a plan that spreads from `pinned`.

    Args:
        problem: Its nodes have only strategies that meet what the user has fixed.
        setting: Of the problem.
        pinned: Names of the nodes with something fixed.
        limit: Bytes on a rank; None is any.

    Raises:
        OutOfMemoryError: No plan was found that fits.
    """
    spread = _Spread(problem, setting, pinned)
    most = np.inf if limit is None else limit
    least = np.inf
    for price in _PRICES if limit is not None else _PRICES[:1]:
        default = spread.default(price)
        plans = [default, spread.from_pinned(default, price)] if pinned else [default]
        least = min(least, *(problem.memory(plan) for plan in plans))
        fitting = [plan for plan in plans if problem.memory(plan) <= most]
        if fitting:
            if len(problem.nodes) <= _POLISHED_MAX:
                fitting = [polish(problem, plan, float(most)) for plan in fitting]
            return min(fitting, key=problem.seconds)
    raise OutOfMemoryError(float(least))


def data_parallel(problem: Problem, setting: Setting, pinned: Collection[str]) -> list[int]:
    """Return the default that a propagated plan is never slower than; see `propagate`."""
    return _Spread(problem, setting, pinned).default(0.0)


class _Spread:
    """Chooses strategies node by node.

    Args:
        problem: As of `propagate`.
        setting: As of `propagate`.
        pinned: As of `propagate`.
    """

    def __init__(self, problem: Problem, setting: Setting, pinned: Collection[str]) -> None:
        self._problem = problem
        self._pinned = [at for at, node in enumerate(problem.nodes) if node.name in pinned]
        self._data = sorted(setting.data_axes)
        self._others = [axis for axis in range(len(setting.sizes)) if axis not in setting.data_axes]
        self._edges: dict[int, list[Edge]] = defaultdict(list)
        for edge in problem.edges:
            self._edges[edge.source].append(edge)
            self._edges[edge.target].append(edge)

    def default(self, price: float) -> list[int]:
        """Return data parallel: all but fixed nodes are replicated along axes that share samples.

        Nodes come in the order of execution, so what an operator reads has been placed.
        """
        chosen: dict[int, int] = {}
        for at, node in enumerate(self._problem.nodes):
            allowed = (node.rows[:, self._others] == 0).all(axis=1)
            if node.kind == "param":
                allowed &= (node.rows[:, self._data] == 0).all(axis=1)
            if not allowed.any() or at in self._pinned or (price and node.kind == "param"):
                # Sharded parameters take less memory, if that has a price.
                allowed = np.ones(len(node.rows), bool)
            # What parameters pay is the same for all ranks: samples decide.
            moved = self._between(at, chosen, but_params=True)
            chosen[at] = _best(moved, node.seconds + price * node.memory, allowed)
        return [chosen[at] for at in range(len(self._problem.nodes))]

    def from_pinned(self, default: Sequence[int], price: float) -> list[int]:
        """Return the plan that spreads from fixed nodes; `default` holds for what they reach not.

        Along data axes `default` holds for all.
        """
        chosen: dict[int, int] = {}
        for at in self._order():
            node = self._problem.nodes[at]
            like = node.rows[default[at]][self._data]
            allowed = (node.rows[:, self._data] == like).all(axis=1)
            costs = self._between(at, chosen) + node.seconds + price * node.memory
            chosen[at] = _best(costs, node.seconds, allowed)
        return [chosen.get(at, default[at]) for at in range(len(self._problem.nodes))]

    def _order(self) -> Iterator[int]:
        """Yield the nodes that fixed ones reach, breadth first."""
        seen = set(self._pinned)
        queue = deque(self._pinned)
        while queue:
            at = queue.popleft()
            yield at
            for edge in self._edges[at]:
                other = edge.target if edge.source == at else edge.source
                if other not in seen:
                    seen.add(other)
                    queue.append(other)

    def _between(self, at: int, chosen: dict[int, int], *, but_params: bool = False) -> FloatArray:
        """Return the redistribution of each strategy of a node to neighbours that have one."""
        costs: FloatArray = np.zeros(len(self._problem.nodes[at].rows))
        for edge in self._edges[at]:
            if edge.target == at and edge.source in chosen:
                if but_params and self._is_of_param(edge):
                    continue
                costs = costs + edge.seconds[chosen[edge.source]]
            elif edge.source == at and edge.target in chosen:
                costs = costs + edge.seconds[:, chosen[edge.target]]
        return costs

    def _is_of_param(self, edge: Edge) -> bool:
        """Return whether an edge is that of a parameter, or of the layout of one."""
        if self._problem.nodes[edge.source].kind == "param":
            return True
        name = edge.exchange.value if edge.exchange else ""
        return any(
            one.target == edge.source
            and self._problem.nodes[one.source].name == name
            and self._problem.nodes[one.source].kind == "param"
            for one in self._edges[edge.source]
        )


def _best(first: FloatArray, second: FloatArray, allowed: BoolArray) -> int:
    """Return the row with the least of `first`, of equal ones the least of `second`."""
    masked = np.where(allowed, first, np.inf)
    # What differs by rounding alone is equal.
    is_least = allowed & (masked <= masked.min() * (1 + 1e-9) + 1e-15)
    return int(np.where(is_least, second, np.inf).argmin())
