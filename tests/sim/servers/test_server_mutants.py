"""The simulation notices when a rule of the parameter servers is left out."""

import pytest
import server_faults
import server_mutants

pytestmark = pytest.mark.sim

SEEDS_MAX = 2_000
# The smallest seed that shows it, from where the search goes on when the faults change.
FIRST = {
    "ackbeforedurable": 0,
    "asarrived": 0,
    "doesnotsettle": 0,
    "dropsallbutone": 0,
    "forgetspushes": 0,
    "forgetswholeft": 0,
    "copiesanything": 0,
    "lateorders": 308,
    "losesrows": 0,
    "measuresonce": 3,
    "mixescopies": 0,
    "neverasksagain": 14,
    "nolog": 6,
    "normsofsome": 3,
    "oldnorms": 4,
    "oldreports": 85,
    "onetoostale": 0,
    "opensatonce": 0,
    "othercurve": 89,
    "servesanystep": 0,
    "staleepoch": 0,
    "twice": 0,
}


@pytest.mark.parametrize("name", sorted(FIRST))
def test_mutant_is_killed(name):
    _, promise = server_faults.first_broken(range(FIRST[name], SEEDS_MAX), name)

    assert not promise.startswith("raised"), "it breaks the program, not a promise"


def test_every_mutant_is_known():
    assert FIRST.keys() == server_mutants.SERVER_MUTANTS.keys() - {""}
