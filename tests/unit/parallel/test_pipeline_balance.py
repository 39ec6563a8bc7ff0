"""Cuts of a sequence into parts of equal work."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.parallel.pipeline.balance import balance


def _largest(values, starts):
    return max(sum(values[a:b]) for a, b in itertools.pairwise([*starts, len(values)]))


@pytest.mark.parametrize(
    ("costs", "parts", "starts"),
    [
        ([1], 1, [0]),
        ([1, 1, 1, 1, 4], 2, [0, 4]),
        ([1] * 8, 4, [0, 2, 4, 6]),
        ([1] * 7, 3, [0, 2, 4]),
        ([1] * 5, 4, [0, 1, 2, 3]),
        ([0, 5, 0, 5, 0], 2, [0, 2]),
        ([0, 0, 0], 3, [0, 1, 2]),
        ([9, 1, 1, 1], 4, [0, 1, 2, 3]),
    ],
)
def test_cost_is_made_even(costs, parts, starts):
    assert balance(costs, [0] * len(costs), parts) == starts


def test_among_equal_costs_the_sizes_decide():
    costs = [4, 0, 0, 4]

    assert balance(costs, [1, 9, 1, 1], 2) == [0, 2]
    assert balance(costs, [9, 1, 1, 1], 2) == [0, 1]


@given(st.data(), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_no_other_cut_is_better(data, costs):
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    parts = data.draw(st.integers(1, len(costs)))

    found = balance(costs, sizes, parts)

    cuts = [(0, *rest) for rest in itertools.combinations(range(1, len(costs)), parts - 1)]
    best = min((_largest(costs, cut), _largest(sizes, cut)) for cut in cuts)
    assert tuple(found) in cuts
    assert (_largest(costs, found), _largest(sizes, found)) == best
