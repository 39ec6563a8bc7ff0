"""Which cases of a test over several parameters CI takes, and which the nightly run alone."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import pytest

# Of the cases of a test, those that only the nightly run has.
Choice = Callable[[list[pytest.Function]], list[pytest.Function]]


def of_night(items: Iterable[pytest.Item]) -> Iterator[pytest.Function]:
    """Yield the cases of all tests marked `sampled` or `few` that only the nightly run has."""
    choices: dict[str, Choice] = {"sampled": at_night, "few": beyond_few}
    tests: defaultdict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        for mark in choices:
            if isinstance(item, pytest.Function) and item.get_closest_marker(mark):
                tests[mark, item.nodeid.partition("[")[0]].append(item)
    for (mark, _), cases in tests.items():
        yield from choices[mark](cases)


def beyond_few(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Return all cases of a test but as many as its mark says, at equal distances.

    The first differs from test to test, so that tests over the same values take others.
    """
    cases = [case for case in cases if not case.get_closest_marker("slow")]
    if not cases:
        return []
    mark = cases[0].get_closest_marker("few")
    count = min(mark.args[0] if mark else 1, len(cases))
    first = zlib.crc32(cases[0].nodeid.partition("[")[0].encode())
    taken = {(first + at * len(cases) // count) % len(cases) for at in range(count)}
    return [case for at, case in enumerate(cases) if at not in taken]


def at_night(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Return the cases of a test whose values are in others, of all parameters but any one.

    Two parameters leave each value in a case, three each pair of values.
    """
    cases = [case for case in cases if not case.get_closest_marker("slow")]
    numbers: defaultdict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    rows = [_numbered(case, numbers) for case in cases]
    fewest = min(map(len, numbers.values()), default=1)
    shown: set[tuple[int | None, ...]] = set()
    others = []
    for row, case in sorted(zip(rows, cases, strict=True), key=lambda it: sum(it[0]) % fewest):
        values = {(*row[:at], None, *row[at + 1 :]) for at in range(len(row))}
        if values <= shown:
            others.append(case)
        shown |= values
    return others


def _numbered(
    case: pytest.Function, numbers: defaultdict[str, dict[tuple[int, ...], int]]
) -> list[int]:
    """Return a number for the value of each parameter of a case; those known are in `numbers`."""
    params = case.callspec.params
    given = [mark.args[0] for mark in case.iter_markers("parametrize")]
    groups = [it.replace(" ", "").split(",") if isinstance(it, str) else [*it] for it in given]
    # The others are those of fixtures.
    groups += [[name] for name in params if all(name not in names for names in groups)]
    row = []
    for names in groups:
        known = numbers[",".join(names)]
        values = tuple(id(params[name]) for name in names)
        row.append(known.setdefault(values, len(known)))
    return row
