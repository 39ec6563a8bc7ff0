"""Reading: what is accepted, and what each mistake is called."""

import json
from dataclasses import replace

import pytest

from ranktable import (
    RankTable,
    RankTableError,
    Server,
    SuperPod,
    TableDevice,
    TableProblem,
    TableStatus,
    UnknownVersionError,
    Version,
    parse_table,
    render_table,
)


def device(index, rank=None, **fields):
    return {
        "device_id": str(index),
        "device_ip": f"192.168.1.{index + 1}",
        "rank_id": str(index if rank is None else rank),
    } | fields


def document(**fields):
    """One server with two devices; `fields` replace top-level ones."""
    return {
        "version": "1.0",
        "server_count": "1",
        "server_list": [{"server_id": "10.0.0.1", "device": [device(0), device(1)]}],
        "status": "completed",
    } | fields


def without(fields, *keys):
    return {key: value for key, value in fields.items() if key not in keys}


def problems_of(content, **options):
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    with pytest.raises(RankTableError) as raised:
        parse_table(text, **options)
    return [str(problem) for problem in raised.value.problems]


SMALL = RankTable(
    version=Version.V1_0,
    server_list=(
        Server(
            server_id="10.0.0.1",
            device=(
                TableDevice(device_id=0, rank_id=0, device_ip="192.168.1.1"),
                TableDevice(device_id=1, rank_id=1, device_ip="192.168.1.2"),
            ),
        ),
    ),
)


def test_bytes_and_text_give_the_same_table():
    text = json.dumps(document())

    assert parse_table(text) == SMALL
    assert parse_table(text.encode()) == SMALL
    assert parse_table(b"\xef\xbb\xbf" + text.encode()) == SMALL


def test_integers_are_read_as_the_strings_they_should_be():
    """MindSpore's merge_hccl writes integer ranks."""
    server = {"server_id": "10.0.0.1", "device": [device(0, rank_id=0), device(1, rank_id=1)]}

    assert parse_table(json.dumps(document(server_list=[server], server_count=1))) == SMALL


def test_every_field_is_read():
    fields = {
        "device_id": "3",
        "rank_id": "0",
        "device_ip": "fe80::1,10.1.1.1",
        "super_device_id": "65537",
        "device_port": "16666",
        "backup_device_ip": "10.1.1.2",
        "backup_device_port": "16667",
        "host_port": "16668",
        "device_logical_id": "0",
    }
    server = {
        "server_id": "node_0",
        "host_ip": "10.0.0.1",
        "server_ip": "10.0.0.2",
        "container_ip": "10.0.0.3",
        "pod_ip": "10.0.0.4",
        "hardware_type": "800I-A3-64G",
        "host_nic_ip": "reserve",
        "device": [fields],
    }
    pods = [{"super_pod_id": "0", "server_list": [{"server_id": "node_0"}]}]
    content = document(version="1.2", server_list=[server], super_pod_list=pods)
    table = parse_table(json.dumps(content))

    assert table == RankTable(
        version=Version.V1_2,
        server_list=(
            Server(
                server_id="node_0",
                host_ip="10.0.0.1",
                server_ip="10.0.0.2",
                container_ip="10.0.0.3",
                pod_ip="10.0.0.4",
                hardware_type="800I-A3-64G",
                host_nic_ip="reserve",
                device=(
                    TableDevice(
                        device_id=3,
                        rank_id=0,
                        device_ip="fe80::1,10.1.1.1",
                        super_device_id=65537,
                        device_port=16666,
                        backup_device_ip="10.1.1.2",
                        backup_device_port=16667,
                        host_port=16668,
                        device_logical_id=0,
                    ),
                ),
            ),
        ),
        super_pod_list=(SuperPod(super_pod_id="0", server_list=("node_0",)),),
    )
    assert json.loads(render_table(table)) == content


def test_unknown_fields_are_kept_at_every_level():
    pods = [{"super_pod_id": "0", "server_list": [{"server_id": "a"}], "rack": 7}]
    server = {
        "server_id": "a",
        "device": [device(0, super_device_id="1", numa_id="")],
        "labels": {"zone": ["x", None, 1.5], "age": 3},
    }
    content = document(
        version="1.2", server_list=[server], super_pod_list=pods, cluster_list=[{"az_id": "1"}]
    )
    table = parse_table(json.dumps(content))

    assert table.extra == (("cluster_list", '[{"az_id":"1"}]'),)
    assert table.server_list[0].extra == (("labels", '{"age":3,"zone":["x",null,1.5]}'),)
    assert json.loads(render_table(table)) == content


def test_version_1_2_needs_no_server_count_and_no_pods():
    content = without(document(version="1.2", super_pod_list=[]), "server_count")

    assert parse_table(json.dumps(content)) == replace(SMALL, version=Version.V1_2)


def test_empty_addresses_are_unset():
    """HCCL reads an empty device_ip as none."""
    server = {
        "server_id": "a",
        "device": [device(0, device_ip=""), device(1, device_ip="")],
    }
    table = parse_table(json.dumps(document(server_list=[server])))

    assert [found.device_ip for _, found in table.by_rank()] == ["", ""]


def test_table_still_being_written_may_lack_all_but_its_status():
    assert parse_table('{"status": "initializing"}') == RankTable(
        version=Version.V1_0, server_list=(), status=TableStatus.INITIALIZING
    )


def test_part_may_start_at_any_rank():
    server = {"server_id": "b", "device": [device(0, 8), device(1, 9)]}
    content = document(server_list=[server])

    assert parse_table(json.dumps(content), is_part=True).world_size == 2
    assert problems_of(content) == [
        "server_list[0].device[0].rank_id: 8 is out of range: 2 devices have ranks 0 to 1",
        "server_list[0].device[1].rank_id: 9 is out of range: 2 devices have ranks 0 to 1",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is not JSON: line 1 column 1: Expecting value"),
        ('{"a": 1\n,}', "the file is not JSON: line 2 column 2: Expecting property name"),
        (b'{"a": "\xff"}', "the file is not UTF-8: byte 7 is 0xff"),
        ('{"a": NaN}', "the file is not JSON: NaN is no JSON value"),
        ('{"a": -1e999}', "the file is not JSON: the number -1e999 is out of range"),
        ("9" * 5000, "the file is not JSON: a number has 5000 digits (at most 40)"),
        ("[" * 100_000, "the file is nested deeper than 32 levels"),
        ("[" + "1," * 3_000_000, "the file holds more than 3000000 values"),
        ("[]", "is an array, not an object"),
        ("null", "is null, not an object"),
    ],
)
def test_file_that_is_no_json_object_is_one_problem(text, problem):
    found = problems_of(text)

    assert len(found) == 1
    assert found[0].startswith(problem)


def test_file_over_64_mib_is_refused_unread():
    assert problems_of(b" " * (64 * 2**20 + 1)) == ["the file is longer than 64 MiB"]


@pytest.mark.parametrize("version", ["1.4", "2.0", "", "x" * 100])
def test_unknown_version_is_told_apart(version):
    with pytest.raises(UnknownVersionError) as raised:
        parse_table(json.dumps(document(version=version)))

    shown = json.dumps(version) if len(version) <= 80 else json.dumps("x" * 80) + "..."
    assert str(raised.value) == f'version: {shown} is not read (choose "1.0" or "1.2")'


def test_form_before_version_1_0_is_told_apart():
    content = {"status": "completed", "group_count": "1", "group_list": []}
    with pytest.raises(UnknownVersionError) as raised:
        parse_table(json.dumps(content))

    assert raised.value.problems == (
        TableProblem(
            "group_list",
            "is the form older than version 1.0, which is not read; write the table anew",
        ),
    )


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        (
            {},
            [
                'status: is missing (choose "completed" or "initializing")',
                'version: is missing (choose "1.0" or "1.2")',
                "server_list: is missing",
                "server_count: is missing",
            ],
        ),
        (
            document(status="done", version=1.0),
            [
                'status: is "done" (choose "completed" or "initializing")',
                "version: is a number, not a string",
            ],
        ),
        (document(status=None), ["status: is null, not a string"]),
        (
            without(document(server_group_list=[]), "server_list", "server_count"),
            [
                "server_group_list: holds several tables; take out the one you need",
                "server_list: is missing",
                "server_count: is missing",
            ],
        ),
        (document(server_count="2"), ["server_count: is 2, but server_list is 1 long"]),
        (document(server_count="one"), ['server_count: "one" is no whole number']),
        (document(server_list={}), ["server_list: is an object, not an array"]),
        (
            document(server_list=[{}, "x"], server_count="2"),
            [
                "server_list[0].device: is missing",
                "server_list[0].server_id: is missing",
                "server_list[1]: is a string, not an object",
            ],
        ),
        (
            document(server_list=[{"server_id": 7, "device": [{"device_id": True}, 1]}]),
            [
                "server_list[0].server_id: is a number, not a string",
                "server_list[0].device[0].device_id: is a boolean, not a whole number",
                "server_list[0].device[0].rank_id: is missing",
                "server_list[0].device[1]: is a number, not an object",
            ],
        ),
        (
            document(version="1.2", super_pod_list=[{}, {"server_list": [{"a b": 1}]}]),
            [
                "super_pod_list[0].server_list: is missing",
                "super_pod_list[0].super_pod_id: is missing",
                "super_pod_list[1].super_pod_id: is missing",
                "super_pod_list[1].server_list[0].server_id: is missing",
                'super_pod_list[1].server_list[0]."a b": is no field of a super pod\'s server',
            ],
        ),
    ],
)
def test_wrong_types_and_missing_fields_are_all_told(content, problems):
    assert problems_of(content) == problems


@pytest.mark.parametrize("text", ["1.5", "+1", " 1", "1 ", "", "0x1", "1_0", "٣", "9" * 21])
def test_text_that_is_no_whole_number_is_named(text):
    server = {"server_id": "a", "device": [device(0, rank_id=text)]}

    assert problems_of(document(server_list=[server])) == [
        f"server_list[0].device[0].rank_id: {json.dumps(text)} is no whole number"
    ]


def test_negative_rank_is_out_of_range_in_both_spellings():
    server = {"server_id": "a", "device": [device(0, rank_id=-1), device(1, rank_id="-1")]}

    assert problems_of(document(server_list=[server])) == [
        "server_list[0].device[0].rank_id: -1 is out of range (0 to 4294967295)",
        "server_list[0].device[1].rank_id: -1 is out of range (0 to 4294967295)",
    ]


def test_key_that_stands_twice_is_named():
    text = json.dumps(document()).replace('"rank_id": "1"', '"rank_id": "1", "rank_id": "2"')

    assert problems_of(text) == [
        "server_list[0].device[1].rank_id: stands twice in one object",
    ]


def test_unknown_field_that_cannot_be_kept_is_named():
    deep = json.loads("[" * 40 + "]" * 40)
    text = json.dumps(document(deep=deep, twice={"a": {"b": 0}}))

    assert problems_of(text.replace('"b": 0', '"b": 0, "b": 1')) == [
        "deep: is nested deeper than 32 levels",
        'twice: holds the key "b" twice',
    ]


def test_used_rank_names_both_places():
    servers = [
        {"server_id": "a", "device": [device(i) for i in range(8, 12)]},
        {"server_id": "b", "device": [device(i, device_ip=f"10.0.0.{i}") for i in range(4)]},
    ]
    servers[1]["device"][3]["rank_id"] = "11"

    assert problems_of(document(server_list=servers, server_count="2"), is_part=True) == [
        "server_list[1].device[3].rank_id: 11 is already used by server_list[0].device[3]"
    ]


def test_reading_stops_after_ten_thousand_problems():
    content = document(server_list=[{}] * 20_000)

    assert len(problems_of(content)) == 10_000
