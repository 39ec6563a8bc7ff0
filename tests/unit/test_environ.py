"""What stands in a worker's environment, and what does not."""

import json
import subprocess
import sys

import pytest
from msgspec.structs import replace

from msrun.environ import WorkerIdentity, worker_env

WHO = WorkerIdentity(
    job_id="job",
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
    error_file="/run/job/error-5.json",
    threads=6,
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
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/run/job/error-5.json",
        "MS_ROLE": "MS_WORKER",
        "MS_SCHED_HOST": "10.0.0.1",
        "MS_SCHED_PORT": "8118",
        "MS_WORKER_NUM": "8",
        "MS_NODE_ID": "5",
        "RANK_ID": "5",
        "RANK_SIZE": "8",
        "DEVICE_ID": "3",
        "MSRUN_JOB_ID": "job",
        "MSRUN_GENERATION": "2",
        "MSRUN_NODE_RANK": "1",
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


def test_gloo_of_a_single_node_stays_on_loopback():
    single = {"nnodes": 1, "node_rank": 0}
    expected = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MSRUN_NODE_RANK": "0"}

    assert changes({}, **single) == {**expected, "GLOO_SOCKET_IFNAME": "lo"}
    assert changes({"GLOO_SOCKET_IFNAME": "eth0"}, **single) == expected


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "3"}),
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
