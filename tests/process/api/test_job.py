"""`msrun.Job`: a job that a program starts, asks, stops and waits for."""

from __future__ import annotations

import os
import signal
import threading

import psutil
import pytest
from support import alive, until

import msrun

pytestmark = pytest.mark.process


@pytest.fixture
def start(tmp_path, monkeypatch, runtime):
    """Start jobs of shell-like scripts in a directory; stop them at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    jobs = []

    def begin(text, *args, **options):
        (tmp_path / "train.py").write_text(text)
        jobs.append(msrun.Job("train.py", args, start_method="exec", **options))
        return jobs[-1].start()

    yield begin
    for job in jobs:
        job.stop(now=True)
    # The reaper of a killed launcher cleans after its job has ended for its caller.
    until(lambda: not alive(runtime), "for the processes of all jobs")


WAIT = """
import os, sys, time
print("rank", os.environ["RANK"], *sys.argv[1:], flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def test_a_script_runs_until_it_is_asked_to_end(start, tmp_path):
    job = start(WAIT, "--lr", 0.1, workers=2, log_dir=tmp_path / "logs", job_id="mine")

    status = until(lambda: (s := job.status()).phase == "running" and s, "for all workers")
    assert status == msrun.JobStatus(
        phase="running", generation=0, nodes=1, world_size=2, restarts=0
    )
    assert (job.job_id, job.log_dir, job.verdict) == ("mine", tmp_path / "logs", None)
    assert repr(job) == "<msrun.Job mine (running)>"
    until(lambda: job.logs(1) == "rank 1 --lr 0.1\n", "for a line in its log")
    with pytest.raises(TimeoutError, match=r"job mine has not ended within 0\.01s"):
        job.wait(0.01)

    (tmp_path / "go").touch()

    assert job.wait() == []
    assert job.status() == msrun.JobStatus(phase="done", generation=0)
    assert job.verdict.code == 0
    assert job.logs(0, lines=1) == "rank 0 --lr 0.1\n"
    assert repr(job) == "<msrun.Job mine (ended)>"


@pytest.mark.parametrize("now", [False, True])
def test_a_stopped_job_has_failed_by_the_signal(start, now):
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if now else ""
    job = start(deaf + WAIT, workers=1, grace="5m" if now else "10s")
    until(job.logs, "for its first line")

    job.stop(now=now)

    with pytest.raises(msrun.JobFailed) as failed:
        job.wait()
    assert (failed.value.code, failed.value.rank) == (143, None)
    by = "`msrun stop`" if now else "SIGTERM"
    assert failed.value.message == f"stopped by {by}"
    assert job.status().phase == "failed"


def test_any_thread_may_stop_the_job_that_others_wait_for(start):
    job = start(WAIT, workers=1)
    failures = []

    def wait():
        try:
            job.wait()
        except msrun.JobFailed as error:
            failures.append(error.code)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(job.logs, "for its first line")
    threading.Thread(target=job.stop).start()
    for thread in threads:
        thread.join()

    assert failures == [143, 143]


def test_the_failure_of_a_script_has_its_exception(start):
    job = start("raise ValueError('no luck')", workers=1)

    with pytest.raises(msrun.JobFailed) as failed:
        job.wait()

    error = failed.value
    assert (error.code, error.rank, error.error) == (1, 0, "ValueError: no luck")
    assert error.log_file == str(job.log_dir / "worker_0.log")
    assert job.verdict.root.error == "ValueError: no luck"


def test_a_context_ends_with_its_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(WAIT)

    with msrun.Job("train.py", workers=1, start_method="exec") as job:
        until(job.logs, "for its first line")

    assert job.status().phase == "failed"


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        ("missing.py", {}, "script 'missing.py' does not exist"),
        ("train.py", {"nnodes": 2}, "nnodes=2 needs"),
        (
            "train.py",
            {"workers": 2, "worker_num": 3, "nnodes": 1},
            "worker_num=3 is not 1 node times workers=2",
        ),
    ],
)
def test_a_job_that_cannot_start_is_one_sentence_in_python(
    tmp_path, monkeypatch, program, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    with pytest.raises(msrun.UsageError) as refused:
        msrun.Job(program, **options).start()

    assert message in refused.value.message


def test_a_log_directory_where_none_can_be_made_is_one_sentence_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    job = msrun.Job("train.py", workers=1, log_dir="/proc/x")

    with pytest.raises(msrun.UsageError, match="log_dir=/proc/x cannot be made"):
        job.start().wait()


def test_a_job_says_what_it_cannot_do_yet_or_again(start):
    job = msrun.Job("train.py")
    for call in (job.wait, job.status, job.logs):
        with pytest.raises(msrun.UsageError, match="the job has not been started"):
            call()
    job.stop()
    assert (job.job_id, job.log_dir, job.verdict) == ("", None, None)
    assert repr(job) == "<msrun.Job train.py (not started)>"

    started = start("", workers=1)
    with pytest.raises(msrun.UsageError, match="has been started before"):
        started.start()
    started.wait()
    with pytest.raises(msrun.UsageError, match=r"the log of rank 3 .* has ranks \[0\]"):
        started.logs(3)


def test_a_forked_process_leaves_the_job_alone(start, tmp_path):
    job = start(WAIT, workers=1)
    until(job.logs, "for its first line")
    pid = os.fork()
    if pid == 0:
        job.stop()
        try:
            job.wait()
        except msrun.UsageError:
            os._exit(7)
        os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    (tmp_path / "go").touch()
    assert job.wait() == []


def keeper_of_mine():
    """Return the process between this one and its job's launcher, stopped."""
    below = psutil.Process().children()
    (keeper,) = [process for process in below if process.name() == "msrun keeper"]
    keeper.suspend()
    until(lambda: keeper.status() == psutil.STATUS_STOPPED, "for it to be stopped")
    return keeper


def test_a_keeper_that_is_stopped_is_continued_while_the_job_runs(start, capfd):
    job = start(WAIT, workers=1)
    until(job.logs, "for its first line")
    keeper = keeper_of_mine()

    until(lambda: keeper.status() != psutil.STATUS_STOPPED, "for it to go on", seconds=30)
    job.stop(now=True)
    assert f"the keeper (pid {keeper.pid}) was stopped by a signal" in capfd.readouterr().err


@pytest.mark.parametrize("by", ["stop", "launcher"])
def test_a_keeper_that_is_stopped_keeps_nobody_from_the_end(start, by):
    job = start(WAIT, workers=1)
    until(job.logs, "for its first line")
    (launcher,) = keeper_of_mine().children()
    if by == "launcher":
        launcher.send_signal(signal.SIGKILL)
    else:
        job.stop(now=True)

    with pytest.raises(msrun.JobFailed):
        job.wait(30)
