"""The simulation notices when a rule of the parameter servers is left out."""

import pytest
import server_faults
import server_mutants

pytestmark = pytest.mark.sim

SEEDS_MAX = 2_000
# A seed that shows it; from there the search goes on when the faults change.
FIRST = {
    "ackbeforedurable": 1,
    "asarrived": 3,
    "doesnotsettle": 44,
    "dropsallbutone": 29,
    "forgetspushes": 1,
    "forgetswholeft": 9,
    "copiesanything": 3,
    "lateorders": 308,
    "losesrows": 0,
    "measuresonce": 3,
    "mixescopies": 58,
    "neverasksagain": 14,
    "nolog": 6,
    "normsofsome": 3,
    "oldnorms": 4,
    "oldreports": 85,
    "onetoostale": 1,
    "opensatonce": 2,
    "othercurve": 125,
    "servesanystep": 1,
    "staleepoch": 4,
    "twice": 0,
}


@pytest.mark.parametrize("name", sorted(FIRST))
def test_mutant_is_killed(name):
    _, promise = server_faults.first_broken(range(FIRST[name], SEEDS_MAX), name)

    assert not promise.startswith("raised"), "it breaks the program, not a promise"


def test_every_mutant_is_known():
    assert FIRST.keys() == server_mutants.SERVER_MUTANTS.keys() - {""}
