"""What CI leaves out of a test that is `sampled`, or of which it takes a `few`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from sampled import at_night, beyond_few


class Case:
    """One case, as far as it is looked at; `twice` is a fixture's."""

    def __init__(self, marks=(), **params):
        self.callspec = SimpleNamespace(params=params)
        self._marks = marks

    def iter_markers(self, _):
        return [SimpleNamespace(args=[names]) for names in (("ranks", "config"), "kind")]

    def get_closest_marker(self, name):
        return name if name in self._marks else None


CONFIGS = [(2, {}), (2, {"accumulate": 2}), (4, {})]
ALL = [*itertools.product("abcd", CONFIGS, [True, False])]


def left(cases):
    others = at_night(cases)
    return [case.callspec.params for case in cases if case not in others]


def cases_of(rows, marks=lambda *_: ()):
    return [
        Case(marks(*row), kind=row[0], ranks=row[1][0], config=row[1][1], twice=row[2])
        for row in rows
    ]


def values(params, left_out):
    """Return the values of a case but for one parameter."""
    parts = [params["kind"], (params["ranks"], str(params["config"])), params["twice"]]
    return tuple(part for at, part in enumerate(parts) if at != left_out)


@pytest.mark.parametrize("left_out", range(3))
def test_values_of_all_parameters_but_one_meet(left_out):
    every = [case.callspec.params for case in cases_of(ALL)]
    found = left(cases_of(ALL))

    assert len(found) == len(ALL) / 2
    assert {values(one, left_out) for one in found} == {values(one, left_out) for one in every}


def test_what_is_slow_anyway_shows_nothing():
    marks = lambda kind, *_: ["slow"] * (kind == "a")  # noqa: E731 - it is one
    found = left(cases_of(ALL, marks))

    assert {one["kind"] for one in found if one["twice"]} == {"a", "b", "c", "d"}
    assert sum(one["kind"] != "a" for one in found) == 9


def test_a_case_that_is_alone_stays():
    assert len(left(cases_of(ALL[:1]))) == 1


class Few:
    """A case of a test of which so many are taken."""

    def __init__(self, name, at, count, *, is_slow=False):
        self.nodeid, self._count, self._is_slow = f"{name}[{at}]", count, is_slow

    def get_closest_marker(self, name):
        return self._is_slow if name == "slow" else SimpleNamespace(args=[self._count])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_as_many_cases_are_taken_as_there_are_to_be(count):
    for name in ("one", "another"):
        cases = [Few(name, at, count) for at in range(5)]
        assert len(cases) - len(beyond_few(cases)) == min(count, 5)


def test_tests_over_the_same_values_take_others():
    taken = set()
    for name in range(20):
        cases = [Few(f"test_{name}", at, 2) for at in range(6)]
        taken |= {case.nodeid[-2] for case in set(cases) - set(beyond_few(cases))}
    assert taken == set("012345")


def test_slow_cases_are_not_taken():
    cases = [Few("one", at, 2, is_slow=at < 3) for at in range(6)]
    assert len(set(cases[3:]) - set(beyond_few(cases))) == 2
