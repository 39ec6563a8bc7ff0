"""What a person at a terminal sees of a job, and what a pipe gets."""

from __future__ import annotations

import os
import re

import pytest
from support import script, shell, together, until

pytestmark = pytest.mark.process


@pytest.fixture
def gate(tmp_path):
    """A file that workers wait for, by `read go < gate`; call it to let some of them on."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    # Kept open for reading too, so that no worker comes too late or finds an end.
    descriptor = os.open(path, os.O_RDWR)
    yield lambda workers: os.write(descriptor, b"\n" * workers)
    os.close(descriptor)


WAITING = "echo up; read go < gate; echo on"
FIRST_LINES = "msrun: JOB: {0} on HOST, contained by CONTAINMENT; logs: LOGS\n"


def run_alone(workers):
    return FIRST_LINES.format(f"{workers} worker{'s' if workers > 1 else ''}")


def test_a_terminal_shows_how_the_job_goes_on_and_is_left_clean(at_terminal, terminal, gate):
    program = r"printf '\033[31mred\033[0m\n'; read go < gate; echo end"
    job = at_terminal("--workers-per-node", 1, *shell(program))
    terminal.until(lambda screen: ("running", 1, 1) in screen.statuses(), "for the worker")
    terminal.until(lambda screen: screen.elapsed()[-1] >= 1, "for a second")
    gate(1)
    screen = terminal.until_closed()

    assert job.wait() == 0
    assert screen.statuses()[0] == ("forming", 0, 1)
    assert screen.statuses()[-1][0] == "running"
    assert {phase for phase, _, _ in screen.statuses()} <= {"forming", "starting", "running"}
    assert screen.elapsed() == sorted(screen.elapsed())
    assert screen.has_cursor
    assert job.mask(screen.text()) == (
        run_alone(1) + "msrun: running 1/1 after Ns\n"
        "red\n"
        "end\n"
        "msrun: 1/1 workers finished after Ns\n"
    )


def test_a_terminal_shows_a_failure_last(at_terminal, terminal, gate):
    program = 'echo "rank $RANK"; [ $RANK = 0 ] && exec sleep 600; read go < gate; exit 3'
    job = at_terminal("--workers-per-node", 2, *shell(program))
    terminal.until(lambda screen: ("running", 2, 2) in screen.statuses(), "for both workers")
    job.until_logged("rank", 0, 1)
    gate(1)
    screen = terminal.until_closed()

    assert job.wait() == 3
    assert screen.has_cursor
    assert job.mask(screen.text()) == (
        run_alone(2) + "msrun: running 2/2 after Ns\n"
        "rank 0\n"
        "error: rank 1 (node HOST, local_rank 1, pid N) exited with code 3 after Ns\n"
        "  last line of its log:\n"
        "  | rank 1\n"
        "  log: LOGS/worker_1.log\n"
        "collateral: rank 0 was killed by SIGTERM\n"
    )


def test_control_c_ends_the_job(at_terminal, terminal):
    job = at_terminal("--workers-per-node", 2, *shell("echo up; exec sleep 600"))
    terminal.until(lambda screen: "up" in screen.seen, "for a line of rank 0")
    terminal.type(b"\x03")
    screen = terminal.until_closed()

    assert job.wait() == 130
    assert screen.has_cursor
    assert screen.text().splitlines()[-2:] == [
        "msrun: SIGINT: stopping the workers",
        "error: stopped by SIGINT",
    ]


def test_a_closed_terminal_ends_the_job(at_terminal, terminal):
    job = at_terminal("--workers-per-node", 2, *shell("echo up; exec sleep 600"))
    terminal.until(lambda screen: "up" in screen.seen, "for a line of rank 0")
    terminal.close()

    assert job.wait() == 129


def test_a_dumb_terminal_gets_plain_lines(at_terminal, terminal):
    job = at_terminal(*shell("echo shown"), env={"TERM": "dumb"})
    terminal.until_closed()

    assert job.wait() == 0
    assert job.mask(terminal.raw.decode().replace("\r\n", "\n")) == (
        run_alone(1) + "msrun: running 1/1 after Ns\nshown\nmsrun: 1/1 workers finished after Ns\n"
    )


def test_colours_can_be_switched_off(at_terminal, terminal):
    job = at_terminal(*shell("echo shown"), env={"NO_COLOR": "1"})
    screen = terminal.until_closed()

    assert job.wait() == 0
    assert screen.colours <= {"0m", "1m"}


def test_a_pipe_gets_plain_lines(msrun):
    job = msrun("--workers-per-node", 2, *together("echo here"))

    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == ["[rank 0] here", "[rank 1] here"]
    assert job.mask(job.err) == (
        run_alone(2) + "msrun: running 2/2 after Ns\nmsrun: 2/2 workers finished after Ns\n"
    )


def test_a_pipe_gets_the_lines_of_the_chosen_ranks_on_stdout(msrun, gate):
    program = r"read go < gate; echo rank $RANK; printf 'a\rb\tc\033[0m'"
    job = msrun("--workers-per-node", 2, "--tail", "1", *shell(program))
    job.until_said("msrun: running 2/2")
    gate(2)

    assert job.wait() == 0
    # Reading the file has made a line of the carriage return.
    assert job.out == "[rank 1] rank 1\n[rank 1] a\n[rank 1] b\tc\x1b[0m\n"


def test_a_pipe_is_told_about_restarts_and_the_failure(msrun, gate):
    program = '[ $RANK = 1 ] || exec sleep 600; read go < gate; echo "failing now"; exit 3'
    job = msrun("--workers-per-node", 2, "--max-restarts", 1, *shell(program))
    for generation in (1, 2):
        job.until_said("msrun: running 2/2", times=generation)
        gate(1)

    assert job.wait() == 3
    how = "rank 1 (node HOST, local_rank 1, pid N) exited with code 3 after Ns"
    assert job.mask(job.err) == (
        run_alone(2) + "msrun: running 2/2 after Ns\n"
        f"warning: {how}; log: LOGS/worker_1.log\n"
        "msrun: restart 1 of 1 now\n"
        "msrun: running 2/2 after Ns\n"
        f"error: {how}; the budget of 1 restart(s) is spent\n"
        "  last line of its log:\n"
        "  | failing now\n"
        "  log: LOGS/worker_1.log\n"
        "collateral: rank 0 was killed by SIGTERM\n"
    )


def test_what_it_says_is_written_down_with_the_time(msrun):
    job = msrun(*shell("true"))
    assert job.wait() == 0

    lines = (job.logs / "msrun.log").read_text().splitlines()
    times, words = zip(*(line.split(" ", 1) for line in lines), strict=True)
    assert list(words) == job.err.splitlines()
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", at) for at in times)


# In the background.


def pid_of(job):
    return int(re.search(rf"^msrun: {job.name} runs as pid (\d+); ", job.err, re.MULTILINE)[1])


def until_gone(job):
    until(lambda: not job.members(), "for the job in the background to end")


def journal(job):
    lines = (job.logs / "msrun.log").read_text().splitlines()
    return job.mask("".join(line.partition(" ")[2] + "\n" for line in lines))


def test_a_detached_job_goes_on_alone(msrun, gate):
    job = msrun("--join=False", *shell(WAITING))

    assert job.wait() == 0
    until(lambda: job.log() == "up\n", "for the worker")
    assert job.mask(job.err) == (
        run_alone(1) + "msrun: running 1/1 after Ns\n"
        "msrun: JOB runs as pid N; log: LOGS/msrun.log\n"
    )
    gate(1)
    until_gone(job)
    assert job.log() == "up\non\n"
    assert job.verdict()["code"] == 0
    expected = "msrun: running 1/1 after Ns\nmsrun: 1/1 workers finished after Ns\n"
    assert journal(job) == run_alone(1) + expected


def test_a_detached_job_ends_by_its_pid(msrun):
    job = msrun("--join=False", *shell("echo up; exec sleep 600"))
    assert job.wait() == 0
    os.kill(pid_of(job), 15)
    until_gone(job)

    assert job.verdict()["code"] == 143
    assert journal(job).endswith(
        "msrun: SIGTERM: stopping the workers\nerror: stopped by SIGTERM\n"
    )


def test_a_detached_job_that_cannot_start_says_so(msrun, tmp_path):
    job = msrun("--join=False", "--preload", "no_such", script(tmp_path, ""))

    assert job.wait() == 2
    assert job.err.splitlines()[1:] == [
        "error: cannot import no_such: ModuleNotFoundError: No module named 'no_such'"
    ]


def test_a_closed_terminal_does_not_end_a_detached_job(at_terminal, terminal, gate):
    job = at_terminal("--join=False", *shell(WAITING))
    assert job.wait() == 0
    terminal.until_closed()
    terminal.close()
    gate(1)
    until_gone(job)

    assert job.log() == "up\non\n"
    assert job.verdict()["code"] == 0


def test_nothing_of_a_detached_job_holds_on_to_the_terminal(at_terminal, terminal, gate):
    """Whoever waits for the end of the launcher's output is not kept waiting by the job."""
    job = at_terminal("--join=False", *shell(WAITING))
    screen = terminal.until_closed()

    assert job.members()
    assert f"msrun: {job.name} runs as pid" in screen.text()
    gate(1)
    until_gone(job)
