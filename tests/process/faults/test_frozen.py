"""Processes of ours that somebody stops: woken or replaced, and nothing is left at the end."""

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

import psutil
import pytest
from support import kill, script, shell, until

from msrun.supervise.machine import read_machine

pytestmark = pytest.mark.process

# Within which a frozen process is named, ended or woken.
SECONDS = 30.0
# Each worker leaves a child, one in a session of its own, and one that has no variable of ours.
FAMILY = """
    trap '' TERM
    sleep 600 & setsid sleep 601 &
    (env -i PATH="$PATH" setsid sleep 602 &)
    echo $$ up
    until [ -e go ]; do sleep 0.05; done
    exit $(cat go)
"""
HELPERS = ["msrun reaper", "msrun forksrv", "msrun scheduler"]
# A machine without cgroups, where processes have to be found one by one.
NO_CGROUPS = ["unshare", "-m", "sh", "-c", 'umount -l /sys/fs/cgroup; exec "$@"', "sh"]


@pytest.fixture
def family(msrun):
    def start(*words, wrapper=()):
        job = msrun("--grace", "0.2s", *words, *shell(FAMILY), wrapper=wrapper)
        job.until_logged("up")
        job.until_said("msrun: running")
        sleepers = until(lambda: (s := sleepers_of(job)) and len(s) >= 3 and s, "for the family")
        return job, sleepers

    return start


def sleepers_of(job):
    """Return what a job's worker has left, by ancestry: not all of it has our variables."""
    below = psutil.Process(job.pid).children(recursive=True)
    found = []
    for process in below:
        with contextlib.suppress(psutil.Error):
            if process.name() == "sleep" and process.cmdline()[1:2] > ["60"]:
                found.append(process)
    return found


def stop(process):
    process.suspend()
    until(lambda: process.status() == psutil.STATUS_STOPPED, "for it to be stopped")


def go(job, code):
    draft = job.folder / "draft"
    draft.write_text(f"{code}\n")
    draft.rename(job.folder / "go")


def gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.sampled
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("name", HELPERS)
def test_one_that_is_stopped_delays_the_end_and_changes_nothing_else(family, name, code):
    job, sleepers = family()
    stop(job.find(name))
    began = time.monotonic()
    go(job, code)

    assert job.wait(SECONDS) == code
    assert time.monotonic() - began <= SECONDS
    assert job.verdict()["stuck"] == []
    assert gone(sleepers)


@pytest.mark.sampled
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", HELPERS)
def test_one_that_is_stopped_does_not_keep_a_job_from_being_stopped(family, name, signum):
    job, sleepers = family()
    stop(job.find(name))
    job.send(signum)

    assert job.wait(SECONDS) == 128 + signum
    assert gone(sleepers)


@pytest.mark.parametrize("name", HELPERS)
def test_one_that_is_stopped_when_the_launcher_is_killed(family, name):
    job, sleepers = family()
    stop(job.find(name))
    job.process.kill()

    assert job.wait() == 128 + signal.SIGKILL
    assert gone(sleepers)
    until(lambda: not job.leftovers(), "for the end of all")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", HELPERS)
def test_one_that_is_stopped_does_not_prevent_a_restart(msrun, name):
    program = '[ "$MSRUN_GENERATION" = 1 ] || sleep 600 & echo up $MSRUN_GENERATION $$; wait'
    job = msrun("--max-restarts", 1, *shell(program))
    job.until_logged("up 0")
    job.until_said("msrun: running 1/1")
    stop(job.find(name))
    kill(psutil.Process(int(job.log().split()[-1])))

    assert job.wait(SECONDS) == 0
    assert "up 1" in job.log()


@pytest.mark.slow
def test_a_forkserver_that_is_stopped_during_its_imports_is_continued(msrun, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n"
    )
    job = msrun("--preload", "slow", script(tmp_path, "print('up')"))
    forkserver = job.find("msrun forksrv")
    stop(forkserver)
    (tmp_path / "go").touch()

    assert job.wait(SECONDS) == 0
    assert f"warning: the forkserver (pid {forkserver.pid}) was stopped by a signal" in job.err


def test_a_store_that_is_stopped_is_continued(msrun, tmp_path):
    text = """
        import os, time, torch.distributed as dist

        print("up")
        while not os.path.exists("go"):
            time.sleep(0.05)
        dist.init_process_group("gloo")
        dist.destroy_process_group()
    """
    job = msrun("--workers-per-node", 2, script(tmp_path, text))
    job.until_logged("up", 0, 1)
    forkserver = job.find("msrun forksrv")
    (store,) = (p for p in forkserver.children() if "program.py" not in " ".join(p.cmdline()))
    stop(store)
    (tmp_path / "go").touch()

    assert job.wait(SECONDS) == 0
    assert f"warning: the store (pid {store.pid}) was stopped by a signal" in job.err


def test_what_a_killed_reaper_leaves_is_found_by_ancestry(family):
    """Without a cgroup, and without our variable in its environment."""
    if os.geteuid():
        pytest.skip("needs root for a machine without cgroups")
    job, sleepers = family(wrapper=NO_CGROUPS)
    kill(job.find("msrun reaper"))

    assert job.wait() == 120
    assert gone(sleepers)


# Processes that are frozen although no signal has stopped them.


@pytest.fixture
def freezer():
    """Return a function that freezes a process by a cgroup of its own."""
    own = read_machine({}).cgroup
    if not own or not os.access(own, os.W_OK):
        pytest.skip("no cgroup v2 that this user may divide")
    made = []

    def freeze(process):
        group = Path(own, f"msrun-test-frozen-{uuid.uuid4().hex[:8]}")
        group.mkdir()
        made.append(group)
        (group / "cgroup.procs").write_text(str(process.pid))
        (group / "cgroup.freeze").write_text("1")
        until(lambda: "frozen 1" in (group / "cgroup.events").read_text(), "for it to freeze")

    yield freeze
    for group in made:
        (group / "cgroup.freeze").write_text("0")
        until(lambda group=group: not (group / "cgroup.procs").read_text(), "for its end")
        group.rmdir()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) for n in ("msrun reaper", "msrun forksrv")]
)
def test_one_that_does_not_answer_ends_the_job_by_name(family, freezer, name):
    job, sleepers = family()
    frozen = job.find(name)
    freezer(frozen)
    began = time.monotonic()

    assert job.wait(SECONDS + 5) == 120
    assert time.monotonic() - began <= SECONDS
    short = "reaper" if "reaper" in name else "forkserver"
    assert f"error: the {short} (pid N) has not answered for Ns and is killed" in job.block()
    assert gone(sleepers)


@pytest.mark.slow
def test_a_scheduler_that_does_not_answer_is_replaced(family, freezer):
    job, sleepers = family()
    freezer(job.find("msrun scheduler"))
    job.until_said("it is started again")
    go(job, 3)

    assert job.wait(SECONDS) == 3
    assert "has not answered for " in job.err
    assert gone(sleepers)
