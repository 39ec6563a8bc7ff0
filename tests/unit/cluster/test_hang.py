"""When a worker makes no progress."""

import math

import pytest

from msrun.cluster.liveness.hang import Hang, HangWatch, Sign


def look(watch, *, until, beats=(), cpu=lambda _: None, since=0):
    """Look each second from `since` to `until` at rank 0, which beats at `beats`."""
    found = []
    for now in range(since, until + 1):
        beat_at = max((at for at in beats if at <= now), default=None)
        found += watch.look([Sign(0, beat_at, cpu(now))], now=now)
    return found


def test_a_worker_that_never_beat_does_not_hang():
    assert look(HangWatch(), until=10_000) == []


def test_a_worker_hangs_a_minute_after_its_last_beat():
    watch = HangWatch()

    assert look(watch, until=64, beats=[1, 3, 5]) == []
    assert look(watch, since=65, until=65, beats=[5]) == [Hang(0, 60, "beat")]


def test_it_is_told_once():
    assert len(look(HangWatch(), until=500, beats=[5])) == 1


def test_it_is_told_again_to_a_scheduler_that_may_not_know():
    watch = HangWatch()
    look(watch, until=100, beats=[5])
    watch.tell_again()

    assert look(watch, since=101, until=101, beats=[5]) == [Hang(0, 96, "beat")]


def test_long_steps_make_a_long_patience():
    watch = HangWatch()

    assert look(watch, until=269, beats=[0, 20, 60, 70]) == []
    assert watch.limit(0) == 200
    assert look(watch, since=270, until=270, beats=[70]) == [Hang(0, 200, "beat")]


def test_a_time_that_is_given_is_not_learned():
    watch = HangWatch(timeout=3)

    assert look(watch, until=42, beats=[0, 20, 40]) == [Hang(0, 3, "beat")]


def test_off_is_off():
    watch = HangWatch(timeout=math.inf)

    assert look(watch, until=10_000, beats=[5]) == []
    assert not watch.is_on
    assert HangWatch().is_on


def test_each_worker_has_a_patience_of_its_own():
    watch = HangWatch()
    watch.look([Sign(0, 0.0), Sign(1, 0.0)], now=0)
    watch.look([Sign(0, 1.0), Sign(1, 30.0)], now=30)

    assert (watch.limit(0), watch.limit(1), watch.limit(2)) == (60, 150, 60)


@pytest.mark.parametrize("pause", [6, 3600])
def test_the_time_in_which_nobody_looked_does_not_count(pause):
    """As after a suspend, or when agent and workers were stopped together."""
    watch = HangWatch(timeout=4)
    look(watch, until=3, beats=[3])
    woken = 3 + pause

    assert look(watch, since=woken, until=woken + 3, beats=[3]) == []
    assert look(watch, since=woken + 4, until=woken + 4, beats=[3]) == [Hang(0, pause + 4, "beat")]


def test_a_worker_without_cpu_time_hangs_where_that_is_asked_for():
    watch = HangWatch(idle=30)

    assert watch.needs_cpu
    assert look(watch, until=39, cpu=lambda now: min(now, 10)) == []
    assert look(watch, since=40, until=40, cpu=lambda _: 10) == [Hang(0, 30, "CPU time")]


@pytest.mark.parametrize(("share", "hangs"), [(0.005, True), (0.02, False)])
def test_threads_that_only_wait_are_no_progress(share, hangs):
    found = look(HangWatch(idle=100), until=1000, cpu=lambda now: now * share)

    assert bool(found) is hangs


def test_how_long_a_worker_has_been_silent():
    watch = HangWatch()
    look(watch, until=10, beats=[4])

    assert (watch.silence(0, now=10), watch.silence(1, now=10)) == (6, 0)
