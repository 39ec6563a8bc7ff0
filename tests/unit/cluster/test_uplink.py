"""An agent's end: sessions, the scheduler's life, the echo, the lease."""

import math

import msgspec
import pytest

from msrun.cluster.agent.events import (
    Forgotten,
    Reached,
    SchedulerLost,
    SchedulerMessage,
    SchedulerSilent,
)
from msrun.cluster.agent.uplink import Uplink
from msrun.cluster.liveness.lease import Lease
from msrun.cluster.wire.messages import Drained, Envelope, Register, Stop, Unknown

REGISTER = Register(host="a", slots=1, store_host="a", store_port=1)
STOP = Stop(reason="so")


@pytest.fixture
def uplink():
    uplink = Uplink(job_id="train", node_id="a", incarnation=7, lease=Lease(10.0))
    uplink.join(-1, REGISTER, now=100.0)
    return uplink


def frame(**words):
    known = {"job_id": "train", "node_id": "a", "incarnation": 7, "session": 1, "term": 1}
    return Envelope(**{**known, **words})


def test_join_is_the_first_body_of_a_new_session(uplink):
    (first,) = uplink.join(3, REGISTER, now=101.0)

    assert first == frame(session=2, seq=1, stamp=101.0, term=0, generation=3, body=REGISTER)


def test_a_body_is_repeated_until_it_is_acknowledged(uplink):
    assert uplink.deadline() == 101.0
    _, (again,) = uplink.tick(now=101.0)
    assert (again.seq, again.stamp, again.body) == (1, 101.0, REGISTER)

    uplink.receive(frame(ack=1, stamp=101.0), now=101.1)

    assert uplink.tick(now=101.5) == ([], [])


def test_before_the_first_answer_there_is_only_the_registration(uplink):
    times = [100.0 + i / 4 for i in range(1, 32)]
    said = [(at, frame.seq) for at in times for frame in uplink.tick(now=at)[1]]

    assert said == [(101.0, 1), (103.0, 1), (107.0, 1)]


def test_after_a_late_first_answer_the_next_is_asked_for_at_once(uplink):
    uplink.receive(frame(ack=1, stamp=100.0), now=103.5)

    assert uplink.deadline() == 102.0


def test_a_sign_of_life_is_asked_for_each_fifth_of_the_lease(uplink):
    uplink.receive(frame(ack=1, stamp=100.0), now=100.1)

    assert uplink.deadline() == 102.0
    _, (ask,) = uplink.tick(now=102.0)
    assert (ask.seq, ask.stamp, ask.body) == (0, 102.0, None)


def test_the_first_echo_reaches_and_a_silence_cuts(uplink):
    assert uplink.receive(frame(ack=1, stamp=100.0), now=105.0) == ([Reached()], [])
    # It counts from when this node spoke, and not from when the answer came.
    assert uplink.tick(now=106.9)[0] == []
    assert uplink.tick(now=107.0)[0] == [SchedulerSilent()]
    assert uplink.tick(now=108.0)[0] == []
    assert uplink.receive(frame(ack=1, stamp=107.0), now=108.5)[0] == [Reached()]


def test_a_cut_of_half_a_lease_is_none_whenever_it_begins(uplink):
    uplink.receive(frame(ack=1, stamp=100.0), now=100.1)
    uplink.tick(now=102.0)  # which is lost: the cut has just begun
    events, _ = uplink.tick(now=106.9)

    assert events == []
    assert uplink.receive(frame(stamp=106.9), now=106.95) == ([], [])
    assert uplink.live_until == 106.9 + 8.5


def test_an_earlier_echo_renews_nothing(uplink):
    uplink.receive(frame(ack=1, stamp=100.5), now=101.0)
    uplink.receive(frame(ack=1, stamp=100.0), now=102.0)

    assert uplink.live_until == 100.5 + 8.5


def test_nothing_expires_before_the_first_echo_or_on_one_node(uplink):
    assert uplink.live_until is None
    alone = Uplink(job_id="train", node_id="a", incarnation=7, lease=Lease(math.inf))
    alone.join(-1, REGISTER, now=1.0)
    alone.receive(frame(ack=1, stamp=1.0), now=1.1)
    assert alone.live_until is None
    assert alone.deadline() is None


def test_bodies_are_taken_once_in_order_and_acknowledged(uplink):
    events, (answer,) = uplink.receive(frame(seq=1, stamp=100.0, body=STOP), now=103.0)

    assert events == [Reached(), SchedulerMessage(-1, STOP, 3.0)]
    assert (answer.ack, answer.stamp, answer.term) == (1, 0.0, 1)
    assert uplink.receive(frame(seq=1, stamp=100.0, body=STOP), now=103.0)[0] == []
    assert uplink.receive(frame(seq=3, stamp=100.0, body=STOP), now=103.0)[0] == []


def test_a_body_without_an_echo_has_no_age(uplink):
    events, _ = uplink.receive(frame(seq=1, body=STOP), now=103.0)

    assert events == [SchedulerMessage(-1, STOP, 0.0)]


def test_what_only_an_agent_says_is_counted_and_dropped(uplink):
    events, (answer,) = uplink.receive(frame(seq=1, body=Drained()), now=103.0)

    assert (events, answer.ack) == ([], 1)


@pytest.mark.parametrize(
    "other", [{"job_id": "other"}, {"incarnation": 6}, {"session": 2}, {"session": 0}]
)
def test_a_frame_for_another_is_dropped(uplink, other):
    assert uplink.receive(frame(seq=1, stamp=100.0, body=STOP, **other), now=101.0) == ([], [])


def test_an_unknown_node_registers_anew(uplink):
    assert uplink.receive(frame(term=3, body=Unknown()), now=101.0) == ([Forgotten()], [])

    (first,) = uplink.join(0, REGISTER, now=101.0)

    assert (first.session, first.seq, first.term) == (2, 1, 3)


def test_a_registration_names_the_last_life_that_the_scheduler_knew(uplink):
    uplink.receive(frame(body=Unknown(known=4)), now=101.0)
    (first,) = uplink.join(0, REGISTER, now=101.0)

    assert first.body == msgspec.structs.replace(REGISTER, follows=4)


def test_another_life_of_the_scheduler_is_registered_with(uplink):
    uplink.receive(frame(seq=1, term=1, body=STOP), now=101.0)

    assert uplink.receive(frame(seq=2, term=2, body=STOP), now=102.0) == ([Forgotten()], [])


def test_an_earlier_life_of_the_scheduler_has_nothing_to_say(uplink):
    uplink.receive(frame(seq=1, term=1, body=STOP), now=101.0)
    uplink.receive(frame(term=2), now=102.0)
    uplink.join(0, REGISTER, now=102.0)

    assert uplink.receive(frame(seq=1, term=1, body=STOP), now=103.0) == ([], [])


def test_ask_carries_no_body(uplink):
    (ask,) = uplink.ask(now=104.0)

    assert ask == msgspec.structs.replace(frame(term=0), stamp=104.0)


def test_a_body_that_is_never_taken_is_given_up_with_a_sentence(uplink):
    """As a frame is that the scheduler cannot read: it would be sent each second for ever."""
    uplink.receive(frame(ack=1, stamp=100.0), now=100.1)
    uplink.send(0, Drained(), now=101.0)
    events, at = [], 101.0
    while not events and at < 1000.0:
        at += 1.0
        uplink.receive(frame(ack=1, stamp=at), now=at)
        events, _ = uplink.tick(now=at)

    (lost,) = events
    assert lost == SchedulerLost(
        "the scheduler did not take a message of this node (Drained, sent many times)"
    )
    assert 150.0 <= at <= 170.0


def test_a_registration_is_never_given_up(uplink):
    """Its scheduler may begin later; how long a node waits is the user's decision."""
    said = [event for second in range(2000) for event in uplink.tick(now=101.0 + second)[0]]

    assert said == []


def test_a_freeze_is_no_refusal(uplink):
    uplink.receive(frame(ack=1, stamp=100.0), now=100.1)
    uplink.send(0, Drained(), now=101.0)

    events, _ = uplink.tick(now=10_000.0)
    uplink.receive(frame(ack=2, stamp=10_000.0), now=10_000.1)

    later = [event for second in range(200) for event in uplink.tick(now=10_001.0 + second)[0]]
    assert [*events, *later] == [SchedulerSilent(), SchedulerSilent()]
