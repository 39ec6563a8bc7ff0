"""The fastest plan that fits into memory, with a bound on how much faster any plan could be.

A limit of memory ties all nodes together, so elimination cannot keep to it.  Instead memory gets a
price in seconds a byte (a Lagrange multiplier): at a fixed price the problem is as easy as without
a limit.  Whatever plan is cheapest at some price, its seconds plus price times the bytes that it is
off the limit bound every plan that fits (Everett, Operations Research 11(3), 1963).

`bounded` finds the price at which the cheapest plan changes from one that fits to one that does
not.  Each price is where the two best plans so far cost the same: where no plan is cheaper there,
there is none between them.

Plans change in leaps, so the two may be far from the limit.  `refine` fills what is left: it takes
the blocks of the faster plan one after the other, from the front and from the back, then changes
single nodes (`polish`) and pairs of neighbours, most seconds saved for a byte first, since a saved
copy costs memory on the edge between two.  The plan is not optimal, but the bound stays valid and
says by how much it may miss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from msrun.parallel.search.graph.axis_placement import FloatArray
from msrun.parallel.search.solve.problem import Edge, Problem

T = TypeVar("T")

# Seconds a byte: more than any plan could save.
PROHIBITIVE_PRICE = 1e-3
_ROUNDS_MAX = 40
_SWEEPS_MAX = 8
# Cells of a table of two nodes that are changed together: two axes.
_PAIRS_MAX = 1 << 12
# Seconds that are worth a change.
_LEAST = 1e-12


class OutOfMemoryError(Exception):
    """No plan fits.

    Args:
        least: Bytes that the smallest plan takes.
    """

    def __init__(self, least: float) -> None:
        super().__init__(f"the smallest plan takes {least:.0f} bytes on a rank")
        self.least = least


@dataclass(frozen=True, slots=True)
class PricedPlan(Generic[T]):
    """The cheapest plan at one price of memory.

    Args:
        seconds: Of a step.
        memory: Bytes on a rank.
        plan: The plan.
    """

    seconds: float
    memory: float
    plan: T


@dataclass(frozen=True, slots=True)
class Bounded(Generic[T]):
    """What prices of memory lead to.

    Args:
        fits: The fastest of the plans that fit.
        exceeds: The cheapest one beyond the limit, at a slightly lower price; None if memory is no
            limit.
        bound: Seconds that no plan that fits can undercut.
    """

    fits: PricedPlan[T]
    exceeds: PricedPlan[T] | None
    bound: float


def bounded(
    solve: Callable[[float], PricedPlan[T]], limit: float, *, tolerance: float = 1e-6
) -> Bounded[T]:
    """Return the plans on both sides of a memory limit.

    Args:
        solve: Price of a byte in seconds -> the cheapest plan.
        limit: Bytes on a rank.
        tolerance: Relative distance of plan and bound that is enough.

    Raises:
        OutOfMemoryError: No plan fits.
    """
    exceeds = solve(0.0)
    if exceeds.memory <= limit:
        return Bounded(exceeds, None, exceeds.seconds)
    fits = solve(PROHIBITIVE_PRICE)
    if fits.memory > limit:
        raise OutOfMemoryError(fits.memory)
    bound = exceeds.seconds
    for _ in range(_ROUNDS_MAX):
        # Where both cost the same.
        price = (fits.seconds - exceeds.seconds) / (exceeds.memory - fits.memory)
        if price <= 0 or fits.seconds - bound <= tolerance * fits.seconds:
            break
        plan = solve(price)
        bound = max(bound, plan.seconds + price * (plan.memory - limit))
        # What both ends cost at this price: without a cheaper plan nothing lies between them.
        line = fits.seconds + price * fits.memory
        if plan.seconds + price * plan.memory >= line * (1 - _LEAST):
            break
        if plan.memory <= limit:
            fits = plan
        else:
            exceeds = plan
    return Bounded(fits, exceeds, bound)


def refine(
    problem: Problem,
    fits: Sequence[int],
    exceeds: Sequence[int],
    groups: Sequence[int],
    limit: float,
) -> list[int]:
    """Return a plan that fits and is at least as fast as `fits`, made of it and `exceeds`.

    Args:
        problem: Whose strategies both choose.
        fits: A plan within the limit.
        exceeds: A faster one beyond it.
        groups: Number of the block of each node, in the order of execution.
        limit: Bytes on a rank.
    """
    plans = [list(fits)]
    for sign in (1, -1):  # from the front, and from the back
        order = [sign * group for group in groups]
        plans.append(_mixed(problem, fits, exceeds, order, limit))
    polished = [polish(problem, plan, limit) for plan in plans]
    return min(polished, key=problem.seconds)


def _mixed(
    problem: Problem,
    fits: Sequence[int],
    exceeds: Sequence[int],
    groups: Sequence[int],
    limit: float,
) -> list[int]:
    """Return the best plan of the first groups from `exceeds` and the others from `fits`."""
    places = {group: at for at, group in enumerate(sorted(set(groups)))}
    at = [places[group] for group in groups]
    # Of taking so many groups, 0 to all.
    seconds, memory = np.zeros(len(places) + 1), np.zeros(len(places) + 1)
    for node, place, a, b in zip(problem.nodes, at, fits, exceeds, strict=True):
        for total, own in ((seconds, node.seconds), (memory, node.memory)):
            total[: place + 1] += own[a]
            total[place + 1 :] += own[b]
    for edge in problem.edges:
        u, v = edge.source, edge.target
        low, high = sorted((at[u], at[v]))
        for total, table in ((seconds, edge.seconds), (memory, edge.memory)):
            if table is None:
                continue
            total[: low + 1] += table[fits[u], fits[v]]
            total[high + 1 :] += table[exceeds[u], exceeds[v]]
            if low < high:
                first = (exceeds[u], fits[v]) if at[u] < at[v] else (fits[u], exceeds[v])
                total[low + 1 : high + 1] += table[first]
    best = int(np.where(memory <= limit, seconds, np.inf).argmin())
    return [b if at[n] < best else a for n, (a, b) in enumerate(zip(fits, exceeds, strict=True))]


def polish(problem: Problem, plan: Sequence[int], limit: float) -> list[int]:
    """Return `plan` with single nodes and pairs changed, most seconds saved for a byte first."""
    polisher = _Polisher(problem, plan, limit)
    for _ in range(_SWEEPS_MAX):
        if not polisher.sweep() and not polisher.sweep_pairs():
            break
    return polisher.chosen


class _Polisher:
    """Changes a plan within a memory limit, always to a faster one."""

    def __init__(self, problem: Problem, plan: Sequence[int], limit: float) -> None:
        self._problem, self._limit = problem, limit
        self.chosen = list(plan)
        self._near = _beside((edge, edge.seconds) for edge in problem.edges)
        self._copies = _beside((edge, edge.memory) for edge in problem.edges)
        self._memory = problem.memory(self.chosen)

    def sweep(self) -> bool:
        """Change single nodes; return whether any was."""
        rates = [(self._gain(at)[0], at) for at in range(len(self.chosen))]
        wanted = sorted(((rate, at) for rate, at in rates if rate > 0), reverse=True)
        for _, at in wanted:
            # Changes made before this one may have used the memory, or moved a neighbour.
            _, best, taken = self._gain(at)
            if best >= 0:
                self._memory += taken
                self.chosen[at] = best
        return bool(wanted)

    def sweep_pairs(self) -> bool:
        """Change pairs of neighbours that have few strategies; return whether any was."""
        is_changed = False
        for a, others in self._near.items():
            for b, table in others.items():
                if a < b and table.size <= _PAIRS_MAX:
                    is_changed |= self._change_pair(a, b)
        return is_changed

    def _change_pair(self, a: int, b: int) -> bool:
        seconds_a, bytes_a = self._costs(a, but=b)
        seconds_b, bytes_b = self._costs(b, but=a)
        seconds = seconds_a[:, None] + seconds_b + self._near[a][b]
        nbytes = bytes_a[:, None] + bytes_b + self._copies[a].get(b, 0.0)
        now = self.chosen[a], self.chosen[b]
        _, best, taken = self._best(seconds - seconds[now], nbytes - nbytes[now])
        if best >= 0:
            self._memory += taken
            self.chosen[a], self.chosen[b] = divmod(best, seconds.shape[1])
        return best >= 0

    def _gain(self, at: int) -> tuple[float, int, float]:
        """Return the same as `_best` of one node."""
        seconds, nbytes = self._costs(at)
        now = self.chosen[at]
        return self._best(seconds - seconds[now], nbytes - nbytes[now])

    def _costs(self, at: int, *, but: int | None = None) -> tuple[FloatArray, FloatArray]:
        """Return seconds and bytes of each strategy of a node, next to all others but one."""
        node, chosen = self._problem.nodes[at], self.chosen
        near, copies = (
            sum(table[:, chosen[other]] for other, table in tables[at].items() if other != but)
            for tables in (self._near, self._copies)
        )
        return node.seconds + near, node.memory + copies

    def _best(self, saved: FloatArray, taken: FloatArray) -> tuple[float, int, float]:
        """Return seconds saved for each byte taken, by which change, and these bytes."""
        allowed = (saved < -_LEAST) & (self._memory + taken <= self._limit)
        if not allowed.any():
            return 0.0, -1, 0.0
        rate = np.where(allowed, -saved / np.maximum(taken, 1e-3), 0.0)
        best = int(rate.argmax())
        return float(rate.flat[best]), best, float(taken.flat[best])


def _beside(tables: Iterable[tuple[Edge, FloatArray | None]]) -> dict[int, dict[int, FloatArray]]:
    """Return node -> neighbour -> a table whose rows are the node's strategies."""
    near: dict[int, dict[int, FloatArray]] = defaultdict(dict)
    for edge, table in tables:
        if table is not None:
            ends = (edge.source, edge.target, table), (edge.target, edge.source, table.T)
            for at, other, part in ends:
                near[at][other] = near[at][other] + part if other in near[at] else part
    return near
