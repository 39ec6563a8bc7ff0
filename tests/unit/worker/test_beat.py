"""Beats: counted where an agent finds them, and nothing without one."""

import os
import stat
import subprocess
import sys
import time

import pytest

import msrun
from msrun.worker.beat import LAYOUT

COUNT = """
import sys, msrun
for _ in range(3):
    msrun.beat()
assert not {"torch", "zmq"} & set(sys.modules)
"""
# A beat costs as much as a few calls of functions, and no system call.
TIMED = """
import timeit, msrun
msrun.beat()
print(min(timeit.repeat(msrun.beat, number=20_000, repeat=5)) / 20_000)
"""


def run(code, folder, **changes):
    """Run `code` as worker 3 of generation 1 below `folder`."""
    env = {**os.environ, "MSRUN_RUN_DIR": str(folder), "MSRUN_GENERATION": "1", "RANK_ID": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | changes,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "g1").mkdir()
    return tmp_path


def test_beats_are_counted(folder):
    before = time.monotonic_ns()
    run(COUNT, folder)

    path = folder / "g1" / "beat_3"
    count, when = LAYOUT.unpack(path.read_bytes())
    assert count == 3
    assert before < when < time.monotonic_ns()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "changes",
    [
        {"MSRUN_RUN_DIR": ""},
        {"MSRUN_GENERATION": ""},
        {"RANK_ID": "../../beat"},
        {"MSRUN_RUN_DIR": "/nowhere"},
    ],
)
def test_without_a_job_nothing_happens(folder, changes):
    run(COUNT, folder, **changes)

    assert list((folder / "g1").iterdir()) == []


def test_nobody_leads_it_elsewhere(folder):
    target = folder / "other"
    target.write_bytes(b"precious")
    (folder / "g1" / "beat_3").symlink_to(target)
    run(COUNT, folder)

    assert target.read_bytes() == b"precious"


def test_a_launcher_inside_a_worker_beats_for_the_worker(folder):
    run(COUNT, folder, RANK="0", WORLD_SIZE="8", LOCAL_RANK="0")

    assert sorted(path.name for path in (folder / "g1").iterdir()) == ["ask_3", "beat_3"]


def test_it_costs_nearly_nothing(folder):
    # Ten times what it takes, for a busy machine.
    assert float(run(TIMED, folder)) < 10e-6


def test_there_is_nothing_else_to_import_late():
    with pytest.raises(AttributeError, match="module 'msrun' has no attribute 'beet'"):
        _ = msrun.beet
