"""What a node tells of the devices of its workers, from which rank tables are made."""

import pytest

from msrun.job import JobSpec, ProgramKind, WorkerProgram
from msrun.supervise.node_plan import slot_devices
from msrun.topology import CpuTopology, Device, DeviceKind, Machine

ADDRESSES = {4: "192.1.27.4", 6: "192.1.27.6"}


def found(kind, physical, **changes):
    told = {"workers_per_node": 2, "device": None} | changes
    program = WorkerProgram(kind=ProgramKind.SCRIPT, target="t.py")
    job = JobSpec(job_id="j", program=program, cwd="/", log_dir="/l", **told)
    machine = Machine(
        host="a",
        cpus=CpuTopology(numa={0: (0,)}, siblings={0: (0,)}),
        devices=tuple(
            Device(kind=kind, index=index, physical=number) for index, number in enumerate(physical)
        ),
        memory_available=1 << 30,
        processes_available=100,
        files_available=100,
        cgroup=None,
    )
    return slot_devices(job, machine, lambda numbers: {n: ADDRESSES[n] for n in numbers if n != 5})


@pytest.mark.parametrize(
    ("kind", "physical", "changes", "expected"),
    [
        (DeviceKind.NPU, (6, 5, 4), {}, [(6, "192.1.27.6"), (5, "")]),
        (DeviceKind.NPU, (6, 4), {"workers_per_node": 1, "device": 1}, [(4, "192.1.27.4")]),
        (DeviceKind.CUDA, (6, 4), {}, [(6, ""), (4, "")]),
        (DeviceKind.CUDA, (6,), {}, []),
        (DeviceKind.CUDA, (), {}, []),
    ],
)
def test_each_worker_has_the_device_of_its_slot(kind, physical, changes, expected):
    assert found(kind, physical, **changes) == expected
