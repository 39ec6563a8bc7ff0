"""Real jobs of which a rank makes no progress: it is found, shown, and the job goes on."""

import time

import psutil
import pytest
from support import script, stalls, until

pytestmark = pytest.mark.process

# All ranks beat as long as the first generation lasts.
BEAT = """
    import os, time
    import msrun

    msrun.beat()
    print(os.getpid())
    while os.environ["MSRUN_GENERATION"] == "0":
        msrun.beat()
        time.sleep(0.05)
    print("done")
"""


def test_a_rank_that_stops_to_beat_is_named_and_the_job_starts_again(msrun, tmp_path):
    words = ["--workers-per-node", 3, "--max-restarts", 1, "--hang-timeout", "2s"]
    job = msrun(*words, stalls(tmp_path, 1))

    assert job.wait(60) == 0

    summary = "  2 ranks (0,2) in all_reduce at stall.py:11; rank 1 in next_batch at stall.py:7\n"
    assert "warning: generation 0 hangs: no beat of rank " in job.err
    assert summary in job.err
    report = (job.logs / "hang_0.txt").read_text()
    assert summary.strip() in report
    assert f"    {tmp_path}/stall.py:7 in next_batch\n" in report
    assert "warning: rank 1 (node " in job.err
    assert ") made no progress for " in job.err
    assert "msrun: restart 1 of 1 now\n" in job.err
    assert [job.log(rank).splitlines()[-1] for rank in range(3)] == ["done"] * 3


def test_without_a_restart_the_job_ends_with_the_code_of_a_hang(msrun, tmp_path):
    words = ["--workers-per-node", 3, "--hang-timeout", "2s"]
    job = msrun(*words, stalls(tmp_path, 1))

    assert job.wait(60) == 124

    assert job.block().startswith(
        "error: rank 1 (node HOST, local_rank 1, pid N) made no progress for Ns and was given up "
        "after Ns\n  last line of its log:\n  | waiting\n"
    )
    root = job.verdict()["root"]
    assert (root["rank"], root["code"], root["signum"]) == (1, None, None)
    assert 2.0 <= root["stalled"] <= root["ran_for"]
    assert root["stalled"] <= 2.0 + 10.0


def test_a_stopped_rank_is_found_although_it_shows_no_stack(msrun, tmp_path):
    """F-11."""
    words = ["--workers-per-node", 2, "--max-restarts", 1, "--hang-timeout", "2s"]
    job = msrun(*words, script(tmp_path, BEAT))
    job.until_logged("\n", 0, 1)
    stopped = psutil.Process(int(job.log(1).split()[0]))
    stopped.suspend()
    until(lambda: stopped.status() == psutil.STATUS_STOPPED, "for the worker to stop")
    stopped_at = time.monotonic()

    assert job.wait(60) == 0
    # The timeout, stacks of all ranks, the next generation.
    assert time.monotonic() - stopped_at <= 2.0 + 10.0
    assert "rank 1 without a stack: it is stopped, by SIGSTOP or a debugger" in job.err
    assert "warning: rank 1 (node " in job.err
    assert job.log(1).endswith("done\n")


IDLE = """
    import os, time

    if os.environ["MSRUN_GENERATION"] == "0" and os.environ["RANK"] == "1":
        time.sleep(600)
    while os.environ["MSRUN_GENERATION"] == "0":
        pass
    print("done")
"""


def test_a_rank_without_cpu_time_hangs_where_that_is_asked_for(msrun, tmp_path):
    words = ["--workers-per-node", 2, "--max-restarts", 1, "--detect-idle", "4s"]
    job = msrun(*words, script(tmp_path, IDLE, "idle.py"))

    assert job.wait(60) == 0

    assert "hangs: no CPU time of rank 1 on node " in job.err
    assert "rank 1 in <module> at idle.py:5" in job.err
    assert [job.log(rank).splitlines()[-1] for rank in range(2)] == ["done"] * 2
