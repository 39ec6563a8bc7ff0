"""Invariants: each mistake is one problem with its path."""

from dataclasses import replace

import pytest

from ranktable import (
    RankTable,
    Server,
    SuperPod,
    TableDevice,
    TableStatus,
    Version,
    check_hccl,
    check_table,
)


def servers(count=2, devices=2, **fields):
    """Servers a, b, ...; super_device_id = rank_id, all addresses different."""
    return tuple(
        Server(
            server_id="abcdefgh"[s],
            device=tuple(
                TableDevice(
                    device_id=i,
                    rank_id=s * devices + i,
                    device_ip=f"10.1.{s}.{i}",
                    super_device_id=s * devices + i,
                )
                for i in range(devices)
            ),
            **fields,
        )
        for s in range(count)
    )


def plain(*server_list, **fields):
    return RankTable(version=Version.V1_0, server_list=server_list, **fields)


def pods(table, **members):
    """`table` as version 1.2 with one pod for each keyword; a letter is a server."""
    return replace(
        table,
        version=Version.V1_2,
        super_pod_list=tuple(
            SuperPod(super_pod_id=name, server_list=tuple(ids)) for name, ids in members.items()
        ),
    )


def with_device(server, index, **changes):
    """`server` with one device changed."""
    device = list(server.device)
    device[index] = replace(device[index], **changes)
    return replace(server, device=tuple(device))


def found(table, **options):
    return [str(problem) for problem in check_table(table, **options)]


A, B = servers()


@pytest.mark.parametrize(
    "table",
    [
        plain(A, B),
        plain(B, A),
        plain(with_device(with_device(A, 0, rank_id=1), 1, rank_id=0), B),
        pods(plain(A, B), x="ab"),
        pods(plain(*servers(3)), x="ab", y="c"),
        pods(plain(*servers(3)), y="c", x="ba"),
        pods(plain(A, with_device(B, 0, super_device_id=0)), x="a", y="b"),
        plain(status=TableStatus.INITIALIZING),
        plain(replace(A, device=()), A, status=TableStatus.INITIALIZING),
    ],
)
def test_sound_table_has_no_problems(table):
    assert found(table) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"device_id": -1}, "device_id: -1 is out of range (0 to 4294967295)"),
        ({"rank_id": 2**32}, "rank_id: 4294967296 is out of range (0 to 4294967295)"),
        ({"super_device_id": -5}, "super_device_id: -5 is out of range (0 to 4294967295)"),
        ({"device_logical_id": -5}, "device_logical_id: -5 is out of range (0 to 4294967295)"),
        ({"device_port": 0}, "device_port: 0 is no port (1 to 65535)"),
        ({"backup_device_port": 65536}, "backup_device_port: 65536 is no port (1 to 65535)"),
        ({"host_port": -1}, "host_port: -1 is no port (1 to 65535)"),
        ({"device_ip": "10.0.0.300"}, 'device_ip: "10.0.0.300" is no IP address'),
        ({"device_ip": "10.0.0.3, 10.0.0.4"}, 'device_ip: " 10.0.0.4" is no IP address'),
        ({"backup_device_ip": "\x1b[2J"}, 'backup_device_ip: "\\u001b[2J" is no IP address'),
    ],
)
def test_value_of_a_device_is_named(changes, problem):
    assert found(plain(A, with_device(B, 1, **changes))) == [f"server_list[1].device[1].{problem}"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"server_id": ""}, 'server_id: "" is not 1 to 64 printable characters'),
        ({"server_id": "a\n"}, 'server_id: "a\\n" is not 1 to 64 printable characters'),
        (
            {"server_id": "x" * 81},
            f'server_id: "{"x" * 80}"... is not 1 to 64 printable characters',
        ),
        (
            {"hardware_type": "x" * 65},
            f'hardware_type: "{"x" * 65}" is not 1 to 64 printable characters',
        ),
        ({"host_ip": "node0"}, 'host_ip: "node0" is no IP address'),
        ({"server_ip": "1.2.3"}, 'server_ip: "1.2.3" is no IP address'),
        ({"container_ip": "1::2::3"}, 'container_ip: "1::2::3" is no IP address'),
        ({"pod_ip": "x"}, 'pod_ip: "x" is no IP address'),
        ({"host_ip": "fe80::1%\x07"}, 'host_ip: "fe80::1%\\u0007" is no IP address'),
        ({"host_nic_ip": "reserved"}, 'host_nic_ip: "reserved" is no IP address'),
    ],
)
def test_value_of_a_server_is_named(changes, problem):
    assert found(plain(A, replace(B, **changes))) == [f"server_list[1].{problem}"]


def test_values_are_checked_while_the_table_is_being_written():
    table = plain(replace(A, host_ip="x"), status=TableStatus.INITIALIZING)

    assert found(table) == ['server_list[0].host_ip: "x" is no IP address']


@pytest.mark.parametrize(
    ("table", "problems"),
    [
        (plain(), ["server_list: is empty: a completed table has at least one server"]),
        (
            plain(replace(A, device=())),
            ["server_list[0].device: is empty: a server has at least one device"],
        ),
        (
            plain(A, replace(B, server_id="a")),
            ['server_list[1].server_id: "a" is already used by server_list[0]'],
        ),
        (
            plain(with_device(A, 1, device_id=0)),
            [
                "server_list[0].device[1].device_id: 0 is already used by server_list[0].device[0]",
            ],
        ),
        (
            plain(with_device(with_device(A, 0, host_port=9), 1, host_port=9)),
            [
                "server_list[0].device[1].host_port: 9 is already used by server_list[0].device[0]",
            ],
        ),
        (
            plain(A, with_device(B, 0, device_ip="10.1.2.9,10.1.0.1")),
            [
                (
                    "server_list[1].device[0].device_ip: "
                    '"10.1.0.1" is already used by server_list[0].device[1]'
                ),
            ],
        ),
        (
            plain(
                with_device(A, 0, backup_device_ip="10.1.0.1"),
                with_device(B, 0, backup_device_ip="10.1.0.1"),
            ),
            [
                (
                    "server_list[1].device[0].backup_device_ip: "
                    '"10.1.0.1" is already used by server_list[0].device[0]'
                ),
            ],
        ),
        (
            plain(A, with_device(B, 1, rank_id=1)),
            ["server_list[1].device[1].rank_id: 1 is already used by server_list[0].device[1]"],
        ),
        (
            plain(A, with_device(B, 1, rank_id=4)),
            [
                "server_list[1].device[1].rank_id: 4 is out of range: 4 devices have ranks 0 to 3",
            ],
        ),
        (
            plain(replace(A, device=(replace(A.device[0], rank_id=1),))),
            ["server_list[0].device[0].rank_id: 1 is out of range: 1 device has rank 0"],
        ),
        (
            plain(with_device(A, 1, rank_id=2), with_device(B, 0, rank_id=1)),
            [
                (
                    "server_list[0].device: "
                    "rank_id 0 is followed by 2: the ranks of a server are one block"
                ),
                (
                    "server_list[1].device: "
                    "rank_id 1 is followed by 3: the ranks of a server are one block"
                ),
            ],
        ),
    ],
)
def test_values_that_do_not_fit_together_are_named(table, problems):
    assert found(table) == problems


@pytest.mark.parametrize(
    ("table", "problems"),
    [
        (
            pods(plain(A, B), x="ab", y=""),
            ["super_pod_list[1].server_list: is empty: a super pod has servers"],
        ),
        (
            pods(plain(A, B), x="a"),
            ['server_list[1].server_id: "b" is in no super pod'],
        ),
        (
            pods(plain(A, B), x="abz"),
            ['super_pod_list[0].server_list[2].server_id: "z" is not in server_list'],
        ),
        (
            pods(plain(A, B), x="ab", y="b"),
            [
                (
                    "super_pod_list[1].server_list[0].server_id: "
                    '"b" is already used by super_pod_list[0].server_list[1]'
                ),
            ],
        ),
        (
            pods(plain(*servers(3)), x="ac", y="b"),
            [
                (
                    'server_list[2].server_id: "c" stands apart from super pod "x": '
                    "the servers of a super pod are listed together"
                ),
            ],
        ),
        (
            pods(plain(A, with_device(B, 0, super_device_id=None)), x="ab"),
            ["server_list[1].device[0].super_device_id: is missing: the server is in a super pod"],
        ),
        (
            pods(plain(A, with_device(B, 0, super_device_id=1)), x="ab"),
            [
                (
                    "server_list[1].device[0].super_device_id: "
                    "1 is already used by server_list[0].device[1]"
                ),
            ],
        ),
        (
            pods(plain(A), **{"": "a"}),
            ['super_pod_list[0].super_pod_id: "" is not 1 to 127 printable characters'],
        ),
    ],
)
def test_super_pods_that_do_not_fit_are_named(table, problems):
    assert found(table) == problems


def test_super_pod_id_that_stands_twice_is_named():
    table = pods(plain(A, B), x="a", y="b")
    twice = tuple(replace(pod, super_pod_id="x") for pod in table.super_pod_list)

    assert found(replace(table, super_pod_list=twice)) == [
        'super_pod_list[1].super_pod_id: "x" is already used by super_pod_list[0]'
    ]


def test_part_may_start_at_any_rank_but_not_repeat_one():
    part = plain(B)
    assert found(part, is_part=True) == []

    assert found(plain(with_device(B, 0, rank_id=3)), is_part=True) == [
        "server_list[0].device[1].rank_id: 3 is already used by server_list[0].device[0]"
    ]


def without_ips(server):
    return replace(
        server, device=tuple(replace(device, device_ip=None) for device in server.device)
    )


@pytest.mark.parametrize(
    ("table", "problems"),
    [
        (plain(A, B), []),
        (plain(without_ips(A)), []),
        (plain(replace(without_ips(A), host_ip="10.0.0.1"), B), []),
        (pods(plain(without_ips(A), B), x="ab"), []),
        (
            pods(plain(with_device(A, 0, device_ip=""), B), x="a", y="b"),
            [
                (
                    "server_list[0].device[0].device_ip: "
                    "is missing: with 2 servers HCCL needs it, or the server's host_ip"
                ),
            ],
        ),
        (
            plain(A, B, status=TableStatus.INITIALIZING),
            ['status: "initializing" is not "completed": still being written'],
        ),
        (
            replace(pods(plain(A, B), x="ab"), version=Version.V1_0),
            ['super_pod_list: is ignored by HCCL in version "1.0" (use "1.2")'],
        ),
    ],
)
def test_what_hccl_needs_is_named(table, problems):
    assert [str(problem) for problem in check_hccl(table)] == problems


def test_checking_stops_after_ten_thousand_problems():
    many = replace(A, device=(replace(A.device[0], rank_id=-1),) * 20_000)

    assert len(check_table(plain(many))) == 10_000
