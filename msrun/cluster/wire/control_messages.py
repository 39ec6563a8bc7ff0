"""Requests of tools that control a job from outside, and the answers of its scheduler.

One question in one bounded frame, one answer in one.  Long lists come in pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from msrun.cluster.liveness.stacks import StackGroup
from msrun.cluster.verdict import Name, Verdict
from msrun.cluster.wire.codec import FRAME_BYTES_MAX
from msrun.cluster.wire.messages import (
    PROTOCOL_VERSION,
    Formation,
    NodeId,
    Number,
    Offset,
    Ranges,
    Signum,
)
from msrun.errors import ProtocolError, VersionError
from msrun.job import SERVERS_MAX

_PAGE_BYTES_MAX = 48 * 1024
LOG_BYTES_MAX = 32 * 1024

T = TypeVar("T")


class Request(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all requests."""


class GetStatus(Request, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Where does the job stand?"""


class GetNodes(Request, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Which nodes does it have, from number `first` on?"""

    first: Number = 0


class GetRanks(Request, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Which ranks does it have, from `first` on?"""

    first: Number = 0


class GetServers(Request, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Which parameter servers does it have, from number `first` on?"""

    first: Number = 0


class GetLog(Request, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Return a part of the log of a rank.

    Args:
        rank: The rank.
        offset: First byte that is wanted; None for the last `lines` lines.
        lines: How many.
    """

    rank: Number
    offset: Offset | None = None
    lines: Number = 0


class GetStacks(Request, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Where are all ranks in their programs?"""


class StopJob(Request, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Stop the job, as SIGTERM to each of its launchers does.

    Args:
        now: With SIGKILL, without time for the workers.
    """

    now: bool = False


class DrainNode(Request, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Let a node leave the job, which goes on; `node` is its host, address, rank or id."""

    node: NodeId


class ScaleServers(Request, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Have so many parameter servers."""

    servers: Annotated[int, msgspec.Meta(ge=1, le=SERVERS_MAX)]


class SignalJob(Request, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Send a signal to workers.

    Args:
        signum: The signal.
        ranks: First and last rank of each range; empty for all ranks.
    """

    signum: Signum
    ranks: Ranges = []


AnyRequest = (
    GetStatus
    | GetNodes
    | GetRanks
    | GetServers
    | GetLog
    | GetStacks
    | StopJob
    | DrainNode
    | ScaleServers
    | SignalJob
)


class Reply(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all replies."""


class Denied(Reply, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """It was not done; `reason` is one sentence."""

    reason: str


class Done(Reply, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The request was carried out, or begun; `sentence` describes it."""

    sentence: str


class Status(Reply, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Where a job stands.

    Args:
        job_id: The job.
        phase: Such as `running`.
        generation: The generation that runs or is next.
        uptime: Seconds since this scheduler started.
        formation: How many nodes it takes.
        nodes: Nodes that are registered.
        world_size: Workers in the generation.
        waiting_for: Nodes that are missing while it forms; else empty.
        failures: Restarts used after failures of workers.
        losses: Restarts used after lost nodes.
        max_restarts: Restarts allowed of each kind.
        causes: Why earlier generations ended, the latest last.
        scheduler_restarts: How often the scheduler itself was started again.
        verdict: The result of a job that is over.
    """

    job_id: str
    phase: str
    generation: int
    uptime: float
    formation: Formation
    nodes: int
    world_size: int
    waiting_for: str
    failures: int
    losses: int
    max_restarts: int
    causes: list[str]
    scheduler_restarts: int
    verdict: Verdict | None = None


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One node.

    Args:
        node_id: Its name in the protocol.
        host: Its host name.
        address: By which others reach it.
        role: `serving`, `spare`, `leaving` or `lost`.
        node_rank: Its place in the generation; None for a spare.
        ranks: Its first rank and how many it has; None for a spare.
        slots: Workers that it can run.
        silent: Seconds since its last sign of life; None for a lost one, and on one node,
            which gives none.
        scheduler: The scheduler runs on it.
        devices: As of `Register`.
    """

    node_id: str
    host: str
    address: str
    role: str
    node_rank: int | None
    ranks: tuple[int, int] | None
    slots: int
    silent: float | None
    scheduler: bool
    devices: list[tuple[int, str]] = []


class Nodes(Reply, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A page of nodes; `following` is the number of the next one, None at the end."""

    rows: list[NodeRow]
    following: int | None = None


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank.

    Args:
        rank: The rank.
        local_rank: Its number on its node.
        host: Its node.
        pid: Its pid; None before it was started.
        state: `starting`, `running`, or how it ended.
        seconds: Since it was started, or for which it ran; None before.
    """

    rank: int
    local_rank: int
    host: str
    pid: int | None
    state: str
    seconds: float | None


class Ranks(Reply, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A page of ranks; `following` is the next one, None at the end."""

    rows: list[RankRow]
    following: int | None = None


class ServerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter server.

    Args:
        server: Its number.
        host: Its node.
        pid: Its pid; None while it does not run.
        restarts: How often it was started again.
    """

    server: int
    host: str
    pid: int | None
    restarts: int


class ServerPage(Reply, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A page of parameter servers; `following` is the next one, None at the end."""

    rows: list[ServerRow]
    following: int | None = None


class Log(Reply, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a rank's log.

    Args:
        host: The node that has it.
        log_file: Its path there.
        data: The part, at most `LOG_BYTES_MAX`.
        offset: The byte after it.
    """

    host: str
    log_file: str
    data: bytes
    offset: int


class Stacks(Reply, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Where all ranks are.

    Args:
        generation: The generation of the ranks.
        groups: Ranks by where they are, larger groups first.
        left_out: Groups that one frame has no room for.
    """

    generation: int
    groups: list[StackGroup]
    left_out: int = 0


AnyReply = Denied | Done | Status | Nodes | Ranks | ServerPage | Log | Stacks


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request on the wire.

    Args:
        question: Id of the job; empty for the one that the scheduler runs.
        request: The request.
        version: Version of the protocol.
    """

    question: Name
    request: AnyRequest
    version: int = PROTOCOL_VERSION


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reply on the wire."""

    answer: AnyReply
    version: int = PROTOCOL_VERSION


class _Marked(msgspec.Struct, frozen=True):
    version: int = 0
    question: str | None = None


_encoder = msgspec.msgpack.Encoder()
_marks = msgspec.msgpack.Decoder(_Marked)
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)


def is_question(frame: bytes | memoryview) -> bool:
    """Whether `frame` looks like a question; decoding it may still fail."""
    try:
        return _marks.decode(frame).question is not None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def encode(message: Question | Answer) -> bytes:
    """Return the one frame that carries `message`.

    Raises:
        ProtocolError: It would be too large, or holds values that no peer could read.
    """
    try:
        frame = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError) as error:
        raise ProtocolError(f"it cannot be sent: {error}") from error
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(f"{len(frame)} bytes are over the limit of {FRAME_BYTES_MAX}")
    return frame


def decode_question(frame: bytes) -> Question:
    """Return the question that `frame` carries; raises as `decode_answer`."""
    return _decode(frame, _questions)


def decode_answer(frame: bytes) -> Answer:
    """Return the answer that `frame` carries.

    Raises:
        VersionError: It is of another version.
        ProtocolError: It is too large, or no answer.
    """
    return _decode(frame, _answers)


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(f"{len(frame)} bytes are over the limit of {FRAME_BYTES_MAX}")
    try:
        version = _marks.decode(frame).version
        if version != PROTOCOL_VERSION:
            msg = f"the job speaks protocol version {version}, this msrun {PROTOCOL_VERSION}"
            raise VersionError(msg, hint="use the msrun that started the job")
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame is no message: {error}") from error


def fitting(rows: Sequence[T]) -> list[T]:
    """Return the first of `rows`, as many as one frame has room for, at least one."""
    size = 0
    for count, row in enumerate(rows):
        size += len(_encoder.encode(row))
        if size > _PAGE_BYTES_MAX and count:
            return list(rows[:count])
    return list(rows)
