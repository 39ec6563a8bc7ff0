"""Programs that use up what a machine has, and launchers that are given too little of it."""

import signal
import time

import pids
import psutil
import pytest
from memory import entering
from support import script, shell, until

pytestmark = pytest.mark.process

PROCESSES = 200
GRACE = 0.5
# Each forks until nothing more can be, and tries again for ever.
BOMB = """
    import os, signal, time

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"up\\n")
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            time.sleep(0.5)
"""
# A machine without cgroups, where processes have to be found one by one.
NO_CGROUPS = ["unshare", "-m", "sh", "-c", 'umount -l /sys/fs/cgroup; exec "$@"', "sh"]


@pytest.fixture
def bomb(msrun, tmp_path):
    """Start a job whose worker forks until its cgroup is full."""
    with pids.limited(PROCESSES) as group:

        def start(*wrapper):
            words = ["--workers-per-node", 2, "--grace", f"{GRACE}s", "--start-method", "exec"]
            wrapper = [*entering(group), *wrapper]
            job = msrun(*words, script(tmp_path, BOMB), wrapper=wrapper)
            job.until_said("msrun: running 2/2")
            count = group / "pids.current"
            until(lambda: int(count.read_text()) == PROCESSES, "for a full machine", pause=0.1)
            return job

        yield start


@pytest.mark.slow  # two hundred processes would be felt by the tests beside it
@pytest.mark.parametrize("wrapper", [[], NO_CGROUPS], ids=["cgroup", "no cgroup"])
def test_a_fork_bomb_is_stopped_within_the_grace(bomb, wrapper):
    """F-22."""
    job = bomb(*wrapper)
    began = time.monotonic()
    job.send(signal.SIGTERM)

    assert job.wait() == 143
    assert time.monotonic() - began <= GRACE + 2.0
    assert job.leftovers() == []


def with_files(count):
    return ["sh", "-c", f'ulimit -n {count}; exec "$@"', "sh"]


def test_too_few_files_are_one_sentence(msrun):
    """F-23."""
    job = msrun(*shell("true"), wrapper=with_files(64))

    assert job.wait() == 2
    assert job.err == (
        "error: --workers-per-node 1 is more than this machine can hold: at most 0, limited by "
        "open files (ulimit -n)\n"
    )


@pytest.mark.thorough
def test_just_enough_files_are_enough_and_nobody_spins(msrun):
    """F-23: the fewest with which two workers are not refused, over a restart."""
    program = '[ "$MSRUN_GENERATION" = 0 ] && exit 3; echo up; until [ -e go ]; do sleep 0.2; done'
    words = ["--workers-per-node", 2, "--max-restarts", 1]
    job = msrun(*words, *shell(program), wrapper=with_files(72))
    job.until_logged("up", 0, 1)
    job.until_said("msrun: running 2/2")
    ours = [job.find("msrun reaper"), job.find("msrun scheduler"), job.find("msrun forksrv")]
    ours.append(psutil.Process(job.pid))
    before = cpu_seconds(ours)
    end = time.monotonic() + 2.0
    until(lambda: time.monotonic() >= end, "for time to pass")
    spent = cpu_seconds(ours) - before
    (job.folder / "go").touch()

    assert job.wait() == 0
    assert spent <= 0.2


def cpu_seconds(processes):
    return sum(sum(process.cpu_times()[:2]) for process in processes)
