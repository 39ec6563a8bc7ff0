"""Every message between workers, parameter servers and their coordinator.

A message is a header.  Rows and gradients travel beside it as raw buffers, the *payload*, which
no machine of this package looks into.  Every header to or from a worker names the epoch, and the
life of its sender: a process that was killed and started again has a larger one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from msrun.cluster.servers.ownership import Ownership, Slice

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]


class Header(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a snapshot on a server's disk holds, beside rows and optimizer state.

    Args:
        epoch: The ownership under which it was taken.
        version: Optimizer steps that its rows have had.
        clocks: Worker -> how many of its pushes are in it.
        done: Worker -> the clock at which it left.
    """

    epoch: Number
    version: Number
    clocks: dict[int, Number]
    done: dict[int, Number] = {}


# From a worker to a server.


class FromPeer(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A message of a worker.

    Args:
        worker: Its rank.
        life: How many times it was started before.
        epoch: The ownership it knows.
    """

    worker: Number
    life: Number
    epoch: Number


class WorkerHello(FromPeer, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A worker, or its next life, asks a server which push comes next."""


class WorkerStep(FromPeer, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A message of a worker within a step.

    Args:
        clock: The step, counted from 0.
        floor: The oldest push that the worker can still send.
        settled: Every server has acknowledged all pushes below.
        safe: Every server has all pushes below on disk.
    """

    clock: Number
    floor: Number
    settled: Number
    safe: Number


class Pull(WorkerStep, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Ask for rows as they are before step `clock`; the payload says which.

    Args:
        part: Counts the pulls of a worker's life, of which a step may have several.
    """

    part: Number = 0


class Measure(WorkerStep, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Ask for norms of the sum of all workers' gradients of step `clock`; no row changes.

    The payload is the worker's gradients.

    Args:
        round: Counts the measurements of the step, from 1.
        is_again: The server has had the gradients, so there is no payload.
    """

    round: Number
    is_again: bool = False


class Push(WorkerStep, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Send the gradients of step `clock`, already scaled as they are to be added.

    Args:
        rounds: Measurements of the step, which come before.
        is_commit: The gradients are those of the last measurement, and the payload says by what
            they are multiplied.
    """

    rounds: Number = 0
    is_commit: bool = False


class Leave(WorkerStep, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A worker has no step `clock`, and no later one."""


# From a server to a worker.


class FromServer(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A message of a server.

    Args:
        server: Its number.
        server_life: How many times it was started before.
        worker: For whom it is.
        life: For which life of it.
        epoch: The ownership of both.
        clock: How many pushes of that worker are here, the first ones without a gap.
        rounds: How many measurements of its next step are here.
        version: Optimizer steps that the server has done.
        durable: How many pushes of that worker are on disk.
        is_done: The worker has left, as far as this server knows.
        has_left: It is on disk that the worker has left.
    """

    server: Number
    server_life: Number
    worker: Number
    life: Number
    epoch: Number
    clock: Number
    rounds: Number = 0
    version: Number
    durable: Number
    is_done: bool = False
    has_left: bool = False


class Welcome(FromServer, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Answer a `WorkerHello`."""


class Ack(FromServer, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Say which pushes are here.  In memory: only those below `durable` outlive the server."""


class Rows(FromServer, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Answer a `Pull`; the rows are the payload.

    Args:
        asked: The clock of the pull.
        part: Its part.
        oldest: The rows hold every push below this clock, of every worker that has not left.
    """

    asked: Number
    oldest: Number
    part: Number = 0


class Norms(FromServer, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Answer a `Measure` once those of all workers are here; the norms are the payload.

    Args:
        asked: The clock of the measurement.
        round: Its round.
        absent: Workers that have pushed their gradients of the step without this measurement: there
            are no norms.
    """

    asked: Number
    round: Number
    absent: list[Number] = []


class Moved(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Tell a worker about the current ownership; what it asked or sent was not accepted."""

    ownership: Ownership


# Between the coordinator and the others.


class AskOwnership(FromPeer, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A worker asks for an ownership that is newer than the one it knows, if there is one."""


class NeedRollback(FromPeer, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A worker cannot send a push again that a server has lost."""


class ServerHello(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A server has started, or has heard nothing for long."""

    server: Number
    life: Number


class CoordinatorOrder(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A message of the coordinator to a server.

    Args:
        term: How many coordinators there were before.
        count: Counts the orders of a term; a server ignores an order that is older than another.
    """

    term: Number
    count: Number


class Freeze(CoordinatorOrder, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Answer no pull any more, and report.

    Args:
        epoch: The ownership that is to end.
        goal: Do all steps below, and take a snapshot there; -1 while this is not known.
    """

    epoch: Number
    goal: int


class Adopt(CoordinatorOrder, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Go over to `ownership`: take slices from their earlier owners, and put all on disk.

    Args:
        ownership: The new one.
        before: The one before it, whose snapshots have the rows; None for the first.
    """

    ownership: Ownership
    before: Ownership | None


class Open(CoordinatorOrder, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Serve workers: all servers have the rows of this epoch on disk."""

    epoch: Number


class FromServerToCoordinator(
    Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True
):
    """An answer to an `CoordinatorOrder`, by a life of a server, about an epoch."""

    server: Number
    life: Number
    epoch: Number


class Frozen(
    FromServerToCoordinator, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True
):
    """The state of a server that answers no pull.

    Args:
        term: That of the last order that it got.
        count: Which order that was.
        version: Optimizer steps that it has done.
        clocks: Worker -> how many of its pushes are here.
        done: Worker -> the clock at which it left.
        saved: Versions of this epoch that are on disk.
        traffic: Bytes of slices that were pulled and pushed here since it owns them.
    """

    term: Number
    count: Number
    version: Number
    clocks: dict[int, Number]
    done: dict[int, Number]
    saved: list[Number]
    traffic: list[tuple[Slice, float]] = []


class Adopted(
    FromServerToCoordinator, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True
):
    """All slices of the server in this epoch are on its disk."""


class Opened(
    FromServerToCoordinator, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True
):
    """The server serves this epoch, or has no part in it; earlier snapshots are gone."""


class SnapshotMissing(
    FromServerToCoordinator, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True
):
    """The server keeps slices in this epoch whose snapshot is not on its disk."""


# Between servers.


class FetchSlices(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A new owner asks an earlier one for slices, as they are in a snapshot.

    Args:
        server: Who asks.
        epoch: For which ownership.
        base: The epoch of the snapshot.
        version: Its version.
        slices: What it wants.
    """

    server: Number
    epoch: Number
    base: Number
    version: Number
    slices: list[Slice]


class SliceContents(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Answer a `FetchSlices`; rows and optimizer state are the payload."""

    server: Number
    epoch: Number
    slices: list[Slice]


class FetchCopies(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A server that was killed asks another one for what both have, as it is now.

    Args:
        server: Who asks.
        life: Which life of it.
        epoch: The ownership of both.
        slices: What it wants.
        version: Steps that these are to have had: the answer waits for them.
    """

    server: Number
    life: Number
    epoch: Number
    slices: list[Slice]
    version: Number = 0


class CopyContents(Header, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Answer a `FetchCopies`; rows and optimizer state are the payload.

    Args:
        server: Who answers.
        life: Whom: which life of it.
        epoch: The ownership of both.
        now: What the rows hold; None where the server has none either, since it was killed, too.
    """

    server: Number
    life: Number
    epoch: Number
    now: Snapshot | None


BetweenServers = FetchSlices | SliceContents | FetchCopies | CopyContents
ToServer = WorkerHello | Pull | Measure | Push | Leave | Freeze | Adopt | Open | BetweenServers
ToWorker = Welcome | Ack | Rows | Norms | Moved
ToCoordinator = (
    AskOwnership | NeedRollback | ServerHello | Frozen | Adopted | Opened | SnapshotMissing
)
Message = ToServer | ToWorker | ToCoordinator
