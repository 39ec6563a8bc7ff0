"""The launcher as the first process of a container, to which the kernel gives every orphan."""

import os
import signal
import subprocess

import mpi
import psutil
import pytest
from support import PATIENCE, kill, shell, until
from terminals import TELL

pytestmark = pytest.mark.process

CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
ORPHANS = 20
START_ORPHANS = f"for _ in $(seq {ORPHANS}); do (setsid sleep 1000 &); done"
WAIT = "until [ -e go ]; do sleep 0.01; done"


@pytest.fixture
def contained(msrun):
    """Start `msrun` with the words given as the first process of a container; return both."""
    if subprocess.run([*CONTAINER, "true"], timeout=PATIENCE, check=False).returncode:
        pytest.skip("this user may not make a pid namespace")

    def start(*words):
        job = msrun(*words, wrapper=CONTAINER)
        job.until_logged("up")
        job.until_said("msrun: running")
        (first,) = psutil.Process(job.pid).children()
        return job, first

    return start


def orphans_of(parent):
    return [child for child in parent.children() if name_of(child) == "sleep"]


def name_of(process):
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def leave_orphans(first):
    """Be a stranger in the container of the process `first`, which reaps what is left to it."""
    enter = ["nsenter", "-t", str(first.pid), "-p", "sh", "-c", START_ORPHANS]
    subprocess.run(enter, timeout=PATIENCE, check=True)
    until_reaped(first)


def until_reaped(parent):
    """Kill the orphans that come to `parent`, and wait until nothing is left of them."""
    orphans = until(lambda: complete(orphans_of(parent)), "for the orphans")
    kill(*orphans)
    until(lambda: not any(map(psutil.pid_exists, pids(orphans))), "for them to be reaped")


def program(path, text):
    """Write a shell program and return its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(params=["dynamic", "ssh", "mpirun"])
def backend(request, tmp_path):
    """Return the words that choose a backend, whose nodes are this machine."""
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    if request.param == "ssh":
        here = program(tmp_path / "here", 'for line; do :; done; exec sh -c "$line"')
        return ["--launcher", "ssh", "--hostfile", "hosts", "--ssh", here]
    if request.param == "mpirun":
        if lacks := mpi.missing("mpirun.mpich"):
            pytest.skip(lacks)
        return ["--launcher", "mpirun", "--mpirun", "mpirun.mpich", "--workers-per-node", "1"]
    return []


def test_a_first_process_reaps_what_strangers_leave_to_it(contained, backend):
    """F-20: a probe or a shell of the container, whose orphans are nobody's else."""
    job, first = contained(*backend, *shell(f"echo up; {WAIT}; exit 7"))
    leave_orphans(first)
    (job.folder / "go").touch()

    assert job.wait() == 7
    assert "rank 0 (node HOST, local_rank 0, pid N) exited with code 7" in job.block()


def test_a_first_process_that_follows_a_batch_job_reaps_them_too(msrun, tmp_path):
    """F-20."""
    asks = {
        "sbatch": "cat > /dev/null; echo 7",
        "scontrol": "state=RUNNING; [ -e go ] && state=COMPLETED; echo JobState=$state",
    }
    (tmp_path / "bin").mkdir()
    for name, text in asks.items():
        program(tmp_path / "bin" / name, text)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    job = msrun("--launcher", "slurm", *shell("true"), wrapper=CONTAINER, env=env, plain=True)
    until(lambda: job.out == "7\n", "for the number of the job")
    (first,) = psutil.Process(job.pid).children()
    leave_orphans(first)
    (tmp_path / "go").touch()

    assert job.wait() == 0


def test_a_first_process_with_the_scheduler_of_others_reaps_them_too(cluster):
    """F-20."""
    scheduler = cluster.scheduler(TELL, workers=1, wrapper=CONTAINER)
    scheduler.until_said("scheduler of 1 worker(s) at")
    (first,) = psutil.Process(scheduler.process.pid).children()
    leave_orphans(first)
    cluster.worker(TELL, workers=1)

    assert cluster.codes() == [0, 0]


def complete(orphans):
    return orphans if len(orphans) == ORPHANS else []


def pids(processes):
    return [process.pid for process in processes]


def test_orphans_of_workers_are_reaped_while_the_job_runs(contained):
    """F-20."""
    job, _ = contained(*shell(f"{START_ORPHANS}; echo up; {WAIT}"))
    until_reaped(job.find("msrun reaper"))
    (job.folder / "go").touch()

    assert job.wait() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_first_process_that_is_stopped_ends_with_the_code_of_that(contained, signum):
    """F-20: the kernel lets no signal end such a process that it does not handle."""
    job, first = contained("--workers-per-node", 2, *shell("echo up; setsid sleep 1000 & wait"))
    first.send_signal(signum)

    assert job.wait() == 128 + signum
    assert job.block() == f"error: stopped by {signum.name}\n"
