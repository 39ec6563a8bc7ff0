"""What is cut short, and that what is left out is counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.cluster.bounds import PROCESSES_MAX, RUNS_MAX, RankSet, clip, few, listed, newest


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([4], "4"),
        ([1, 0], "0-1"),
        ([0, 1, 2, 3, 7], "0-3,7"),
        ([1, 3, 5, 6], "1,3,5-6"),
    ],
)
def test_ranks_as_text(numbers, text):
    assert str(RankSet.of(numbers)) == text


@given(st.sets(st.integers(0, 40), max_size=30))
def test_few_ranks_are_all_kept(ranks):
    found = RankSet.of(ranks)

    assert {rank for low, high in found.runs for rank in range(low, high + 1)} == ranks
    assert len(found) == len(ranks)


def test_of_many_runs_the_first_are_kept_and_all_are_counted():
    found = RankSet.of(range(0, 80_000, 2))

    assert found == RankSet(40_000, [(2 * n, 2 * n) for n in range(RUNS_MAX)])
    assert str(found).endswith(f",{2 * RUNS_MAX - 2} and {40_000 - RUNS_MAX} more")


def test_one_run_of_many_ranks_is_whole():
    assert RankSet.of(range(80_000)) == RankSet(80_000, [(0, 79_999)])


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "..."),
        ("abcdef", 5, "ab..."),
        ("größer", 6, "gr..."),
        ("训训训", 8, "训..."),
        ("a\ud800" * 4, 6, "a?a..."),
    ],
)
def test_text_is_cut_between_characters(text, most, expected):
    assert clip(text, most) == expected


@pytest.mark.parametrize(
    ("most", "expected"), [(0, []), (5, []), (6, ["训训"]), (7, ["b", "训训"]), (8, ["b", "训训"])]
)
def test_of_lines_the_newest_are_kept(most, expected):
    assert newest(["aaa", "b", "训训"], most) == expected


def test_few_processes_are_all_named():
    assert few(["4711 D python", "4712 D sh"]) == ["4711 D python", "4712 D sh"]


def test_of_many_processes_the_first_are_named_and_the_others_counted():
    of_a_node = few(f"{n} D python" for n in range(100))
    of_a_job = few([*of_a_node, *of_a_node, "7 D sh"])

    assert of_a_node == [*(f"{n} D python" for n in range(16)), "84 more processes"]
    assert of_a_job == [*of_a_node[:PROCESSES_MAX], "185 more processes"]


def test_a_command_line_is_cut():
    (process,) = few(["4711 D " + "训" * 4096])

    assert len(process.encode()) <= 256
    assert process.startswith("4711 D 训")


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, ""), (2, "n0, n1"), (9, "n0, n1, n2, n3, n4, n5, n6, n7 and 1 more")],
)
def test_names_as_text(count, expected):
    assert listed([f"n{n}" for n in range(count)]) == expected
