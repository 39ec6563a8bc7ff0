import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.cluster.scheduler.restart_policy import Again, GiveUp, RestartPolicy
from msrun.cluster.verdict import RankExit
from msrun.job import RestartLimits

NO_PROGRESS = GiveUp(
    "the same early failure came 3 times in a row",
    123,
    "correct the cause, or pass --no-progress-limit 0 to try until the budget is spent",
)


def failure(code=3, ran_for=1.0, **changes):
    return RankExit(
        **{
            "rank": 0,
            "node_rank": 0,
            "host": "a",
            "local_rank": 0,
            "pid": 1,
            "code": code,
            "ran_for": ran_for,
            **changes,
        }
    )


def policy(job_id="train", **limits):
    return RestartPolicy(job_id, RestartLimits(**{"no_progress_limit": 3, **limits}))


def steps(policy, *failures):
    return [policy.after(each, now=float(at)) for at, each in enumerate(failures)]


def test_no_restart_unless_asked_for():
    given_up = policy()

    assert steps(given_up, failure()) == [GiveUp()]
    assert given_up.used == 0


@pytest.mark.parametrize("code", [126, 127])
def test_a_program_that_cannot_start_is_not_restarted(code):
    assert steps(policy(max_restarts=3), failure(code)) == [
        GiveUp("it cannot be started, so it is not restarted")
    ]


def test_the_budget_is_spent():
    spent = policy(max_restarts=2)

    assert steps(spent, *[failure(ran_for=100.0)] * 3) == [
        Again(0.0),
        Again(0.0),
        GiveUp("the budget of 2 restart(s) is spent"),
    ]
    assert spent.used == 2


def test_restarts_leave_the_window():
    windowed = policy(max_restarts=1, window=10.0)

    decided = [windowed.after(failure(ran_for=100.0), now=now) for now in (0.0, 9.9, 10.0)]

    assert decided == [Again(0.0), GiveUp("the budget of 1 restart(s) is spent"), Again(0.0)]
    assert windowed.used == 2


def test_equal_early_failures_end_the_job():
    assert steps(policy(max_restarts=9, backoff_max=0.0), *[failure()] * 3) == [
        Again(0.0),
        Again(0.0),
        NO_PROGRESS,
    ]


def test_no_progress_is_not_counted_without_a_limit():
    endless = policy(max_restarts=9, backoff_max=0.0, no_progress_limit=0)

    assert steps(endless, *[failure()] * 9) == [Again(0.0)] * 9


@pytest.mark.parametrize(
    "other",
    [
        failure(4),
        failure(None, signum=9),
        failure(rank=1),
        failure(error="OSError"),
        failure(ran_for=60.0),
    ],
    ids=["code", "signal", "rank", "exception", "not early"],
)
def test_another_failure_in_between_counts_as_progress(other):
    guarded = policy(max_restarts=9, backoff_max=0.0)

    decided = steps(guarded, failure(), failure(), other, failure(), failure(), failure())

    assert decided == [*[Again(0.0)] * 5, NO_PROGRESS]


def test_pauses_double_up_to_the_limit_and_keep_within_their_quarter():
    growing = policy(max_restarts=9, no_progress_limit=0, backoff_initial=2.0, backoff_max=10.0)

    delays = [step.delay for step in steps(growing, *[failure()] * 7)]

    assert delays[0] == 0.0
    assert [
        full * 0.75 < delay <= full
        for full, delay in zip([2.0, 4.0, 8.0, 10.0, 10.0, 10.0], delays[1:], strict=True)
    ] == [True] * 6
    assert len(set(delays[4:])) == 3


def test_a_healthy_generation_makes_the_next_restart_immediate():
    healed = policy(max_restarts=9, no_progress_limit=0)

    decided = steps(healed, failure(), failure(), failure(ran_for=60.0), failure())

    assert [step.delay > 0 for step in decided] == [False, True, False, True]


def test_two_jobs_do_not_return_in_step_but_one_job_is_predictable():
    first, again, other = (
        steps(policy(job, max_restarts=9), failure(), failure())[-1] for job in ("a", "a", "b")
    )

    assert first == again != other


@given(
    st.lists(st.floats(0, 1e9), max_size=60),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
)
def test_no_pause_is_longer_than_the_limit(runs, initial, limit):
    patient = policy(
        max_restarts=1000,
        no_progress_limit=0,
        window=math.inf,
        backoff_initial=initial,
        backoff_max=limit,
    )

    delays = [step.delay for step in steps(patient, *[failure(ran_for=r) for r in runs])]

    assert [d for d in delays if not 0 <= d <= limit] == []
