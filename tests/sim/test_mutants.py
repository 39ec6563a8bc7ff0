"""The simulation notices when a rule of the protocol is left out."""

import faults
import mutants
import pytest

pytestmark = pytest.mark.sim

SEEDS_MAX = 10_000
# A seed that shows it; from there the search goes on when the faults change.
FIRST = {
    "agentstop": 2,
    "anylife": 282,
    "forgetsexclusions": 1313,
    "forgetsnoderanks": 1,
    "hastens": 5,
    "ignoresranks": 2,
    "keepsservers": 17,
    "sparesservers": 87,
    "lateassign": 918,
    "leavesworkers": 203,
    "nodrain": 1,
    "nofence": 12,
    "noterm": 679,
    "nowal": 8,
    "receipt": 113,
    "revives": 890,
    "stale": 41,
    "staleidle": 555,
    "stopsworkersalone": 66,
    "trustslog": 57,
    "waitsforimports": 87,
    "wallclock": 4,
}


@pytest.mark.parametrize("name", sorted(FIRST))
def test_mutant_is_killed(name):
    _, promise, _ = faults.first_broken(range(FIRST[name], SEEDS_MAX), name)

    assert not promise.startswith("raised"), "it breaks the program, not a promise"


def test_every_mutant_is_known():
    assert FIRST.keys() == mutants.MUTANTS.keys() - {"", mutants.WITH_SERVERS}
