"""Devices counted in made-up trees."""

import os

import pytest

from msrun.supervise.devices import read_devices
from msrun.topology import Device, DeviceKind

INFORMATION = """\
Model: \t\t NVIDIA H200
IRQ:   \t\t 285
GPU UUID: \t {uuid}
Bus Type: \t PCIe
Bus Location: \t {bus}
Device Minor: \t {minor}
GPU Excluded:\t No
"""


def write(root, path, text=""):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def add_gpu(root, minor, bus, node, uuid=""):
    write(root, f"dev/nvidia{minor}")
    text = INFORMATION.format(uuid=uuid or f"GPU-{minor}{minor}", bus=bus, minor=minor)
    write(root, f"proc/driver/nvidia/gpus/{bus}/information", text)
    write(root, f"sys/bus/pci/devices/{bus}/numa_node", f"{node}\n")


def add_npu(root, number, bus, node):
    write(root, f"dev/davinci{number}")
    driver = f"sys/bus/pci/drivers/devdrv_device_driver/{bus}"
    write(root, f"{driver}/dev_id", f"{number}\n")
    write(root, f"{driver}/numa_node", f"{node}\n")


@pytest.fixture
def four_gpus(tmp_path):
    for minor, node in enumerate((0, 0, 1, 1)):
        add_gpu(tmp_path, minor, f"0000:{minor + 1}7:00.0", node, f"GPU-{'abcd'[minor]}0-{minor}")
    for other in ("nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1", "null"):
        write(tmp_path, f"dev/{other}")
    return tmp_path


def physical(root, text):
    return [d.physical for d in read_devices(root, {"CUDA_VISIBLE_DEVICES": text})]


def test_an_empty_machine_has_no_devices(tmp_path):
    assert read_devices(tmp_path, {}) == ()
    assert read_devices(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1"}) == ()


def test_gpus_have_the_node_of_their_bus(four_gpus):
    assert read_devices(four_gpus, {}) == tuple(
        Device(kind=DeviceKind.CUDA, index=i, physical=i, numa_node=node)
        for i, node in enumerate((0, 0, 1, 1))
    )


def test_visible_gpus_are_renumbered_in_the_given_order(four_gpus):
    assert read_devices(four_gpus, {"CUDA_VISIBLE_DEVICES": "3,0"}) == (
        Device(kind=DeviceKind.CUDA, index=0, physical=3, numa_node=1),
        Device(kind=DeviceKind.CUDA, index=1, physical=0, numa_node=0),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("none", []),
        ("0,-1,1", [0]),
        ("2,9,1", [2]),
        ("0, 1 ,2", [0, 1, 2]),
        ("1gpu,+2", [1, 2]),
        ("0,1,0", []),
        ("1,,2", [1]),
        ("99999999999999999999", []),
        ("GPU-c0-2,GPU-a0-0", [2, 0]),
        ("GPU-d", [3]),
        ("GPU-", []),
        ("GPU-b,GPU-zz,GPU-a", [1]),
        ("GPU-b,0", [1]),
        ("0,GPU-b", [0]),
        ("GPU-b,GPU-b0", []),
    ],
)
def test_cuda_visible_devices_reads_as_cuda_does(four_gpus, text, expected):
    assert physical(four_gpus, text) == expected


def test_mig_instances_are_counted_by_name(four_gpus):
    names = "MIG-11-22,MIG-33-44"
    assert physical(four_gpus, names) == [0, 1]
    assert physical(four_gpus, "MIG-11,MIG-11") == []
    assert physical(four_gpus, "MIG-11,0") == [0]


def test_the_older_name_of_a_mig_instance_tells_its_node(four_gpus):
    names = "MIG-GPU-d0-3/1/0,MIG-GPU-a0-0/2/0,MIG-55"
    devices = read_devices(four_gpus, {"CUDA_VISIBLE_DEVICES": names})
    assert [d.numa_node for d in devices] == [1, 0, None]


def test_a_uuid_without_the_drivers_word_is_believed(tmp_path):
    write(tmp_path, "dev/nvidia0")
    write(tmp_path, "dev/nvidia1")
    assert physical(tmp_path, "GPU-a,GPU-b") == [0, 1]


def test_numbers_follow_the_bus_where_minors_do_not(tmp_path):
    add_gpu(tmp_path, 0, "0000:c1:00.0", 1)
    add_gpu(tmp_path, 1, "0000:17:00.0", 0)
    add_gpu(tmp_path, 2, "10000:01:00.0", 2)
    assert [d.numa_node for d in read_devices(tmp_path, {})] == [0, 1, 2]


def test_a_container_with_two_of_eight_gpus_counts_from_zero(tmp_path):
    add_gpu(tmp_path, 6, "0000:a7:00.0", 1)
    add_gpu(tmp_path, 7, "0000:b7:00.0", 1)
    assert [d.physical for d in read_devices(tmp_path, {})] == [0, 1]


def test_a_node_that_the_firmware_does_not_tell_is_none(tmp_path):
    add_gpu(tmp_path, 0, "0000:17:00.0", -1)
    write(tmp_path, "dev/nvidia1")
    assert [d.numa_node for d in read_devices(tmp_path, {})] == [None, None]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_a_device_that_may_not_be_opened_is_not_counted(four_gpus):
    (four_gpus / "dev/nvidia0").chmod(0)
    assert len(read_devices(four_gpus, {})) == 3


def test_odd_driver_files_are_no_devices_and_no_error(tmp_path):
    write(tmp_path, "dev/nvidia0")
    write(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Device Minor: ??\n:\nx")
    (tmp_path / "proc/driver/nvidia/gpus/0000:02:00.0/information").mkdir(parents=True)
    assert read_devices(tmp_path, {}) == (Device(kind=DeviceKind.CUDA, index=0, physical=0),)


@pytest.fixture
def four_npus(tmp_path):
    for number, (bus, node) in enumerate((("c1", 6), ("81", 4), ("42", 2), ("01", 0))):
        add_npu(tmp_path, number, f"0000:{bus}:00.0", node)
    for other in ("davinci_manager", "devmm_svm", "hisi_hdc"):
        write(tmp_path, f"dev/{other}")
    return tmp_path


def test_npus_have_the_node_that_their_driver_tells(four_npus):
    assert read_devices(four_npus, {"CUDA_VISIBLE_DEVICES": ""}) == tuple(
        Device(kind=DeviceKind.NPU, index=i, physical=i, numa_node=node)
        for i, node in enumerate((6, 4, 2, 0))
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("1,2,3", [1, 2, 3]),
        ("3,1", [3, 1]),
        ("1, 2,3", [1]),
        ("1 ,2", [1]),
        ("1,8,2", [1]),
        ("1,2,-1,3", [1, 2]),
        ("1,1,2", [1]),
    ],
)
def test_ascend_visible_devices_reads_as_cann_does(four_npus, text, expected):
    devices = read_devices(four_npus, {"ASCEND_RT_VISIBLE_DEVICES": text})
    assert [d.physical for d in devices] == expected


def test_npus_without_sysfs_have_no_node(tmp_path):
    for number in (10, 9):
        write(tmp_path, f"dev/davinci{number}")
    assert read_devices(tmp_path, {}) == tuple(
        Device(kind=DeviceKind.NPU, index=i, physical=i) for i in range(2)
    )


def test_hidden_gpus_leave_the_npus(four_npus):
    add_gpu(four_npus, 0, "0000:17:00.0", 0)
    kinds = {d.kind for d in read_devices(four_npus, {})}
    hidden = {d.kind for d in read_devices(four_npus, {"CUDA_VISIBLE_DEVICES": ""})}
    assert (kinds, hidden) == ({DeviceKind.CUDA}, {DeviceKind.NPU})
