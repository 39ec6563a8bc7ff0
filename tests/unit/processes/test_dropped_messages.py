"""How often the scheduler's log tells what was dropped."""

from collections import Counter

from msrun.processes.scheduler.dropped_messages import Dropped


def test_the_first_is_told_at_once_and_the_rest_once_a_second(caplog):
    counts = Counter()
    dropped = Dropped(counts)
    assert dropped.deadline() is None
    due = []
    for tenth in range(25):
        now = 100 + tenth / 10
        counts["strangers"] += 1
        due.append(dropped.deadline() <= now)
        dropped.tick(now=now)

    assert [tenth for tenth, is_due in enumerate(due) if is_due] == [0, 10, 20]
    assert caplog.messages == [
        "dropped 1 strangers",
        "dropped 10 strangers",
        "dropped 10 strangers",
    ]
    assert dropped.deadline() == 103.0


def test_every_kind_is_told_in_one_line(caplog):
    dropped = Dropped(Counter({"strangers": 2, "frames": 1}))
    dropped.tick(now=1.0)
    dropped.tick(now=9.0)

    assert caplog.messages == ["dropped 2 strangers, 1 frames"]
