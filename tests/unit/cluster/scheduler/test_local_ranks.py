"""Local ranks of nodes that share a machine, such as processes that were started by hand."""

from msrun.cluster.scheduler.generation import start_generation
from msrun.cluster.scheduler.roster import RegisteredNode
from msrun.cluster.wire.messages import Register


def starts(*nodes):
    """Return first rank, first local rank and local size of nodes (machine, address, slots)."""
    roster = {
        f"n{i}": RegisteredNode(
            1,
            Register(
                host=host, slots=slots, store_host=address, store_port=1, shares_host=shares_host
            ),
            since=0.0,
        )
        for i, (host, address, slots, shares_host) in enumerate(nodes)
    }
    generation = start_generation(roster)
    found = map(generation.start, roster)
    return [(s.first_rank, s.first_local_rank, s.local_world_size) for s in found]


def test_nodes_of_one_machine_count_their_local_ranks_together():
    a, b = ("a", "10.0.0.1", 1, True), ("b", "10.0.0.2", 1, True)

    assert starts(a, b, a, b, a) == [(0, 0, 3), (1, 0, 2), (2, 1, 3), (3, 1, 2), (4, 2, 3)]


def test_machines_of_one_name_are_told_apart_by_their_addresses():
    same = [("localhost", f"10.0.0.{i}", 1, True) for i in (1, 2)]

    assert starts(*same) == [(0, 0, 1), (1, 0, 1)]


def test_nodes_that_have_their_machine_to_themselves_count_alone():
    a = ("a", "10.0.0.1", 2, False)

    assert starts(a, a) == [(0, 0, 0), (2, 0, 0)]
