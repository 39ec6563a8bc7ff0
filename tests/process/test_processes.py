"""What a worker inherits, and what is between the launcher and it."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from support import script, shell, until

from msrun.cluster.wire.messages import Formation
from msrun.job import RestartLimits
from msrun.processes.scheduler.config import SchedulerConfig
from msrun.processes.scheduler.handle import SchedulerProcess

pytestmark = pytest.mark.process

# Prints what a process has open and what it does about signals.
INSIDE = """
import os, re, signal
descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
status = open("/proc/self/status").read()
masks = {name: int(value, 16) for name, value in re.findall(r"Sig(\\w+):\\s(\\w+)", status)}
for name in ("Blk", "Ign", "Cgt"):
    print(name, sorted(n for n in range(1, 65) if masks[name] >> (n - 1) & 1))
print("fds", [fd for fd in descriptors if os.path.exists(f"/proc/self/fd/{fd}")])
print("nice", os.nice(0), "umask", oct(os.umask(0)))
"""
# What the traceback of a crash and of a stack dump on demand is printed by.
FAULTHANDLER = {
    signal.SIGSEGV,
    signal.SIGFPE,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGRTMIN + 5,
    signal.SIGRTMIN + 6,
}
# Where a dump goes that the agent asks for.
STACK_DESCRIPTOR = 100
# With which it notes how its streams take turns: the notes, and the log for each stream.
TURN_DESCRIPTORS = "101, 102, 103"


def plain(command, folder):
    """Return what `command` prints when a shell starts it."""
    return subprocess.check_output(
        command, cwd=folder, text=True, stdin=subprocess.DEVNULL, timeout=20
    )


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_a_python_worker_is_like_a_process_of_python_itself(msrun, tmp_path, method):
    program = script(tmp_path, INSIDE)
    job = msrun("--start-method", method, program)
    assert job.wait() == 0
    ours, pythons = facts(job.log()), facts(plain([sys.executable, program], tmp_path))

    assert pythons.pop("fds") == "[0, 1, 2]"
    assert ours.pop("fds") == f"[0, 1, 2, {STACK_DESCRIPTOR}, {TURN_DESCRIPTORS}]"
    assert numbers(ours.pop("Cgt")) == numbers(pythons.pop("Cgt")) | FAULTHANDLER
    assert ours == pythons


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may have such a priority")
def test_what_must_not_wait_for_busy_workers_runs_before_them(msrun):
    job = msrun(*shell("echo up; sleep 600"))
    job.until_logged("up", 0)
    job.until_said("msrun: running 1/1")
    ahead = {m.name() for m in job.members() if os.getpriority(os.PRIO_PROCESS, m.pid) < 0}

    assert {"msrun reaper", "msrun scheduler"} <= ahead
    assert os.getpriority(os.PRIO_PROCESS, job.process.pid) < 0
    # The end of the agent is what the others wait for; who reaps must not come before all.
    kinds = {
        m.name(): os.sched_getscheduler(m.pid) & ~os.SCHED_RESET_ON_FORK for m in job.members()
    }
    assert kinds["msrun reaper"] == kinds["msrun scheduler"] == os.SCHED_OTHER
    assert os.sched_getscheduler(job.process.pid) & os.SCHED_RR
    assert not ahead & {"msrun forksrv", "msrun store", "sh", "sleep"}


def facts(text):
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def numbers(text):
    """Return the signals of a list, without the two that the C library keeps for its threads."""
    return {int(word) for word in text.strip("[]").split(",")} - {32, 33}


def test_a_command_is_like_one_that_a_shell_started(msrun, tmp_path):
    program = ["sh", "-c", "grep Sig /proc/self/status; ls /proc/self/fd; umask; ulimit -a"]
    job = msrun("--no-python", *program)

    assert job.wait() == 0
    assert without_queue(job.log()) == without_queue(plain(program, tmp_path))


def without_queue(text):
    """Drop the count of queued signals, which is the whole user's."""
    return [line for line in text.splitlines() if not line.startswith("SigQ")]


def test_a_worker_leads_a_session_of_its_own_and_has_a_childs_name(msrun):
    job = msrun("--workers-per-node", 2, *shell("echo $$ up; exec sleep 600"))
    job.until_logged("up", 0, 1)
    workers = [int(job.log(rank).split()[0]) for rank in (0, 1)]
    forkserver, reaper = job.find("msrun forksrv"), job.find("msrun reaper")

    assert [os.getsid(pid) for pid in workers] == workers
    assert {child.pid for child in forkserver.children()} == set(workers)
    assert (forkserver.ppid(), reaper.ppid()) == (reaper.pid, job.pid)
    assert job.find("msrun scheduler").ppid() == job.pid
    job.send(signal.SIGTERM)
    job.wait()


def test_only_rank_0_reads_the_launchers_standard_input(msrun):
    reading, writing = os.pipe()
    os.write(writing, b"three words here\n")
    os.close(writing)
    program = 'echo "$(cat)."'
    job = msrun("--workers-per-node", 2, *shell(program), stdin=reading)
    os.close(reading)

    assert job.wait() == 0
    assert (job.log(0), job.log(1)) == ("three words here.\n", ".\n")


def test_two_jobs_run_side_by_side(msrun):
    """Each with its own directory, ports and processes; the end of one is none of the other's."""
    program = "echo up; until [ -e go ]; do sleep 0.01; done"
    first, second = msrun(*shell(program)), msrun(*shell("echo up; exec sleep 600"))
    first.until_logged("up")
    second.until_logged("up")
    second.send(signal.SIGTERM)
    assert second.wait() == 143
    assert first.process.poll() is None
    (first.folder / "go").touch()

    assert first.wait() == 0


def test_a_job_id_that_runs_already_is_refused(msrun):
    first = msrun("--job-id", "train", *shell("echo up; until [ -e go ]; do sleep 0.01; done"))
    first.until_logged("up")
    second = msrun("--job-id", "train", *shell("true"))

    assert second.wait() == 2
    assert second.err == (
        "error: --job-id train is the name of a job that still runs on this machine\n"
        "  hint: choose another name, or leave --job-id out\n"
    )
    (first.folder / "go").touch()
    assert first.wait() == 0


def test_the_forkserver_takes_the_program_for_python_only(msrun):
    """A command needs no torch: what would load it is not there."""
    job = msrun(*shell("echo up; exec sleep 600"))
    job.until_logged("up")
    mapped = [m.path for m in until(lambda: job.find("msrun forksrv").memory_maps(), "for maps")]
    job.send(signal.SIGTERM)
    job.wait()

    assert not [path for path in mapped if "libtorch" in path]


def test_a_scheduler_that_is_killed_before_it_reads_anything_is_told_nothing(tmp_path):
    config = SchedulerConfig(
        job_id="j",
        formation=Formation(),
        join_timeout=None,
        last_call=0.0,
        restarts=RestartLimits(),
        secret=None,
        wal_file=str(tmp_path / "wal"),
        log_file=str(tmp_path / "scheduler.log"),
        parent=os.getpid(),
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        scheduler = SchedulerProcess(config, listening, os.environ)
    scheduler.kill()
    until(lambda: scheduler.has_died, "for its end")
    scheduler.pass_on(signal.SIGTERM)

    assert "was killed by SIGKILL" in scheduler.how_it_ended()
    scheduler.end(timeout=0)
