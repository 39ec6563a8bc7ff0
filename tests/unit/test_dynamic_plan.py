"""What a node of several would do, as far as that is known before the job forms."""

import pytest
from msgspec import structs

from launchers.dynamic import DynamicLauncher
from msrun.job import JobSpec, ProgramKind, WorkerProgram
from msrun.supervise import node_plan
from msrun.topology import CpuTopology, Device, DeviceKind, Machine

MACHINE = Machine(
    host="node1",
    cpus=CpuTopology(numa={0: (0, 1)}, siblings={0: (0,), 1: (1,)}),
    devices=(),
    memory_available=8 << 30,
    processes_available=4096,
    files_available=1024,
    cgroup=None,
)


def plan(**changes):
    job = JobSpec(
        job_id="train-1",
        program=WorkerProgram(kind=ProgramKind.SCRIPT, target="train.py"),
        workers_per_node=2,
        cwd="/home/u",
        log_dir="/logs",
        **changes,
    )
    return DynamicLauncher().plan(job, MACHINE)


def several(**changes):
    return plan(
        **{
            "nnodes_min": 3,
            "nnodes_max": 3,
            "master_addr": "node0",
            "master_port": 29500,
            "serves": False,
            "listen_host": "10.0.0.1",
            "address": "10.0.0.2",
            **changes,
        }
    )


def variables(found, *names):
    return [tuple(worker.env[name] for name in names) for worker in found.workers]


def test_one_node_knows_everything_but_ports():
    found = plan()

    assert found.has_ranks
    assert [worker.log_file for worker in found.workers] == [
        "/logs/worker_0.log",
        "/logs/worker_1.log",
    ]
    assert (
        variables(found, "MASTER_ADDR", "MASTER_PORT", "MS_SCHED_HOST", "MS_SCHED_PORT")
        == [("127.0.0.1", "<port>", "127.0.0.1", "<port>")] * 2
    )


def test_logs_have_the_address_towards_the_other_nodes():
    name = "w_{ip}_{rank}"

    assert plan(worker_log_name=name).workers[1].log_file == "/logs/w_127.0.0.1_1.log"
    found = several(worker_log_name=name, node_rank=1)
    assert found.workers[0].log_file == "/logs/w_10.0.0.2_2.log"


def test_a_node_with_a_rank_among_equals_knows_its_ranks():
    found = several(node_rank=1)

    assert found.has_ranks
    assert [(w.rank, w.local_rank, w.node_rank) for w in found.workers] == [(2, 0, 1), (3, 1, 1)]
    assert [worker.log_file for worker in found.workers] == [
        "/logs/worker_2.log",
        "/logs/worker_3.log",
    ]
    assert variables(found, "RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE") == [
        ("2", "6", "1", "3"),
        ("3", "6", "1", "3"),
    ]
    assert (
        variables(found, "MSRUN_RANK0_ADDR", "MS_SCHED_HOST", "MS_SCHED_PORT")
        == [("<address>", "127.0.0.1", "<port>")] * 2
    )


@pytest.fixture
def outside(monkeypatch):
    """An environment that says nothing of interfaces."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.mark.usefixtures("outside")
def test_workers_talk_over_the_interface_of_this_nodes_address():
    here = several(node_rank=1, listen_host="127.0.0.1", address="127.0.0.1")

    assert variables(plan(), "GLOO_SOCKET_IFNAME") == [("lo",)] * 2
    assert variables(here, "GLOO_SOCKET_IFNAME") == [("lo",)] * 2
    assert "GLOO_SOCKET_IFNAME" not in several(node_rank=1).workers[0].env


def test_every_node_reaches_the_store_over_its_own_loopback_interface():
    names = ("MASTER_ADDR", "MSRUN_RANK0_ADDR")
    first, second = several(node_rank=0, address="10.0.0.1"), several(node_rank=1)

    assert variables(first, *names) == [("127.0.0.1", "10.0.0.1")] * 2
    assert variables(second, *names) == [("127.0.0.1", "<address>")] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"node_rank": 1, "nnodes_min": 2},
        {"node_rank": 1, "world_size": 7},
        {"node_rank": 1, "nnodes_min": 1, "nnodes_max": 6, "world_size": 6},
    ],
)
def test_a_node_that_must_wait_for_its_ranks(changes):
    found = several(**changes)

    assert not found.has_ranks
    assert [worker.local_rank for worker in found.workers] == [0, 1]
    assert [worker.log_file for worker in found.workers] == ["/logs/worker_<rank>.log"] * 2


def test_a_total_tells_how_many_equal_nodes_there_are():
    found = several(nnodes_min=1, nnodes_max=8, world_size=8, node_rank=0)

    assert variables(found, "WORLD_SIZE", "GROUP_WORLD_SIZE") == [("8", "4")] * 2


def test_workers_on_npus_get_what_hccl_needs():
    npus = tuple(Device(kind=DeviceKind.NPU, index=i, physical=i) for i in range(2))
    machine = structs.replace(MACHINE, devices=npus)
    job = structs.replace(
        several().job, address="10.0.0.1", join_timeout=1200.0, hang_timeout=3600.0
    )
    placement = node_plan.expected(job, "/run")

    def given(machine, base):
        (env, *_) = [w.env for w in node_plan.plan_workers(job, machine, placement, base)]
        return {name: value for name, value in env.items() if name.startswith("HCCL")}

    assert given(MACHINE, {}) == {}
    assert given(machine, {"HCCL_EXEC_TIMEOUT": "9"}) == {
        "HCCL_IF_IP": "10.0.0.1",
        "HCCL_SOCKET_FAMILY": "AF_INET",
        "HCCL_CONNECT_TIMEOUT": "1200",
    }


def by_hand(device=None):
    """Return what the third of four processes on this machine gives its worker."""
    job = structs.replace(several().job, workers_per_node=1, node_name="c", device=device)
    placement = node_plan.Placement(
        generation=0,
        node_rank=5,
        nnodes=6,
        first_rank=5,
        world_size=6,
        store=("10.0.0.1", "1"),
        scheduler=("10.0.0.1", "2"),
        run_dir="/run",
        first_local_rank=2,
        local_world_size=4,
    )
    (worker,) = node_plan.plan_workers(job, MACHINE, placement, {})
    return worker


def test_a_process_of_many_on_a_machine_has_its_local_rank_and_device_there():
    worker = by_hand()

    assert (worker.rank, worker.local_rank) == (5, 2)
    assert variables_of(worker) == ("2", "4", "2", "1", None)


def test_a_process_with_a_device_of_its_own_sees_no_other():
    assert variables_of(by_hand(device=3)) == ("0", "1", "3", "1", "3")


def variables_of(worker):
    names = "LOCAL_RANK LOCAL_WORLD_SIZE DEVICE_ID OMP_NUM_THREADS CUDA_VISIBLE_DEVICES"
    return tuple(worker.env.get(name) for name in names.split())
