"""Who a process is by a rank table, and where ranks meet by what their starter says.

The environments are recorded ones, without what nobody reads.
"""

import pytest

from msrun.environ import RankIdentity
from msrun.errors import UsageError
from msrun.identity import find_master, read_identity, step_options
from ranktable import Inventory, InventoryDevice, build_table, render_table


def server(name, devices, **fields):
    inventory = tuple(InventoryDevice(device_id=i) for i in devices)
    return Inventory(server_id=name, devices=inventory, **fields)


@pytest.fixture
def table(tmp_path):
    """Write a rank table of these servers and return its path."""

    def write(*servers, status="completed"):
        path = tmp_path / "hccl.json"
        text = render_table(build_table(servers)).replace("completed", status)
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def two(table):
    return table(server("10.0.0.1", [4, 5], host_ip="10.0.0.1"), server("10.0.0.2", [0, 1, 2]))


def by_table(path, rank, **more):
    return read_identity({"RANK_TABLE_FILE": path, "RANK_ID": rank, **more})


def test_a_rank_table_and_a_rank_are_enough(two):
    assert by_table(two, "3") == RankIdentity(
        source="a rank table",
        rank=3,
        world_size=5,
        local_rank=1,
        local_world_size=3,
        node_rank=1,
        device=1,
    )


@pytest.mark.parametrize(
    ("rank", "more", "device"),
    [
        ("1", {}, 5),
        ("1", {"DEVICE_ID": "5"}, 5),
        ("1", {"RANK_SIZE": "5", "DEVICE_ID": "5"}, 5),
        ("1", {"RANK_SIZE": "2"}, 5),  # MindSpore's samples give those of a server
        ("1", {"ASCEND_RT_VISIBLE_DEVICES": "4,5", "DEVICE_ID": "1"}, None),
        ("1", {"WORLD_SIZE": "9", "OMPI_COMM_WORLD_RANK": "3"}, 5),
    ],
)
def test_the_device_of_a_rank(two, rank, more, device):
    found = by_table(two, rank, **more)

    assert (found.rank, found.world_size, found.local_rank, found.device) == (1, 5, 1, device)


def test_the_older_name_of_the_variable(two):
    found = read_identity({"MINDSPORE_HCCL_CONFIG_PATH": two, "RANK_ID": "0"})

    assert (found.source, found.world_size) == ("a rank table", 5)


@pytest.mark.parametrize(
    ("env", "source"),
    [
        ({"RANK_TABLE_FILE": "gone"}, "plain python"),
        ({"RANK_TABLE_FILE": "gone", "RANK_ID": "", "RANK_SIZE": "8"}, "plain python"),
        (
            {"RANK_TABLE_FILE": "gone", "RANK_ID": "1", "RANK": "1", "WORLD_SIZE": "2"},
            "a script",
        ),
        ({"RANK_ID": "1", "RANK_SIZE": "2"}, "a rank table"),
    ],
)
def test_where_the_table_is_not_asked(env, source):
    assert read_identity(env).source == source


@pytest.mark.parametrize(
    ("rank", "more", "sentence"),
    [
        ("5", {}, "environment RANK_ID=5 is no rank of {} (choose 0 to 4)"),
        ("01", {}, "environment RANK_ID=01 is no rank of {} (choose 0 to 4)"),
        (
            "0",
            {"RANK_SIZE": "8"},
            "environment RANK_SIZE=8 contradicts the ranks: {} has 5",
        ),
        (
            "0",
            {"DEVICE_ID": "0"},
            "environment DEVICE_ID=0 contradicts the table: {} gives rank 0 device 4",
        ),
    ],
)
def test_what_contradicts_the_table_is_refused(two, rank, more, sentence):
    with pytest.raises(UsageError) as refusal:
        by_table(two, rank, **more)

    assert refusal.value.message == sentence.format(two)


def test_a_table_that_cannot_be_used_is_refused(table, tmp_path):
    path = table(server("a", [0]))
    (tmp_path / "bad.json").write_text('{"status": "completed", "version": "1.0"}')

    with pytest.raises(UsageError) as gone:
        by_table(str(tmp_path / "none.json"), "0")
    with pytest.raises(UsageError) as bad:
        by_table(str(tmp_path / "bad.json"), "0")
    table(server("a", [0]), status="initializing")
    with pytest.raises(UsageError) as unfinished:
        by_table(path, "0")

    assert gone.value.message == (
        f"rank table {tmp_path}/none.json cannot be read: No such file or directory"
    )
    assert bad.value.render() == (
        f"error: {tmp_path}/bad.json: server_list: is missing\n"
        "  hint: `msrun ranktable check` tells 1 more"
    )
    assert unfinished.value.message == f"{path}: status: the table is still being written"


# -- where ranks meet ------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[03,11]",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
HEAD_4 = "292814848.0;tcp://192.0.2.1:34889;tcp6://[2001:db8::2]:34151"
OPEN_MPI_4 = {
    **OPEN_MPI,
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": HEAD_4,
    "OMPI_MCA_orte_local_daemon_uri": "292814848.1;tcp://192.0.2.2:52921",
    "PMIX_NAMESPACE": "292814849",
}
OPEN_MPI_5 = {
    **OPEN_MPI,
    "OMPI_COMM_WORLD_RANK": "2",
    "PMIX_NAMESPACE": "prterun-my-node-0-19570@1",
    "PMIX_SERVER_URI41": "prterun-my-node-0-19570@0.2;tcp4://127.0.0.1:60039",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
INTEL = {**HYDRA, "I_MPI_HYDRA_UUID": "be4c0000-fb6f-dfc8-c860-06001e9d0f79"}


def meeting(env):
    return find_master(env, read_identity(env))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (SLURM, ("gpu03", 21556)),
        ({**SLURM, "SLURM_STEP_ID": "1"}, ("gpu03", 28002)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4"}, ("127.0.0.1", 21556)),
        (OPEN_MPI_4, ("192.0.2.1", 29152)),
        (
            {**OPEN_MPI_4, "OMPI_MCA_orte_hnp_uri": "7.0;tcp6://[2001:db8::2]:1"},
            ("2001:db8::2", 29152),
        ),
        (
            {**OPEN_MPI_4, "OMPI_MCA_orte_hnp_uri": "7.0;tcp://192.0.2.1,198.51.100.1:1"},
            ("192.0.2.1", 29152),
        ),
        ({**OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, ("127.0.0.1", 29152)),
        (OPEN_MPI_5, ("my-node-0", 25717)),
        (INTEL, ("127.0.0.1", 21254)),
        ({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "7"}, ("a", 7)),
    ],
)
def test_the_starter_tells_where_ranks_meet(env, expected):
    assert meeting(env) == expected


@pytest.mark.parametrize(
    "env",
    [
        {**OPEN_MPI_4, "OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_orte_local_daemon_uri": HEAD_4},
        {
            **OPEN_MPI_5,
            "OMPI_COMM_WORLD_RANK": "0",
            "PMIX_SERVER_URI41": "prterun-my-node-0-19570@0.0;tcp4://127.0.0.1:1",
        },
    ],
)
def test_rank_0_of_open_mpi_on_the_node_of_mpirun_agrees_with_the_others(env):
    others = OPEN_MPI_4 if "OMPI_MCA_orte_hnp_uri" in env else OPEN_MPI_5

    assert meeting(env) == meeting(others)


@pytest.mark.parametrize(("env", "host"), [(OPEN_MPI_4, "192.0.2.1"), (OPEN_MPI_5, "my-node-0")])
def test_rank_0_of_open_mpi_elsewhere_says_so(env, host):
    elsewhere = {**env, "OMPI_COMM_WORLD_RANK": "0"}

    with pytest.raises(UsageError) as refusal:
        meeting(elsewhere)

    assert refusal.value.render() == (
        f"error: Open MPI placed rank 0 on another node than mpirun's, {host}\n"
        "  hint: set MASTER_ADDR and MASTER_PORT, or let mpirun's node be the first of the hosts"
    )
    assert meeting({**elsewhere, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"})[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ([server("10.0.0.1", [0]), server("b", [0])], ("10.0.0.1", 23248)),
        ([server("a", [0], host_ip="10.0.0.3"), server("b", [0])], ("10.0.0.3", 31563)),
        (
            [server("a", [0], host_ip="10.0.0.3", pod_ip="10.1.0.3"), server("b", [0])],
            ("10.1.0.3", 31563),
        ),
        ([server("a", [0, 1])], ("127.0.0.1", 31563)),
        ([server("a", [2, 3])], ("127.0.0.1", 23879)),
    ],
)
def test_ranks_of_a_table_meet_at_the_server_of_rank_0(table, servers, expected):
    path = table(*servers)

    assert meeting({"RANK_TABLE_FILE": path, "RANK_ID": "1"}) == expected


@pytest.mark.parametrize(
    ("env", "starter"),
    [
        (HYDRA, "MPI started 2"),
        ({**INTEL, "PMI_SIZE": "4"}, "MPI started 4"),
        ({**OPEN_MPI_5, "PMIX_NAMESPACE": "other"}, "Open MPI started 3"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "Slurm started 4"),
        ({"RANK_ID": "1", "RANK_SIZE": "2"}, "a rank table started 2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "a script started 2"),
    ],
)
def test_a_starter_that_does_not_tell_is_named(env, starter):
    with pytest.raises(UsageError) as refusal:
        meeting(env)

    assert refusal.value.render() == (
        f"error: {starter} ranks, and MASTER_ADDR and MASTER_PORT are not set\n"
        "  hint: set both to a free port on the node of rank 0, or start one msrun on each node"
    )


def test_a_node_list_that_is_none_is_refused():
    with pytest.raises(UsageError) as refusal:
        meeting({**SLURM, "SLURM_STEP_NODELIST": "gpu[3"})

    assert refusal.value.message == (
        "environment SLURM_STEP_NODELIST: host list 'gpu[3' has a bracket that is not closed"
    )


# -- one msrun a node ------------------------------------------------------------------

ONE_EACH = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


def test_one_msrun_a_node_of_a_step_needs_no_options():
    assert step_options({**ONE_EACH, "SLURM_LOCALID": "0"}) == {
        "MSRUN_NNODES": "2",
        "MSRUN_NODE_RANK": "1",
        "MSRUN_MASTER_ADDR": "gpu03",
        "MSRUN_MASTER_PORT": "21556",
        "MSRUN_JOB_ID": "slurm-42.0",
    }


def test_one_msrun_a_node_of_open_mpi_needs_no_options():
    env = {**OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}

    assert step_options(env) == {
        "MSRUN_NNODES": "3",
        "MSRUN_NODE_RANK": "1",
        "MSRUN_MASTER_ADDR": "192.0.2.1",
        "MSRUN_MASTER_PORT": "29152",
        "MSRUN_JOB_ID": "mpi-86c6b400",
    }


@pytest.mark.parametrize(
    "env",
    [
        {},
        SLURM,  # two tasks on each node
        {**ONE_EACH, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {**ONE_EACH, "SLURM_STEP_NODELIST": ""},
        {**ONE_EACH, "SLURM_STEP_NODELIST": "["},
        {**HYDRA, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    ],
)
def test_others_get_no_options(env):
    assert step_options(env) == {}
