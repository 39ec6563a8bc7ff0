"""The fixture that starts launchers and sees to it that each leaves nothing behind."""

from __future__ import annotations

import signal

import pytest
from screen import Terminal
from support import Job, alive, until
from terminals import Cluster


@pytest.fixture
def runtime(tmp_path):
    """The launchers' own XDG_RUNTIME_DIR, which also marks every process of theirs."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def msrun(tmp_path, runtime):
    """Start `msrun` with the words given; at the end of the test nothing of it may be left."""
    jobs = []

    def start(*arguments, **options):
        job = Job(tmp_path, arguments, runtime=runtime, **options)
        jobs.append(job)
        return job

    yield start
    was_running = [job for job in jobs if job.process.poll() is None]
    for job in was_running:
        job.process.kill()
        job.process.wait()
    for job in jobs:
        print(f"======== {job.name}, exit code {job.process.returncode}\n{job.report()}")
    if was_running:
        until(lambda: not any(job.members() for job in jobs), "for a killed launcher's tree")
        return
    if any(job.process.returncode == -signal.SIGKILL for job in jobs):
        # The reaper of a killed launcher cleans after the test has gone on.
        until(lambda: not any(job.leftovers() for job in jobs), "for a killed launcher's reaper")
    left = [line for job in jobs for line in job.leftovers()]
    assert not left
    assert not jobs or [path.name for path in (runtime / "msrun").glob("*")] in ([], [".guard"])


@pytest.fixture
def cluster(tmp_path, runtime):
    """Start processes by hand; at the end of the test nothing of them may be left."""
    found = Cluster(tmp_path, runtime)
    yield found
    running = [each for each in found.processes if each.process.poll() is None]
    for each in running:
        each.process.kill()
        each.process.wait()
    for each in found.processes:
        code = each.process.returncode
        print(f"======== {each.name}, exit code {code}\n== out\n{each.out}\n== err\n{each.err}")
    for path in sorted(tmp_path.glob("msrun_logs/*/*.log")):
        print(f"======== {path.name}\n{path.read_text(errors='replace')[-4000:]}")
    if running:
        until(lambda: not alive(runtime), "for the trees of killed processes")
        return
    assert alive(runtime) == []
    left = [path.name for path in (runtime / "msrun").glob("*")]
    assert left in ([], [".guard"])


@pytest.fixture
def terminal():
    terminal = Terminal()
    yield terminal
    print(f"======== terminal\n{terminal.raw!r}")
    terminal.close()


@pytest.fixture
def at_terminal(msrun, terminal):
    """Start `msrun` as the foreground job of a terminal."""

    def start(*arguments, env=None):
        env = {"TERM": "xterm-256color", **(env or {})}
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.theirs)
        job = msrun(*arguments, wrapper=("setsid", "--ctty"), env=env, **ends)
        terminal.started()
        return job

    return start
