"""Where the output of workers and of the launcher goes, whoever reads it or does not."""

import contextlib
import os
import signal
import stat
import subprocess
import time

import pytest
from support import PATIENCE, script, shell

pytestmark = pytest.mark.process

LINE_CHARS_MAX = 4200  # as shown, with prefix and the count of what is left out


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_logs_are_private_files_in_a_private_directory(msrun):
    job = msrun("--workers-per-node", 2, *shell("umask 0; echo $RANK"))

    assert job.wait() == 0
    names = ["msrun.log", "scheduler.log", "verdict.json", "worker_0.log", "worker_1.log"]
    assert sorted(path.name for path in job.logs.iterdir()) == names
    assert {mode(path) for path in job.logs.iterdir()} == {0o600}
    assert mode(job.logs) == 0o700


def test_a_log_may_be_named_by_rank_host_and_address(msrun):
    pattern = "w-{rank}-of-{host}-{ip}"
    job = msrun("--workers-per-node", 2, "--worker-log-name", pattern, *shell("echo $RANK"))

    assert job.wait() == 0
    for rank in (0, 1):
        (log,) = job.logs.glob(f"w-{rank}-of-{os.uname().nodename}-*.log")
        assert log.read_text() == f"{rank}\n"


def test_a_job_that_is_run_again_has_a_log_of_its_own(msrun, tmp_path):
    for text in ("first", "second"):
        job = msrun("--job-id", "train", "--log-dir", tmp_path / "logs", *shell(f"echo {text}"))
        assert job.wait() == 0

    assert (tmp_path / "logs" / "worker_0.log").read_text() == "second\n"


def test_chosen_ranks_show_on_the_console_line_by_line_and_harmless(msrun):
    program = r"""
        printf 'rank %s: \033[31mred\033[0m\007\n' $RANK
        printf 'half a line'
    """
    job = msrun("--workers-per-node", 3, "--tail", "1-2", *shell(program))

    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == [
        "[rank 1] half a line",
        "[rank 1] rank 1: \x1b[31mred\x1b[0m\\x07",
        "[rank 2] half a line",
        "[rank 2] rank 2: \x1b[31mred\x1b[0m\\x07",
    ]


def test_a_pipe_shows_every_worker_of_a_small_job(msrun):
    job = msrun("--workers-per-node", 3, *shell('echo "out $RANK"; echo "err $RANK" >&2'))

    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == [f"[rank {rank}] out {rank}" for rank in range(3)]
    shown = [line for line in job.err.splitlines() if line.startswith("[rank")]
    assert sorted(shown) == [f"[rank {rank}] err {rank}" for rank in range(3)]


def test_a_pipe_shows_no_worker_if_so_asked(msrun):
    job = msrun("--tail", "none", *shell("echo secretly"))

    assert job.wait() == 0
    assert job.out == ""


def test_an_endless_line_is_whole_in_the_log_and_capped_on_the_console(msrun):
    size = 5_000_000
    job = msrun("--tail", 0, *shell(f"head -c {size} /dev/zero | tr '\\0' x; echo; echo end"))

    assert job.wait() == 0
    assert job.log() == "x" * size + "\nend\n"
    assert max(map(len, job.out.splitlines())) < LINE_CHARS_MAX
    assert len(job.out) < size / 10
    assert job.out.endswith("[rank 0] end\n")


MUCH = "head -c 2000000 /dev/zero | tr '\\0' '\\n'; head -c 200000 /dev/zero | tr '\\0' x"


def test_a_reader_that_stops_reading_does_not_hold_the_job_up(msrun):
    reading, writing = os.pipe()
    job = msrun("--tail", 0, *shell(MUCH), stdout=writing, stderr=writing)
    os.close(writing)

    assert job.wait() == 0
    assert job.verdict()["code"] == 0
    os.close(reading)


def test_a_full_console_holds_up_neither_a_restart_nor_a_stop(msrun):
    """Standard error takes nothing from the start, and nobody ever reads it."""
    reading, writing = os.pipe()
    fill(writing)
    program = '[ "$MSRUN_GENERATION" = 1 ] || exit 3; echo up; exec sleep 600'
    job = msrun("--max-restarts", 1, *shell(program), stderr=writing)
    os.close(writing)
    job.until_logged("up")
    began = time.monotonic()
    job.send(signal.SIGTERM)

    assert job.wait() == 143
    assert time.monotonic() - began < 1
    os.close(reading)


def fill(pipe):
    """Write to `pipe` until it takes not one byte more."""
    os.set_blocking(pipe, False)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while os.write(pipe, b"x" * size):
                pass
    os.set_blocking(pipe, True)


def test_a_reader_that_leaves_is_no_failure(msrun):
    reading, writing = os.pipe()
    job = msrun("--tail", 0, *shell(MUCH), stdout=writing, stderr=writing)
    os.close(writing)
    os.close(reading)

    assert job.wait() == 0


def test_closed_standard_streams_are_survived(msrun):
    """Nor do the launcher's own files and sockets take their numbers."""
    close = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    job = msrun(
        "--workers-per-node", 2, *shell("echo to stdout; echo to stderr >&2"), wrapper=close
    )

    assert job.wait() == 0
    assert job.log(0) == job.log(1) == "to stdout\nto stderr\n"
    assert "finished" in (job.logs / "msrun.log").read_text()


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_the_last_line_of_a_killed_python_rank_is_in_its_log(msrun, tmp_path, method):
    """Nobody flushed it."""
    program = """
        import os, signal
        print("last words", end="")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    job = msrun("--start-method", method, script(tmp_path, program))

    assert job.wait() == 137
    assert job.log() == "last words"
    assert "  | last words\n" in job.block()


# Prints more than its disk takes, then makes room and prints on.
FLOOD = """
    import os, pathlib
    filler = pathlib.Path(os.environ["FILLER"])
    filler.write_bytes(bytes(150_000))
    for number in range(20_000):
        print("line", number, "of many")
    filler.unlink()
    print("there is space again")
"""


def test_a_full_disk_kills_no_rank_and_what_is_lost_is_counted(msrun, tmp_path):
    if subprocess.run(["unshare", "-m", "true"], timeout=PATIENCE, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    mount = (
        f"mount -t tmpfs -o size=256k,mode=700 none {disk} || exit 99\n"
        f'"$@"; code=$?; cp -r {disk} {kept}; exit $code'
    )
    job = msrun(
        "--log-dir",
        disk,
        "--start-method",
        "exec",
        script(tmp_path, FLOOD),
        wrapper=["unshare", "-m", "sh", "-c", mount, "sh"],
        env={"FILLER": str(disk / "filler")},
    )

    assert job.wait() == 0
    before, after = (kept / "worker_0.log").read_text().split("[msrun] ")
    whole = "".join(f"line {number} of many\n" for number in range(20_000))
    assert whole.startswith(before)
    lost = len(whole) - len(before)
    assert after == f"{lost} bytes lost: the log's disk was full\nthere is space again\n"


def test_a_chosen_rank_is_followed_while_the_job_runs(msrun):
    """What a worker writes shows before the job ends."""
    reading, writing = os.pipe()
    program = "echo first; until [ -e go ]; do sleep 0.01; done; echo last"
    job = msrun("--tail", 0, *shell(program), stdout=writing)
    os.close(writing)
    with os.fdopen(reading) as shown:
        assert shown.readline() == "[rank 0] first\n"
        (job.folder / "go").touch()
        assert shown.read() == "[rank 0] last\n"

    assert job.wait() == 0
