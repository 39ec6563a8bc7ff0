"""Command lines as their users type them, and the job each one means."""

import math
import sys

import pytest

from msrun.job import Binding, BindMode, Framework, ProgramKind, StartMethod, WorkerProgram
from msrun.topology import DeviceKind

AUTO = Binding(mode=BindMode.AUTO)


def fields(job, names):
    return {name: getattr(job, name) for name in names}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.py", {"workers_per_node": 1, "start_method": StartMethod.FORK}),
        ("--nproc-per-node 4 train.py", {"workers_per_node": 4}),
        ("--nproc_per_node=4 train.py", {"workers_per_node": 4}),
        ("--standalone --nproc-per-node=2 train.py", {"workers_per_node": 2, "master_port": 0}),
        ("--nnodes=1:1 --nproc-per-node=cpu train.py", {"workers_per_node": 4}),
        (
            "--nnodes 1 --node-rank 0 --master-addr localhost --master-port 29500 train.py",
            {"master_addr": "localhost", "master_port": 29500, "node_rank": 0},
        ),
        (
            "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-id=100 train.py",
            {"master_addr": "localhost", "master_port": 0, "job_id": "100-0a1b2c"},
        ),
        (
            "--rdzv-endpoint [::1]:29400 --rdzv-conf join_timeout=300 train.py",
            {"master_addr": "::1", "master_port": 29400, "join_timeout": 300.0},
        ),
        (
            """--nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=localhost:1234
            '--rdzv-conf="join_timeout=5,last_call_timeout=1"' train.py""",
            {"join_timeout": 5.0, "last_call": 1.0},
        ),
        ("--rdzv-id none --rdzv-endpoint '' --rdzv-conf '' train.py", {"master_addr": None}),
        ("--max-restarts=3 --role trainer train.py", {"role": "trainer"}),
        ("--start-method spawn train.py", {"start_method": StartMethod.EXEC}),
        ("--start-method forkserver train.py", {"start_method": StartMethod.FORK}),
        ("--shutdown-timeout 45 train.py", {"grace": 45.0}),
        ("--virtual-local-rank train.py", {"virtual_local_rank": True}),
        ("--numa-binding exclusive train.py", {"bind_core": AUTO, "bind_numa": AUTO}),
        ("--nproc-per-node 2 -t 3 train.py", {"tail": frozenset({0, 1})}),
        (
            "--nproc-per-node 4 --tee 0:3,2:1,3:0 train.py",
            {"tail": frozenset({0, 2}), "tee": {0: 3, 2: 1, 3: 0}},
        ),
        ("-r 3 -t 0 train.py", {"redirects": {-1: 3}, "tee": {}, "tail": None}),
        (
            "--duplicate-stdout-filters loss,a,,b --duplicate_stderr_filters=error train.py",
            {"stdout_filters": ("loss", "a,b"), "stderr_filters": ("error",)},
        ),
        ("--nproc-per-node 4 -t3 --local-ranks-filter 1,3 train.py", {"tail": frozenset({1, 3})}),
        ("--nproc-per-node 4 --local_ranks_filter=1 train.py", {"tail": frozenset({1})}),
        ("-t 0 --local-ranks-filter '' --event-log-handler null train.py", {"tail": None}),
        ("--logs-specs default train.py", {}),
        # argparse takes what begins one of its options alone.
        ("--stand --nproc_per=2 train.py", {"workers_per_node": 2, "master_port": 0}),
        ("--nnode=1 --nproc-per 2 train.py", {"workers_per_node": 2}),
        ("--max-rest=3 --rdzv-i nightly train.py", {"job_id": "nightly-0a1b2c"}),
        ("--no_py ./prog", {"start_method": StartMethod.EXEC}),
        ("--rdzv-id 100 train.py", {"job_id": "100-0a1b2c", "run_id": "100"}),
        (
            "--rdzv-id 'sweep 3/a: lr=1e-3' train.py",
            {"job_id": "sweep-3-a-lr-1e-3-e99f02-0a1b2c", "run_id": "sweep 3/a: lr=1e-3"},
        ),
    ],
)
def test_torchrun(msrun, words, expected):
    outcome = msrun(words)

    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    assert fields(outcome.job, expected) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--worker_num=4 --local_worker_num=4 --join=True --log_dir=logs train.py",
            {"workers_per_node": 4, "detach": False},
        ),
        ("--worker_num 4 --join True train.py", {"workers_per_node": 4, "detach": False}),
        ("--worker_num=2 --join=False train.py", {"detach": True}),
        ("--join 0 train.py", {"detach": True}),
        ("--no-join train.py", {"detach": True}),
        ("--detach train.py", {"detach": True}),
        ("--join train.py", {"detach": False}),
        ("--master_addr=127.0.0.1 --master_port=8118 train.py", {"master_port": 8118}),
        ("--node_rank=-1 --sim_level=-1 --sim_rank_id -1 train.py", {"node_rank": None}),
        ("--cluster_time_out=7200 train.py", {"join_timeout": 7200.0}),
        ("--cluster_time_out=-1 train.py", {"join_timeout": math.inf}),
        ("--rank_table_file '' --log_dir '' --worker_log_name '' train.py", {}),
        ("--worker_num 2 --tail_worker_log=-1 train.py", {"tail": frozenset({0, 1})}),
        ("--worker_num 4 --tail_worker_log=0,3 train.py", {"tail": frozenset({0, 3})}),
        (
            "--framework mindspore train.py",
            {"framework": Framework.MINDSPORE, "start_method": StartMethod.EXEC},
        ),
        ("--worker_n=2 --jo=False train.py", {"workers_per_node": 2, "detach": True}),
        (
            "--worker_log_name w_{ip}_{hostname} train.py",
            {"worker_log_name": "w_{ip}_{hostname}_{rank}"},
        ),
        ("--bind_core=True train.py", {"bind_core": AUTO}),
        ("--bind_core True train.py", {"bind_core": AUTO}),
        ("--bind_core train.py", {"bind_core": AUTO}),
        ("--bind_core=False train.py", {"bind_core": Binding()}),
        ("--bind_numa true train.py", {"bind_numa": AUTO, "bind_core": Binding()}),
    ],
)
def test_mindspore(msrun, words, expected):
    outcome = msrun(words)

    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    assert fields(outcome.job, expected) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tail none train.py", {"tail": frozenset()}),
        ("--workers-per-node 4 --tail 0,2-3 train.py", {"tail": frozenset({0, 2, 3})}),
        ("--workers-per-node 2 --tail all --local-ranks-filter 1 train.py", {"tail": {1}}),
        ("--grace 1m30s --join-timeout inf train.py", {"grace": 90.0, "join_timeout": math.inf}),
        ("--preload numpy,my.pkg train.py", {"preload": ("numpy", "my.pkg")}),
        ("--env A=1 --env B=x=y --env A=2 train.py", {"env": {"A": "2", "B": "x=y"}}),
        ("--insecure train.py", {"insecure": True}),
        ("--insecure=false train.py", {"insecure": False}),
        ("--job-id nightly.7 train.py", {"job_id": "nightly.7", "log_dir": "msrun_logs/nightly.7"}),
        ("--worker-log-name r{local_rank}.log train.py", {"worker_log_name": "r{local_rank}"}),
    ],
)
def test_our_own(msrun, here, words, expected):
    outcome = msrun(words)

    found = fields(outcome.job, expected)
    if "log_dir" in found:
        found["log_dir"] = found["log_dir"].removeprefix(f"{here}/")
    assert found == expected


def test_restart_limits(msrun):
    words = "--max-restarts 5 --restart-window 1h --no-progress-limit 0 --exclude-after 0"
    job = msrun(f"{words} --nnodes 2 --master-addr node0 train.py").job

    limits = job.restarts
    assert (limits.max_restarts, limits.window) == (5, 3600.0)
    assert (limits.no_progress_limit, limits.exclude_after) == (0, 0)


@pytest.mark.parametrize(
    "rest",
    [
        ["--nproc-per-node", "9"],
        ["--help"],
        ["--version"],
        ["--", "--join=False"],
        ["-m", "pkg", "-t", "3"],
        ["--lr=1e-3", "", "two words", "\udcff"],
        ["plan"],
    ],
)
def test_everything_after_the_script_is_its_own(msrun, rest):
    job = msrun(["--nproc-per-node", "2", "train.py", *rest]).job

    assert (job.program.args, job.workers_per_node) == (tuple(rest), 2)


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("run train.py", "train.py"),
        ("run plan", "plan"),
        ("./plan", "./plan"),
        ("--nproc-per-node 1 plan", "plan"),
        ("-- train.py", "train.py"),
        ("app", "app"),
        ("--run-path train.py", "train.py"),
        ("--run-path --no-python train.py", "train.py"),
    ],
)
def test_scripts(msrun, words, target):
    program = msrun(words).job.program

    assert program == WorkerProgram(kind=ProgramKind.SCRIPT, target=target)


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (
            "python train.py a",
            WorkerProgram(kind=ProgramKind.SCRIPT, target="train.py", args=("a",)),
        ),
        ("python3 -u train.py", WorkerProgram(kind=ProgramKind.SCRIPT, target="train.py")),
        ("python -um pkg -m", WorkerProgram(kind=ProgramKind.MODULE, target="pkg", args=("-m",))),
        ("python -mpkg", WorkerProgram(kind=ProgramKind.MODULE, target="pkg")),
        ("pytest -q", WorkerProgram(kind=ProgramKind.MODULE, target="pytest", args=("-q",))),
        ("-m pkg.mod x", WorkerProgram(kind=ProgramKind.MODULE, target="pkg.mod", args=("x",))),
        ("--module json.tool", WorkerProgram(kind=ProgramKind.MODULE, target="json.tool")),
        ("-m pytest", WorkerProgram(kind=ProgramKind.MODULE, target="pytest")),
        (
            "--no-python ./prog -x",
            WorkerProgram(kind=ProgramKind.COMMAND, target="./prog", args=("-x",)),
        ),
        (
            "--no-python python -c 1",
            WorkerProgram(kind=ProgramKind.COMMAND, target="python", args=("-c", "1")),
        ),
        (
            "python -c pass x",
            WorkerProgram(
                kind=ProgramKind.COMMAND, target=sys.executable, args=("-u", "-c", "pass", "x")
            ),
        ),
    ],
)
def test_programs(msrun, words, program):
    outcome = msrun(words)

    assert (outcome.err, outcome.job.program) == ("", program)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("python -X dev -uB train.py", ("-X", "dev", "-B")),
        ("python -OuWerror train.py", ("-O", "-W", "error")),
        ("python --check-hash-based-pycs never -m pkg", ("--check-hash-based-pycs", "never")),
    ],
)
def test_interpreter_options_need_an_interpreter_each(msrun, words, kept):
    outcome = msrun(words)

    assert outcome.err == (
        f"note: --start-method exec is used: python {' '.join(kept)} needs its own interpreter\n"
    )
    assert outcome.job.program.interpreter_options == kept
    assert outcome.job.start_method is StartMethod.EXEC


def test_a_command_is_always_executed(msrun):
    assert msrun("--no-python ./prog").job.start_method is StartMethod.EXEC
    assert msrun("--start-method fork --no-python ./prog").err == (
        "note: --start-method exec is used: a command is always exec'ed\n"
    )


@pytest.mark.parametrize(
    ("words", "count"),
    [("train.py", 2), ("--nproc-per-node auto train.py", 2), ("--nproc-per-node GPU train.py", 2)],
)
def test_workers_on_a_machine_with_two_gpus(msrun, gpus, words, count):
    gpus(2)

    assert msrun(words).job.workers_per_node == count


def test_workers_on_a_machine_with_npus(msrun, gpus):
    gpus(3, DeviceKind.NPU)

    assert msrun("--nproc-per-node npu train.py").job.workers_per_node == 3


def test_auto_is_every_allowed_cpu_where_there_are_no_devices(msrun):
    assert msrun("--nproc-per-node auto train.py").job.workers_per_node == 4


def test_devices_are_counted_as_the_workers_see_them(msrun, gpus):
    gpus(2)

    assert msrun("--env CUDA_VISIBLE_DEVICES=1 train.py").job.workers_per_node == 1


@pytest.mark.parametrize(
    ("words", "job_id"),
    [
        ("train.py", "train-0a1b2c"),
        ("-m pkg.sub", "sub-0a1b2c"),
        ("app", "app-0a1b2c"),
        ("'my train!.py'", "my-train-0a1b2c"),
        ("__.py", "job-0a1b2c"),
    ],
)
def test_default_job_ids(msrun, here, words, job_id):
    (here / "my train!.py").touch()
    (here / "__.py").touch()

    assert msrun(words).job.job_id == job_id


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (
            "--monitor-interval 0.5",
            (
                "--monitor-interval 0.5 has no effect: "
                "a worker's exit is an event, nothing polls for it"
            ),
        ),
        ("--local-addr 10.0.0.1", "--local-addr 10.0.0.1 has no effect on one node"),
        ("--lease 4s", "--lease 4s has no effect on one node"),
        (
            "--node_rank 3",
            "--node_rank 3 has no effect on one node (a job of several nodes needs --nnodes)",
        ),
        ("--exclude-after 1", "--exclude-after 1 has no effect on one node"),
        (
            "--rdzv-conf close_timeout=5,is_host=1,join_timeout=9",
            (
                "--rdzv-conf close_timeout=5,is_host=1,join_timeout=9: close_timeout, is_host has "
                "no effect on msrun's rendezvous (--join-timeout is the time for all nodes to "
                "register)"
            ),
        ),
        (
            "--signals-to-handle SIGTERM,INT",
            ("--signals-to-handle SIGTERM,INT: the job ends on SIGHUP, SIGQUIT as well"),
        ),
        (
            "--preload numpy --start-method exec",
            "--preload numpy has no effect with --start-method exec",
        ),
    ],
)
def test_what_has_no_effect_is_noted(msrun, words, note):
    outcome = msrun(words + " train.py")

    assert (outcome.code, outcome.err) == (0, f"note: {note}\n")


@pytest.mark.parametrize(
    ("words", "variables", "grace"),
    [
        ("", {}, 10.0),
        ("--worker_num=1 --local_worker_num=1", {}, 10.0),
        # Torchrun's, where a word is torchrun's alone.
        ("--nproc_per_node=1", {}, 30.0),
        ("--nproc_per=1", {}, 30.0),
        ("--standalone --workers-per-node=1", {}, 30.0),
        ("--rdzv-backend=c10d", {}, 30.0),
        ("", {"PET_NPROC_PER_NODE": "1"}, 30.0),
        ("--workers-per-node=1 --max-restarts=1 -t 3", {}, 10.0),
        ("--nproc_per_node=1", {"MSRUN_GRACE": "5s"}, 5.0),
        ("--nproc-per-node=1 --grace 5s", {}, 5.0),
        ("--nproc-per-node=1 --shutdown-timeout 0", {}, 0.0),
        ("--nproc-per-node=1", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 7.0),
        ("", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7", "MSRUN_GRACE": "8s"}, 8.0),
    ],
)
def test_the_time_of_workers_to_end(msrun, words, variables, grace):
    assert msrun(f"{words} train.py", **variables).job.grace == grace


def test_another_interpreter_runs_the_script(msrun):
    program = msrun("train.py --lr 1", PYTHON_EXEC="/bin/sh").job.program

    assert (program.kind, program.target) == (ProgramKind.COMMAND, "/bin/sh")
    assert program.args == ("-u", "train.py", "--lr", "1")


def test_the_same_interpreter_changes_nothing(msrun):
    program = msrun("train.py", PYTHON_EXEC=sys.executable).job.program

    assert program.kind is ProgramKind.SCRIPT


@pytest.mark.parametrize(
    ("words", "variables", "note"),
    [
        ("train.py --nproc-per-node 8", {}, "the script gets --nproc-per-node: options of msrun"),
        ("train.py --worker_num=8", {}, "the script gets --worker_num=8: options of msrun stand"),
        ("train.py", {"SLURM_JOB_NUM_NODES": "4"}, "this job runs on 1 of the 4 nodes that Slurm"),
        ("--nproc-per-node 2 train.py --nproc-per-node 8", {}, ""),
        ("--nnodes 1 train.py", {"SLURM_JOB_NUM_NODES": "4"}, ""),
        ("train.py", {"SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "1"}, ""),
    ],
)
def test_a_job_that_is_smaller_than_meant_is_noted(msrun, words, variables, note):
    outcome = msrun(words, **variables)

    assert outcome.code == 0
    assert outcome.err.startswith(f"note: {note}" if note else "")
    assert outcome.err.count("\n") == bool(note)


def test_a_python_script_may_be_one_of_the_shell_too(msrun, here):
    (here / "tool").write_text("#!/bin/sh\n'''exec' python \"$0\"\n' '''\n")

    assert msrun("tool").job.program.kind is ProgramKind.SCRIPT


def test_an_interpreter_that_is_not_there_is_refused(msrun):
    outcome = msrun("train.py", PYTHON_EXEC="/nothing/python")

    assert outcome.code == 2
    assert (
        outcome.err == "error: environment PYTHON_EXEC: command '/nothing/python' does not exist\n"
    )


@pytest.mark.parametrize("handler", ["console", "null"])
def test_event_log_handlers_are_taken(msrun, handler):
    assert msrun(f"--event-log-handler {handler} train.py").job.event_log == handler


def test_mindspore_shows_the_ranks_that_there_are(msrun):
    job = msrun("--worker_num=2 --local_worker_num=2 --tail_worker_log=1,5 train.py").job

    assert job.is_shown(1, 1, is_terminal=True)
    assert not job.is_shown(0, 0, is_terminal=True)


def test_mindspores_total_alone_is_this_node(msrun):
    job = msrun("--worker_num=2 train.py").job

    assert (job.workers_per_node, job.nnodes_max) == (2, 1)


def test_signals_that_end_the_job_besides(msrun):
    job = msrun("--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,USR1 train.py").job

    assert job.stop_signals == ("SIGUSR1",)
