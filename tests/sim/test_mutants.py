"""The simulation notices when a rule of the protocol is left out."""

import mutants
import pytest

pytestmark = pytest.mark.sim

SEEDS_MAX = 10_000
# The smallest seed that shows it, from where the search goes on when the faults change.
FIRST = {
    "agentstop": 1,
    "anylife": 44,
    "lateassign": 70,
    "lateregister": 278,
    "nodrain": 0,
    "nofence": 8,
    "nowal": 9,
    "receipt": 1,
    "stale": 30,
    "staleidle": 5,
    "waitsforimports": 87,
    "forgetsexclusions": 705,
    "trustslog": 44,
    "hastens": 23,
    "wallclock": 2,
}


@pytest.mark.parametrize("name", sorted(mutants.MUTANTS))
def test_mutant_is_killed(name):
    assert mutants.killed_by(name, range(FIRST[name], SEEDS_MAX)) is not None


def test_every_mutant_is_known():
    assert FIRST.keys() == mutants.MUTANTS.keys()
