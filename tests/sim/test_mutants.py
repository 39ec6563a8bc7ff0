"""The simulation notices when a rule of the protocol is left out."""

import faults
import mutants
import pytest

pytestmark = pytest.mark.sim

SEEDS_MAX = 10_000
# The smallest seed that shows it, from where the search goes on when the faults change.
FIRST = {
    "agentstop": 0,
    "anylife": 183,
    "forgetsexclusions": 337,
    "forgetsnoderanks": 0,
    "hastens": 5,
    "ignoresranks": 2,
    "keepsservers": 0,
    "sparesservers": 0,
    "lateassign": 694,
    "leavesworkers": 125,
    "nodrain": 0,
    "nofence": 11,
    "noterm": 163,
    "nowal": 2,
    "receipt": 109,
    "revives": 499,
    "stale": 31,
    "staleidle": 350,
    "stopsworkersalone": 0,
    "trustslog": 2,
    "waitsforimports": 2,
    "wallclock": 4,
}


@pytest.mark.parametrize("name", sorted(FIRST))
def test_mutant_is_killed(name):
    _, promise, _ = faults.first_broken(range(FIRST[name], SEEDS_MAX), name)

    assert not promise.startswith("raised"), "it breaks the program, not a promise"


def test_every_mutant_is_known():
    assert FIRST.keys() == mutants.MUTANTS.keys() - {"", mutants.WITH_SERVERS}
