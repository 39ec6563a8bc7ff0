"""When a generation may start, and until when its nodes are waited for."""

import math

import pytest

from msrun.cluster.scheduler.forming import HEARING_SECONDS, WAITING_SECONDS, Forming


@pytest.fixture
def forming():
    return Forming(join_timeout=60.0, last_call=5.0, give_up_at=60.0)


def test_a_full_cluster_starts_at_once(forming):
    assert forming.is_due(is_enough=True, is_full=True, now=1.0)


def test_an_open_cluster_starts_after_the_last_call(forming):
    assert not forming.is_due(is_enough=True, is_full=False, now=1.0)
    assert forming.deadline(is_full=False) == 6.0
    assert not forming.is_due(is_enough=True, is_full=False, now=5.9)
    assert forming.is_due(is_enough=True, is_full=False, now=6.0)


def test_the_last_call_begins_anew_when_one_goes(forming):
    forming.is_due(is_enough=True, is_full=False, now=1.0)
    assert not forming.is_due(is_enough=False, is_full=False, now=2.0)
    assert forming.deadline(is_full=False) == 60.0
    assert not forming.is_due(is_enough=True, is_full=False, now=7.0)
    assert forming.is_due(is_enough=True, is_full=False, now=12.0)


def test_later_generations_wait_for_their_pause_and_no_last_call(forming):
    forming.again(20.0, now=15.0)

    assert not forming.is_due(is_enough=True, is_full=True, now=15.0)
    assert forming.deadline(is_full=True) == 15.0 + WAITING_SECONDS
    assert forming.is_due(is_enough=True, is_full=False, now=20.0)


def test_nobody_is_waited_for_after_the_deadline(forming):
    assert not forming.is_over(now=59.9)
    assert forming.is_over(now=60.0)
    forming.again(70.0, now=65.0)
    assert not forming.is_over(now=129.9)
    assert forming.is_over(now=130.0)


def test_who_came_while_the_scheduler_was_frozen_is_heard_before_it_gives_up(forming):
    forming.woke(now=40.0)
    assert forming.give_up_at == 60.0
    forming.woke(now=90.0)
    assert not forming.is_over(now=90.0)
    assert forming.is_over(now=90.0 + HEARING_SECONDS)


def test_after_a_freeze_nobody_is_waited_for_longer_than_before():
    forming = Forming(join_timeout=4.0, last_call=2.0, give_up_at=4.0)
    forming.woke(now=90.0)
    assert forming.give_up_at == 94.0
    forming.is_due(is_enough=True, is_full=False, now=90.0)
    forming.woke(now=100.0)

    assert forming.deadline(is_full=False) == 102.0


def test_a_last_call_that_ended_during_a_freeze_is_not_over_at_once():
    forming = Forming(join_timeout=60.0, last_call=30.0, give_up_at=60.0)
    forming.is_due(is_enough=True, is_full=False, now=1.0)
    forming.woke(now=5.0)
    assert forming.deadline(is_full=False) == 31.0
    forming.woke(now=40.0)

    assert forming.deadline(is_full=False) == 40.0 + HEARING_SECONDS


def test_the_last_call_outlasts_the_deadline(forming):
    forming.is_due(is_enough=True, is_full=False, now=58.0)

    assert not forming.is_over(now=61.0)


def test_those_who_wait_are_told_once_each_time_somebody_came(forming):
    assert not forming.report_is_due(now=50.0)
    forming.someone_came(now=10.0)
    forming.someone_came(now=11.0)
    assert not forming.report_is_due(now=12.9)
    assert forming.report_is_due(now=13.0)
    assert not forming.report_is_due(now=14.0)


def test_without_a_limit_there_is_no_deadline():
    forming = Forming(join_timeout=math.inf, last_call=5.0, give_up_at=math.inf)

    assert forming.deadline(is_full=False) is None
