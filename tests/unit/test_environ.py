"""What stands in a worker's environment, and what does not."""

import json
import os
import subprocess
import sys

import pytest
from msgspec.structs import replace

from msrun import environ
from msrun.environ import RankIdentity, WorkerIdentity, worker_env
from msrun.errors import UsageError

WHO = WorkerIdentity(
    job_id="job",
    run_id="the job",
    generation=2,
    rank=5,
    world_size=8,
    local_rank=1,
    local_world_size=4,
    node_rank=1,
    nnodes=2,
    device=3,
    role="default",
    max_restarts=3,
    store=("10.0.0.1", "40001"),
    scheduler=("10.0.0.1", "8118"),
    run_dir="/run/job",
    rank0_address="10.0.0.1",
    error_file="/run/job/error-5.json",
    threads=6,
    stop_signals="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
)


def test_a_worker_has_the_variables_of_torchrun_and_mindspore_and_ours():
    assert worker_env(WHO, {}) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "5",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "40001",
        "TORCHELASTIC_RUN_ID": "the job",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/run/job/error-5.json",
        "MS_ROLE": "MS_WORKER",
        "MS_SCHED_HOST": "10.0.0.1",
        "MS_SCHED_PORT": "8118",
        "MS_WORKER_NUM": "8",
        "MS_NODE_ID": "5",
        "MS_TOPO_TIMEOUT": "600",
        "RANK_ID": "5",
        "RANK_SIZE": "8",
        "DEVICE_ID": "3",
        "MSRUN_JOB_ID": "job",
        "MSRUN_GENERATION": "2",
        "MSRUN_NODE_RANK": "1",
        "MSRUN_RANK0_ADDR": "10.0.0.1",
        "MSRUN_RUN_DIR": "/run/job",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "6",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def changes(base, **fields):
    """Return what differs from the usual variables when `base` and `fields` are so."""
    usual, other = worker_env(WHO, {}), worker_env(replace(WHO, **fields), base)
    return {
        name: other.get(name)
        for name in sorted({*usual, *other})
        if usual.get(name) != other.get(name)
    }


def test_defaults_give_way_to_the_launchers_environment():
    base = {"OMP_NUM_THREADS": "2", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "", "RANK": "77"}

    assert changes(base) == {"OMP_NUM_THREADS": None, "TORCH_NCCL_ASYNC_ERROR_HANDLING": None}


def test_gloo_uses_the_interface_to_the_other_workers():
    assert changes({}, interface="eth1") == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert changes({"GLOO_SOCKET_IFNAME": "eth0"}, interface="eth1") == {}


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "3", "ASCEND_RT_VISIBLE_DEVICES": "3"}),
        ({"CUDA_VISIBLE_DEVICES": "7,6,5,4"}, {"CUDA_VISIBLE_DEVICES": "4"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,GPU-c, GPU-d"}, {"CUDA_VISIBLE_DEVICES": "GPU-d"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {}),
        ({"ASCEND_RT_VISIBLE_DEVICES": "4,5,6,7"}, {"ASCEND_RT_VISIBLE_DEVICES": "7"}),
        (
            {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "4,5,6,7"},
            {"ASCEND_RT_VISIBLE_DEVICES": "7"},
        ),
    ],
)
def test_a_virtual_local_rank_sees_one_device(base, expected):
    assert changes(base, virtual_local_rank=True) == {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        **expected,
    }


CONFIG_FILE = "/run/job/parallel.json"


@pytest.mark.parametrize(
    ("base", "config", "expected"),
    [
        ({}, "", {}),
        ({"MSRUN_CONFIG": "job.yaml"}, "", {"MSRUN_CONFIG": ""}),
        ({}, CONFIG_FILE, {"MSRUN_CONFIG": CONFIG_FILE}),
        ({"MSRUN_CONFIG": "job.yaml"}, CONFIG_FILE, {"MSRUN_CONFIG": CONFIG_FILE}),
    ],
)
def test_a_worker_has_the_configuration_of_its_own_job_or_none(base, config, expected):
    assert changes(base, config=config) == expected


# Who a process is, as its starter says: real environments, without what nobody reads.

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
HYDRA = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
}
BATCH = {
    "SLURM_JOB_ID": "42",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
PMI2 = {"PMI_RANK": "5", "PMI_SIZE": "8"}
# mpirun starts its own processes, one a node, by a step of Slurm.
PROXY = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
ALONE = RankIdentity(source="plain python")


def identity(source, **fields):
    usual = {"rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4, "node_rank": 1}
    return RankIdentity(source=source, **usual | fields)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ALONE),
        (TORCHRUN, identity("torchrun")),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, identity("torchrun", generation=2)),
        (OPEN_MPI, identity("Open MPI", node_rank=None)),
        (HYDRA, identity("MPI", node_rank=None)),
        (STEP, identity("Slurm")),
        (BATCH, ALONE),
        (
            {"RANK_ID": "5", "RANK_SIZE": "8", "DEVICE_ID": "1"},
            identity("a rank table", local_world_size=2, node_rank=None),
        ),
        (
            {"JOB_COMPLETION_INDEX": "5", "WORLD_SIZE": "8"},
            identity("Kubernetes", local_rank=0, local_world_size=1, node_rank=5),
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
            identity("a script", local_world_size=2, node_rank=None),
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "8"},
            identity("a script", local_rank=0, local_world_size=1, node_rank=None),
        ),
        (PMI2 | {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}, identity("MPI", node_rank=None)),
    ],
)
def test_each_starter_says_who_a_process_is(env, expected):
    assert environ.rank_identity(env) == expected


def test_a_worker_of_ours_knows_who_it_is():
    expected = identity("msrun", generation=2)

    assert environ.rank_identity(worker_env(WHO, {})) == expected
    # What started the launcher is not what started the worker.
    assert environ.rank_identity({**STEP, **OPEN_MPI, **worker_env(WHO, {})}) == expected


def test_a_worker_with_one_visible_device_is_the_first_of_its_node():
    env = worker_env(replace(WHO, virtual_local_rank=True), {})

    expected = identity("msrun", local_rank=0, local_world_size=1, generation=2)
    assert environ.rank_identity(env) == expected


@pytest.mark.parametrize(
    ("env", "source"),
    [
        ({**STEP, **TORCHRUN}, "torchrun"),
        ({**PROXY, **OPEN_MPI}, "Open MPI"),
        ({**PROXY, **HYDRA}, "MPI"),
        ({**STEP, **PMI2}, "Slurm"),
        ({**OPEN_MPI, **TORCHRUN}, "torchrun"),
        ({**BATCH, **HYDRA}, "MPI"),
    ],
)
def test_the_innermost_starter_counts(env, source):
    found = environ.rank_identity(env)

    assert (found.source, found.rank, found.local_rank) == (source, 5, 1)


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [
        ("4(x2)", "1", 4),
        ("4,2(x3),1", "0", 4),
        ("4,2(x3),1", "3", 2),
        ("3,2(x3),3", "4", 3),
        ("1", "0", 2),  # fewer than this rank shows that there are
        ("8", "1", 2),
        ("", "1", 2),
        ("2(xa)", "1", 2),
    ],
)
def test_tasks_on_a_node_of_slurm(tasks, node, expected):
    env = {**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}

    assert environ.rank_identity(env).local_world_size == expected


def test_a_script_may_rename_the_ranks_of_slurm():
    env = {**STEP, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}

    assert environ.rank_identity(env).local_world_size == 4


def test_an_index_of_kubernetes_alone_says_nothing():
    assert environ.rank_identity({"JOB_COMPLETION_INDEX": "5"}) == ALONE


def test_a_rank_that_is_0_may_lack_a_world_size():
    assert environ.rank_identity({"RANK_ID": "0", "DEVICE_ID": "0"}) == ALONE


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({**TORCHRUN, "RANK": "x"}, "environment RANK=x is no whole number"),
        ({**TORCHRUN, "RANK": "-1"}, "environment RANK=-1 is no whole number"),
        ({**TORCHRUN, "RANK": "\x1b[2J"}, r"environment RANK='\x1b[2J' is no whole number"),
        ({**TORCHRUN, "WORLD_SIZE": "8.0"}, "environment WORLD_SIZE=8.0 is no whole number"),
        ({**TORCHRUN, "RANK": "8"}, "environment RANK=8 must be below WORLD_SIZE=8"),
        (
            {**TORCHRUN, "LOCAL_RANK": "4"},
            "environment LOCAL_RANK=4 must be below LOCAL_WORLD_SIZE=4",
        ),
        ({**TORCHRUN, "GROUP_RANK": "a"}, "environment GROUP_RANK=a is no whole number"),
        (
            {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "²"},
            "environment TORCHELASTIC_RESTART_COUNT=² is no whole number",
        ),
        (
            {**STEP, "SLURM_PROCID": "8"},
            "environment SLURM_PROCID=8 must be below SLURM_STEP_NUM_TASKS=8",
        ),
        ({"RANK": "3"}, "environment RANK=3 is set and WORLD_SIZE is not"),
        ({"RANK": "3", "WORLD_SIZE": ""}, "environment RANK=3 is set and WORLD_SIZE is not"),
        ({"RANK_ID": "1"}, "environment RANK_ID=1 is set and RANK_SIZE is not"),
        (
            {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4"},
            "environment MS_ROLE=MS_WORKER, and this process has not joined its cluster",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_variable(env, sentence):
    with pytest.raises(UsageError) as refusal:
        environ.rank_identity(env)

    assert refusal.value.message == sentence


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, None),
        ({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}, ("node0", 29500)),
        ({"MASTER_ADDR": "::1", "MASTER_PORT": "1"}, ("::1", 1)),
    ],
)
def test_where_the_store_is(env, expected):
    assert environ.master(env) == expected


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"MASTER_ADDR": "a"}, "environment MASTER_ADDR is set and MASTER_PORT is not"),
        ({"MASTER_PORT": "1"}, "environment MASTER_PORT is set and MASTER_ADDR is not"),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "x"},
            "environment MASTER_PORT=x is no whole number",
        ),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "0"},
            "environment MASTER_PORT=0 is outside 1 to 65535",
        ),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "65536"},
            "environment MASTER_PORT=65536 is outside 1 to 65535",
        ),
    ],
)
def test_a_store_that_cannot_be_is_refused_with_the_variable(env, sentence):
    with pytest.raises(UsageError) as refusal:
        environ.master(env)

    assert refusal.value.message == sentence


@pytest.mark.parametrize(
    ("env", "expected"),
    [({}, None), ({"MSRUN_CONFIG": ""}, None), ({"MSRUN_CONFIG": "p.yaml"}, "p.yaml")],
)
def test_the_configuration_that_was_handed_over(env, expected):
    assert environ.config_file(env) == expected


def ask(expression, **env):
    """Return `expression` as a fresh process with exactly the variables `env` sees it."""
    script = f"import json, os\nfrom msrun import environ\nprint(json.dumps({expression}))"
    command = [sys.executable, "-c", script]
    return json.loads(subprocess.check_output(command, env=env, timeout=30, text=True))


def test_options_outside_a_worker_come_from_the_whole_environment():
    env = {"MSRUN_JOB_ID": "j", "MSRUN_CONFIG": "x.yaml", "MSRUN_GRACE": "5s"}

    seen = ask("environ.options_environment()", **env)

    assert {name: seen.get(name) for name in env} == env


def test_a_nested_msrun_does_not_take_its_parents_job_for_its_own():
    env = worker_env(WHO, {}) | {"MSRUN_CONFIG": "x.yaml", "MSRUN_GRACE": "5s"}
    seen = ask("environ.options_environment()", **env)

    assert {n: v for n, v in seen.items() if n.startswith("MSRUN_")} == {"MSRUN_GRACE": "5s"}


def test_an_installed_environment_is_the_whole_one_also_for_children():
    expression = """(
        environ.install({'A': '1', 'B': 'é'}),
        dict(os.environ),
        sorted(line for line in os.popen('env').read().split() if line[:2] in ('A=', 'B=', 'C=')),
    )"""

    assert ask(expression, C="2", PATH="/usr/bin:/bin", LC_ALL="C.UTF-8") == [
        None,
        {"A": "1", "B": "é"},
        ["A=1", "B=é"],
    ]


def test_thread_variables_are_held_back_for_a_while():
    expression = """[
        environ.hold_back_threads() and None,
        os.environ['OPENBLAS_NUM_THREADS'],
        environ.restore({'OPENBLAS_NUM_THREADS': None, 'OMP_NUM_THREADS': '3'}),
        os.environ.get('OPENBLAS_NUM_THREADS'),
        os.environ.get('OMP_NUM_THREADS'),
    ]"""

    assert ask(expression, OPENBLAS_NUM_THREADS="9") == [None, "1", None, None, "3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4", 4), ("4,2", 4), (" 8 ", 8), ("", None), ("0", None), ("-1", None), ("²", None)],
)
def test_a_thread_count_is_its_first_level(text, expected):
    env = {"OMP_NUM_THREADS": text, "PYTHONUTF8": "1"}

    assert ask("environ.thread_counts()", **env) == [expected, None]


def test_the_paths_of_the_environment():
    env = {"XDG_RUNTIME_DIR": "/run/user/0", "TORCHELASTIC_ERROR_FILE": "/e"}
    expression = "(environ.runtime_dir(), environ.error_file())"

    assert (ask(expression, **env), ask(expression)) == (["/run/user/0", "/e"], [None, None])


@pytest.mark.parametrize(
    ("found", "name", "now"), [(None, "eth1", "eth1"), (None, "", None), ("eth0", "eth1", "eth0")]
)
def test_an_interface_is_chosen_where_none_is_set(monkeypatch, found, name, now):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", found or "")
    if found is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")

    environ.choose_interface(name)

    assert os.environ.get("GLOO_SOCKET_IFNAME") == now


def hccl(base=(), **changes):
    needs = {
        "address": "10.0.0.1",
        "interface": "eth0",
        "join_timeout": 600,
        "rank_table": False,
        "hang_timeout": None,
    }
    return environ.hccl_env(environ.HcclNeeds(**needs | changes), dict.fromkeys(base, "mine"))


ADDRESS = {
    "HCCL_IF_IP": "10.0.0.1",
    "HCCL_SOCKET_FAMILY": "AF_INET",
    "HCCL_SOCKET_IFNAME": "=eth0",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {**ADDRESS, "HCCL_CONNECT_TIMEOUT": "600"}),
        ({"join_timeout": 10}, {**ADDRESS, "HCCL_CONNECT_TIMEOUT": "300"}),
        ({"join_timeout": -1}, {**ADDRESS, "HCCL_CONNECT_TIMEOUT": "7200"}),
        ({"address": "", "interface": "lo"}, {}),
        ({"address": "", "rank_table": True}, {"HCCL_CONNECT_TIMEOUT": "600"}),
        ({"address": "", "hang_timeout": 600.0}, {}),
        ({"address": "", "hang_timeout": float("inf")}, {}),
        ({"address": "", "hang_timeout": 1800.5}, {"HCCL_EXEC_TIMEOUT": "1861"}),
        (
            {"address": "fd00::1", "interface": ""},
            {
                "HCCL_IF_IP": "fd00::1",
                "HCCL_SOCKET_FAMILY": "AF_INET6",
                "HCCL_CONNECT_TIMEOUT": "600",
            },
        ),
        ({"base": ["HCCL_CONNECT_TIMEOUT"]}, ADDRESS),
        # The user's name of an interface would lose against an address of ours.
        ({"base": ["HCCL_SOCKET_IFNAME"]}, {"HCCL_CONNECT_TIMEOUT": "600"}),
        (
            {"base": ["HCCL_EXEC_TIMEOUT", "HCCL_IF_IP"], "hang_timeout": 4000.0},
            {"HCCL_CONNECT_TIMEOUT": "600"},
        ),
    ],
)
def test_hccl_gets_what_follows_from_the_job_and_nobody_set(changes, expected):
    assert hccl(**changes) == expected
