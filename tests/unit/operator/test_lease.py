"""Leader election on a Lease of plain data, by clocks that the test turns."""

from __future__ import annotations

import copy

import pytest

from launchers.operator.lease import Candidate

WALL = 1_700_000_000.0


class Room:
    """Candidates, one Lease, and the time."""

    def __init__(self):
        self.lease = None
        self.now = 0.0

    def step(self, candidate, *, lands=True):
        """Have a candidate look, and write as it decides; return whether it leads."""
        made = candidate.decide(copy.deepcopy(self.lease), self.now, WALL + self.now)
        if made is None:
            candidate.lost()
        elif lands:
            self.lease = made
            candidate.wrote(self.now)
        return candidate.leads(self.now)


@pytest.fixture
def room():
    return Room()


@pytest.fixture
def two():
    return Candidate("a", "ns", 15.0), Candidate("b", "ns", 15.0)


def test_the_first_one_leads_and_keeps_the_lease_by_renewing_it(room, two):
    a, b = two
    assert room.step(a)
    assert room.lease["metadata"] == {"name": "msrun-operator", "namespace": "ns"}
    assert room.lease["spec"] == {
        "holderIdentity": "a",
        "acquireTime": "2023-11-14T22:13:20.000000Z",
        "renewTime": "2023-11-14T22:13:20.000000Z",
        "leaseDurationSeconds": 15,
        "leaseTransitions": 0,
    }
    for _ in range(50):
        room.now += a.pause
        assert (room.step(a), room.step(b)) == (True, False)


def test_a_lease_that_is_not_renewed_is_taken_after_its_leader_has_given_up(room, two):
    a, b = two
    room.step(a)
    room.step(b)
    taken_at = gave_up_at = None
    while taken_at is None:
        room.now += 0.5
        if gave_up_at is None and not a.leads(room.now):
            gave_up_at = room.now
        if room.step(b):
            taken_at = room.now
    assert (gave_up_at, taken_at) == (10.0, 15.0)
    assert room.lease["spec"]["leaseTransitions"] == 1
    assert not room.step(a)  # who comes back sees that it lost


def test_clocks_of_other_machines_count_for_nothing(room, two):
    a, b = two
    room.step(a)
    room.lease["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
    assert not room.step(b)
    room.now += 14
    assert not room.step(b)


def test_a_lease_that_was_given_back_is_taken_at_once(room, two):
    a, b = two
    room.step(a)
    room.step(b)
    room.lease = a.released(room.lease, WALL)
    assert room.step(b)
    assert a.released(room.lease, WALL) is None


def test_a_write_that_does_not_land_makes_no_leader(room, two):
    a, _ = two
    assert not room.step(a, lands=False)
    assert room.step(a)
    room.now += 10
    assert not room.step(a, lands=False)
