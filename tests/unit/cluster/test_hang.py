"""When a worker makes no progress."""

import math

import pytest

from msrun.cluster.liveness.hang import IDLE, QUIET, Hang, HangWatch, Sign, WorkDone


def look(watch, *, until, beats=(), cpu=lambda _: None, since=0):
    """Look each second from `since` to `until` at rank 0, which beats at `beats`."""
    found = []
    for now in range(since, until + 1):
        beat_at = max((at for at in beats if at <= now), default=None)
        found += watch.look([Sign(0, beat_at, cpu(now))], now=now)
    return found


def test_a_worker_that_never_beat_does_not_hang():
    assert look(HangWatch(), until=10_000) == []


def test_a_worker_is_quiet_a_minute_after_its_last_beat():
    watch = HangWatch()

    assert look(watch, until=64, beats=[1, 3, 5]) == []
    assert look(watch, since=65, until=65, beats=[5]) == [Hang(0, 60, QUIET)]


def test_it_is_told_once():
    assert len(look(HangWatch(), until=500, beats=[5])) == 1


def test_it_is_told_again_to_a_scheduler_that_may_not_know():
    watch = HangWatch()
    look(watch, until=100, beats=[5])
    watch.tell_again()

    assert look(watch, since=101, until=101, beats=[5]) == [Hang(0, 96, QUIET)]


def test_long_steps_make_a_long_patience():
    watch = HangWatch()

    assert look(watch, until=269, beats=[0, 20, 60, 70]) == []
    assert watch.limit(0) == 200
    assert look(watch, since=270, until=270, beats=[70]) == [Hang(0, 200, QUIET)]


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


def at_work(watch, work, *, until, beats=(5,), never=False):
    """Look each second at rank 0, which beats, and at rank 1, which never does if it exists."""
    found = []
    for now in range(until + 1):
        beat_at = max((at for at in beats if at <= now), default=None)
        signs = [Sign(0, beat_at, work=work(now) if watch.needs_work(0, now=now) else None)]
        if never:
            signs.append(Sign(1, None, work=work(now) if watch.needs_work(1, now=now) else None))
        found += [(now, hang.rank, hang.sign) for hang in watch.look(signs, now=now)]
    return found


@pytest.mark.parametrize(
    "work",
    [
        lambda now: WorkDone(cpu=now * 0.5, wakes=0),  # evaluation, or compilation in a child
        lambda now: WorkDone(cpu=now * 0.005, wakes=now * 10),  # a download
        lambda _: WorkDone(cpu=0, wakes=0, goes_on=True),  # a save to a slow disk, a sleep
        lambda now: WorkDone(cpu=0, wakes=0, moved=int(now * 5000)),  # another thread downloads
        lambda now: WorkDone(cpu=100 - now % 70, wakes=0),  # children come and go
    ],
)
def test_one_that_works_is_quiet_and_no_more(work):
    assert at_work(HangWatch(), work, until=1000) == [(65, 0, QUIET)]


def test_one_that_does_no_work_says_so_again_and_again():
    """Threads that wait for messages use a little CPU time, and a look at the stack wakes it."""
    found = at_work(HangWatch(), lambda now: WorkDone(cpu=now * 0.009, wakes=now // 20), until=160)

    assert found == [(65, 0, QUIET), (95, 0, IDLE), (125, 0, IDLE), (155, 0, IDLE)]


def test_one_that_never_beat_is_looked_at_where_another_did():
    found = at_work(HangWatch(), lambda _: WorkDone(0, 0), until=100, never=True)

    assert [entry for entry in found if entry[1] == 1] == [(66, 1, IDLE), (96, 1, IDLE)]
    assert at_work(HangWatch(), lambda _: WorkDone(0, 0), until=999, beats=(), never=True) == []


def test_work_costs_nothing_while_a_worker_beats():
    watch = HangWatch()
    asked = []
    at_work(watch, asked.append, until=100, beats=range(0, 100, 10))

    assert asked == []


def test_one_that_goes_on_may_be_quiet_again():
    busy = at_work(HangWatch(), lambda now: WorkDone(now, 0), until=1000, beats=(5, 100))

    assert busy == [(65, 0, QUIET), (575, 0, QUIET)]


def test_a_time_that_is_given_needs_no_work():
    watch = HangWatch(timeout=30)

    assert at_work(watch, pytest.fail, until=100) == [(35, 0, "beat")]
