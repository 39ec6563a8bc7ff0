"""The same command on each node of a rank table, which has all that the nodes must know."""

import shlex
import sys

import pytest
from nodes import Identity, identities, tell_who

from ranktable import Inventory, InventoryDevice, build_table, render_table

pytestmark = pytest.mark.process


def write_table(lab, slots):
    """Write a table of hosts by their addresses, each with so many devices."""
    servers = [
        Inventory(
            server_id=lab.host(name).addresses[0],
            host_ip=lab.host(name).addresses[0],
            devices=tuple(InventoryDevice(device_id=number) for number in range(count)),
        )
        for name, count in slots.items()
    ]
    path = lab.folder / "t.json"
    path.write_text(render_table(build_table(servers)))
    return path


def test_nodes_and_ranks_are_those_of_the_table(new_lab, launch):
    lab = new_lab("a", "b")
    table = write_table(lab, {"b": 1, "a": 2})
    words = ["--job-id", "of-table", "--rank-table-file", table]
    words += [*tell_who('test "$RANK_TABLE_FILE" = ' + str(table))]
    nodes = [launch(host, *words) for host in lab.hosts]

    assert [node.wait() for node in nodes] == [0, 0]
    assert identities(node.logs for node in nodes) == [
        Identity(0, 0, 0, 3, 1, "b"),
        Identity(1, 0, 1, 3, 2, "a"),
        Identity(2, 1, 1, 3, 2, "a"),
    ]


def test_a_node_that_is_not_in_the_table_says_so(lab, launch):
    table = write_table(lab, {"a": 1, "b": 1})
    node = launch(lab.host("c"), "--rank-table-file", table, *tell_who())

    assert node.wait() == 2
    assert "the rank table has no server with an address of this node" in node.err


def test_a_job_writes_the_table_of_what_it_formed(new_lab, form):
    lab = new_lab("a", "b")
    emitted, built = lab.folder / "emitted.json", lab.folder / "built.json"
    ask = f"{shlex.quote(sys.executable)} -m msrun ranktable build --job $MSRUN_JOB_ID -o {built}"
    words = ["--emit-rank-table", emitted]
    words += tell_who(f"test -s {emitted} || exit 9; [ $RANK != 0 ] || {ask}")
    nodes = [
        node
        for host, slots in zip(lab.hosts, (2, 1), strict=True)
        for node in form([host], "--workers-per-node", slots, *words)
    ]

    assert [node.wait() for node in nodes] == [0, 0]
    expected = write_table(lab, {"a": 2, "b": 1}).read_bytes()
    assert (emitted.read_bytes(), built.read_bytes()) == (expected, expected)
