"""The private directory of a job is removed, or cannot be made again, while the job runs."""

import os

import pytest
from support import script

pytestmark = pytest.mark.process

REMOVES = """
    import os, shutil, sys
    from pathlib import Path

    folder = Path(os.environ["MSRUN_RUN_DIR"])
    if os.environ["MSRUN_GENERATION"] == "0":
        shutil.rmtree(folder)
        if "blocks" in sys.argv:
            folder.write_text("in its place")
        sys.exit(3)
    print("again in", sorted(path.name for path in folder.iterdir()))
"""


def test_a_removed_directory_is_made_again(msrun, tmp_path):
    job = msrun("--max-restarts", "1", script(tmp_path, REMOVES))

    assert job.wait(60) == 0, job.err
    assert "again in" in job.log(0)


def test_one_that_cannot_be_made_is_a_sentence_and_a_verdict(msrun, tmp_path):
    job = msrun("--max-restarts", "1", script(tmp_path, REMOVES), "blocks")

    assert job.wait(60) == 70
    assert "g1 cannot be made: Not a directory" in job.err
    assert "bug" not in job.err
    verdict = job.verdict()
    assert verdict["code"] == 70
    assert "cannot be made: Not a directory; before that, rank 0" in verdict["reason"]
    assert "exited with code 3" in verdict["reason"]
    [left] = (tmp_path / "run" / "msrun").glob("test-*")  # the script's own
    left.unlink()


FULL = ["unshare", "-m", "sh", "-c"]
# Fills the file system of the private directory until no file can be made there.
FILLS = """
    import itertools, os, sys
    from pathlib import Path

    import msrun

    folder = Path(os.environ["MSRUN_RUN_DIR"])
    if os.environ["MSRUN_GENERATION"] == "0":
        msrun.beat()
        try:
            for number in itertools.count():
                (folder / f"filler{number}").touch()
        except OSError:
            sys.exit(3)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a small file system")
def test_a_full_one_is_a_sentence_and_a_verdict(msrun, tmp_path, runtime):
    mount = f'mount -t tmpfs -o nr_inodes=40,mode=700 tmpfs {runtime} && exec "$@"'
    job = msrun("--max-restarts", "1", script(tmp_path, FILLS), wrapper=[*FULL, mount, "sh"])

    assert job.wait(60) == 70
    assert "g1 cannot be made: No space left on device" in job.err
    assert "bug" not in job.err
    reason = job.verdict()["reason"]
    assert "No space left on device; before that, rank 0 (node " in reason
    assert "exited with code 3" in reason


# With a full disk, the first beat of a worker would end it: the memory behind the file is missing.
BEATS = """
    import os
    from pathlib import Path

    import msrun

    folder = Path(os.environ["MSRUN_RUN_DIR"])
    try:
        with (folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        msrun.beat()
        print("beaten")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a small file system")
def test_a_beat_where_no_space_is_left_ends_no_worker(msrun, tmp_path, runtime):
    mount = f'mount -t tmpfs -o size=512k,mode=700 tmpfs {runtime} && exec "$@"'
    job = msrun(script(tmp_path, BEATS), wrapper=[*FULL, mount, "sh"])

    assert job.wait(60) == 0, job.err
    assert "beaten" in job.log(0)


# Takes the scheduler's log away and ends the scheduler, so that no other can begin.
TAKES = """
    import os, signal, sys, time
    from pathlib import Path

    import psutil

    wal = Path(os.environ["MSRUN_RUN_DIR"], "scheduler.wal")
    [scheduler] = [p for p in psutil.process_iter() if p.name() == "msrun scheduler"
                   and p.environ().get("XDG_RUNTIME_DIR") == os.environ["XDG_RUNTIME_DIR"]]
    scheduler.suspend()
    wal.unlink()
    wal.mkdir()
    print("taken")
    os.kill(scheduler.pid, signal.SIGKILL)
    sys.exit(3)
"""


def test_a_scheduler_that_cannot_go_on_says_why_and_the_first_failure_is_kept(msrun, tmp_path):
    job = msrun("--max-restarts", "1", script(tmp_path, TAKES))

    assert job.wait(60) == 70
    assert "taken" in job.log(0)
    verdict = job.verdict()
    assert "scheduler.wal cannot be opened: " in verdict["reason"]
    assert "before that, rank 0 (node " in verdict["reason"]
    assert (verdict["root"]["rank"], verdict["root"]["code"]) == (0, 3)
    assert "Traceback" not in job.err


# Leaves the launcher no file more than it has open.
LIMITS = """
    import os, resource, sys

    agent = os.getpid()
    for _ in range(3):  # forkserver, reaper, agent
        agent = int(open(f"/proc/{agent}/stat").read().rpartition(")")[2].split()[1])
    count = max(map(int, os.listdir(f"/proc/{agent}/fd"))) + 1
    if os.environ["MSRUN_GENERATION"] == "0":
        resource.prlimit(agent, resource.RLIMIT_NOFILE, (count, count))
        print("limited")
        sys.exit(3)
"""


def test_a_launcher_without_files_leaves_a_verdict(msrun, tmp_path):
    job = msrun("--max-restarts", "1", script(tmp_path, LIMITS))

    assert job.wait(60) == 70
    assert "limited" in job.log(0)
    assert "error: the launcher cannot go on: Too many open files: " in job.err
    assert "bug" not in job.err
    verdict = job.verdict()
    assert verdict["code"] == 70
    assert "Too many open files" in verdict["reason"]
    assert "before that, rank 0 (node " in verdict["reason"]
