"""When a scheduler that has ended is started again."""

from msrun.cluster.scheduler.crash_loop_guard import CrashLoopGuard


def live(lives, began, ended):
    lives.began(began)
    return lives.may_begin_again(ended)


def test_five_short_lives_in_a_minute_are_no_reason_to_give_up_and_six_are():
    lives = CrashLoopGuard()

    assert [live(lives, at, at + 2) for at in range(0, 18, 3)] == [True] * 5 + [False]


def test_long_lives_do_not_count():
    lives = CrashLoopGuard()

    assert all(live(lives, at, at + 3) for at in range(0, 300, 3))


def test_short_lives_of_more_than_a_minute_ago_do_not_count():
    lives = CrashLoopGuard()

    assert all(live(lives, at, at + 1) for at in range(0, 600, 13))
