import zlib

import pytest

from msrun.cluster.bounds import RankSet
from msrun.cluster.scheduler import wal
from msrun.cluster.scheduler.wal import Began, Decided, GenerationStarted, Member
from msrun.cluster.verdict import ExitGroup, RankExit, Verdict

ROOT = RankExit(
    rank=1,
    node_rank=0,
    host="a",
    local_rank=1,
    pid=4711,
    code=3,
    ran_for=1.5,
    error="ValueError: a line\r\nand \x85 another",
    tail=["step 1", "größer"],
)
VERDICT = Verdict(
    job_id="train",
    code=3,
    reason="rank 1 exited with code 3",
    generation=1,
    restarts=1,
    root=ROOT,
    collateral=[ExitGroup("was killed by SIGTERM", RankSet.of([0, 2]))],
)
MEMBER = Member(node_id="a/x", host="a", incarnation=7, node_rank=0, first_rank=0, count=2)
RECORDS = [
    Began(1),
    GenerationStarted(0, [MEMBER], "10.0.0.1", 29500),
    Began(2),
    GenerationStarted(1, [MEMBER], "10.0.0.1", 29500, restarts=1),
    Decided(VERDICT),
]
LINES = [wal.encode(record) for record in RECORDS]
LOG = b"".join(LINES)


def line(body):
    return b"%08x %s\n" % (zlib.crc32(body), body)


def test_a_record_is_a_checked_line():
    assert wal.encode(Began(1)) == b'%08x {"type":"Began","term":1}\n' % zlib.crc32(
        b'{"type":"Began","term":1}'
    )


def test_records_come_back_in_order():
    assert wal.decode(LOG) == RECORDS
    assert wal.term(RECORDS) == 2
    assert wal.term([]) == 0


def test_a_torn_end_hides_only_the_record_it_tore():
    whole = [sum(map(len, LINES[:count])) for count in range(len(LINES) + 1)]

    read = [wal.decode(LOG[:length]) for length in range(len(LOG) + 1)]

    expected = [
        RECORDS[: sum(1 for end in whole[1:] if end <= length)] for length in range(len(LOG) + 1)
    ]
    assert read == expected


def test_a_flipped_bit_hides_its_record_and_what_follows():
    for position in range(len(LOG)):
        damaged = next(i for i in range(len(LINES)) if position < sum(map(len, LINES[: i + 1])))
        for bit in range(8):
            log = bytearray(LOG)
            log[position] ^= 1 << bit

            assert wal.decode(bytes(log)) == RECORDS[:damaged], f"byte {position}, bit {bit}"


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'{"type":"Novelty"}', b'{"type":"GenerationStarted","generation":"0"}'],
)
def test_a_whole_line_that_is_no_record_ends_the_log(body):
    assert wal.decode(LINES[0] + line(body) + LINES[1]) == RECORDS[:1]


@pytest.mark.parametrize("log", [b"", LINES[0], LINES[0] + LINES[2][:-1]])
def test_no_verdict_before_it_is_whole(log):
    assert wal.verdict(log) is None


def test_the_first_verdict_holds():
    other = Verdict(job_id="train", code=0, reason="", generation=1, restarts=1)

    assert wal.verdict(LOG + wal.encode(Decided(other))) == VERDICT


@pytest.mark.parametrize("cut", range(0, len(LOG) + 1, 37))
def test_whole_ends_before_what_is_torn(cut):
    ends = [len(b"".join(LINES[:count])) for count in range(len(LINES) + 1)]

    assert wal.whole(LOG[:cut]) == max(end for end in ends if end <= cut)
