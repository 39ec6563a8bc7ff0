"""torch's file timers and torchelastic's events, beside torchrun."""

from __future__ import annotations

import json
import os
import signal

import pytest
from support import script

pytestmark = [pytest.mark.torch, pytest.mark.process]

TIMED = """
    import os, pathlib, signal, sys, time
    import torch.distributed.elastic.timer as timer

    seconds, signum = float(sys.argv[1]), int(sys.argv[2])
    if signum == signal.SIGTERM:
        signal.signal(signum, lambda *_: sys.exit(3))
    client = timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"], signum)
    timer.configure(client)
    with timer.expires(after=600):
        pathlib.Path("said-0").write_text("in time")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == sys.argv[3]:
        with timer.expires(after=0.3, scope="a step"):
            time.sleep(seconds)
    pathlib.Path("said-1").write_text("to the end")
"""
ENABLED = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}


@pytest.mark.slow
def test_timers_that_are_released_in_time_do_nothing(both, tmp_path):
    sides = both([script(tmp_path, TIMED), "0", "9", "0"], env=ENABLED)

    assert [side.process.returncode for side in sides] == [0, 0]
    assert [side.written() for side in sides] == [["in time", "to the end"]] * 2
    assert "has expired" not in sides[0].err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("signum", "ours"), [(signal.SIGKILL, 137), (signal.SIGTERM, 3)], ids=["kill", "term"]
)
def test_a_timer_that_expires_ends_its_worker(both, tmp_path, signum, ours):
    """On purpose: torchrun sends the signal to itself too, and dies of it."""
    program = script(tmp_path, TIMED)
    sides = both([program, "600", str(int(signum)), "0"], env=ENABLED)

    assert sides[0].process.returncode == ours
    assert sides[1].process.returncode != 0
    assert [side.written() for side in sides] == [["in time"]] * 2
    assert f"timer 'a step' has expired; it gets {signum.name}" in sides[0].err


def test_a_job_whose_timer_has_expired_starts_again(launch, tmp_path):
    words = ["--max-restarts=1", script(tmp_path, TIMED), "600", "9", "0"]
    side = launch("msrun", words, env=ENABLED)

    assert side.wait() == 0
    assert side.written() == ["in time", "to the end"]


def test_a_timer_without_a_signal_is_only_told(launch, tmp_path):
    side = launch("msrun", [script(tmp_path, TIMED), "1.5", "0", "0"], env=ENABLED)

    assert side.wait() == 0
    assert "timer 'a step' has expired; it gets no signal" in side.err


@pytest.mark.parametrize("name", ["timers", "no/such/folder", "file"])
def test_the_file_may_be_named(launch, tmp_path, name):
    (tmp_path / "file").touch()
    path = tmp_path / name
    env = ENABLED | {"TORCHELASTIC_TIMER_FILE": str(path)}
    side = launch("msrun", [script(tmp_path, TIMED), "0", "9", "0"], env=env)

    assert side.wait() == (0 if name == "timers" else 2)
    if name != "timers":
        assert f"error: environment TORCHELASTIC_TIMER_FILE={path} " in side.err


GARBAGE = """
    import json, os, sys
    about = {"pid": os.getpid(), "scope_id": "x", "expiration_time": 0.0, "signal": 9}
    bad = [b"", b"x", b"[]", b"[" * 3000, b"{}", b'{"pid": "a"}', bytes(range(32, 256)),
        *(json.dumps({**about, **odd}).encode() for odd in (
            {"pid": 10**30}, {"pid": -1}, {"pid": 0}, {"pid": 4194304}, {"signal": 10**9},
            {"expiration_time": float("nan")}, {"expiration_time": float("-inf")}))]
    for line in bad:
        with open(os.environ["TORCHELASTIC_TIMER_FILE"], "wb", buffering=0) as file:
            file.write(line + b"\\n")
    with open("said-0", "w") as file:
        file.write("alive")
"""


def test_what_is_no_request_is_dropped(launch, tmp_path):
    side = launch("msrun", [script(tmp_path, GARBAGE)], env=ENABLED)

    assert side.wait() == 0
    assert side.written() == ["alive"]


@pytest.mark.slow
def test_without_the_variable_there_is_no_file(both, tmp_path):
    shows = "import os\nopen('said-0', 'w').write(os.environ.get('TORCHELASTIC_TIMER_FILE', 'no'))"
    sides = both([script(tmp_path, shows)])

    assert [side.written() for side in sides] == [["no"]] * 2


FAILS = """
    import os, sys, time
    if os.environ["RANK"] == "0":
        sys.exit(int(sys.argv[1]))
    time.sleep(600 * bool(int(sys.argv[1])))
"""


def events(side):
    """Return the events on a console as name, source, rank and exit code; and all of their keys."""
    found = [json.loads(line) for line in side.err.splitlines() if line.startswith('{"name":')]
    told = [
        (
            event["name"],
            event["source"],
            event["metadata"]["global_rank"],
            json.loads(event["metadata"]["metadata"]).get("exit_code"),
        )
        for event in found
        if event["metadata"]["duration_ms"] is None  # torch's own phases
    ]
    keys = {(*event, *event["metadata"]) for event in found}
    return sorted(told, key=repr), keys


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_events_are_torchelastics(both, tmp_path, code):
    words = ["--event-log-handler=console", "--nproc-per-node=2", script(tmp_path, FAILS), code]
    (ours, our_keys), (theirs, their_keys) = map(events, both(words))

    assert ours == theirs
    assert our_keys == their_keys


def test_events_are_not_shown_unless_they_are_asked_for(launch, tmp_path):
    side = launch("msrun", [script(tmp_path, FAILS), "0"], env=dict(os.environ))

    assert side.wait() == 0
    assert events(side)[0] == []
