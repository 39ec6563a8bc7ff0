"""The scheduler's log: one checked line per record, so that a torn end is seen."""

from __future__ import annotations

import zlib

import msgspec

from msrun.cluster.verdict import Verdict


class GenerationStarted(msgspec.Struct, frozen=True, tag=True):
    """Generation `generation` was announced."""

    generation: int


class Decided(msgspec.Struct, frozen=True, tag=True):
    """The verdict was reached."""

    verdict: Verdict


Record = GenerationStarted | Decided

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """Return `record` as a line: CRC-32 of the rest in hexadecimal, a space, JSON."""
    body = _encoder.encode(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode(data: bytes) -> list[Record]:
    """Return the records before the first one that is torn or damaged."""
    records: list[Record] = []
    for line in data.splitlines(keepends=True):
        checksum, _, body = line.partition(b" ")
        if not body.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body[:-1]):
            break
        try:
            records.append(_decoder.decode(body))
        except msgspec.MsgspecError:
            break
    return records


def verdict(data: bytes) -> Verdict | None:
    """Return the verdict in the log `data`, None when there is none yet."""
    decided = [record for record in decode(data) if isinstance(record, Decided)]
    return decided[0].verdict if decided else None
