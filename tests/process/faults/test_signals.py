"""What the launcher makes of the signals that it gets, in every phase of a job."""

import random
import signal
import time
from datetime import datetime

import psutil
import pytest
from support import STOPS, script, shell, until

pytestmark = pytest.mark.process

IDLE = "echo up; exec sleep 600"
DEAF = "trap '' TERM INT HUP QUIT; echo up; while :; do sleep 0.01; done"

# Rank 0 fails when it may, rank 1 ends when it may, whatever it is told.
LINGERS = """
    [ "$RANK" = 0 ] && { until [ -e go ]; do sleep 0.01; done; exit 3; }
    trap '' TERM INT
    echo up
    until [ -e saved ]; do sleep 0.01; done
"""

every_stop = pytest.mark.parametrize(("signum", "code"), STOPS.items())
usual_stop = pytest.mark.parametrize(("signum", "code"), list(STOPS.items())[:2])


def scheduler_log(job):
    path = job.logs / "scheduler.log"
    return path.read_text() if path.exists() else ""


@every_stop
def test_stopped_while_it_forms(msrun, tmp_path, signum, code):
    """While the forkserver imports what takes it for ever."""
    script(tmp_path, "import signal; signal.pause()", "endless.py")
    job = msrun("--preload", "endless", script(tmp_path, "raise AssertionError"))
    job.find("msrun forksrv")
    until(lambda: "listening" in scheduler_log(job), "for the scheduler")
    job.send(signum)

    assert job.wait() == code
    assert job.block() == f"error: stopped by {signum.name}\n"
    assert "msrun: running" not in job.err


@every_stop
def test_stopped_while_it_runs(msrun, signum, code):
    job = msrun("--workers-per-node", 2, *shell(IDLE))
    job.until_logged("up", 0, 1)
    job.send(signum)

    assert job.wait() == code
    assert job.block() == f"error: stopped by {signum.name}\n"
    assert f"msrun: {signum.name}: stopping the workers\n" in job.err
    assert job.verdict()["code"] == code


@usual_stop
def test_stopped_while_it_stops_for_a_restart(msrun, signum, code):
    """The failure is no longer the job's end, so the signal is."""
    job = msrun("--workers-per-node", 2, "--max-restarts", 3, "--grace", "10m", *shell(LINGERS))
    job.until_logged("up", 1)
    (job.folder / "go").touch()
    until(lambda: "received WorkerExited" in scheduler_log(job), "for the end of rank 0")
    job.send(signum)
    until(lambda: "received Interrupted" in scheduler_log(job), "for the signal")
    (job.folder / "saved").touch()

    assert job.wait() == code
    assert job.block() == f"error: stopped by {signum.name}\n"
    assert "msrun: restart" not in job.err


@usual_stop
def test_stopped_while_it_waits_to_restart(msrun, signum, code):
    job = msrun("--max-restarts", 9, *shell("exit 5"))
    job.until_said("msrun: restart 2 of 9 in ")
    job.send(signum)

    assert job.wait() == code
    assert job.block() == f"error: stopped by {signum.name}\n"
    took = said_at(job, "error: stopped") - said_at(job, f"msrun: {signum.name}")
    assert took.total_seconds() < 1.4, "it waited for the restart"


def said_at(job, text):
    """Return when the launcher began to say `text`, by its own clock."""
    lines = (job.logs / "msrun.log").read_text().splitlines()
    (at,) = [at for at, _, said in (line.partition(" ") for line in lines) if said.startswith(text)]
    return datetime.fromisoformat(at)


def test_a_failure_that_ends_the_job_stays_its_cause_when_a_signal_follows(msrun):
    job = msrun("--workers-per-node", 2, "--grace", "10m", *shell(LINGERS))
    job.until_logged("up", 1)
    (job.folder / "go").touch()
    until(lambda: "received WorkerExited" in scheduler_log(job), "for the end of rank 0")
    job.send(signal.SIGTERM)
    until(lambda: "received Interrupted" in scheduler_log(job), "for the signal")
    (job.folder / "saved").touch()

    assert job.wait() == 3
    assert job.block().startswith("error: rank 0 (node HOST, local_rank 0, pid N) exited with")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once_what_ignores_the_first(msrun, signum):
    job = msrun("--grace", "10m", *shell(DEAF))
    job.until_logged("up")
    job.send(signum)
    until(lambda: "received Interrupted" in scheduler_log(job), "for the first signal's effect")
    job.send(signum)

    assert job.wait() == 128 + signum


def test_what_ignores_sigterm_is_killed_after_the_grace(msrun):
    """F-04 and F-10: nothing is left a second after the grace, in whatever session it sits."""
    job = msrun("--workers-per-node", 2, "--grace", "0.3s", *shell(f"setsid sleep 600 & {DEAF}"))
    job.until_logged("up", 0, 1)
    job.until_said("msrun: running 2/2")
    began = time.monotonic()
    job.send(signal.SIGTERM)

    assert job.wait() == 143
    assert 0.3 <= time.monotonic() - began <= 1.3
    assert job.leftovers() == []


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(10, marks=pytest.mark.thorough),
        pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_an_agent_stopped_at_any_moment_leaves_nothing_and_has_one_code(msrun, count):
    """F-18."""
    for seed in range(count):
        moment = random.Random(seed).uniform(0, 0.7)
        job = msrun("--workers-per-node", 2, *shell("setsid sleep 600 & sleep 601"))
        at = job.started_at + moment
        until(lambda at=at: time.monotonic() >= at, "for the moment to stop")
        job.send(signal.SIGTERM)

        assert job.wait() == 143, f"stopped after {moment:.3f} s"
        assert job.leftovers() == [], f"stopped after {moment:.3f} s"


def test_sigterm_lets_a_worker_end_its_own_way(msrun):
    job = msrun(
        "--grace", "10m", *shell("trap 'echo saved; exit 0' TERM; echo up; sleep 600 & wait")
    )
    job.until_logged("up")
    job.send(signal.SIGTERM)

    assert job.wait() == 143
    assert job.log() == "up\nsaved\n"


def test_a_stopped_worker_is_continued_so_that_it_can_end(msrun):
    job = msrun(
        "--grace", "10m", *shell("trap 'echo saved; exit 0' TERM; echo up $$; sleep 600 & wait")
    )
    job.until_logged("\n")
    worker = psutil.Process(int(job.log().split()[1]))
    worker.suspend()
    until(lambda: worker.status() == psutil.STATUS_STOPPED, "for the worker to stop")
    job.send(signal.SIGTERM)

    assert job.wait() == 143
    assert job.log().endswith("\nsaved\n")


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_the_users_own_signals_reach_every_worker_and_the_job_lives_on(msrun, signum):
    program = f"trap 'echo got it; exit 0' {signum.name[3:]}; echo up; sleep 600 & wait"
    job = msrun("--workers-per-node", 2, *shell(program))
    job.until_logged("up", 0, 1)
    job.send(signum)

    assert job.wait() == 0
    assert job.log(0) == job.log(1) == "up\ngot it\n"


def test_under_nohup_a_hangup_does_nothing(msrun):
    nohup = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]
    program = "echo up; until [ -e go ]; do sleep 0.01; done"
    job = msrun(*shell(program), wrapper=nohup)
    job.until_logged("up")
    job.send(signal.SIGHUP)
    (job.folder / "go").touch()

    assert job.wait() == 0
    assert "SIGHUP" not in job.err


# A signal that comes just before a wait would not end it, so there are many.
PYTHON = """
    import sys, time
    try:
        print("up")
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        print("saved")
        sys.exit(0)
"""


def test_ctrl_c_is_a_keyboard_interrupt_in_a_python_worker(msrun, tmp_path):
    job = msrun("--workers-per-node", 2, script(tmp_path, PYTHON))
    job.until_logged("up", 0, 1)
    job.send(signal.SIGINT)

    assert job.wait() == 130
    assert job.log(0) == job.log(1) == "up\nsaved\n"


SLOW = """
    import os, sys, time

    class Slow:
        def find_spec(self, name, *_):
            if name == os.environ.get("SLOW_IMPORT"):
                print("importing", name, flush=True)
                time.sleep(600)

    sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize("name", ["click", "msgspec", "zmq"])
def test_ctrl_c_while_msrun_is_imported_shows_no_traceback(msrun, tmp_path, name):
    """A slow import, as from a busy file system, gives people the time to press it."""
    (tmp_path / "site").mkdir()
    script(tmp_path / "site", SLOW, "sitecustomize.py")
    env = {"PYTHONPATH": str(tmp_path / "site"), "SLOW_IMPORT": name}
    job = msrun(*shell("true"), env=env)
    until(lambda: f"importing {name}" in job.out, "for the import")
    job.send(signal.SIGINT)

    assert job.wait() == 130
    assert "Traceback" not in job.err
