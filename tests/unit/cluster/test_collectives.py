"""Who is missing in a collective, by the numbers of those that each rank has entered."""

import pytest

from msrun.cluster.liveness.collectives import Collective, causes, missed
from msrun.cluster.liveness.stacks import Frame, RankStack, Suspect, suspect

ALL_REDUCE = Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce")
BACKWARD = Frame("/x/site-packages/torch/autograd/graph.py", 9, "_engine_run_backward")
LOADER = Frame("/home/me/loader.py", 12, "next")


def world(number, name="all_reduce"):
    return Collective("0", number, name)


def tp(number):
    return Collective("5", number, "all_gather")


def test_equal_numbers_miss_nobody():
    assert missed({0: [world(7)], 1: [world(7)], 2: [world(7), tp(3)]}) == []
    assert missed({}) == []


def test_who_is_behind_is_named_with_those_who_are_there():
    [found] = missed({0: [world(1841)], 1: [world(1840, "broadcast")], 2: [world(1841)]})

    assert found.sentence() == "rank 1 never entered all_reduce #1841, which ranks 0,2 did"
    assert causes([found]) == {1}


def test_every_rank_is_in_the_world_and_only_those_that_came_are_in_another_group():
    [found] = missed({0: [world(3), tp(2)], 1: [], 2: [world(3), tp(2)]})

    assert (found.missing, found.there) == ({1}, {0, 2})


def test_a_rank_of_which_nothing_is_known_is_not_missed():
    assert missed({0: [world(3)], 2: [world(3)]}) == []


def test_who_is_behind_because_it_waits_elsewhere_is_no_cause():
    found = missed({0: [world(9), tp(4)], 1: [world(8), tp(5)], 2: [world(9), tp(4)]})
    assert causes(found) == set()

    found = missed({0: [world(9)], 1: [world(8), tp(5)], 2: [world(8), tp(4)]})
    assert [each.sentence() for each in found] == [
        "ranks 1-2 never entered all_reduce #9, which rank 0 did",
        "rank 2 never entered all_gather #5 of group 5, which rank 1 did",
    ]
    assert causes(found) == {2}


def test_the_world_of_nccl_counts_by_itself():
    nccl = [Collective("0 (nccl)", number, "all_reduce") for number in (41, 40)]
    [found] = missed({0: [world(2), nccl[0]], 1: [world(2), nccl[1]], 2: [world(2)]})

    assert found.sentence() == "ranks 1-2 never entered all_reduce #41, which rank 0 did"


def rank(number, frame, *entered, idle=60.0):
    return RankStack(rank=number, frames=(frame,), idle=idle, entered=entered)


@pytest.mark.parametrize(
    ("stacks", "expected", "is_sure"),
    [
        # Those that wait in a backward pass look as if they computed.
        ([rank(0, BACKWARD, world(5), idle=70), rank(1, LOADER, world(4))], 1, True),
        ([rank(0, BACKWARD, world(5), idle=70), rank(1, BACKWARD, world(4))], 1, True),
        # Without numbers only a guess, but not at one that may wait.
        ([rank(0, BACKWARD, idle=70), rank(1, LOADER), rank(2, ALL_REDUCE)], 1, False),
        ([rank(0, BACKWARD, idle=70), rank(1, ALL_REDUCE)], 0, False),
        # Two are missing, or a rank that was there is elsewhere by now.
        ([rank(n, LOADER, world(4)) for n in (0, 1)] + [rank(2, ALL_REDUCE, world(5))], 0, False),
        ([rank(0, LOADER, world(5)), rank(1, LOADER, world(4))], 1, False),
        # It is behind and waits itself, for a message or in the wrong collective.
        ([rank(0, ALL_REDUCE, world(5)), rank(1, ALL_REDUCE, world(4))], 0, False),
    ],
)
def test_the_suspect(stacks, expected, is_sure):
    stalled = {stack.rank: stack.idle for stack in stacks}

    assert suspect(stacks, stalled) == Suspect(expected, is_sure=is_sure)
