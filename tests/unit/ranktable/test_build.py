"""Building from inventories and merging parts."""

from dataclasses import replace

import pytest

from ranktable import (
    Inventory,
    InventoryDevice,
    RankTable,
    RankTableError,
    Server,
    SuperPod,
    TableDevice,
    TableStatus,
    Version,
    build_table,
    convert_table,
    merge_tables,
)


def inventory(server_id, slots, **fields):
    devices = tuple(InventoryDevice(device_id=i, super_device_id=i) for i in range(slots))
    return Inventory(server_id=server_id, devices=devices, **fields)


def problems_of(function, *args):
    with pytest.raises(RankTableError) as raised:
        function(*args)
    return [str(problem) for problem in raised.value.problems]


def test_ranks_follow_the_order_given():
    table = build_table(
        [
            Inventory(
                server_id="b", devices=(InventoryDevice(device_id=5), InventoryDevice(device_id=2))
            ),
            Inventory(server_id="a", devices=(InventoryDevice(device_id=0, device_ip="10.0.0.1"),)),
        ]
    )

    assert table == RankTable(
        version=Version.V1_0,
        server_list=(
            Server(
                server_id="b",
                device=(TableDevice(device_id=5, rank_id=0), TableDevice(device_id=2, rank_id=1)),
            ),
            Server(
                server_id="a", device=(TableDevice(device_id=0, rank_id=2, device_ip="10.0.0.1"),)
            ),
        ),
    )


def test_super_pod_makes_version_1_2():
    table = build_table([inventory("a", 1, super_pod_id="p"), inventory("b", 1, super_pod_id="q")])

    assert table.version is Version.V1_2
    assert table.super_pod_list == (
        SuperPod(super_pod_id="p", server_list=("a",)),
        SuperPod(super_pod_id="q", server_list=("b",)),
    )


def test_inventory_that_makes_no_sound_table_is_refused():
    servers = [inventory("a", 1, super_pod_id="p"), inventory("b", 0), inventory("a", 1)]

    assert problems_of(build_table, servers) == [
        'server_list[2].server_id: "a" is already used by server_list[0]',
        "server_list[1].device: is empty: a server has at least one device",
        'server_list[1].server_id: "b" is in no super pod',
        "server_list[2].device[0].super_device_id: 0 is already used by server_list[0].device[0]",
    ]


def test_merge_numbers_ranks_through():
    first, second = build_table([inventory("a", 2)]), build_table([inventory("b", 3)])

    assert merge_tables([first, second]) == build_table([inventory("a", 2), inventory("b", 3)])


def test_merge_keeps_the_order_of_ranks_inside_a_part():
    server = Server(
        server_id="b",
        device=(TableDevice(device_id=0, rank_id=9), TableDevice(device_id=1, rank_id=8)),
    )
    part = RankTable(version=Version.V1_0, server_list=(server,))
    merged = merge_tables([build_table([inventory("a", 2)]), part])

    assert [found.device_id for _, found in merged.by_rank()] == [0, 1, 1, 0]
    assert [found.rank_id for found in merged.server_list[1].device] == [3, 2]


def test_merge_joins_super_pods_of_one_name():
    names = {"a": "p", "b": "p", "c": "q"}
    parts = [
        build_table(
            [
                Inventory(
                    server_id=server_id,
                    devices=(InventoryDevice(device_id=0, super_device_id=i),),
                    super_pod_id=pod,
                )
            ]
        )
        for i, (server_id, pod) in enumerate(names.items())
    ]

    assert merge_tables(parts).super_pod_list == (
        SuperPod(super_pod_id="p", server_list=("a", "b")),
        SuperPod(super_pod_id="q", server_list=("c",)),
    )


def test_merge_of_one_part_is_that_part():
    part = build_table([inventory("a", 2)])

    assert merge_tables([part]) == part


def test_merge_keeps_unknown_fields_that_agree():
    extra = (("az", '"1"'),)
    parts = [replace(build_table([inventory(name, 1)]), extra=extra) for name in "ab"]

    assert merge_tables(parts).extra == extra


def test_merge_of_nothing_is_refused():
    assert problems_of(merge_tables, []) == ["parts: is empty: there is nothing to merge"]


def test_parts_that_do_not_fit_are_all_told():
    first = replace(build_table([inventory("a", 1)]), extra=(("az", '"1"'), ("zone", "1")))
    second = replace(
        build_table([inventory("b", 1)]),
        version=Version.V1_2,
        status=TableStatus.INITIALIZING,
        extra=(("az", '"2"'),),
    )

    assert problems_of(merge_tables, [first, second]) == [
        'parts[1].status: "initializing" is not "completed": still being written',
        'parts[1].version: "1.2" differs from "1.0" of parts[0]',
        "parts[1].az: differs from that of parts[0]",
        "parts[1].zone: differs from that of parts[0]",
    ]


def test_server_in_two_parts_is_refused():
    part = build_table([inventory("a", 1)])

    assert problems_of(merge_tables, [part, part]) == [
        'server_list[1].server_id: "a" is already used by server_list[0]'
    ]


def test_super_pods_that_disagree_are_refused():
    pod = SuperPod(super_pod_id="p", server_list=("a",))
    first = build_table([inventory("a", 1, super_pod_id="p")])
    second = build_table([inventory("b", 1, super_pod_id="p")])
    second = replace(
        second, super_pod_list=(replace(pod, server_list=("b",), extra=(("rack", "1"),)),)
    )

    assert problems_of(merge_tables, [first, second]) == [
        'super_pod_list[1].super_pod_id: "p" is already used by super_pod_list[0]',
        "server_list[1].device[0].super_device_id: 0 is already used by server_list[0].device[0]",
    ]


def test_version_1_0_keeps_nothing_of_super_pods():
    table = build_table(
        [
            inventory("a", 2, host_ip="10.0.0.1", super_pod_id="p"),
            inventory("b", 1, host_ip="10.0.0.2", super_pod_id="q"),
        ]
    )

    converted = convert_table(table, Version.V1_0)

    devices = tuple(TableDevice(device_id=i, rank_id=i) for i in range(2))
    assert converted == RankTable(
        version=Version.V1_0,
        server_list=(
            Server(server_id="a", host_ip="10.0.0.1", device=devices),
            Server(
                server_id="b", host_ip="10.0.0.2", device=(TableDevice(device_id=0, rank_id=2),)
            ),
        ),
    )


def test_version_1_2_may_put_all_servers_into_a_super_pod():
    table = build_table([inventory("a", 1), inventory("b", 1)])
    table = replace(
        table,
        server_list=tuple(
            replace(s, device=(replace(s.device[0], super_device_id=i),))
            for i, s in enumerate(table.server_list)
        ),
    )

    converted = convert_table(table, Version.V1_2, super_pod_id="p")

    assert converted == replace(
        table,
        version=Version.V1_2,
        super_pod_list=(SuperPod(super_pod_id="p", server_list=("a", "b")),),
    )
    assert convert_table(converted, Version.V1_2) == converted


@pytest.mark.parametrize(
    ("version", "pod", "problem"),
    [
        (
            Version.V1_0,
            None,
            (
                "server_list[0].device[0].device_ip: "
                "is missing: with 2 servers HCCL needs it, or the server's host_ip"
            ),
        ),
        (
            Version.V1_0,
            "p",
            'super_pod_list: "p" is asked for, and version "1.0" has no super pods',
        ),
        (
            Version.V1_2,
            "",
            'super_pod_list[0].super_pod_id: "" is not 1 to 127 printable characters',
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(version, pod, problem):
    table = build_table([inventory("a", 1, super_pod_id="p"), inventory("b", 1, super_pod_id="q")])

    assert problems_of(lambda: convert_table(table, version, super_pod_id=pod))[0] == problem
