"""What CI leaves out of a test that is `sampled`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from sampled import at_night


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
