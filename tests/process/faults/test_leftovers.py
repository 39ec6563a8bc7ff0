"""What a killed or failed launcher leaves, the next one or `msrun ls --clean` removes."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from support import environment, kill, shell, until

from msrun.supervise.machine import read_machine

pytestmark = pytest.mark.process

SLEEP = shell("echo up; exec sleep 600")


@pytest.fixture
def parent_cgroup():
    """The cgroup below which jobs of this process make theirs."""
    found = read_machine({}).cgroup
    if found is None:
        pytest.skip("no cgroup v2 that this user may write")
    return Path(found)


def cgroups(parent, job):
    return list(parent.glob(f"msrun-{job.name}.*"))


def ls_clean(runtime, *words):
    return subprocess.run(
        [sys.executable, "-m", "msrun", "ls", "--clean", *words],
        env=environment(runtime),
        capture_output=True,
        text=True,
        check=True,
    )


def remains(runtime):
    return [path.name for path in (runtime / "msrun").iterdir() if path.name != ".guard"]


def kill_all(job):
    """Kill reaper and launcher, so that nobody cleans up.

    In this order: a forkserver that loses the launcher continues the reaper.
    """
    reaper = job.find("msrun reaper")
    for process in (psutil.Process(job.pid), reaper):  # else the launcher would continue the reaper
        process.suspend()
        until(lambda process=process: process.status() == psutil.STATUS_STOPPED, "for a stop")
    kill(reaper)
    job.process.kill()
    job.wait()


def test_a_cgroup_is_noted_before_it_is_made(msrun, parent_cgroup):
    """A kill between the two would leave it for good."""
    job = msrun(*SLEEP)
    job.until_logged("up")
    noted = (job.run_dir / "cgroup").read_text()

    assert [Path(noted)] == cgroups(parent_cgroup, job)
    assert (job.run_dir / "cgroup").stat().st_mtime_ns <= Path(noted).stat().st_mtime_ns
    job.send(signal.SIGTERM)
    assert job.wait() == 143


def test_a_directory_goes_after_the_cgroup_that_it_notes(msrun, parent_cgroup):
    """A reaper that is killed between the two would leave the cgroup for good."""
    job = msrun(*SLEEP)
    job.until_logged("up")
    many = job.run_dir / "many"  # so that its removal takes a while
    many.mkdir()
    for number in range(10_000):
        (many / str(number)).touch()
    job.send(signal.SIGTERM)
    until(
        lambda: not (many.exists() and len(list(many.iterdir())) == 10_000),
        "for a first file to go",
    )

    assert cgroups(parent_cgroup, job) == []
    assert job.wait() == 143


def test_ls_clean_removes_what_killed_launchers_have_left(msrun, runtime):
    job = msrun(*SLEEP)
    job.until_logged("up")
    kill_all(job)
    assert remains(runtime) == [job.name]

    done = ls_clean(runtime)

    assert f"msrun: removed what job {job.name} had left" in done.stderr
    assert remains(runtime) == []
    assert not job.leftovers()
    assert "removed" not in ls_clean(runtime).stderr


def test_ls_clean_removes_shared_memory_of_workers(msrun, runtime):
    job = msrun(*shell(": > /dev/shm/torch_$$_1_0; echo torch_$$_1_0; exec sleep 600"))
    job.until_logged("torch_")
    segment = Path("/dev/shm", job.log().strip())
    job.until_said("msrun: running")
    kill_all(job)
    assert segment.exists()

    ls_clean(runtime)

    assert not segment.exists()


def test_ls_clean_leaves_jobs_that_run(msrun, runtime):
    job = msrun(*SLEEP)
    job.until_logged("up")

    rows = json.loads(ls_clean(runtime, "--json").stdout)

    assert [row["job_id"] for row in rows["jobs"]] == [job.name]
    job.send(signal.SIGTERM)
    assert job.wait() == 143


def test_the_next_job_removes_what_others_left_in_every_place(msrun, runtime):
    """A launcher in another session has another XDG_RUNTIME_DIR, or none."""
    home = runtime / "home"
    home.mkdir()
    place = home / ".cache" / f"msrun-{os.uname().nodename}"
    place.mkdir(mode=0o700, parents=True)
    place.parent.chmod(0o700)
    left = place / "left"
    left.mkdir(mode=0o700)
    (left / "lock").touch()

    assert msrun(*shell("true"), env={"HOME": str(home)}).wait() == 0
    assert not left.exists()


@pytest.mark.parametrize(
    "counts", [range(16, 32, 4), pytest.param(range(8, 40, 4), marks=pytest.mark.slow)], ids=str
)
def test_a_start_that_fails_leaves_no_cgroup(msrun, parent_cgroup, counts):
    """Of 16 files there are not enough for the processes."""
    few = ["sh", "-c", 'ulimit -n "$0"; exec "$@"']
    codes = set()
    for count in counts:
        job = msrun(*shell("true"), wrapper=[*few, str(count)])
        codes.add(job.wait())
        assert cgroups(parent_cgroup, job) == []
    assert codes - {0}


def test_two_jobs_of_one_name_have_a_cgroup_each(msrun, parent_cgroup, tmp_path):
    """In sessions with other places for private directories; cleaning up hits one of them alone."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    name = f"test-{uuid.uuid4().hex[:8]}"
    jobs = [
        msrun("--job-id", name, "--log-dir", tmp_path / session, *SLEEP, env=env)
        for session, env in (("one", {}), ("two", {"XDG_RUNTIME_DIR": str(other)}))
    ]
    for job, session in zip(jobs, ("one", "two"), strict=True):
        job.logs = tmp_path / session
        job.until_logged("up")
    assert len(cgroups(parent_cgroup, jobs[0])) == 2
    kill_all(jobs[0])
    ls_clean(jobs[0].runtime)

    assert jobs[1].process.poll() is None
    jobs[1].send(signal.SIGTERM)
    assert jobs[1].wait() == 143
    assert cgroups(parent_cgroup, jobs[0]) == []


def test_nothing_is_left_when_store_and_reaper_die_together(msrun, parent_cgroup):
    job = msrun("--workers-per-node", 2, "--start-method", "fork", "-m", "http.server", "0")
    job.until_said("running 2/2")
    store = job.find("msrun store")
    reaper = job.find("msrun reaper")
    kill(store, reaper)

    assert job.wait() == 120
    assert cgroups(parent_cgroup, job) == []
    assert not job.leftovers()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_everybody_while_the_reaper_starts_is_a_stop(msrun, signum):
    """As `scancel` sends it, and kills of a whole cgroup."""
    job = msrun(*SLEEP)
    until(lambda: len(job.members()) > 1, "for the second process", pause=0)
    for member in job.members():
        if member.pid != job.pid:
            os.kill(member.pid, signum)
    os.kill(job.pid, signum)

    assert job.wait() == 128 + signum


def test_a_fifo_in_place_of_a_log_delays_neither_start_nor_restart(msrun, tmp_path):
    """Whoever opens one to write waits for a reader: the launcher its journal, a worker its log."""
    logs = tmp_path / "logs"
    logs.mkdir(mode=0o700)
    os.mkfifo(logs / "msrun_elsewhere.log")
    program = f"""
        [ "$MSRUN_GENERATION" = 0 ] || exit 0
        rm {logs}/worker_0.log
        mkfifo {logs}/worker_0.log
        exit 3
    """
    job = msrun("--log-dir", logs, "--max-restarts", 1, *shell(program))

    assert job.wait(60) == 126
    assert "cannot start rank 0" in job.err
