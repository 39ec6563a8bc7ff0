"""Where ranks come from."""

import pytest

from msrun.cluster.scheduler import rank_assignment
from msrun.cluster.wire.messages import Formation, Register


def node(host="a", *, slots=1, address=None, rank=None):
    return Register(
        host=host, slots=slots, store_host=address or host, store_port=1, node_rank=rank
    )


def nodes(**slots):
    return {name: node(name, slots=count) for name, count in slots.items()}


ELASTIC = Formation(nnodes_min=1, nnodes_max=3)


def test_the_first_order_is_by_rank_then_address_then_name():
    there = {
        "u": node("node10"),
        "v": node("node9"),
        "w": node("w", address="10.0.0.10"),
        "x": node("x", address="10.0.0.9"),
        "y": node("y", address="::1"),
        "z": node("z", rank=0),
    }
    formation = Formation(nnodes_min=6, nnodes_max=6)

    assert rank_assignment.assign_node_ranks(there, formation, []) == ["z", "x", "w", "y", "v", "u"]


def test_a_given_rank_is_had_beside_nodes_without_one():
    there = {"a": node("a"), "b": node("b"), "c": node("c", rank=1)}
    fixed = Formation(nnodes_min=3, nnodes_max=3)

    assert rank_assignment.assign_node_ranks(there, fixed, []) == ["a", "c", "b"]
    there["c"] = node("c", rank=3)
    assert rank_assignment.assign_node_ranks(there, fixed, []) == ["c", "a", "b"]


def test_a_node_that_stays_keeps_its_rank_and_a_newcomer_takes_a_free_one():
    assert rank_assignment.assign_node_ranks(nodes(b=1, c=1, d=1), ELASTIC, ["a", "b", "c"]) == [
        "d",
        "b",
        "c",
    ]


def test_nobody_waits_for_a_cold_node_that_can_be_done_without():
    there = nodes(a=1, b=1, c=1, d=1)
    pair = Formation(nnodes_min=2, nnodes_max=2)

    assert rank_assignment.assign_node_ranks(there, ELASTIC, ["a"], cold={"c", "d"}) == ["a", "b"]
    assert rank_assignment.assign_node_ranks(there, pair, ["a", "b"], cold={"b", "c"}) == ["a", "d"]
    assert rank_assignment.assign_node_ranks(there, pair, ["a", "b"], cold={"b", "c", "d"}) == [
        "a",
        "b",
    ]
    assert rank_assignment.assign_node_ranks(nodes(a=1, b=1), pair, ["a"], cold={"b"}) == ["a", "b"]


def test_node_ranks_close_up_when_no_node_takes_them():
    assert rank_assignment.assign_node_ranks(nodes(b=1, c=1), ELASTIC, ["a", "b", "c"]) == [
        "b",
        "c",
    ]


def test_newcomers_sit_behind_those_who_stay():
    assert rank_assignment.assign_node_ranks(nodes(c=1, b=1, a=1), ELASTIC, ["b"]) == [
        "b",
        "a",
        "c",
    ]


def test_no_more_than_the_most_take_part_and_first_those_who_did():
    assert rank_assignment.assign_node_ranks(nodes(d=1, e=1, c=1, b=1), ELASTIC, ["b", "c"]) == [
        "b",
        "c",
        "d",
    ]


def test_as_many_nodes_as_have_the_workers_that_were_asked_for():
    formation = Formation(nnodes_min=1, nnodes_max=4, world_size=4)

    assert rank_assignment.assign_node_ranks(nodes(a=2, b=3, c=2), formation, []) == ["a", "c"]


@pytest.mark.parametrize(
    ("formation", "there", "enough", "full"),
    [
        (Formation(nnodes_min=2, nnodes_max=2), {"a": 1}, False, False),
        (Formation(nnodes_min=2, nnodes_max=2), {"a": 1, "b": 1}, True, True),
        (Formation(nnodes_min=1, nnodes_max=2), {"a": 1}, True, False),
        (Formation(nnodes_min=4, nnodes_max=4, world_size=4), {"a": 3}, False, False),
        (Formation(nnodes_min=4, nnodes_max=4, world_size=4), {"a": 3, "b": 1}, True, True),
        (Formation(nnodes_min=2, nnodes_max=2, world_size=9), {"a": 1, "b": 1}, True, True),
    ],
)
def test_enough_and_full(formation, there, enough, full):
    count, slots = len(there), sum(there.values())

    assert rank_assignment.is_enough(count, slots, formation) is enough
    assert rank_assignment.is_full(count, slots, formation) is full
