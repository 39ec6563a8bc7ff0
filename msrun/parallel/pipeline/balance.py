"""Contiguous parts of equal work: where a model is cut when no stages are named."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate


def balance(costs: Sequence[int], sizes: Sequence[int], parts: int) -> list[int]:
    """Return the first unit of each part of a sequence that is cut into contiguous parts.

    The largest cost of a part is as small as it can be; among such cuts the largest size is;
    within both limits costs are as even as can be.  No part is empty.

    Example: costs 1 1 1 1 4 in 2 parts -> [0, 4].

    Args:
        costs: Work of each unit, such as its flops.
        sizes: Memory of each unit, such as the bytes of its parameters.
        parts: At least 1, at most the number of units.
    """
    sums = _Sums([0, *accumulate(costs)], [0, *accumulate(sizes)])
    cost = _least(max(costs), sum(costs), lambda limit: sums.fits(parts, limit, sum(sizes)))
    size = _least(max(sizes), sum(sizes), lambda limit: sums.fits(parts, cost, limit))
    return sums.cut(parts, cost, size)


class _Sums:
    """Prefix sums of cost and size, which answer in steps of one bisection a part."""

    def __init__(self, costs: Sequence[int], sizes: Sequence[int]) -> None:
        self._costs = costs
        self._sizes = sizes
        self._units = len(costs) - 1

    def reach(self, start: int, cost: int, size: int) -> int:
        """Return where a part from `start` must end at the latest."""
        by_cost = bisect_right(self._costs, self._costs[start] + cost)
        by_size = bisect_right(self._sizes, self._sizes[start] + size)
        return min(by_cost, by_size) - 1

    def fits(self, parts: int, cost: int, size: int) -> bool:
        """Return whether `parts` parts are enough; fewer can always be cut further."""
        start = 0
        for _ in range(parts):
            start = self.reach(start, cost, size)
        return start == self._units

    def cut(self, parts: int, cost: int, size: int) -> list[int]:
        """Return the starts of parts within both limits, as even as the rest allows."""
        earliest = self._earliest(parts, cost, size)
        starts = [0]
        for left in range(parts - 1, 0, -1):
            start = starts[-1]
            first = max(start + 1, earliest[left])
            last = min(self.reach(start, cost, size), self._units - left)
            even = self._costs[start] + (self._costs[-1] - self._costs[start]) / (left + 1)
            starts.append(min(range(first, last + 1), key=lambda at: abs(self._costs[at] - even)))
        return starts

    def _earliest(self, parts: int, cost: int, size: int) -> list[int]:
        """Return, for each number of parts, the first unit from which they reach the end."""
        ends = [self._units]
        for _ in range(parts):
            start = ends[-1]
            while start > 0 and self.reach(start - 1, cost, size) >= ends[-1]:
                start -= 1
            ends.append(start)
        return ends


def _least(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the least number from `low` to `high` that fits; `high` does."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
