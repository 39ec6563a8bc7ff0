"""1,000 clusters under faults that no run before has seen."""

import secrets

import faults
import pytest

pytestmark = pytest.mark.sim

CHUNK = 250


@pytest.mark.few(2)
@pytest.mark.parametrize("chunk", range(4))
def test_promises_hold_under_faults(chunk):
    base = secrets.randbelow(2**48)
    print(f"chunk {chunk}: seeds {base} to {base + CHUNK - 1}")

    rate = faults.hold(range(base, base + CHUNK))

    assert rate >= faults.SEEDS_PER_CPU_SECOND_MIN
