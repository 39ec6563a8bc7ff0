"""After any end the machine is as it was before; a job that went well says so."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support import (
    PATIENCE,
    alive,
    answers,
    environment,
    kill,
    listening,
    script,
    shell,
    until,
)

from msrun.supervise.process import is_alive

pytestmark = pytest.mark.process

# More than heartbeats of the connection take.
MESSAGE_BYTES_MIN = 300

NO_DESTROY = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    print(ones.item())
"""


def run_without_destroy(msrun, tmp_path, times):
    program = script(tmp_path, NO_DESTROY)
    for _ in range(times):
        job = msrun("--workers-per-node", 4, program)
        assert job.wait() == 0
        assert [job.log(rank) for rank in range(4)] == ["4.0\n"] * 4


@pytest.mark.slow
@pytest.mark.thorough
def test_ranks_that_forget_their_process_group_end_well(msrun, tmp_path):
    run_without_destroy(msrun, tmp_path, 5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_that_forget_their_process_group_always_end_well(msrun, tmp_path):
    run_without_destroy(msrun, tmp_path, 100)


SHARES_MEMORY = """
    import os, pathlib, signal, time
    from multiprocessing import shared_memory

    block = shared_memory.SharedMemory(create=True, size=1 << 20)
    pathlib.Path("block").write_text(block.name)
    print("up")
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def sharing(msrun, tmp_path):
    """A job whose worker made a block of shared memory, which is there."""
    job = msrun("--start-method", "exec", script(tmp_path, SHARES_MEMORY))
    job.until_logged("up")
    block = Path("/dev/shm", (tmp_path / "block").read_text())
    assert block.exists()
    tracker = job.find("multiprocessing.resource_tracker")
    until(lambda: ignores_sigint(tracker), "for Python's tracker of the block to work")
    yield job, block
    block.unlink(missing_ok=True)


def ignores_sigint(member):
    status = Path(f"/proc/{member.pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    return ignored >> (signal.SIGINT - 1) & 1


def test_shared_memory_of_a_killed_worker_is_gone(sharing):
    job, block = sharing
    (job.folder / "go").touch()

    assert job.wait() == 137
    assert not block.exists()


def test_shared_memory_is_gone_when_the_agent_was_killed(sharing, runtime):
    job, block = sharing
    job.process.kill()
    until(lambda: not alive(runtime), "for the end of the tree")

    assert not block.exists()


def test_a_program_that_calls_itself_a_tracker_is_not_spared(msrun):
    claims = 'sh -c "echo up; trap : TERM; sleep 600; :" multiprocessing.resource_tracker'
    job = msrun(*shell(f"{claims} & until [ -e go ]; do sleep 0.01; done; exit 3"))
    job.until_logged("up")
    (job.folder / "go").touch()

    assert job.wait() == 3
    assert job.leftovers() == []


def test_a_job_inside_a_program_leaves_it_as_it_was(tmp_path, runtime):
    """What is left of ZeroMQ could stop the program, whenever Python collects it."""
    code = """
        import os
        from msrun.cli.main import main

        assert main(["--no-python", "true"]) == 0
        print(os.listdir("/proc/self/task") == [str(os.getpid())])
    """
    program = script(tmp_path, code)

    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=environment(runtime),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize(
    ("program", "code"),
    [("exit 3", 3), ("setsid sleep 600 & exit 0", 0), ("kill -KILL $$", 137)],
)
def test_nothing_is_left_on_the_machine(msrun, runtime, program, code):
    job = msrun("--workers-per-node", 2, *shell(f"until [ -e go ]; do sleep 0.01; done; {program}"))
    job.until_said("msrun: running 2/2")
    places = set(listening(job.members()))
    assert places
    assert job.run_dir.is_dir()
    (job.folder / "go").touch()

    assert job.wait() == code
    assert job.leftovers() == []
    assert [path.name for path in (runtime / "msrun").iterdir()] == [".guard"]
    assert not [place for place in places if answers(*place)]


STRAYS = """
    (setsid sh -c 'echo $$ > stray; exec sleep 600' &)
    until [ -s stray ]; do sleep 0.01; done
    echo up
    exec sleep 601
"""


def test_the_next_start_ends_the_strays_of_a_job_whose_agent_and_reaper_were_killed(msrun):
    """Nobody was left to do it; what has the job's mark in its environment is a stray."""
    job = msrun(*shell(STRAYS))
    job.until_logged("up")
    job.until_said("msrun: running 1/1")
    stray = psutil.Process(int((job.folder / "stray").read_text()))
    reaper = job.find("msrun reaper")
    agent = psutil.Process(job.pid)
    for victim in (agent, reaper):
        victim.suspend()
    kill(reaper, agent)
    job.wait()
    until(lambda: job.members() == [stray], "for the death of all but the stray")
    assert job.run_dir.is_dir()
    following = msrun(*shell("true"))

    assert following.wait() == 0
    until(lambda: not is_alive(stray.pid), "for its end")
    assert job.leftovers() == []


def test_a_verdict_that_the_scheduler_wrote_before_it_was_killed_is_kept(msrun):
    """The agent is held while the scheduler decides, so that it sees both at once."""
    job = msrun(*shell("echo up; until [ -e go ]; do sleep 0.01; done"))
    job.until_logged("up")
    job.until_said("msrun: running 1/1")
    scheduler = job.find("msrun scheduler")
    ((_, port),) = listening([scheduler])
    log = job.logs / "scheduler.log"
    until(lambda: "received Running" in log.read_text(), "for the agent to have said all else")
    scheduler.suspend()
    (job.folder / "go").touch()
    until(lambda: waiting_bytes(port) > MESSAGE_BYTES_MIN, "for the worker's end to be told")
    job.send(signal.SIGSTOP)
    scheduler.resume()
    until(lambda: "wrote Decided" in log.read_text(), "for the scheduler to decide")
    kill(scheduler)
    job.send(signal.SIGCONT)

    assert job.wait() == 0
    assert job.err.splitlines()[-1].startswith("msrun: 1/1 workers finished after ")


def waiting_bytes(port):
    """Return the bytes that wait to be read on the connections to a local `port`."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return sum(int(f[4].split(":")[1], 16) for f in fields if f[1].endswith(f":{port:04X}"))
