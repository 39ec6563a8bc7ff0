"""From a failed generation to the next: how soon, after what, and when not any more."""

import statistics
import time

import psutil
import pytest
from support import kill, script, shell, until

pytestmark = pytest.mark.process


def generation(number):
    """Return a shell condition that holds in generation `number`."""
    return f'[ "$MSRUN_GENERATION" = {number} ]'


def test_every_rank_starts_again_with_its_rank_and_the_next_generation(msrun):
    program = f'echo "rank $RANK of $WORLD_SIZE, restart $TORCHELASTIC_RESTART_COUNT"\n{FAIL_ONCE}'
    job = msrun("--workers-per-node", 2, "--max-restarts", 1, *shell(program))

    assert job.wait() == 0
    for rank in (0, 1):
        assert job.log(rank) == (
            f"rank {rank} of 2, restart 0\n"
            "[msrun] generation 1 starts here\n"
            f"rank {rank} of 2, restart 1\n"
        )
    assert job.mask(job.err) == (
        "msrun: JOB: 2 workers on HOST, contained by CONTAINMENT; logs: LOGS\n"
        "msrun: running 2/2 after Ns\n"
        "warning: rank 1 (node HOST, local_rank 1, pid N) exited with code 4 after Ns; "
        "log: LOGS/worker_1.log\n"
        "msrun: restart 1 of 1 now\n"
        "msrun: running 2/2 after Ns\n"
        "msrun: 2/2 workers finished after Ns\n"
    )
    assert job.verdict()["restarts"] == 1


# Rank 1 of generation 0 fails when both ranks have written their line.  Ranks of generation 1 end
# when both run, or msrun would not say that they did.
FAIL_ONCE = f"""
    touch "up-$RANK-$MSRUN_GENERATION"
    if {generation(1)}; then
        until [ -e up-0-1 ] && [ -e up-1-1 ]; do sleep 0.01; done
        exit 0
    fi
    [ "$RANK" = 0 ] && exec sleep 600
    until [ -e up-0-0 ]; do sleep 0.01; done
    exit 4
"""


def test_nothing_of_a_generation_lives_when_the_next_one_starts(msrun):
    """Not what sits in a session of its own, nor what lost its parent."""
    program = f"""
        if {generation(0)}; then
            setsid sleep 600 & echo $! >> family
            (setsid sh -c 'echo $$ >> family; exec sleep 601' &)
            until [ "$(wc -l < family)" = 2 ]; do sleep 0.01; done
            kill -KILL $$
        fi
        for pid in $(cat family); do
            if grep -qs sleep "/proc/$pid/comm"; then echo alive; else echo gone; fi
        done
    """
    job = msrun("--max-restarts", 1, *shell(program))

    assert job.wait() == 0
    assert job.log().splitlines()[1:] == ["gone", "gone"]


LOADERS = """
    import os, signal
    from pathlib import Path
    from torch.utils.data import DataLoader

    family = Path("family")
    if os.environ["MSRUN_GENERATION"] == "0":
        batches = iter(DataLoader(range(1000), num_workers=2))
        next(batches)
        family.write_text(" ".join(str(worker.pid) for worker in batches._workers))
        os.kill(os.getpid(), signal.SIGKILL)
    pids = family.read_text().split()
    print(len(pids), [pid for pid in pids if Path("/proc", pid).exists()])
"""


@pytest.mark.torch
@pytest.mark.thorough
def test_no_data_loader_of_a_killed_rank_lives_when_the_next_generation_starts(msrun, tmp_path):
    """F-09."""
    job = msrun("--max-restarts", 1, script(tmp_path, LOADERS))

    assert job.wait() == 0
    assert job.log().splitlines()[-1] == "2 []"


# Rank 0 writes down when it is asked to stop.
WATCHES = """
    [ "$RANK" = 1 ] && { echo $$ up; exec sleep 600; }
    trap 'date +%s%N; exit 0' TERM
    echo up
    sleep 600 & wait
"""


@pytest.mark.slow  # it measures
def test_a_killed_rank_is_known_within_50_ms(msrun):
    """P9."""
    took = [seconds_to_notice(msrun) for _ in range(10)]

    assert statistics.median(took) <= 0.05, took


def seconds_to_notice(msrun):
    """Return the seconds from the SIGKILL of a worker until another is asked to stop."""
    job = msrun("--workers-per-node", 2, *shell(WATCHES))
    job.until_logged("up", 0, 1)
    job.until_said("msrun: running 2/2")
    worker = psutil.Process(int(job.log(1).split()[0]))
    killed_at = time.time_ns()
    kill(worker)
    assert job.wait() == 137
    return (int(job.log(0).split()[-1]) - killed_at) / 1e9


def test_the_next_generation_starts_within_300_ms_of_a_kill(msrun):
    took = [seconds_to_restart(msrun) for _ in range(10)]

    assert statistics.median(took) <= 0.3, took


def seconds_to_restart(msrun):
    """Return the seconds from the SIGKILL of a worker to the first command of its successor."""
    program = f'echo $$ > "pid-$MSRUN_JOB_ID"; {generation(0)} && exec sleep 600; exit 0'
    job = msrun("--max-restarts", 1, *shell(program))
    pid_file = job.folder / f"pid-{job.name}"
    worker = psutil.Process(int(until(lambda: text_of(pid_file), "for the worker's pid")))
    until(lambda: worker.name() == "sleep", "for generation 0 to run")
    killed_at = time.time_ns()
    kill(worker)
    assert job.wait() == 0
    return (pid_file.stat().st_mtime_ns - killed_at) / 1e9


def text_of(path):
    return path.read_text() if path.exists() else ""


def test_equal_early_failures_in_a_row_end_the_job(msrun):
    """The first restart is at once, the second waits, a third is refused: nothing changes."""
    words = ("--max-restarts", 10, "--no-progress-limit", 3)
    job = msrun(*words, *shell("date +%s%N; exit 6"))

    assert job.wait() == 123
    assert job.block() == (
        "error: rank 0 (node HOST, local_rank 0, pid N) exited with code 6 after Ns; "
        "the same early failure came 3 times in a row\n"
        "  last line of its log:\n"
        f"  | {job.log().splitlines()[-1]}\n"
        "  log: LOGS/worker_0.log\n"
        "  hint: correct the cause, or pass --no-progress-limit 0 "
        "to try until the budget is spent\n"
    )
    first, second, third = starts(job)
    assert second - first < 1
    assert "msrun: restart 1 of 10 now\n" in job.err
    assert 1.5 <= third - second < 3
    assert job.verdict()["restarts"] == 2


def test_without_a_no_progress_limit_the_budget_is_spent(msrun):
    job = msrun("--max-restarts", 2, *shell("date +%s%N; exit 6"))

    assert job.wait() == 6
    assert "; the budget of 2 restart(s) is spent" in job.block()
    assert len(starts(job)) == 3


def test_restarts_that_were_asked_for_are_had(msrun):
    """Four equal failures, and the fifth start succeeds: as under torchrun."""
    job = msrun("--max-restarts", 4, *shell('[ "$TORCHELASTIC_RESTART_COUNT" = 4 ] || exit 1'))

    assert job.wait() == 0


def starts(job):
    """Return when the worker's generations started, in seconds."""
    return [int(line) / 1e9 for line in job.log().splitlines() if line.isdigit()]


def test_a_failed_generation_is_stopped_before_the_next(msrun):
    """Ranks that ignore SIGTERM are killed after the grace, then the next generation starts."""
    program = f"""
        trap '' TERM
        {generation(1)} && exit 0
        touch "up-$RANK"
        [ "$RANK" = 1 ] && {{ until [ -e up-0 ]; do sleep 0.01; done; exit 3; }}
        while :; do sleep 0.01; done
    """
    options = ("--workers-per-node", 2, "--max-restarts", 1, "--grace", "0.3s")
    job = msrun(*options, *shell(program))

    assert job.wait() == 0
    assert (job.logs / "worker_0.log").read_text() == "[msrun] generation 1 starts here\n"
