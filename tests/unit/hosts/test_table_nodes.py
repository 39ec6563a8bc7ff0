"""Which node of a rank table this one is."""

import pytest

from msrun.errors import UsageError
from msrun.hosts.hostlist import Host
from msrun.rank_table.nodes import check_devices, find_server, hosts_of, servers_of
from ranktable import Inventory, InventoryDevice, build_table, parse_table, render_table


def server(name, numbers, **fields):
    devices = tuple(InventoryDevice(device_id=number) for number in numbers)
    return Inventory(server_id=name, devices=devices, **fields)


TABLE = build_table(
    [
        server("a", [4, 5], host_ip="10.0.0.1", pod_ip="10.1.0.1"),
        server("10.0.0.2", [0, 1, 2]),
    ]
)


def test_servers_are_hosts():
    assert hosts_of(TABLE) == (
        Host(name="10.1.0.1", slots=2, devices=(4, 5)),
        Host(name="10.0.0.2", slots=3, devices=(0, 1, 2)),
    )


def test_the_order_is_that_of_the_ranks():
    text = render_table(TABLE)
    for old, new in (("4", "1"), ("3", "0"), ("2", "z")):
        text = text.replace(f'"rank_id": "{old}"', f'"rank_id": "#{new}"')
    text = text.replace('"rank_id": "0"', '"rank_id": "3"').replace(
        '"rank_id": "1"', '"rank_id": "4"'
    )
    text = text.replace("#z", "2").replace("#", "")

    assert [one.server_id for one in servers_of(parse_table(text))] == ["10.0.0.2", "a"]


@pytest.mark.parametrize(
    ("own", "node_rank"),
    [("10.0.0.1", 0), ("10.1.0.1", 0), ("a", 0), ("10.0.0.2", 1)],
)
def test_a_node_finds_its_server(own, node_rank):
    assert find_server(TABLE, own.__eq__) == node_rank


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (
            (),
            "the rank table has no server with an address of this node (it has a, 10.0.0.2)",
        ),
        (
            ("10.0.0.1", "10.0.0.2"),
            "this node is both server a and server 10.0.0.2 of the rank table",
        ),
    ],
)
def test_a_node_that_is_none_or_several_is_refused(own, sentence):
    with pytest.raises(UsageError) as refusal:
        find_server(TABLE, own.__contains__)

    assert refusal.value.message == sentence


def test_a_device_that_is_missing_is_refused():
    first = servers_of(TABLE)[0]
    check_devices(first, (4, 5, 6))
    check_devices(first, ())  # a node of CPUs only

    with pytest.raises(UsageError) as refusal:
        check_devices(first, (0, 1))

    assert refusal.value.message == (
        "the rank table gives server a device 4, and this node has 0, 1"
    )
