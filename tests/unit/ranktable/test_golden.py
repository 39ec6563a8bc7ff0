"""Worked examples: each file is what its inventory builds, byte for byte."""

from pathlib import Path

import pytest

from ranktable import Inventory, InventoryDevice, build_table, check_hccl, parse_table, render_table

DATA = Path(__file__).parent / "data"

# What MindSpore's hccl_tools writes on a server with eight devices.
SINGLE_SERVER = [
    Inventory(
        server_id="10.155.111.140",
        host_nic_ip="reserve",
        devices=tuple(
            InventoryDevice(device_id=i, device_ip=f"192.{i % 4 + 1}.27.{6 + i // 4}")
            for i in range(8)
        ),
    )
]

MULTI_SERVER = [
    Inventory(
        server_id=f"10.155.111.{140 + s}",
        host_ip=f"10.155.111.{140 + s}",
        pod_ip=f"10.244.{s}.17",
        devices=tuple(
            InventoryDevice(device_id=i, device_ip=f"192.{i % 4 + 1}.27.{6 + 2 * s}")
            for i in range(4)
        ),
    )
    for s in range(2)
]

# Two pods; ids of devices repeat between pods, as they may.
SUPER_POD = [
    Inventory(
        server_id=f"node-{s}",
        host_ip=f"10.0.0.{s + 1}",
        super_pod_id=f"pod-{s // 2}",
        devices=tuple(
            InventoryDevice(
                device_id=i,
                device_ip=f"172.16.{s}.{i + 1}",
                super_device_id=(s % 2) * 1048576 + i * 65537,
            )
            for i in range(4)
        ),
    )
    for s in range(3)
]

EXAMPLES = {
    "v1_0_single_server.json": SINGLE_SERVER,
    "v1_0_multi_server.json": MULTI_SERVER,
    "v1_2_super_pod.json": SUPER_POD,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_inventory_builds_the_golden_file(name):
    golden = (DATA / name).read_bytes()

    assert render_table(build_table(EXAMPLES[name])).encode() == golden


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_file_is_parsed_to_what_was_built(name):
    golden = (DATA / name).read_bytes()

    assert parse_table(golden) == build_table(EXAMPLES[name])


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_file_suits_hccl(name):
    golden = (DATA / name).read_bytes()

    assert check_hccl(parse_table(golden)) == ()


def test_every_golden_file_has_an_example():
    assert sorted(path.name for path in DATA.iterdir()) == sorted(EXAMPLES)
