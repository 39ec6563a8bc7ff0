"""The simulation notices when a rule of the protocol is left out."""

import mutants
import pytest

pytestmark = pytest.mark.sim

SEEDS_MAX = 10_000
# The smallest seed that shows it, from where the search goes on when the faults change.
FIRST = {
    "agentstop": 8,
    "lateassign": 78,
    "lateregister": 25,
    "nodrain": 0,
    "nofence": 0,
    "nowal": 1,
    "receipt": 18,
    "stale": 21,
    "staleidle": 328,
    "wallclock": 2,
}


@pytest.mark.parametrize("name", sorted(mutants.MUTANTS))
def test_mutant_is_killed(name):
    assert mutants.killed_by(name, range(FIRST[name], SEEDS_MAX)) is not None


def test_every_mutant_is_known():
    assert FIRST.keys() == mutants.MUTANTS.keys()
