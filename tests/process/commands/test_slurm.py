"""Jobs that a real Slurm runs, by a batch script of ours or under srun."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import slurm
from ports import free_port
from support import environment, shell, until

import msrun as package

pytestmark = pytest.mark.process
HOME = Path(package.__file__).parent.parent


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if os.geteuid() != 0 or slurm.MISSING:
        pytest.skip(slurm.MISSING or "needs root, as whom slurmd runs")
    with slurm.cluster(tmp_path_factory.mktemp("s") / "c", nodes=2) as env:
        yield env


@pytest.fixture
def start(cluster, msrun, tmp_path, runtime):
    """Submit a job of two workers on one node, and follow it."""
    python = tmp_path / "remote-python"
    python.write_text(
        f"#!/bin/sh\nXDG_RUNTIME_DIR={runtime} PYTHONPATH={shlex.quote(str(HOME))} "
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    words = ["--launcher", "slurm", "--workers-per-node", "2", "--output", tmp_path / "console"]

    def call(*program):
        return msrun(*words, "--remote-python", python, "--grace", "5s", *program, env=cluster)

    return call


def call(cluster, *command):
    """Return what a command of Slurm prints."""
    return subprocess.run(
        command,
        env={**os.environ, **cluster},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout


def state(cluster, number):
    return re.search(r"JobState=(\w+)", call(cluster, "scontrol", "show", "job", number))[1]


def test_a_job_that_ends_well(start, cluster):
    job = start(*shell('echo "$RANK of $WORLD_SIZE"'))

    assert job.wait() == 0
    assert [job.log(rank) for rank in (0, 1)] == ["0 of 2\n", "1 of 2\n"]
    assert state(cluster, job.out.strip()) == "COMPLETED"


def test_the_code_is_the_first_failing_workers(start, cluster, tmp_path):
    job = start(*shell("[ $RANK = 1 ] && exit 3; sleep 60"))

    assert job.wait() == 3
    assert state(cluster, job.out.strip()) == "FAILED"
    assert "rank 1 (node" in (tmp_path / "console").read_text()


def test_a_signal_to_the_one_who_follows_cancels_the_job(start, cluster):
    job = start(*shell("trap 'exit 0' TERM; echo ready; sleep 60 & wait"))
    job.until_logged("ready", 0, 1)

    job.send(signal.SIGTERM)

    assert job.wait() == 143
    until(lambda: state(cluster, job.out.strip()) == "CANCELLED", "for the state")
    until(lambda: not job.members(), "for the end of the job's processes")


def test_a_job_that_nobody_follows(start, cluster):
    job = start("--no-join", *shell("exit 4"))

    assert job.wait() == 0
    until(lambda: state(cluster, job.out.strip()) == "FAILED", "for the state")


@pytest.mark.slow
def test_a_job_that_slurm_starts_again_has_all_its_restarts(start, cluster, tmp_path):
    first = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3"
    words = ["--max-restarts", "1", "--requeue", "true"]
    job = start(*words, *shell(f'{first}; [ "$SLURM_RESTART_COUNT" ] || {{ echo up; sleep 60; }}'))
    job.until_logged("up", 0, 1)

    call(cluster, "scontrol", "requeue", job.out.strip())

    assert job.wait(45) == 0
    verdict = job.verdict()
    assert (verdict["generation"], verdict["restarts"]) == (1, 1)
    assert (tmp_path / "console").read_text().count("exited with code 3") == 2


def test_what_slurm_refuses(start):
    job = start("--partition", "none", "train.py")

    assert job.wait() == 2
    assert job.err.startswith("error: sbatch refused the job: ")
    assert "partition" in job.err


MEET = """
import os
from msrun.identity import find_master, read_identity
who = read_identity(os.environ)
print(who.rank, who.world_size, who.local_rank, who.node_rank, *find_master(os.environ, who))
"""


@pytest.mark.parametrize(
    ("words", "ranks"), [(["-N1"], ["0 2 0 0", "1 2 1 0"]), (["-N2"], ["0 2 0 0", "1 2 0 1"])]
)
def test_ranks_that_srun_starts_know_where_to_meet(cluster, words, ranks):
    done = subprocess.run(
        ["srun", "-n2", *words, sys.executable, "-c", MEET],
        env={**os.environ, **cluster, "PYTHONPATH": str(HOME)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    lines = sorted(line.rsplit(" ", 2) for line in done.stdout.splitlines())
    places = {tuple(line[1:]) for line in lines}
    assert [line[0] for line in lines] == ranks, done.stderr
    assert len(places) == 1
    assert places.pop()[0] == ("127.0.0.1" if words == ["-N1"] else "n0")


def test_one_msrun_a_node_is_one_job_without_options(cluster, runtime, tmp_path):
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(os.urandom(32))
    # The nodes are one machine here, whose name is neither's.
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    msrun = [sys.executable, "-m", "msrun", "--secret-file", secret, "--log-dir", tmp_path / "logs"]
    done = subprocess.run(
        [
            "srun",
            "-N2",
            "-n2",
            *msrun,
            "--workers-per-node",
            "2",
            *shell("echo $RANK > rank.$RANK"),
        ],
        cwd=tmp_path,
        env={**environment(runtime), **cluster, **meeting, "PYTHONPATH": str(HOME)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("rank.*")) == [f"rank.{r}" for r in range(4)]
