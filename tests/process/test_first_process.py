"""The launcher as the first process of a container, to which the kernel gives every orphan."""

import signal
import subprocess

import psutil
import pytest
from support import PATIENCE, kill, shell, until

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


def test_a_first_process_reaps_what_strangers_leave_to_it(contained):
    """F-20: a probe or a shell of the container, whose orphans are nobody's else."""
    job, first = contained(*shell(f"echo up; {WAIT}; exit 7"))
    enter = ["nsenter", "-t", str(first.pid), "-p", "sh", "-c", START_ORPHANS]
    subprocess.run(enter, timeout=PATIENCE, check=True)
    orphans = until(lambda: complete(orphans_of(first)), "for the orphans")
    kill(*orphans)
    until(lambda: not any(map(psutil.pid_exists, pids(orphans))), "for them to be reaped")
    (job.folder / "go").touch()

    assert job.wait() == 7
    assert "rank 0 (node HOST, local_rank 0, pid N) exited with code 7" in job.block()


def complete(orphans):
    return orphans if len(orphans) == ORPHANS else []


def pids(processes):
    return [process.pid for process in processes]


def test_orphans_of_workers_are_reaped_while_the_job_runs(contained):
    """F-20."""
    job, _ = contained(*shell(f"{START_ORPHANS}; echo up; {WAIT}"))
    reaper = job.find("msrun reaper")
    orphans = until(lambda: complete(orphans_of(reaper)), "for the orphans")
    kill(*orphans)
    until(lambda: not any(map(psutil.pid_exists, pids(orphans))), "for them to be reaped")
    (job.folder / "go").touch()

    assert job.wait() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_first_process_that_is_stopped_ends_with_the_code_of_that(contained, signum):
    """F-20: the kernel lets no signal end such a process that it does not handle."""
    job, first = contained("--workers-per-node", 2, *shell("echo up; setsid sleep 1000 & wait"))
    first.send_signal(signum)

    assert job.wait() == 128 + signum
    assert job.block() == f"error: stopped by {signum.name}\n"
