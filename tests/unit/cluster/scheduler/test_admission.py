"""Nodes that are heard at once, and those that have to be reached first."""

import pytest

from msrun.cluster.scheduler.admission import Admission
from msrun.cluster.scheduler.events import AgentMessage, Lost
from msrun.cluster.wire.messages import Drained, Register, Warmed


def said(body, incarnation=7):
    return AgentMessage("a", incarnation, -1, body)


def registers(**words):
    return said(Register(host="a", slots=1, store_host="a", store_port=1, **words))


NEW = registers()


@pytest.fixture
def admission():
    return Admission()


def test_a_new_node_is_heard_once_it_was_reached(admission):
    assert admission.receive(NEW) == ([], True)
    assert admission.receive(said(Warmed())) == ([], False)

    assert admission.is_busy
    assert admission.probed(("a", 7), is_reachable=True) == [NEW, said(Warmed())]
    assert not admission.is_busy
    assert admission.receive(NEW) == ([NEW], False)


def test_a_node_that_cannot_be_reached_is_probed_again(admission):
    admission.receive(NEW)

    assert admission.probed(("a", 7), is_reachable=False) == [NEW]
    assert admission.receive(NEW) == ([], True)


def test_a_node_that_was_lost_meanwhile_is_not_heard(admission):
    admission.receive(NEW)
    admission.lose(Lost("a", 7, "it ended", 0.0))

    assert admission.probed(("a", 7), is_reachable=True) == []
    assert admission.receive(NEW) == ([], True)


def test_another_life_is_probed_by_itself(admission):
    admission.receive(NEW)
    admission.probed(("a", 7), is_reachable=True)

    assert admission.receive(said(NEW.body, incarnation=8)) == ([], True)


@pytest.mark.parametrize("words", [{"seen": 0}, {"seen": 2, "running": 2}])
def test_a_node_that_has_taken_part_is_heard_at_once(admission, words):
    assert admission.receive(registers(**words)) == ([registers(**words)], False)


def test_a_member_that_an_earlier_scheduler_knew_is_heard_at_once(admission):
    admission.expect("a", 7)

    assert admission.receive(NEW) == ([NEW], False)
    assert admission.receive(said(Drained())) == ([said(Drained())], False)


def test_one_node_is_not_probed():
    assert Admission(is_open=True).receive(NEW) == ([NEW], False)
