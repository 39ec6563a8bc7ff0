"""Slices are divided evenly, and few of them move."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.cluster.servers.messages import Adopt, Message, Push
from msrun.cluster.servers.ownership import Ownership, Slice, Table, balance, mirrored


def bytes_per_server(tables, owners):
    totals = {}
    for table in tables:
        for index, server in enumerate(owners[table.name]):
            totals[server] = totals.get(server, 0) + table.bytes_of(index)
    return totals


@given(rows=st.integers(1, 10_000), slices=st.integers(1, 64))
def test_slices_are_the_whole_table(rows, slices):
    table = Table(name="t", rows=rows, row_bytes=3, slices=min(rows, slices))

    assert sum(table.bytes_of(index) for index in range(table.slices)) == rows * 3


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 7])
def test_bytes_per_server_are_equal_within_a_fifth(servers):
    tables = [
        Table(name="users", rows=1_000_000, row_bytes=768, slices=64),
        Table(name="items", rows=300_000, row_bytes=768, slices=64),
        Table(name="bias", rows=1, row_bytes=12),
    ]

    totals = bytes_per_server(tables, balance(tables, range(servers)))

    mean = sum(totals.values()) / servers
    assert len(totals) == servers
    assert all(abs(total / mean - 1) < 0.2 for total in totals.values())


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 3), (3, 1), (3, 4)])
def test_only_what_must_moves(before, after):
    tables = [Table(name="users", rows=960_000, row_bytes=512, slices=96)]
    old = balance(tables, range(before))

    new = balance(tables, range(after), before=old)

    moved = sum(a != b for a, b in zip(old["users"], new["users"], strict=True))
    totals = bytes_per_server(tables, new)
    mean = sum(totals.values()) / after
    assert all(abs(total / mean - 1) < 0.2 for total in totals.values())
    assert moved <= 96 * (1 - min(before, after) / max(before, after)) + 4


def test_nothing_moves_without_need():
    tables = [Table(name="users", rows=960_000, row_bytes=512, slices=96)]
    old = balance(tables, range(3))

    assert balance(tables, range(3), before=old) == old


def test_traffic_counts_as_bytes_do():
    tables = [Table(name="users", rows=80, row_bytes=1, slices=8)]
    hot = {Slice("users", index): 1.0 for index in range(2)}

    owners = balance(tables, range(2), traffic=hot)["users"]

    assert owners[0] != owners[1]
    assert sorted(owners) == [0] * 4 + [1] * 4


def test_traffic_that_was_measured_later_moves_slices():
    tables = [Table(name="users", rows=80, row_bytes=1, slices=8)]
    hot = {Slice("users", index): 1.0 for index in range(2)}
    before = {"users": [0, 0, 0, 0, 1, 1, 1, 1]}

    owners = balance(tables, range(2), before=before, traffic=hot)["users"]

    assert owners[0] != owners[1]


def test_messages_are_the_same_after_the_wire():
    ownership = Ownership(
        epoch=2, version=7, clocks={0: 7, 3: 7}, done={3: 7}, owners={"embed": [0, 1]}
    )
    sent = [
        Adopt(term=0, count=1, ownership=ownership, before=None),
        Push(worker=0, life=1, epoch=2, clock=7, floor=3, settled=7, safe=3),
    ]

    for message in sent:
        wire = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(wire, type=Message) == message


def test_impossible_numbers_are_refused_by_the_decoder():
    push = Push(worker=0, life=0, epoch=1, clock=-1, floor=0, settled=0, safe=0)

    with pytest.raises(msgspec.ValidationError, match="clock"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(push), type=Message)


@pytest.mark.parametrize("servers", [2, 3, 4, 6])
def test_traffic_does_not_change_the_bytes_of_a_server(servers):
    """A new server has nothing: it gets its share of bytes, and of the traffic."""
    tables = [Table(name=name, rows=12_000, row_bytes=8, slices=12) for name in ("a", "b", "c")]
    draw = random.Random(servers)
    traffic = {
        Slice(table.name, index): draw.random() ** 3 for table in tables for index in range(12)
    }
    before = balance(tables, range(servers - 1))

    owners = balance(tables, range(servers), before=before, traffic=traffic)

    def shares(load):
        found = dict.fromkeys(range(servers), 0.0)
        for table in tables:
            for index, server in enumerate(owners[table.name]):
                found[server] += load(table, index)
        return [value * servers / sum(found.values()) for value in found.values()]

    assert shares(lambda table, index: table.bytes_of(index)) == pytest.approx([1] * servers)
    busy = shares(lambda table, index: traffic[Slice(table.name, index)])
    assert busy == pytest.approx([1] * servers, abs=0.1)


TABLES = [
    Table(name="users", rows=2400, row_bytes=8, slices=12),
    Table(name="b", rows=1, row_bytes=8),
]


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("servers", range(2, 10))
def test_a_copy_is_on_another_node_than_its_slice(servers, nodes):
    """Number i is on node i modulo the nodes, so the last one may be on the node of the first."""
    node_of = {server: server % nodes for server in range(servers)}
    owners = balance(TABLES, range(servers))

    copies = mirrored(owners, node_of)

    assert copies.keys() == owners.keys()
    for table, each in owners.items():
        pairs = zip(each, copies[table], strict=True)
        assert all(node_of[owner] != node_of[copy] for owner, copy in pairs)


@pytest.mark.parametrize(("servers", "nodes"), [(2, 1), (3, 1), (4, 2), (4, 3), (7, 3), (9, 4)])
def test_each_server_has_the_copies_of_one_other(servers, nodes):
    owners = {"each": [*range(servers)]}

    copies = mirrored(owners, {server: server % nodes for server in range(servers)})

    assert sorted(copies["each"]) == owners["each"]
    assert all(owner != copy for owner, copy in enumerate(copies["each"]))


def test_servers_that_have_no_match_on_another_node_divide_the_copies():
    """Three of five are on one node: the other two have the copies of all three."""
    owners = {"t": [server for server in range(5) for _ in range(4)]}

    copies = mirrored(owners, {server: server % 2 for server in range(5)})["t"]

    assert [copies.count(server) for server in range(5)] == [3, 6, 3, 6, 2]


def test_a_server_alone_has_no_copy():
    assert mirrored({"users": [0, 0]}, {0: 0}) == {}
