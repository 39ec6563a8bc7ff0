"""The scheduler's log: one checked line per record, so that a torn end is seen."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import msgspec

from msrun.cluster.verdict import Verdict


class Began(msgspec.Struct, frozen=True, tag=True):
    """Scheduler number `term` of the job, from 1, began."""

    term: int


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a generation.

    Args:
        node_id: The node.
        host: Its host name.
        incarnation: Which start of its launcher.
        node_rank: Its place among the nodes.
        first_rank: Global rank of its local_rank 0.
        count: Its workers.
        first_local_rank: As in `Start`.
        local_world_size: As in `Start`.
    """

    node_id: str
    host: str
    incarnation: int
    node_rank: int
    first_rank: int
    count: int
    first_local_rank: int = 0
    local_world_size: int = 0


class GenerationStarted(msgspec.Struct, frozen=True, tag=True):
    """Generation `generation` was announced.

    Args:
        generation: The generation.
        members: Its nodes by node rank.
        store_host: Address of its TCPStore.
        store_port: Port of it.
        restarts: Restarts after failures of workers so far.
        losses: Restarts after losses of nodes so far.
        blamed: Failures so far that began on a node.
        cause: Why there is one after another; empty for the first.
    """

    generation: int
    members: list[Member] = []
    store_host: str = ""
    store_port: int = 0
    restarts: int = 0
    losses: int = 0
    blamed: dict[str, int] = {}
    cause: str = ""


class ServersScaled(msgspec.Struct, frozen=True, tag=True):
    """The job is to have so many parameter servers from now on."""

    total: int


class Excluded(msgspec.Struct, frozen=True, tag=True):
    """A node may run no more workers, for the reason `why`, a sentence."""

    node_id: str
    why: str


class Decided(msgspec.Struct, frozen=True, tag=True):
    """The verdict was reached; a scheduler must tell it to the nodes in `untold`."""

    verdict: Verdict
    untold: list[str] = []


Record = Began | GenerationStarted | ServersScaled | Excluded | Decided

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """Return `record` as a line: CRC-32 of the rest in hexadecimal, a space, JSON."""
    body = _encoder.encode(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode(data: bytes) -> list[Record]:
    """Return the records before the first one that is torn or damaged."""
    return _decode(data)[0]


def whole(data: bytes) -> int:
    """Return the bytes of `data` before the first record that is torn or damaged."""
    return _decode(data)[1]


def _decode(data: bytes) -> tuple[list[Record], int]:
    records: list[Record] = []
    length = 0
    for line in data.splitlines(keepends=True):
        checksum, _, body = line.partition(b" ")
        if not body.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body[:-1]):
            break
        try:
            records.append(_decoder.decode(body))
        except msgspec.MsgspecError:
            break
        length += len(line)
    return records, length


def term(records: Iterable[Record]) -> int:
    """Return the number of the last scheduler that began; 0 without any."""
    return max((record.term for record in records if isinstance(record, Began)), default=0)


def last_generation(records: Iterable[Record]) -> GenerationStarted | None:
    """Return the last generation that was announced; None before the first."""
    started = [record for record in records if isinstance(record, GenerationStarted)]
    return started[-1] if started else None


def causes(records: Iterable[Record]) -> list[tuple[int, str]]:
    """Return each generation that followed another, with the reason."""
    started = (record for record in records if isinstance(record, GenerationStarted))
    return [(record.generation, record.cause) for record in started if record.cause]


def scaled(records: Iterable[Record]) -> int | None:
    """Return how many parameter servers the job is to have; None as it was started."""
    totals = [record.total for record in records if isinstance(record, ServersScaled)]
    return totals[-1] if totals else None


def excluded(records: Iterable[Record]) -> dict[str, str]:
    """Return the nodes that may run no more workers, and why."""
    return {record.node_id: record.why for record in records if isinstance(record, Excluded)}


def verdict(data: bytes) -> Verdict | None:
    """Return the verdict in the log `data`, None when there is none yet."""
    return verdict_of(decode(data))


def untold(records: Sequence[Record]) -> list[str]:
    """Return the nodes that the next scheduler must tell how the job ended or goes on."""
    decided = [record.untold for record in records if isinstance(record, Decided)]
    last = last_generation(records)
    members = last.members if last else []
    return decided[0] if decided else [member.node_id for member in members]


def verdict_of(records: Iterable[Record]) -> Verdict | None:
    """Return the verdict in `records`, None when there is none yet."""
    decided = [record for record in records if isinstance(record, Decided)]
    return decided[0].verdict if decided else None
