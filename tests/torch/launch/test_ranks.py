"""Ranks that stay for the next test are what new ones would be, and none stays after a failure."""

import itertools
import multiprocessing
import os
import time
import warnings
from pathlib import Path

import psutil
import pytest
from ranks import WAITED_MAX, _collect, run_warm

import msrun

pytestmark = pytest.mark.torch


def surroundings():
    """Return what this rank finds, and leave other things behind."""
    found = Path.cwd(), os.environ.get("OF_THE_TEST"), os.environ["RANK"], list(warnings.filters)
    os.chdir("/")
    os.environ["OF_THE_TEST"] = "left"
    warnings.simplefilter("ignore")
    msrun.init()
    return found


@pytest.mark.filterwarnings("ignore:nothing says this")
def test_a_rank_finds_what_its_test_does(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setenv("OF_THE_TEST", name)
        expected = [(tmp_path / name, name, rank, warnings.filters) for rank in "01"]

        assert run_warm(surroundings, 2) == expected


def pids():
    return os.getpid()


def fail_on_last():
    assert os.environ["RANK"] == "0", "of the last rank alone"


def test_ranks_stay_and_are_stopped_meanwhile_until_one_fails():
    first = run_warm(pids, 2)
    for pid in first:  # else it waits for ever
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    assert run_warm(pids, 2) == first

    with pytest.raises(pytest.fail.Exception) as caught:
        run_warm(fail_on_last, 2)
    assert caught.value.msg.startswith("rank 1: ")
    assert "AssertionError: of the last rank alone" in caught.value.msg
    assert not any(map(psutil.pid_exists, first))
    assert set(run_warm(pids, 2)).isdisjoint(first)


@pytest.mark.parametrize("waited", [0.0, 0.2])
def test_the_wait_for_a_core_does_not_count_as_late(waited):
    here, there = multiprocessing.Pipe()
    seconds = itertools.chain([5.0], itertools.repeat(5.0 + waited))
    begin = time.monotonic()
    answers = _collect([here], 0.05, lambda: next(seconds))
    took = time.monotonic() - begin
    there.close()
    here.close()

    assert answers == [(False, "did not return in time")]
    assert took >= 0.05 + waited
    assert WAITED_MAX < 60
