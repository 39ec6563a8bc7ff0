"""The simulation notices when a rule of the protocol is left out."""

import mutants
import pytest

pytestmark = pytest.mark.sim

SEEDS_MAX = 10_000
# The smallest seed that shows it, from where the search goes on when the faults change.
FIRST = {
    "agentstop": 2,
    "anylife": 44,
    "forgetsseats": 0,
    "ignoresranks": 2,
    "lateassign": 164,
    "leavesworkers": 38,
    "lateregister": 198,
    "nodrain": 0,
    "nofence": 6,
    "nowal": 2,
    "receipt": 11,
    "stale": 30,
    "staleidle": 26,
    "waitsforimports": 87,
    "forgetsexclusions": 741,
    "trustslog": 71,
    "hastens": 27,
    "wallclock": 2,
}


@pytest.mark.parametrize("name", sorted(mutants.MUTANTS))
def test_mutant_is_killed(name):
    assert mutants.killed_by(name, range(FIRST[name], SEEDS_MAX)) is not None


def test_every_mutant_is_known():
    assert FIRST.keys() == mutants.MUTANTS.keys()
