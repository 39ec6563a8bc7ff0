"""The rank table that follows from where nodes and ranks of a job are."""

import pytest

from msrun.cluster.scheduler.rank_table import table_of
from msrun.cluster.wire.control_messages import NodeRow
from msrun.errors import UsageError


def row(address, first, count, *devices, **changes):
    told = {
        "node_id": f"{address}/{first}",
        "host": f"h{first}",
        "address": address,
        "role": "serving",
        "node_rank": first,
        "ranks": (first, count),
        "slots": count,
        "silent": None,
        "scheduler": first == 0,
        "devices": list(devices),
    }
    return NodeRow(**told | changes)


def entries(table):
    return [
        (server.server_id, device.rank_id, device.device_id, device.device_ip)
        for server, device in table.by_rank()
    ]


def test_devices_are_those_of_the_slots():
    rows = [row("10.0.0.2", 2, 1, (7, "192.1.27.6")), row("10.0.0.1", 0, 2, (4, ""), (3, ""))]

    assert entries(table_of(rows)) == [
        ("10.0.0.1", 0, 4, None),
        ("10.0.0.1", 1, 3, None),
        ("10.0.0.2", 2, 7, "192.1.27.6"),
    ]


def test_slots_without_devices_are_counted():
    rows = [row("10.0.0.1", 0, 2), row("10.0.0.2", 2, 1)]

    assert [entry[:3] for entry in entries(table_of(rows))] == [
        ("10.0.0.1", 0, 0),
        ("10.0.0.1", 1, 1),
        ("10.0.0.2", 2, 0),
    ]


def test_processes_that_were_started_by_hand_are_one_server_a_machine():
    rows = [row("10.0.0.1", 0, 1, (0, "")), row("10.0.0.1", 1, 1, (1, "")), row("10.0.0.2", 2, 1)]

    assert [entry[:3] for entry in entries(table_of(rows))] == [
        ("10.0.0.1", 0, 0),
        ("10.0.0.1", 1, 1),
        ("10.0.0.2", 2, 0),
    ]


def test_a_slot_that_is_not_used_has_no_rank():
    assert len(entries(table_of([row("10.0.0.1", 0, 1, (0, ""), (1, ""), slots=2)]))) == 1


def test_a_spare_has_no_ranks():
    rows = [row("10.0.0.1", 0, 1), row("10.0.0.2", 1, 1, ranks=None, node_rank=None)]

    assert len(table_of(rows).server_list) == 1


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "the job has no ranks yet, of which a table could be made"),
        ([row("", 0, 1)], "the job has lost node h0, whose address a table needs"),
        (
            [row("10.0.0.1", 0, 1), row("10.0.0.2", 1, 1), row("10.0.0.1", 2, 1)],
            (
                'the table would be unsound: server_list[2].server_id: "10.0.0.1" is already '
                "used by server_list[0]"
            ),
        ),
    ],
)
def test_what_has_no_table(rows, sentence):
    with pytest.raises(UsageError) as refusal:
        table_of(rows)

    assert refusal.value.message == sentence
