"""Messages of parameter servers as frames: one head in msgpack, then each tensor as it is.

A payload is a tree of mappings, lists and plain values whose leaves may be tensors.  In the head a
tensor is its type and shape; its bytes are a frame of their own.  Nothing is ever unpickled, and
what does not fit together is dropped by whoever receives it.  Between processes of one node a
tensor in shared memory (`shared_memory.py`) is its place there, and has no frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from msrun.cluster.servers.events import Rules, ToHead, ToPeer, ToRank
from msrun.cluster.servers.messages import Header, Message
from msrun.cluster.servers.ownership import Table
from msrun.errors import ProtocolError
from msrun.parallel.servers.first_rows.sources import TableSource
from msrun.parallel.servers.recipe import Recipe
from msrun.parallel.servers.shared_memory import SHARED_BYTES_MIN, Offer, PeerRegion, SharedRegion
from msrun.transport.data_sockets import Buffer

RANK = "rank"
SERVER = "server"
HEAD = "head"

Actor = tuple[str, int]
# The job's generation, which session of its ranks this is, and what no other session has.
_SESSION = "[0-9]{1,15}-[0-9]{1,15}-[0-9a-z]{1,64}"
SessionName = Annotated[str, msgspec.Meta(pattern=f"^{_SESSION}$")]
_MaybeSession = Annotated[str, msgspec.Meta(pattern=f"^({_SESSION})?$")]
_MARK = "$"
_SHARED_MARK = "@"
# Smaller tensors are copied on arrival: their frames lie wherever in a buffer that many share.
_SHARED_BYTES_MAX = 16 << 10
_TYPES = {
    str(dtype).partition(".")[2]: dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
}


class SessionPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What servers do for one life of the job's ranks, from given contents on.

    Args:
        session: A name that no other session of any job has: see `session_order`.
        tables: The parameters that servers own.
        recipe: The optimizer.
        rules: Staleness, snapshots, retries.
        workers: Number of ranks.
        directory: Where snapshots go; empty is the servers' private directory.
        suppliers: Table -> the rank that has its first contents.
        sources: Table that no rank has -> what servers make it of.
    """

    session: SessionName
    tables: list[Table]
    recipe: Recipe
    rules: Rules
    workers: int
    directory: str = ""
    suppliers: dict[str, int]
    sources: dict[str, TableSource] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Table -> into how many slices it is cut."""
        return {table.name: table.slices for table in self.tables}


class Setup(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Rank 0 asks the coordinator for a session."""

    plan: SessionPlan


class Begin(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The coordinator tells a server to end its session, and to begin this one."""

    plan: SessionPlan


class Begun(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A server is in the session of this message."""


class Hail(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A rank is there: a server that wants contents knows a way to it."""


class WantContents(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A server asks a rank for the first contents of slices: table -> numbers of slices."""

    slices: dict[str, list[int]]


class FirstContents(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A rank answers with contents: table -> number of the slice -> rows and state."""


class Share(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A rank offers its shared memory to a server, which says nothing if it cannot have it."""

    offer: Offer


class Shared(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A server has the region of `token`, and offers its own; without a token it has none."""

    token: str
    offer: Offer | None = None


class CanRead(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A rank has the region of `token`, which is the server's."""

    token: str


class JobEnds(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Servers cannot go on, and why."""

    reason: str


class Released(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The coordinator tells a server that it is one too many, and has nothing that others lack."""


Sharing = Share | Shared | CanRead
Greeting = Setup | Begin | Begun | Hail | WantContents | FirstContents
Word = Message | Greeting | JobEnds | Sharing | Released


class Packet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The head of a message.

    Args:
        session: The session of its sender; empty before the first.
        sender: Kind and number of its sender.
        target: For whom it is: server 0 has the coordinator beside itself.
        word: The message.
        payload: Its payload, without tensors.
    """

    session: _MaybeSession
    sender: Actor
    target: Actor
    word: Word
    payload: Any = None


class _NoRegionError(Exception):
    """A tensor is in shared memory that is not here."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Packet)


# What reading of anything may raise.
_NO_MESSAGE = (
    *(ValueError, TypeError, LookupError),
    *(ArithmeticError, StopIteration, RuntimeError),
)
# Stands for a payload whose tensors are in shared memory that its receiver does not have.
NOT_HERE = object()


def session_name(generation: int, count: int, drawn: str) -> str:
    """Return the name of a session: the `count`-th of the ranks of a generation."""
    return f"{generation}-{count}-{drawn}"


def session_order(session: str) -> tuple[int, int]:
    """Return generation and count of a session: a later session has larger ones."""
    generation, count, _ = session.split("-")
    return int(generation), int(count)


def encode(
    packet: Packet, payload: object = None, region: SharedRegion | None = None
) -> list[Buffer]:
    """Return the frames of a message; `region` is the one that its receiver can read."""
    buffers: list[Buffer] = []
    plain = _packed(payload, buffers, region)
    return [_encoder.encode(msgspec.structs.replace(packet, payload=plain)), *buffers]


def decode(
    parts: Sequence[Buffer], regions: Mapping[Actor, PeerRegion] | None = None
) -> tuple[Packet, Any]:
    """Return a message and its payload, or `NOT_HERE`.

    Args:
        parts: Its frames.
        regions: The shared memory of those who may have sent it.

    Raises:
        ProtocolError: It is no message.
    """
    try:
        packet = _decoder.decode(parts[0])
        left = iter(parts[1:])
        region = regions.get(packet.sender) if regions else None
        payload = _unpacked(packet.payload, left, region)
        is_whole = next(left, None) is None
    except _NoRegionError:
        return packet, NOT_HERE
    except _NO_MESSAGE as error:
        text = f"no message of parameter servers: {error}"
        raise ProtocolError(text) from None
    if not is_whole:
        raise ProtocolError("no message of parameter servers: frames are left")
    return packet, payload


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor; of one on the host that is contiguous, without a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type, unused-ignore]


def pack(tree: object) -> tuple[bytes, list[Buffer]]:
    """Return a tree without its tensors, and their bytes."""
    buffers: list[Buffer] = []
    return _encoder.encode(_packed(tree, buffers, None)), buffers


def _packed(tree: Any, buffers: list[Buffer], region: SharedRegion | None) -> Any:
    if isinstance(tree, Tensor):
        kind = [str(tree.dtype).partition(".")[2], *tree.shape]
        if region and tree.nbytes >= SHARED_BYTES_MIN:
            place = region.place(tree)
            if place is not None:
                return {_SHARED_MARK: [place, *kind]}
        buffers.append(bytes_of(tree))
        return {_MARK: kind}
    if isinstance(tree, Mapping):
        return {key: _packed(value, buffers, region) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_packed(value, buffers, region) for value in tree]
    return tree


def _unpacked(tree: Any, left: Iterator[Buffer], region: PeerRegion | None = None) -> Any:
    if isinstance(tree, dict):
        if _MARK in tree:
            return _tensor(tree[_MARK], next(left))
        if _SHARED_MARK in tree:
            if region is None:
                raise _NoRegionError
            place, kind, *shape = tree[_SHARED_MARK]
            return region.tensor(place, shape, _TYPES[kind])
        return {key: _unpacked(value, left, region) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_unpacked(value, left, region) for value in tree]
    return tree


def _tensor(mark: Sequence[Any], data: Buffer) -> Tensor:
    kind, *shape = mark
    dtype, count = _TYPES[kind], math.prod(shape)
    if count * dtype.itemsize != len(data) or min(shape, default=0) < 0:
        raise ValueError(f"{len(data)} bytes for {kind} {shape}")
    if not count:
        return torch.empty(shape, dtype=dtype)
    if len(data) <= _SHARED_BYTES_MAX:
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=dtype).view(shape)


def unpack(head: bytes, parts: Sequence[Buffer]) -> Any:
    """Return the tree that `pack` has packed."""
    return _unpacked(msgspec.msgpack.decode(head), iter(parts))


def lengths(head: bytes) -> list[int]:
    """Return how many bytes each tensor of a packed tree has."""
    return list(_lengths(msgspec.msgpack.decode(head)))


def _lengths(tree: Any) -> Iterator[int]:
    if isinstance(tree, dict):
        if _MARK in tree:
            kind, *shape = tree[_MARK]
            yield _TYPES[kind].itemsize * math.prod(shape)
            return
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from _lengths(value)


def actor_of(to: ToRank | ToPeer | ToHead) -> Actor:
    """Return whom a machine's message is for."""
    match to:
        case ToRank(worker=worker):
            return (RANK, worker)
        case ToPeer(server=server):
            return (SERVER, server)
    return (HEAD, 0)
