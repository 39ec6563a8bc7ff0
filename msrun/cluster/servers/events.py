"""Events and actions of the three machines, and the rules that they share."""

from __future__ import annotations

import math

import msgspec

from msrun.cluster.servers.messages import (
    CopyContents,
    FetchCopies,
    FetchSlices,
    Header,
    Message,
    Norms,
    Rows,
    SliceContents,
    Snapshot,
)
from msrun.cluster.servers.ownership import Ownership, Slice
from msrun.cluster.tick import Tick

# Rows, gradients, or which rows: what the machines pass on and do not look into.
Payload = object


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for.

    Args:
        staleness: How many steps a worker may be ahead of the slowest one; 0 adds the gradients of
            all workers and does one optimizer step with the sum; above, each push is a step.
        every: Optimizer steps of a server from one snapshot to the next.
        retry: Seconds after which a message without an answer is sent again.
        replicas: Hot copies of each slice, 0 or 1; copies are for sync training alone.
    """

    staleness: float = 0
    every: int = 100
    retry: float = 1.0
    replicas: int = 0

    @property
    def is_sync(self) -> bool:
        """Whether every step sees all gradients of the step before, and none of its own."""
        return self.staleness == 0


# Who a message is for.


class ToRank(msgspec.Struct, frozen=True):
    """A worker."""

    worker: int


class ToPeer(msgspec.Struct, frozen=True):
    """A server."""

    server: int


class ToHead(msgspec.Struct, frozen=True):
    """The coordinator."""


# Events.


class Arrived(msgspec.Struct, frozen=True):
    """A message has come, with its payload."""

    message: Message
    payload: Payload = None


class Saved(msgspec.Struct, frozen=True):
    """A snapshot is on the disk of this server, and will be after any crash."""

    epoch: int
    version: int


class StepBegins(msgspec.Struct, frozen=True):
    """The worker needs rows for its next step, or further rows for it; `ask` says which."""

    ask: Payload


class StepMeasures(msgspec.Struct, frozen=True):
    """The worker needs norms of the sum of all workers' gradients, and has its own."""

    gradients: Payload


class StepEnds(msgspec.Struct, frozen=True):
    """The worker has the gradients of its step.

    Args:
        gradients: They; or how those of the last measurement are changed.
        is_commit: Whether they are the latter.
    """

    gradients: Payload
    is_commit: bool = False


class Reconnected(msgspec.Struct, frozen=True):
    """There is another connection to a server: what went over the last one may be lost."""

    server: int


class Finished(msgspec.Struct, frozen=True):
    """The worker does no further step."""


class Scale(msgspec.Struct, frozen=True):
    """Servers and workers are to be these from the next step boundary on."""

    servers: tuple[int, ...]
    workers: tuple[int, ...]


ServerEvent = Arrived | Saved | Tick
WorkerEvent = Arrived | Reconnected | StepBegins | StepMeasures | StepEnds | Finished | Tick
CoordinatorEvent = Arrived | Scale | Tick


# Actions of all three.


class SendMessage(msgspec.Struct, frozen=True):
    """Send `message`, with `payload` beside it.

    It may get lost, come twice, late, or after others.
    """

    to: ToRank | ToPeer | ToHead
    message: Header
    payload: Payload = None


class Unrecoverable(msgspec.Struct, frozen=True):
    """End the job: rows are lost for good, or a server has broken a rule."""

    reason: str


# Actions of a server.


class SendRows(msgspec.Struct, frozen=True):
    """Answer a pull with the rows as they are now; `ask` is the payload of the pull."""

    message: Rows
    ask: Payload


class SendNorms(msgspec.Struct, frozen=True):
    """Answer a measurement with norms of the sum of these gradients, added in this order."""

    message: Norms
    pushes: tuple[tuple[int, Payload], ...]


class SendSlices(msgspec.Struct, frozen=True):
    """Answer another server with slices of a snapshot on this disk."""

    asked: FetchSlices
    message: SliceContents


class SendCopies(msgspec.Struct, frozen=True):
    """Answer another server with slices as they are now."""

    asked: FetchCopies
    message: CopyContents


class TakeCopies(msgspec.Struct, frozen=True):
    """Replace all rows and optimizer state by what was kept."""


class Committed(msgspec.Struct, frozen=True):
    """A push whose gradients a measurement brought.

    Args:
        gradients: Payload of the measurement.
        commit: Payload of the push: how they are changed.
    """

    gradients: Payload
    commit: Payload


class ApplyStep(msgspec.Struct, frozen=True):
    """Add the gradients in this order and do one optimizer step: `version` + 1 follows."""

    version: int
    pushes: tuple[tuple[int, Payload], ...]


class LoadSnapshot(msgspec.Struct, frozen=True):
    """Replace all rows and optimizer state by those of a snapshot on this disk."""

    epoch: int
    version: int


class KeepSlices(msgspec.Struct, frozen=True):
    """Keep slices that an earlier owner sent, until `AssembleSlices`."""

    slices: tuple[Slice, ...]
    payload: Payload


class AssembleSlices(msgspec.Struct, frozen=True):
    """Replace all rows and optimizer state.

    Args:
        ownership: The slices of this server are the new contents.
        base: The epoch whose snapshot of `ownership.version` has `own`; None where the model's
            initial weights are the contents.
        own: Slices from that snapshot on this disk; all others were kept.
    """

    ownership: Ownership
    base: int | None
    own: tuple[Slice, ...]


class SaveSnapshot(msgspec.Struct, frozen=True):
    """Write rows and optimizer state as they are now to disk; `Saved` reports it."""

    snapshot: Snapshot


class DropSnapshots(msgspec.Struct, frozen=True):
    """Remove snapshots, each an epoch and a version, from this disk."""

    which: tuple[tuple[int, int], ...]


# Actions of a worker.


class DeliverRows(msgspec.Struct, frozen=True):
    """Give the script the rows of step `clock`: server -> payload."""

    clock: int
    rows: dict[int, Payload]


class DeliverNorms(msgspec.Struct, frozen=True):
    """Give the script the norms of its measurement.

    Args:
        clock: The step.
        norms: Server -> payload.
        absent: Workers that do not measure in this step; then there are no norms.
    """

    clock: int
    norms: dict[int, Payload]
    absent: tuple[int, ...] = ()


class StepDone(msgspec.Struct, frozen=True):
    """All servers have the gradients of step `clock`."""

    clock: int


class BeginAt(msgspec.Struct, frozen=True):
    """Go on with step `clock`: of a worker that has just started, or whose steps were undone."""

    clock: int


class WorkerLeft(msgspec.Struct, frozen=True):
    """This worker has no part in the job any more, and nothing of it can be lost."""


# Actions of the coordinator.


class DivisionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record of the coordinator's log: what it goes on from after a crash.

    Args:
        ownership: The current one, which servers adopt or have adopted.
        before: The one before it, while servers still have it.
        pool: The servers among which it divides the slices.
        servers: Those that were asked for last.
        workers: Those that were asked for last.
    """

    ownership: Ownership
    before: Ownership | None
    pool: tuple[int, ...]
    servers: tuple[int, ...]
    workers: tuple[int, ...]


class WriteDecision(msgspec.Struct, frozen=True):
    """Write to the log, before anything that follows is sent."""

    decision: DivisionRecord


class ServersReleased(msgspec.Struct, frozen=True):
    """These servers own nothing any more, and all that they owned is on other disks."""

    servers: tuple[int, ...]


ServerAction = (
    SendMessage
    | SendRows
    | SendNorms
    | SendSlices
    | SendCopies
    | TakeCopies
    | ApplyStep
    | LoadSnapshot
    | KeepSlices
    | AssembleSlices
    | SaveSnapshot
    | DropSnapshots
)
WorkerAction = (
    SendMessage | DeliverRows | DeliverNorms | StepDone | BeginAt | WorkerLeft | Unrecoverable
)
CoordinatorAction = SendMessage | WriteDecision | ServersReleased | Unrecoverable

NEVER = math.inf
