"""`--log-limit`: logs of workers that write without end, and who follows them meanwhile."""

import os
import re
import signal
import subprocess
import sys

import pytest
from support import PATIENCE, environment, script, shell, until

pytestmark = pytest.mark.process

MIB = 1 << 20
LEFT_OUT = re.compile(r"\[msrun\] (\d+) bytes are left out: --log-limit")
# 14 bytes a line, half as much again as the limit allows.
LINES = 120_000
ROUNDS = f"""
    for round in 1 2 3; do
        seq -f "r$round %09.0f x" 1 {LINES}
        until [ -e go$round ]; do sleep 0.01; done
    done
    echo end
"""


def space(path):
    return path.stat().st_blocks * 512


def go_on(job, path, rounds=(1, 2, 3)):
    """Let the workers write one round after the other, each time once their log was cut."""
    for number in rounds:
        last = f"r{number} {LINES:09d} x".encode()
        until(lambda last=last: path.exists() and last in end(path), "for the end of a round")
        until(lambda: space(path) <= MIB, f"for the cut after round {number}")
        (job.folder / f"go{number}").touch()


def end(path):
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        return file.read()


def check(text, size):
    """Check that `text` is the first and the last lines of `size` bytes, with a note between."""
    lines = text.splitlines()
    (at,) = (n for n, line in enumerate(lines) if LEFT_OUT.fullmatch(line))
    note = lines[at] + "\n"
    assert len(text) <= MIB
    assert len(text) >= MIB // 2
    assert len(text) - len(note) + int(LEFT_OUT.fullmatch(lines[at])[1]) == size
    every = [f"r{number} {n:09d} x" for number in (1, 2, 3) for n in range(1, LINES + 1)] + ["end"]
    assert lines[:at] == every[:at]
    assert at > 1000
    assert lines[at + 1 :] == every[at + 1 - len(lines) :]


TOTAL = 3 * LINES * len("r1 000000001 x\n") + len("end\n")


def test_a_log_keeps_its_beginning_and_its_newest_lines(msrun):
    job = msrun("--log-limit", "1MiB", "--tail", "none", *shell(ROUNDS))
    go_on(job, job.logs / "worker_0.log")

    assert job.wait() == 0
    check(job.log(), TOTAL)
    assert job.err.count("warning: rank 0 has reached --log-limit 1MiB") == 1
    assert "worker_0.log keeps its beginning and its newest lines" in job.err
    names = ["msrun.log", "scheduler.log", "verdict.json", "worker_0.log"]
    assert sorted(path.name for path in job.logs.iterdir()) == names
    assert (job.logs / "worker_0.log").stat().st_mode & 0o777 == 0o600


def test_a_log_below_its_limit_is_whole(msrun):
    job = msrun("--log-limit", "10MiB", "--tail", "none", *shell("seq 1 100000"))

    assert job.wait() == 0
    assert job.log().splitlines() == [str(n) for n in range(1, 100_001)]
    assert "--log-limit" not in job.err


def test_what_was_written_since_the_last_look_is_cut_at_the_end(msrun):
    job = msrun("--log-limit", "1MiB", "--tail", "none", *shell("seq 1 1000000"))

    assert job.wait() == 0
    assert len(job.log()) <= MIB
    assert job.log().splitlines()[0] == "1"
    assert job.log().splitlines()[-1] == "1000000"


def test_streams_with_files_of_their_own_are_bounded_together(msrun):
    program = ROUNDS.replace("seq -f", f"seq 1 {LINES} >&2; seq -f")
    job = msrun("--log-limit", "1MiB", "-r", "3", *shell(program))
    go_on(job, job.logs / "worker_0.out")

    assert job.wait() == 0
    out, err = ((job.logs / f"worker_0.{name}").read_text() for name in ("out", "err"))
    assert len(out) + len(err) <= MIB
    assert len(LEFT_OUT.findall(out)) == len(LEFT_OUT.findall(err)) == 1
    assert (out.splitlines()[0], out.splitlines()[-1]) == ("r1 000000001 x", "end")
    assert (err.splitlines()[0], err.splitlines()[-1]) == ("1", str(LINES))


def test_the_console_shows_everything_or_says_what_it_missed(msrun):
    job = msrun("--log-limit", "1MiB", "--tail", "0", *shell(ROUNDS))
    go_on(job, job.logs / "worker_0.log")

    assert job.wait() == 0
    assert "\0" not in job.out
    assert "\\x00" not in job.out
    shown = [line.removeprefix("[rank 0] ") for line in job.out.splitlines()]
    assert shown[0] == "r1 000000001 x"
    assert shown[-1] == "end"
    missed = sum(int(note[1]) for line in shown if (note := LEFT_OUT.fullmatch(line)))
    said = sum(len(line) + 1 for line in shown if not LEFT_OUT.fullmatch(line))
    # A line may be cut in the midst, and then has an end of its own.
    assert 0 <= said + missed - TOTAL <= len(shown) // 1000 + 10


def test_logs_follow_over_a_cut(msrun, runtime):
    job = msrun("--log-limit", "1MiB", "--tail", "none", *shell(ROUNDS))
    job.until_logged("r1")
    path, shown = job.logs / "worker_0.log", job.folder / "shown"
    with shown.open("wb") as file:
        follow = subprocess.Popen(
            [sys.executable, "-m", "msrun", "logs", "--follow", "--lines", "10", job.name],
            env=environment(runtime),
            stdout=file,
            stderr=subprocess.DEVNULL,
        )
    until(lambda: shown.stat().st_size, "for the first lines")
    follow.send_signal(signal.SIGSTOP)
    go_on(job, path, rounds=[1, 2])
    until(lambda: f"r3 {LINES:09d} x".encode() in end(path), "for the end of round 3")
    follow.send_signal(signal.SIGCONT)
    until(lambda: f"r3 {LINES:09d} x".encode() in end(shown), "for round 3 to be shown")
    (job.folder / "go3").touch()

    assert job.wait() == 0
    follow.wait(PATIENCE)
    lines = shown.read_text().splitlines()
    assert "\\x00" not in shown.read_text()
    assert any(map(LEFT_OUT.fullmatch, lines))


def test_a_later_generation_goes_on_below_the_limit(msrun):
    program = f"""
        seq 1 {LINES}
        [ "$MSRUN_GENERATION" = 1 ] || exit 3
        echo end
    """
    job = msrun("--log-limit", "1MiB", "--max-restarts", "1", *shell(program))

    assert job.wait() == 0
    assert len(job.log()) <= MIB
    assert job.log().splitlines()[0] == "1"
    assert job.log().splitlines()[-1] == "end"
    assert len(LEFT_OUT.findall(job.log())) == 1


def test_an_emptied_log_is_filled_anew(msrun):
    job = msrun("--log-limit", "1MiB", "--tail", "none", *shell(ROUNDS))
    path = job.logs / "worker_0.log"
    go_on(job, path, rounds=[1])
    os.truncate(path, 0)
    (job.folder / "go2").touch()
    (job.folder / "go3").touch()

    assert job.wait() == 0
    assert len(job.log()) <= MIB
    assert job.log().splitlines()[-1] == "end"


def test_samples_of_streams_that_take_turns_do_not_fill_the_private_directory(msrun, tmp_path):
    program = """
        import os, sys
        from pathlib import Path
        for n in range(100_000):
            sys.stdout.write("o\\n")
            sys.stderr.write("e\\n")
        print("written")
        while not os.path.exists("go"):
            pass
    """
    job = msrun("--tail", "0", "--start-method", "exec", script(tmp_path, program))
    job.until_logged("written")
    (samples,) = job.run_dir.glob("g0/samples*")
    until(lambda: samples.stat().st_size > 2 * MIB, "for the samples")
    until(lambda: space(samples) < 2 * MIB, f"for their space, {space(samples)}")
    (job.folder / "go").touch()

    assert job.wait() == 0
    assert job.out.count("o\n") == 100_000


@pytest.mark.parametrize("size", ["4kB", "100", "much", "-1"])
def test_a_limit_that_is_none_is_refused(msrun, size):
    job = msrun("--log-limit", size, *shell("true"))

    assert job.wait() == 2
    assert f"--log-limit: '{size}'" in job.err or f"--log-limit '{size}'" in job.err
