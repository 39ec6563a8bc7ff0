"""Stacks: read from what faulthandler writes, grouped, and the odd one."""

import faulthandler
import tempfile
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.cluster.bounds import RankSet
from msrun.cluster.liveness.stacks import (
    FRAMES_MAX,
    Frame,
    RankStack,
    StackGroup,
    Suspect,
    group,
    parse,
    render,
    summary,
    suspect,
)

DUMP = """\
Thread 0x00007f7e3cdff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f7e4d9fe740 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/distributed/x.py", line 2810 in all_reduce
  File "/home/me/a dir/train.py", line 41 in step
  File "/home/me/a dir/train.py", line 50 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "/x/msrun/worker/main_module.py", line 120 in run
  File "/x/msrun/__main__.py", line 8 in <module>
"""
ALL_REDUCE = Frame("/usr/lib/python3.11/site-packages/torch/distributed/x.py", 2810, "all_reduce")
OPERATOR = Frame("/lib/python3.11/site-packages/torch/_ops.py", 882, "redispatch")
STEP = Frame("/home/me/a dir/train.py", 41, "step")
MAIN = Frame("/home/me/a dir/train.py", 50, "<module>")


def test_the_main_thread_without_those_who_run_it():
    assert parse(DUMP) == (ALL_REDUCE, STEP, MAIN)


@pytest.mark.parametrize(
    "text", ["", "  File", '  File "x", line 99999999999999 in f', "Thread 0x (most recent"]
)
def test_what_is_no_stack_has_no_frames(text):
    assert parse(text) == ()


def test_a_dump_has_a_limit():
    line = f'  File "{"d" * 999}", line 1 in {"f" * 999}\n'
    frames = parse("Current thread 0x1 (most recent call first):\n" + line * 999)

    assert len(frames) == FRAMES_MAX
    assert (len(frames[0].file), len(frames[0].function)) == (120, 60)


@given(st.text())
def test_any_text_may_be_read(text):
    parse(text)


@pytest.mark.parametrize("all_threads", [True, False])
def test_what_this_interpreter_writes_is_read(all_threads):
    started, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (started.set(), done.wait()))
    thread.start()
    started.wait()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=all_threads)
        file.seek(0)
        found = parse(file.read())
    done.set()
    thread.join()

    assert found[0].function == "test_what_this_interpreter_writes_is_read"
    assert found[0].place().startswith("test_stacks.py:")


def rank(number, *frames, problem="", idle=60.0):
    return RankStack(rank=number, frames=frames, problem=problem, idle=idle)


DISTRIBUTED = "/usr/lib/python3.11/site-packages/torch/distributed"
BARRIER = Frame(f"{DISTRIBUTED}/distributed_c10d.py", 5, "monitored_barrier")
STORE = Frame(f"{DISTRIBUTED}/distributed_c10d.py", 5, "_store_based_barrier")
OWN = Frame("/home/me/train.py", 5, "all_reduce")
LOADER = Frame("/home/me/loader.py", 12, "next")


def test_equal_stacks_are_one_group_and_large_groups_come_first():
    stacks = [rank(3, LOADER), *(rank(n, ALL_REDUCE, STEP) for n in (4, 0, 2, 1))]
    stacks.append(rank(5, problem="it is stopped"))

    assert group(stacks) == [
        StackGroup(RankSet.of([0, 1, 2, 4]), [ALL_REDUCE, STEP]),
        StackGroup(RankSet.of([3]), [LOADER]),
        StackGroup(RankSet.of([5]), [], "it is stopped"),
    ]


def test_groups_in_words():
    groups = group([rank(3, LOADER), rank(0, ALL_REDUCE, STEP), rank(1, ALL_REDUCE, STEP)])

    assert summary(groups) == (
        "2 ranks (0-1) in all_reduce at x.py:2810, called at train.py:41; "
        "rank 3 in next at loader.py:12"
    )
    assert render(groups[1:]) == (
        "rank 3 in next at loader.py:12\n    /home/me/loader.py:12 in next"
    )


def test_of_many_groups_not_all_are_named():
    groups = [StackGroup(RankSet.of([n]), [Frame("/x.py", n, "f")]) for n in range(20)]

    assert summary(groups).endswith("; rank 15 in f at x.py:15; and 4 more groups")


@pytest.mark.parametrize(
    ("stacks", "stalled", "expected"),
    [
        ([rank(0, STEP), rank(1, STEP), rank(2, LOADER)], {0: 60, 1: 60, 2: 60}, 2),
        # A rank that still makes progress is somewhere else for good reasons.
        ([rank(0, STEP), rank(1, STEP), rank(2, LOADER, idle=1)], {0: 60, 1: 61}, 1),
        # One that has not been silent for long enough to be reported may still be the one.
        ([rank(0, STEP), rank(1, STEP), rank(2, LOADER, idle=40)], {0: 60, 1: 61}, 2),
        # What is stopped shows no stack, and keeps the others waiting.
        ([rank(0, STEP), rank(1, problem="stopped"), rank(2, problem="stopped")], {0: 60}, 1),
        # All in one place: who came there first.
        ([rank(0, STEP), rank(1, STEP, idle=62), rank(2, STEP)], {0: 60, 1: 62, 2: 60}, 1),
        # A rank that never beat makes no difference.
        ([rank(0, STEP), rank(1, LOADER, idle=0)], {0: 60}, 0),
    ],
)
def test_the_suspect(stacks, stalled, expected):
    assert suspect(stacks, stalled).rank == expected


@pytest.mark.parametrize(
    ("stacks", "stalled", "expected", "is_sure"),
    [
        # The one that waits fell silent first.
        ([rank(0, ALL_REDUCE, STEP, idle=61), rank(1, LOADER)], {0: 61, 1: 60}, 1, True),
        ([rank(0, BARRIER, idle=61), rank(1, LOADER)], {0: 61, 1: 60}, 1, True),
        ([rank(0, STORE, idle=61), rank(1, LOADER)], {0: 61, 1: 60}, 1, True),
        # Through many calls of one operator.
        ([rank(0, *6 * [OPERATOR], ALL_REDUCE), rank(1, LOADER, idle=61)], {1: 61}, 1, True),
        # It goes on and does not come, or never beat.
        ([rank(0, ALL_REDUCE), rank(1, LOADER, idle=1)], {0: 60}, 1, True),
        ([rank(0, ALL_REDUCE), rank(1, LOADER, idle=0)], {0: 60}, 1, True),
        # The smaller group is the one that waits.
        (
            [rank(0, ALL_REDUCE, idle=70), rank(1, LOADER), rank(2, LOADER)],
            {0: 70, 1: 60, 2: 60},
            1,
            False,
        ),
        ([rank(0, ALL_REDUCE), rank(1, problem="it is stopped")], {0: 60}, 1, True),
        # All wait, as in different collectives, or none does: a guess.
        ([rank(0, ALL_REDUCE), rank(1, BARRIER)], {0: 60, 1: 60}, 0, False),
        ([rank(0, STEP), rank(1, LOADER)], {0: 60, 1: 60}, 0, False),
        # A function of the program may have any name.
        ([rank(0, OWN), rank(1, LOADER, idle=61)], {0: 60, 1: 61}, 1, False),
    ],
)
def test_a_rank_that_waits_is_no_suspect(stacks, stalled, expected, is_sure):
    assert suspect(stacks, stalled) == Suspect(expected, is_sure=is_sure)
