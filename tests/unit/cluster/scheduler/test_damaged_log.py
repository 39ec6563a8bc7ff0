"""The scheduler's log with every kind of damage: what comes back is a beginning of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.cluster.scheduler import wal
from msrun.cluster.verdict import Verdict

MEMBER = wal.Member(
    node_id="a/10.0.0.1/0", host="a", incarnation=7, node_rank=0, first_rank=0, count=8
)
RECORDS = [
    wal.Began(1),
    *(wal.GenerationStarted(g, [MEMBER] * 2, "10.0.0.1", 29500, g) for g in range(10)),
    wal.Decided(Verdict(job_id="train", code=1, reason="größer", generation=11, restarts=11)),
]
LINES = [wal.encode(record) for record in RECORDS]
LOG = b"".join(LINES)


def test_the_log_that_is_damaged_below_has_the_size_it_should():
    assert 3500 < len(LOG) < 4600
    assert wal.decode(LOG) == RECORDS


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.few(3)
def test_a_log_with_a_flipped_bit_ends_before_it(bit):
    for at in range(len(LOG)):
        damaged = bytearray(LOG)
        damaged[at] ^= 1 << bit
        damaged = bytes(damaged)
        records, length = wal.decode(damaged), wal.whole(damaged)
        assert records == RECORDS[: len(records)]
        assert length == sum(map(len, LINES[: len(records)])) <= at


def test_a_log_that_is_cut_off_ends_before_the_cut():
    for length in range(len(LOG) + 1):
        records = wal.decode(LOG[:length])
        assert records == RECORDS[: len(records)]
        assert wal.whole(LOG[:length]) == sum(map(len, LINES[: len(records)]))


@given(st.lists(st.binary(max_size=40) | st.sampled_from(LINES), max_size=6))
def test_a_log_of_anything_is_read_as_far_as_it_is_one(lines):
    data = b"".join(lines)

    assert b"".join(map(wal.encode, wal.decode(data))) == data[: wal.whole(data)]
