"""Processes of ours that are frozen: when they are woken, and when they are given up."""

from msrun.cluster.liveness.heartbeat import (
    SILENT_SECONDS,
    STOPPED_SECONDS,
    Finding,
    HelperLife,
    Wakefulness,
)


def looks(life, states, *, first=0.0, awake_since=0.0):
    """Look once a second; return the time of each finding."""
    found = {}
    for number, state in enumerate(states):
        now = first + number
        if finding := life.look(state, now=now, awake_since=awake_since):
            found[now] = finding
    return found


def test_one_that_stays_stopped_is_woken_again_and_again():
    assert looks(HelperLife(), "T" * 12) == {5.0: Finding.WAKE, 10.0: Finding.WAKE}
    assert STOPPED_SECONDS == 5.0


def test_one_that_is_stopped_for_a_moment_is_left_alone():
    assert looks(HelperLife(), "TTTTSTTTTS") == {}


def test_one_that_does_not_answer_is_given_up_once():
    life = HelperLife(heard_at=2.0)

    assert looks(life, "S" * 60) == {2.0 + SILENT_SECONDS: Finding.GIVE_UP}
    assert life.silence(now=60.0) == 58.0


def test_one_that_answers_is_not():
    life = HelperLife(heard_at=0.0)
    for second in range(60):
        life.hear(now=second)
        assert life.look("D", now=second + 1, awake_since=0.0) is None


def test_one_that_cannot_be_asked_yet_is_not():
    assert looks(HelperLife(), "S" * 60) == {}


def test_a_debugger_and_its_own_end_excuse_one():
    for excused in ("t", "Z", None):
        assert looks(HelperLife(heard_at=0.0), [excused] * 60) == {}


def test_the_time_in_which_the_agent_did_not_run_does_not_count():
    awake = Wakefulness()
    assert [awake.look(now=now) for now in (100.0, 101.0, 102.0)] == [100.0] * 3
    assert awake.look(now=400.0) == 400.0

    life = HelperLife(heard_at=102.0)
    assert life.look("S", now=400.0, awake_since=400.0) is None
    assert life.look("S", now=421.0, awake_since=400.0) is Finding.GIVE_UP
    stopped = HelperLife()
    assert stopped.look("T", now=102.0, awake_since=100.0) is None
    assert stopped.look("T", now=400.0, awake_since=400.0) is None
