"""`--rank-table-file` without a fleet: each node finds its place in the table by itself."""

import json

import pytest

from msrun.topology import DeviceKind
from ranktable import Inventory, InventoryDevice, build_table, render_table


def server(name, *numbers):
    return Inventory(
        server_id=name, devices=tuple(InventoryDevice(device_id=number) for number in numbers)
    )


@pytest.fixture
def table(here):
    """Write a table of the servers given."""

    def write(*servers):
        (here / "t.json").write_text(render_table(build_table(servers)))

    return write


@pytest.fixture
def two(table):
    """This node, 10.0.0.1, is the second of two."""
    table(server("10.0.0.2", 0, 1), server("10.0.0.1", 4, 5, 6))


@pytest.mark.usefixtures("two")
def test_a_node_is_where_its_address_stands(msrun, here):
    job = msrun("--rank-table-file t.json train.py").job

    assert (job.nnodes_min, job.nnodes_max, job.world_size) == (2, 2, 5)
    assert (job.node_rank, job.workers_per_node, job.serves) == (1, 3, False)
    assert (job.master_addr, job.master_port) == ("10.0.0.2", 29500)
    assert job.rank_table == str(here / "t.json")


@pytest.mark.parametrize("name", ["10.0.0.1", "node0", "fd00::1"])
def test_names_and_addresses_of_this_node(msrun, table, name):
    table(server(name, 0), server("10.0.0.2", 0))

    job = msrun("--rank-table-file t.json train.py").job

    assert (job.node_rank, job.serves, job.master_addr) == (0, True, name)


def test_one_server_is_a_job_of_one_node(msrun, table):
    table(server("10.0.0.1", 0, 1))

    job = msrun("--rank-table-file t.json train.py").job

    assert (job.is_alone, job.workers_per_node, job.master_addr) == (True, 2, None)


@pytest.mark.parametrize("words", ["--master-addr b", "--rdzv-endpoint b:29500"])
@pytest.mark.usefixtures("two")
def test_another_node_may_have_the_scheduler(msrun, system, words):
    system.names["b"] = ("10.0.0.3",)

    job = msrun(f"--rank-table-file t.json {words} train.py").job

    assert (job.master_addr, job.node_rank) == ("b", 1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DeviceKind.NPU, "ASCEND_RT_VISIBLE_DEVICES"),
        (DeviceKind.CUDA, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_workers_see_the_devices_of_the_table_in_its_order(msrun, gpus, table, kind, name):
    gpus(8, kind)
    table(server("10.0.0.1", 5, 4))

    job = msrun("--rank-table-file t.json --env A=1 train.py").job

    assert job.env == {"A": "1", name: "5,4"}


@pytest.mark.usefixtures("two")
def test_a_plan_says_where_values_come_from(msrun):
    outcome = msrun("plan --json --rank_table_file t.json train.py")

    values = json.loads(outcome.out)["job"]
    assert values["nnodes"] == {"value": 2, "source": "flag --rank_table_file"}
    assert values["node-rank"] == {"value": 1, "source": "flag --rank_table_file"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--nnodes 3", "--nnodes 3 contradicts --rank-table-file t.json, which has 2 servers"),
        (
            "--worker-num 4",
            "--worker-num 4 contradicts --rank-table-file t.json, which has 5 ranks",
        ),
        (
            "--nproc-per-node 2",
            (
                "--nproc-per-node 2 contradicts --rank-table-file t.json, which gives this node 3 "
                "ranks"
            ),
        ),
        (
            "--node-rank 0",
            (
                "--rank-table-file t.json: server 0 of the rank table is 10.0.0.2, and this node "
                "is server 1, 10.0.0.1"
            ),
        ),
        (
            "--node-rank 2",
            "--rank-table-file t.json: the rank table has no server 2 (choose 0 to 1)",
        ),
        (
            "--standalone",
            "--rank-table-file t.json contradicts --standalone, which is this node alone",
        ),
        (
            "--env RANK_TABLE_FILE=x",
            "--env RANK_TABLE_FILE=x cannot be given: msrun sets RANK_TABLE_FILE in every worker",
        ),
    ],
)
@pytest.mark.usefixtures("two")
def test_what_contradicts_the_table_is_refused(msrun, words, sentence):
    outcome = msrun(f"--rank-table-file t.json {words} train.py")

    assert (outcome.code, outcome.job) == (2, None)
    assert outcome.err.splitlines()[0] == f"error: {sentence}"


@pytest.mark.usefixtures("two")
def test_a_device_that_is_not_there_is_refused(msrun, gpus):
    gpus(6, DeviceKind.NPU)

    outcome = msrun("--rank-table-file t.json train.py")

    assert (outcome.code, outcome.job) == (2, None)
    assert outcome.err.splitlines()[0] == (
        "error: --rank-table-file t.json: the rank table gives server 10.0.0.1 device 6, and this "
        "node has 0, 1, 2, 3, 4, 5"
    )


def test_a_table_of_other_nodes_is_refused_unless_the_node_is_told(msrun, table):
    table(server("10.0.0.2", 0), server("10.0.0.3", 0))
    refused = msrun("--rank-table-file t.json train.py")
    told = msrun("--rank-table-file t.json --node-rank 1 train.py")

    assert refused.err.splitlines() == [
        (
            "error: --rank-table-file t.json: the rank table has no server with an address of this "
            "node (it has 10.0.0.2, 10.0.0.3)"
        ),
        "  hint: give --node-rank, or write the table anew",
    ]
    assert told.job.node_rank == 1


def test_two_servers_on_one_machine_are_told_apart_by_hand(msrun, table):
    table(server("10.0.0.1", 0), server("node0", 1))
    refused = msrun("--rank-table-file t.json train.py")
    told = msrun("--rank-table-file t.json --node-rank 1 train.py")

    assert "this node is both server 10.0.0.1 and server node0" in refused.err
    assert told.job.node_rank == 1


def test_a_file_that_is_no_table_is_refused(msrun, here):
    (here / "t.json").write_text("{}")

    outcome = msrun("--rank-table-file t.json train.py")

    assert outcome.code == 2
    assert outcome.err.startswith("error: t.json: status: is missing ")


def test_the_machine_is_asked_with_the_variables_of_the_workers(msrun, gpus, table):
    gpus(4)
    table(server("10.0.0.1", 1))

    outcome = msrun("--rank-table-file t.json --env CUDA_VISIBLE_DEVICES=0 train.py")

    assert outcome.code == 2
    assert "gives server 10.0.0.1 device 1, and this node has 0" in outcome.err


# What the job writes.


@pytest.mark.parametrize(
    ("kind", "told"), [(DeviceKind.NPU, "HERE/out.json"), (DeviceKind.CUDA, "")]
)
def test_workers_on_npus_are_told_of_the_table_that_is_written(msrun, gpus, here, kind, told):
    gpus(2, kind)

    job = msrun("--emit-rank-table out.json train.py").job

    assert job.emit_rank_table == str(here / "out.json")
    assert job.rank_table == told.replace("HERE", str(here))


@pytest.mark.usefixtures("two")
def test_a_table_that_is_given_is_the_one_workers_are_told_of(msrun, gpus, here):
    gpus(8, DeviceKind.NPU)

    job = msrun("--rank-table-file t.json --emit-rank-table out.json train.py").job

    assert job.rank_table == str(here / "t.json")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("app", "--emit-rank-table app is a directory"),
        ("none/t.json", "--emit-rank-table none/t.json: HERE/none is not there"),
        ("prog/t.json", "--emit-rank-table prog/t.json: HERE/prog is a file, not a directory"),
        (
            "t.json --rank-table-file ./t.json",
            "--emit-rank-table t.json would replace --rank-table-file ./t.json",
        ),
    ],
)
@pytest.mark.usefixtures("two")
def test_where_a_table_cannot_be_written(msrun, words, sentence):
    outcome = msrun(f"--emit-rank-table {words} train.py")

    assert (outcome.code, outcome.job) == (2, None)
    assert outcome.err.startswith(f"error: {sentence}")
