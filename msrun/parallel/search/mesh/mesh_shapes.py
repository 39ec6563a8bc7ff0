"""Which meshes a number of ranks can be."""

from __future__ import annotations

import math

_AXIS_MAX = 64
_THIRD_AXIS_MAX = 16


def divisors(number: int) -> list[int]:
    """Return what divides `number`, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def shapes(ranks: int) -> list[tuple[int, ...]]:
    """Return the meshes of one to three axes; the inner axes are not too long."""
    found: list[tuple[int, ...]] = [(ranks,)]
    inner = [n for n in divisors(ranks) if 1 < n <= min(_AXIS_MAX, ranks - 1)]
    found += [(ranks // n, n) for n in inner]
    for n in inner:
        for m in (m for m in inner if m <= _THIRD_AXIS_MAX):
            if ranks % (n * m) == 0 and ranks > n * m:
                found.append((ranks // (n * m), m, n))
    return found


def data_shapes(ranks: int) -> list[tuple[int, ...]]:
    """Return the same where ranks of the first axis have different samples: it may have one."""
    return shapes(ranks) + ([(1, ranks)] if ranks > 1 else [])
