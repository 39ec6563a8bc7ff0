"""The scheduler's ends: who has registered, who is lost, what is late."""

import msgspec
import pytest

from msrun.cluster.liveness.lease import Lease, lease
from msrun.cluster.scheduler.events import AgentMessage, Lost
from msrun.cluster.scheduler.peers import AgentLinks
from msrun.cluster.wire.link import first_resend
from msrun.cluster.wire.messages import TERM_MAX, Drained, Envelope, Register, Stop, Unknown

REGISTER = Register(host="a", slots=1, store_host="a", store_port=1)
STOP = Stop(reason="so")


@pytest.fixture
def peers():
    return AgentLinks(job_id="train", lease=Lease(10.0), term=1)


def frame(**words):
    known = {"job_id": "train", "node_id": "a", "incarnation": 7, "session": 1}
    return Envelope(**{**known, **words})


def join(peers, *, now=100.0, follows=None, **words):
    body = following(follows)
    return peers.receive(frame(seq=1, stamp=1.0, body=body, **words), now=now)


def following(life):
    return msgspec.structs.replace(REGISTER, follows=life)


def tick_until(peers, now):
    """Return who is lost by then, when the scheduler looks as often as it does."""
    losses = []
    while (due := peers.deadline()) is not None and due <= now:
        losses += peers.tick(now=due)[0]
    return losses


def test_a_registration_is_passed_on_once_and_echoed(peers):
    running = msgspec.structs.replace(REGISTER, running=0, seen=0)
    events, (answer,) = peers.receive(frame(seq=1, stamp=1.0, body=running), now=100.0)

    assert events == [AgentMessage("a", 7, -1, running)]
    assert (answer.ack, answer.stamp, answer.term, answer.body) == (1, 1.0, 1, None)
    assert "a" in peers
    assert join(peers)[0] == []


def test_a_newcomer_is_answered_with_what_it_waits_for(peers):
    assert join(peers) == ([AgentMessage("a", 7, -1, REGISTER)], [])
    (start,) = peers.send("a", 0, STOP, now=100.4)

    assert (start.ack, start.stamp) == (1, 1.0)
    assert peers.tick(now=100.9) == ([], [])


def test_a_newcomer_that_has_to_wait_is_answered_before_it_asks_again(peers):
    join(peers)

    assert peers.tick(now=100.25) == ([], [])
    _, (answer,) = peers.tick(now=100.5)
    assert (answer.ack, answer.stamp, answer.body) == (1, 1.0, None)
    assert peers.tick(now=100.75) == ([], [])


def test_a_newcomer_that_asks_again_is_answered_at_once(peers):
    join(peers)
    _, (answer,) = join(peers)

    assert (answer.ack, answer.stamp) == (1, 1.0)


def test_in_a_crowd_newcomers_are_answered_later_but_well_within_their_lease():
    times = Lease(10.0)
    peers = AgentLinks(
        job_id="train", lease=times, term=1, first_resend=first_resend(10_000, times)
    )
    join(peers, now=100.0)

    assert first_resend(10_000, times) == 3.5
    assert peers.tick(now=101.7) == ([], [])
    assert len(peers.tick(now=101.95)[1]) == 1


def test_the_largest_stamp_is_echoed(peers):
    join(peers)
    peers.receive(frame(stamp=3.0), now=101.0)
    _, (answer,) = peers.receive(frame(stamp=2.0), now=102.0)

    assert answer.stamp == 3.0


def test_an_acknowledgement_alone_is_not_answered(peers):
    join(peers)
    (sent,) = peers.send("a", 0, STOP, now=100.0)

    assert not peers.all_delivered
    assert peers.receive(frame(ack=sent.seq), now=100.1) == ([], [])
    assert peers.all_delivered


def test_a_body_is_repeated_until_it_is_acknowledged(peers):
    join(peers)
    (sent,) = peers.send("a", 4, STOP, now=100.0)
    _, (again,) = peers.tick(now=101.0)

    assert sent == again
    assert (sent.seq, sent.generation, sent.session) == (1, 4, 1)


def test_nothing_is_sent_to_a_node_that_is_not_there(peers):
    assert peers.send("a", 0, STOP, now=100.0) == []


@pytest.mark.parametrize(
    "words",
    [
        {"stamp": 1.0},
        {"stamp": 1.0, "seq": 2, "body": Drained()},
        {"stamp": 1.0, "seq": 1, "body": Drained()},
        {"stamp": 1.0, "seq": 2, "body": REGISTER},
    ],
)
def test_who_has_not_registered_is_told_so(peers, words):
    events, (answer,) = peers.receive(frame(**words), now=100.0)

    assert events == []
    assert answer == frame(term=1, body=Unknown())


def test_an_acknowledgement_of_who_has_not_registered_is_not_answered(peers):
    assert peers.receive(frame(ack=3), now=100.0) == ([], [])


def test_a_silent_node_is_lost_after_the_lease(peers):
    join(peers, now=100.0)

    assert tick_until(peers, 109.9) == []
    assert tick_until(peers, 110.2) == [Lost("a", 7, "no sign of life for 10s", 100.0)]
    assert "a" not in peers
    assert tick_until(peers, 120.0) == []


def test_a_scheduler_that_was_frozen_hears_its_nodes_before_it_judges_them(peers):
    join(peers, now=100.0)
    join(peers, now=100.0, node_id="b")
    peers.woke(now=130.0)

    assert peers.tick(now=130.0)[0] == []
    peers.receive(frame(stamp=2.0), now=130.1)
    assert tick_until(peers, 139.9) == []
    assert tick_until(peers, 140.0) == [Lost("b", 7, "no sign of life for 10s", 100.0)]
    assert "a" in peers


def test_a_late_registration_of_a_lost_session_counts_for_nothing(peers):
    join(peers)
    tick_until(peers, 110.0)

    events, (answer,) = join(peers, now=111.0)

    assert events == []
    assert isinstance(answer.body, Unknown)
    assert join(peers, session=2)[0] == [AgentMessage("a", 7, -1, REGISTER)]


def test_a_new_life_of_a_lost_node_must_have_heard_of_the_lost_one(peers):
    join(peers)
    tick_until(peers, 110.0)

    events, (answer,) = join(peers, incarnation=2, now=111.0)
    assert (events, answer) == ([], frame(incarnation=2, term=1, body=Unknown(known=7)))
    events, _ = join(peers, incarnation=2, session=2, term=1, follows=7, now=111.0)
    assert events == [AgentMessage("a", 2, -1, following(7))]


@pytest.mark.parametrize("life", [2, 9])
def test_a_life_that_has_not_heard_of_the_known_one_may_be_the_earlier(peers, life):
    """Its machine was booted anew: its registration was under way meanwhile."""
    join(peers)
    join(peers, incarnation=life)
    join(peers, incarnation=5)
    join(peers, incarnation=5, session=2, term=1, follows=7)

    events, (answer,) = join(peers, incarnation=life, session=2, term=1, follows=7)

    assert (events, answer.body) == ([], Unknown(known=5))
    assert peers.lose("a", 5, "it ended") == [Lost("a", 5, "it ended", 100.0)]


def test_a_life_that_another_followed_is_over(peers):
    join(peers)
    join(peers, incarnation=2, session=2, term=1, follows=7)

    assert join(peers, session=2, term=1, follows=2) == ([], [])
    assert "a" in peers


def test_what_a_life_has_heard_of_holds_with_a_scheduler_that_knows_no_life():
    peers = AgentLinks(job_id="train", lease=Lease(10.0), term=2)

    events, _ = join(peers, session=3, term=2, follows=4)

    assert events == [AgentMessage("a", 7, -1, following(4))]


def test_what_is_known_to_be_dead_is_lost_at_once(peers):
    join(peers)

    assert peers.lose("a", 7, "it ended") == [Lost("a", 7, "it ended", 100.0)]
    assert peers.lose("a", 7, "it ended") == []


def test_the_end_of_an_earlier_life_says_nothing_of_this_one(peers):
    join(peers, incarnation=8)

    assert peers.lose("a", 7, "it ended") == []
    assert "a" in peers


def test_a_new_life_voids_the_one_before(peers):
    join(peers)
    assert join(peers, incarnation=2, now=101.0)[0] == []  # it may be dead by now
    events, _ = join(peers, incarnation=2, session=2, term=1, follows=7, now=101.0)

    lost = Lost("a", 7, "it was started anew", 100.0)
    assert events == [lost, AgentMessage("a", 2, -1, following(7))]


def test_a_new_session_begins_anew(peers):
    join(peers)
    peers.send("a", 0, STOP, now=100.0)
    events, _ = join(peers, session=2)

    assert events == [AgentMessage("a", 7, -1, REGISTER)]
    assert peers.all_delivered
    assert peers.receive(frame(session=1, stamp=2.0), now=101.0) == ([], [])


def test_a_later_life_of_the_scheduler_wants_to_be_registered_with():
    peers = AgentLinks(job_id="train", lease=Lease(10.0), term=2)

    for term in (0, 1):
        events, (answer,) = join(peers, term=term)
        assert (events, answer.body, answer.term) == ([], Unknown(), 2)
    assert join(peers, session=2, term=2)[0] == [AgentMessage("a", 7, -1, REGISTER)]


def test_a_scheduler_that_lost_its_log_takes_a_larger_term_than_any_agent_knows(peers):
    join(peers, node_id="b")
    events, (answer,) = join(peers, term=4)

    assert (events, answer.body, answer.term) == ([], Unknown(), 5)
    assert join(peers, session=2, term=5)[0] == [AgentMessage("a", 7, -1, REGISTER)]
    (told,) = peers.send("b", 0, STOP, now=100.0)  # by which it begins a new session
    assert told.term == 5


def test_no_term_is_larger_than_an_agent_can_read(peers):
    join(peers, term=TERM_MAX)
    (told,) = peers.send("a", 0, STOP, now=100.0)

    assert told.term == TERM_MAX


def test_an_expected_node_is_lost_when_it_does_not_come(peers):
    peers.expect("a", 7, now=100.0)
    peers.expect("b", 3, now=100.0)
    assert join(peers, now=105.0)[0] == [AgentMessage("a", 7, -1, REGISTER)]

    assert tick_until(peers, 110.0) == [Lost("b", 3, "no sign of life for 10s", 100.0)]


def test_a_single_node_is_never_lost():
    peers = AgentLinks(job_id="train", lease=lease(0), term=1)
    join(peers, now=100.0)
    assert len(peers.tick(now=1e9)[1]) == 1

    assert peers.deadline() is None
    assert "a" in peers


def test_what_only_a_scheduler_says_is_counted_and_dropped(peers):
    join(peers)
    events, (answer,) = peers.receive(frame(seq=2, body=STOP), now=101.0)

    assert (events, answer.ack) == ([], 2)
