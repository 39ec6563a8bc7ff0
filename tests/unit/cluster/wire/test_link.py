"""A line that numbers, keeps and repeats."""

import random

from msrun.cluster.liveness.lease import Lease
from msrun.cluster.wire.link import RESEND_MAX, RESEND_SECONDS, OrderedLink, first_resend
from msrun.cluster.wire.messages import Drained


def bodies(count):
    return [Drained(stuck=[str(n)]) for n in range(count)]


def test_bodies_are_numbered_from_1():
    link = OrderedLink()

    assert [link.put(0, body, now=0.0).seq for body in bodies(3)] == [1, 2, 3]


def test_only_the_next_number_is_taken():
    link = OrderedLink()

    assert [link.take(seq) for seq in (2, 1, 1, 3, 2, 3)] == [False, True, False, False, True, True]
    assert link.received == 3


def test_nothing_is_overdue_before_its_time():
    link = OrderedLink()
    link.put(0, Drained(), now=5.0)

    assert link.deadline == 5.0 + RESEND_SECONDS
    assert link.overdue(now=5.9) == []


def test_what_is_not_acknowledged_is_sent_again_and_again():
    link = OrderedLink()
    first, *parcels = [link.put(0, body, now=0.0) for body in bodies(3)]
    link.acknowledge(first.seq, now=0.0)

    assert link.overdue(now=1.0) == parcels
    assert link.overdue(now=1.5) == []
    assert link.overdue(now=2.0) == parcels
    assert link.overdue(now=3.0) == parcels


def test_whoever_has_acknowledged_nothing_is_asked_less_and_less_often():
    link = OrderedLink()
    first, *others = [link.put(0, body, now=0.0) for body in bodies(2)]
    times = [at for at in range(20) if link.overdue(now=float(at))]

    assert times == [1, 3, 7, 11, 15, 19]

    link.acknowledge(first.seq, now=20.0)

    assert link.overdue(now=21.0) == others
    assert link.overdue(now=22.0) == others


def test_in_a_crowd_the_first_body_has_more_time_to_arrive():
    lines = [OrderedLink(first_resend(nnodes, Lease(10.0))) for nnodes in (1, 1_000, 10_000)]
    for link in lines:
        link.put(0, Drained(), now=0.0)

    assert [link.deadline for link in lines] == [1.002, 3.0, 3.5]
    assert [link.deadline for link in lines if link.overdue(now=3.5)] == [5.504, 7.5, 7.5]


def test_a_short_lease_makes_nobody_hurry():
    assert first_resend(10_000, Lease(0.5)) == RESEND_SECONDS


def test_an_acknowledgement_covers_all_before_it():
    link = OrderedLink()
    parcels = [link.put(0, body, now=0.0) for body in bodies(3)]
    link.acknowledge(2, now=0.5)

    assert link.deadline == 0.5 + RESEND_SECONDS
    assert link.overdue(now=1.5) == parcels[2:]

    link.acknowledge(3, now=1.6)

    assert link.deadline is None
    assert link.overdue(now=9.0) == []


def test_a_late_acknowledgement_changes_nothing():
    link = OrderedLink()
    link.put(0, Drained(), now=0.0)
    link.acknowledge(0, now=0.9)

    assert link.deadline == RESEND_SECONDS


def test_so_much_at_once_and_no_more():
    link = OrderedLink()
    parcels = [link.put(0, body, now=0.0) for body in bodies(RESEND_MAX + 1)]

    assert link.overdue(now=1.0) == parcels[:RESEND_MAX]


def test_everything_arrives_once_and_in_order_over_a_bad_line():
    for seed in range(50):
        draw = random.Random(seed)
        here, there = OrderedLink(), OrderedLink()
        parcels = [here.put(0, body, now=0.0) for body in bodies(100)]
        taken = []
        now = 0.0
        while here.deadline is not None:
            now += RESEND_SECONDS
            frames = [p for p in here.overdue(now=now) for _ in range(draw.randint(0, 2))]
            draw.shuffle(frames)
            taken += [p.body for p in frames if there.take(p.seq)]
            here.acknowledge(there.received, now=now)

        assert taken == [parcel.body for parcel in parcels]
