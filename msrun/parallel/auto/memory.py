"""The fastest plan that fits into memory, with a bound on how much faster any plan could be.

Memory is given a price (Lagrange), at which the problem is as easy as without a limit.  The price
at which the cheapest plan just fits bounds every plan that fits (Everett, Operations Research
11(3), 1963).  Between the two plans on either side of the limit, one block after the other is
exchanged, and then single tensors, as long as time is saved and memory is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from msrun.parallel.auto.codes import Array
from msrun.parallel.auto.problem import Problem

T = TypeVar("T")

# Seconds a byte: more than any plan could save.
_PROHIBITIVE = 1e-3
_ROUNDS_MAX = 40
_SWEEPS_MAX = 8
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
class Answer(Generic[T]):
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
        fits: The fastest plan found that fits.
        exceeds: The fastest that does not quite; None if memory is no limit.
        bound: Seconds that no plan that fits can undercut.
    """

    fits: Answer[T]
    exceeds: Answer[T] | None
    bound: float


def bounded(
    solve: Callable[[float], Answer[T]], limit: float, *, tolerance: float = 1e-6
) -> Bounded[T]:
    """Return the plans on both sides of a memory limit.

    Each price is where the two best plans so far cost the same; when no plan is cheaper there,
    there is none in between.

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
    fits = solve(_PROHIBITIVE)
    if fits.memory > limit:
        raise OutOfMemoryError(fits.memory)
    bound = exceeds.seconds
    for _ in range(_ROUNDS_MAX):
        price = (fits.seconds - exceeds.seconds) / (exceeds.memory - fits.memory)
        if price <= 0 or fits.seconds - bound <= tolerance * fits.seconds:
            break
        made = solve(price)
        bound = max(bound, made.seconds + price * (made.memory - limit))
        line = fits.seconds + price * fits.memory
        if made.seconds + price * made.memory >= line * (1 - _LEAST):
            break
        if made.memory <= limit:
            fits = made
        else:
            exceeds = made
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
    for sign in (1, -1):
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
        (u, v), table = (edge.source, edge.target), edge.seconds
        low, high = sorted((at[u], at[v]))
        seconds[: low + 1] += table[fits[u], fits[v]]
        seconds[high + 1 :] += table[exceeds[u], exceeds[v]]
        if low < high:
            first = (exceeds[u], fits[v]) if at[u] < at[v] else (fits[u], exceeds[v])
            seconds[low + 1 : high + 1] += table[first]
    best = int(np.where(memory <= limit, seconds, np.inf).argmin())
    return [b if at[n] < best else a for n, (a, b) in enumerate(zip(fits, exceeds, strict=True))]


def polish(problem: Problem, plan: Sequence[int], limit: float) -> list[int]:
    """Return `plan` with single nodes changed, most seconds saved for a byte first."""
    chosen = list(plan)
    near: dict[int, list[tuple[int, Array]]] = defaultdict(list)
    for edge in problem.edges:
        near[edge.source].append((edge.target, edge.seconds))
        near[edge.target].append((edge.source, edge.seconds.T))
    memory = problem.memory(chosen)

    def change(at: int) -> tuple[Array, Array]:
        node, now = problem.nodes[at], chosen[at]
        seconds = node.seconds.copy()
        for other, table in near[at]:
            seconds += table[:, chosen[other]]
        return seconds - seconds[now], node.memory - node.memory[now]

    def gain(at: int) -> tuple[float, int]:
        """Return seconds saved for each byte taken, and by which strategy."""
        saved, taken = change(at)
        allowed = (saved < -_LEAST) & (memory + taken <= limit)
        if not allowed.any():
            return 0.0, -1
        rate = np.where(allowed, -saved / np.maximum(taken, 1e-3), 0.0)
        best = int(rate.argmax())
        return float(rate[best]), best

    for _ in range(_SWEEPS_MAX):
        rates = [(gain(at), at) for at in range(len(problem.nodes))]
        wanted = sorted(((rate, at) for (rate, _), at in rates if rate > 0), reverse=True)
        for _, at in wanted:
            _, best = gain(at)
            if best >= 0:
                memory += float(
                    problem.nodes[at].memory[best] - problem.nodes[at].memory[chosen[at]]
                )
                chosen[at] = best
        if not wanted:
            break
    return chosen
