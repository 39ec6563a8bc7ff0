"""The state machine of a parameter server.  It does no IO and knows no row.

Phases: WAITING -> ADOPTING -> READY -> SERVING <-> FROZEN -> ADOPTING (the next epoch) ...

What makes the sums exact, and lets any process die:

- *A push counts once.*  `clocks` holds how many pushes of each worker are here without a gap.  A
  push with another clock than the next one changes nothing; its answer says which one is next.
- *Gradients are added in the order of the workers*, not of arrival, so a step that is done again
  gives the same bits.
- *A step is done when every server can do it* (`settled`).  A worker settles a step when all
  servers have acknowledged its push.  Only then does any server apply it.  If a worker dies between
  two pushes of one step, no server has gone past that step, and its next life repeats it.
- *An acknowledged push is in memory only.*  Every answer says which pushes are on disk
  (`durable`), and workers keep all others.  A server that was killed goes on from a snapshot.
- *Nothing from another ownership is accepted.*  Every message names its epoch.
- *Snapshots are at the same versions on all servers*, and none is dropped before all servers have
  it or a later one (`safe`).  So there always is a version to which all can go back.

- *Copies are servers like others.*  Workers push to the owner of a slice and to the server with its
  copy, and both do the same steps.  A server that was killed takes all that it had from those that
  have it, at one version, and no step is done again.  Only if they have been killed, too, or stay
  at different versions, or behind its snapshot, it goes on from that.

- *A measurement changes nothing.*  Before it pushes, a worker may ask for norms of the sum of all
  gradients of the step, as clipping needs them.  Its gradients are held, counted like pushes
  (`rounds`), and the answer waits for those of all workers.  The push that follows may then say
  only by what they are multiplied.  They are in memory alone: a server that was killed gets them
  again, each before the push of its step.

With staleness above 0 every push is a step of its own, applied when it comes; a pull waits until
the slowest worker is at most that many steps behind.
"""

# tidy: long file, one machine is read in one place: every transition of a server stands here.

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from msrun.cluster.servers.events import (
    NEVER,
    ApplyStep,
    Arrived,
    AssembleSlices,
    Committed,
    DropSnapshots,
    KeepSlices,
    LoadSnapshot,
    Payload,
    Rules,
    Saved,
    SaveSnapshot,
    SendCopies,
    SendMessage,
    SendNorms,
    SendRows,
    SendSlices,
    ServerAction,
    ServerEvent,
    TakeCopies,
    ToHead,
    ToPeer,
    ToRank,
)
from msrun.cluster.servers.messages import (
    Ack,
    Adopt,
    Adopted,
    CoordinatorOrder,
    CopyContents,
    FetchCopies,
    FetchSlices,
    Freeze,
    FromPeer,
    FromServer,
    Frozen,
    Leave,
    Measure,
    Message,
    Moved,
    Norms,
    Open,
    Opened,
    Pull,
    Push,
    Rows,
    ServerHello,
    SliceContents,
    Snapshot,
    SnapshotMissing,
    Welcome,
    WorkerHello,
    WorkerStep,
)
from msrun.cluster.servers.ownership import Ownership, Slice

_Answer = TypeVar("_Answer", bound=FromServer)

# Retries without a word of the coordinator after which a server reports again.
_PATIENCE = 3
# Requests for copies after which a server takes its snapshot.
_COPIES_ASKED_MAX = 3


class ServerPhase(enum.Enum):
    """The state of a server."""

    WAITING = "waiting"
    ADOPTING = "adopting"
    READY = "ready"
    SERVING = "serving"
    FROZEN = "frozen"


@dataclass(slots=True, kw_only=True)
class ServerState:
    """One life of one server.

    Args:
        server: Its number.
        life: How many times it was started before.
        rules: What the user asked for.
        disk: The snapshots on its disk.
        version: Optimizer steps that its rows have had.
        clocks: Worker -> how many of its pushes are here.
        traffic: Slice -> bytes that were pulled and pushed, as the caller counts them.
    """

    server: int
    life: int
    rules: Rules
    disk: list[Snapshot] = field(default_factory=list)
    phase: ServerPhase = ServerPhase.WAITING
    ownership: Ownership | None = None
    version: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    traffic: dict[Slice, float] = field(default_factory=dict)
    _before: Ownership | None = None
    _durable: Snapshot | None = None
    _lives: dict[int, int] = field(default_factory=dict)
    _settled: dict[int, int] = field(default_factory=dict)
    _safe: int = 0
    _held: dict[tuple[int, int], Payload] = field(default_factory=dict)
    # Worker -> measurements of its next step that are here; clock and round -> their gradients; and
    # worker -> the measurement that it waits for.
    _rounds: dict[int, int] = field(default_factory=dict)
    _measured: dict[tuple[int, int], dict[int, Payload]] = field(default_factory=dict)
    _asking: dict[int, tuple[int, int]] = field(default_factory=dict)
    _waiting: dict[int, tuple[Pull, Payload]] = field(default_factory=dict)
    _missing: dict[int, list[Slice]] = field(default_factory=dict)
    # Server -> what it is asked for and what it answered, while this one takes copies.
    _copies: dict[int, tuple[list[Slice], Snapshot | None]] = field(default_factory=dict)
    _copies_asked: int = 0
    # Server -> its request for copies of a version that is not here yet.
    _lending: dict[int, FetchCopies] = field(default_factory=dict)
    _saving: dict[tuple[int, int], Snapshot] = field(default_factory=dict)
    _goal: int = -1
    _order: tuple[int, int] = (-1, -1)
    _due: float = -math.inf
    _actions: list[ServerAction] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        """The ownership that it knows; 0 before the first."""
        return self.ownership.epoch if self.ownership else 0

    def deadline(self) -> float | None:
        """Return when `Tick` is due; None where nothing is."""
        return None if self._due == NEVER else self._due

    def handle(self, event: ServerEvent, *, now: float) -> list[ServerAction]:
        """Return what follows from `event`, in order."""
        self._actions = []
        match event:
            case Arrived(message=message, payload=payload):
                self._receive(message, payload, now)
            case Saved(epoch=epoch, version=version):
                self._saved(epoch, version)
        for asked in [each for each in self._lending.values() if each.version <= self.version]:
            del self._lending[asked.server]
            self._copy(asked)
        if now >= self._due:
            self._remind(now)
        return self._actions

    def _receive(self, message: Message, payload: Payload, now: float) -> None:
        if isinstance(message, CoordinatorOrder):
            order = (message.term, message.count)
            if order <= self._order:
                return
            self._order = order
            self._obey(message)
            self._wait(now)
        elif isinstance(message, FromPeer):
            self._hear(message, payload)
        elif isinstance(message, FetchSlices):
            self._lend(message)
        elif isinstance(message, SliceContents):
            self._take(message, payload)
        elif isinstance(message, FetchCopies):
            self._copy(message)
        elif isinstance(message, CopyContents):
            self._take_copies(message, payload)

    def _wait(self, now: float) -> None:
        """Set the time at which something must have been heard."""
        is_asking = self._missing or self._copies
        retries = 1 if self.phase is ServerPhase.WAITING or is_asking else _PATIENCE
        is_idle = self.phase is ServerPhase.SERVING
        self._due = NEVER if is_idle else now + retries * self.rules.retry

    def _remind(self, now: float) -> None:
        if self._missing:
            self._fetch()
        elif self._copies:
            self._ask_for_copies()
        elif self.phase is not ServerPhase.SERVING:
            self._tell_head(ServerHello(server=self.server, life=self.life))
        self._wait(now)

    # Workers.

    def _hear(self, message: FromPeer, payload: Payload) -> None:
        if self.phase not in {ServerPhase.SERVING, ServerPhase.FROZEN} or self.ownership is None:
            return
        worker = message.worker
        if message.epoch < self.epoch:
            self._tell_worker(worker, Moved(ownership=self.ownership))
        if message.epoch != self.epoch or worker not in self.clocks:
            return
        if message.life < self._lives.get(worker, 0):
            return
        if message.life > self._lives.get(worker, 0):
            self._waiting.pop(worker, None)
            self._forget_rounds(worker)
        self._lives[worker] = message.life
        if isinstance(message, WorkerHello):
            self._answer(worker, Welcome)
        elif isinstance(message, WorkerStep) and not self._is_closed:
            self._step(message, payload)

    def _step(self, message: WorkerStep, payload: Payload) -> None:
        worker = message.worker
        self._settled[worker] = max(self._settled[worker], message.settled)
        self._safe = max(self._safe, message.safe)
        if not self.rules.is_sync:  # what a life cannot send any more is not waited for
            skipped = max(0, message.floor - self.clocks[worker])
            self.clocks[worker] += skipped
            self.version += skipped
        match message:
            case Measure():
                self._measure(message, payload)
                self._answer(worker, Ack)
            case Push(clock=clock, rounds=rounds, is_commit=is_commit):
                if self._is_next(worker, clock) and self._rounds.get(worker, 0) == rounds:
                    if is_commit:
                        payload = Committed(self._measured[clock, rounds][worker], payload)
                    self.clocks[worker] = clock + 1
                    self._rounds.pop(worker, None)
                    self._accept(worker, clock, payload)
                self._answer(worker, Ack)
            case Pull(clock=clock):
                self._waiting[worker] = (message, payload)
                if self.clocks[worker] < clock or (self.rules.is_sync and self.version > clock):
                    self._answer(worker, Ack)
            case Leave(clock=clock):
                if self.clocks[worker] == clock:
                    self.done[worker] = clock
                    self._save_if_due(has_left=True)
                self._answer(worker, Ack)
        self._advance()
        self._tell_norms()
        self._serve()
        self._drop()

    def _measure(self, message: Measure, payload: Payload) -> None:
        worker, clock, number = message.worker, message.clock, message.round
        is_next = clock == self.clocks[worker] and number == self._rounds.get(worker, 0) + 1
        if is_next and not message.is_again:
            self._rounds[worker] = number
            self._measured.setdefault((clock, number), {})[worker] = payload
        if worker in self._measured.get((clock, number), {}):
            self._asking[worker] = (clock, number)

    def _tell_norms(self) -> None:
        """Answer the measurements for which all gradients are here, or never will be."""
        for worker, (clock, number) in sorted(self._asking.items()):
            given = self._measured.get((clock, number), {})
            lacking = self._unmeasured(clock, given)
            absent = [each for each in lacking if self.clocks[each] > clock]
            if lacking and not absent:
                continue
            del self._asking[worker]
            more = {"asked": clock, "round": number}
            message = self._header(worker, Norms, **more)
            if absent:
                message = msgspec.structs.replace(message, absent=absent)
                self._tell_worker(worker, message)
            else:
                self._do(SendNorms(message, tuple(sorted(given.items()))))

    def _unmeasured(self, clock: int, given: Mapping[int, Payload]) -> list[int]:
        """Return the workers whose gradients a norm lacks."""
        needed = {each for each in self.clocks if self._takes_part(each, clock)}
        return sorted(needed - given.keys())

    def _forget_rounds(self, worker: int) -> None:
        """Forget the measurements of a worker's last life, which its next one repeats."""
        self._rounds.pop(worker, None)
        self._asking.pop(worker, None)
        for (clock, _), given in self._measured.items():
            if clock == self.clocks[worker]:
                given.pop(worker, None)

    def _is_next(self, worker: int, clock: int) -> bool:
        """Whether this push was not here yet, and all before it were."""
        return clock == self.clocks[worker]

    def _accept(self, worker: int, clock: int, payload: Payload) -> None:
        if self.rules.is_sync:
            self._held[worker, clock] = payload
        else:
            self._apply(((worker, payload),))

    def _apply(self, pushes: tuple[tuple[int, Payload], ...]) -> None:
        self._do(ApplyStep(self.version, pushes))
        self.version += 1
        self._save_if_due()

    def _advance(self) -> None:
        """Do all steps for which every worker's gradients are here, and on every server."""
        while self.rules.is_sync and not self._is_closed:
            version = self.version
            needed = [worker for worker in sorted(self.clocks) if self._takes_part(worker, version)]
            if not needed or not all(self.clocks[worker] > version for worker in needed):
                return
            if version >= self._goal and not self._is_settled(needed, version):
                return
            self._apply(tuple((worker, self._held.pop((worker, version))) for worker in needed))
            for key in [key for key in self._measured if key[0] <= version]:
                del self._measured[key]

    def _takes_part(self, worker: int, version: int) -> bool:
        return self.done.get(worker, math.inf) > version

    def _is_settled(self, workers: list[int], version: int) -> bool:
        return all(self._settled[worker] > version for worker in workers)

    def _oldest(self) -> int:
        """Return below which clock all pushes are here, of workers that have not left."""
        clocks = [clock for worker, clock in self.clocks.items() if worker not in self.done]
        return min(clocks, default=max(self.clocks.values(), default=0))

    def _may_serve(self, pull: Pull) -> bool:
        if self.rules.is_sync:
            return self.version == pull.clock
        if self.clocks[pull.worker] < pull.clock:
            return False
        return pull.clock - self._oldest() <= self.rules.staleness

    def _serve(self) -> None:
        """Answer the pulls that can be answered."""
        if self.phase is not ServerPhase.SERVING:
            return
        for worker, (pull, ask) in sorted(self._waiting.items()):
            if self._may_serve(pull):
                del self._waiting[worker]
                more = {"asked": pull.clock, "oldest": self._oldest(), "part": pull.part}
                self._do(SendRows(self._header(worker, Rows, **more), ask))

    def _header(self, worker: int, kind: type[_Answer], **more: int) -> _Answer:
        durable = self._durable.clocks.get(worker, 0) if self._durable else 0
        return kind(
            server=self.server,
            server_life=self.life,
            worker=worker,
            life=self._lives[worker],
            epoch=self.epoch,
            clock=self.clocks[worker],
            rounds=self._rounds.get(worker, 0),
            version=self.version,
            durable=durable,
            is_done=worker in self.done,
            has_left=self._durable is not None and worker in self._durable.done,
            **more,
        )

    def _answer(self, worker: int, kind: type[Welcome | Ack]) -> None:
        self._tell_worker(worker, self._header(worker, kind))

    # Snapshots.

    def _save_if_due(self, *, has_left: bool = False) -> None:
        """Take a snapshot at a version at which all servers take one."""
        is_end = self.version in self.done.values() if self.rules.is_sync else has_left
        if is_end or (self.version % self.rules.every == 0 and not has_left):
            self._save()

    def _save(self) -> None:
        snapshot = self._snapshot()
        which = _name(snapshot)
        if which not in self._saving and snapshot not in self.disk:
            self._saving[which] = snapshot
            self._do(SaveSnapshot(snapshot))

    def _snapshot(self) -> Snapshot:
        clocks = self.clocks
        if self.rules.is_sync:  # pushes that are held are not in it
            clocks = {
                worker: min(self.version, self.done.get(worker, self.version)) for worker in clocks
            }
        done = {worker: clock for worker, clock in self.done.items() if clock <= clocks[worker]}
        return Snapshot(epoch=self.epoch, version=self.version, clocks=dict(clocks), done=done)

    def _saved(self, epoch: int, version: int) -> None:
        snapshot = self._saving.pop((epoch, version), None)
        if snapshot is None:
            return
        self.disk = [kept for kept in self.disk if _name(kept) != (epoch, version)] + [snapshot]
        if epoch != self.epoch:
            return
        if self._durable is None or version >= self._durable.version:
            self._durable = snapshot
        if self.phase is ServerPhase.ADOPTING:
            self._adopted()
        elif self.phase is ServerPhase.FROZEN:
            self._report()
        if version == self.version and snapshot.done != self._snapshot().done:
            self._save()  # a worker left while it was written
        for worker in sorted(self.done.keys() & self._lives.keys()):
            self._answer(worker, Ack)
        self._drop()

    def _drop(self) -> None:
        """Drop snapshots that nobody goes back to."""
        if self.phase is not ServerPhase.SERVING or self._durable is None:
            return
        versions = [kept.version for kept in self.disk if kept.epoch == self.epoch]
        safe = self._safe if self.rules.is_sync else self._durable.version
        oldest = max((version for version in versions if version <= safe), default=0)
        self._drop_all(
            [kept for kept in self.disk if kept.epoch < self.epoch or kept.version < oldest]
        )

    def _drop_all(self, snapshots: list[Snapshot]) -> None:
        if snapshots:
            self.disk = [kept for kept in self.disk if kept not in snapshots]
            self._do(DropSnapshots(tuple(map(_name, snapshots))))

    # The coordinator.

    def _obey(self, order: CoordinatorOrder) -> None:
        match order:
            case Adopt(ownership=ownership, before=before):
                newest = max((kept.epoch for kept in self.disk), default=0)
                if ownership.epoch > self.epoch and ownership.epoch >= newest:
                    self._adopt(ownership, before)
                elif ownership.epoch == self.epoch and self.phase is not ServerPhase.ADOPTING:
                    self._answer_head(Adopted)
            case Open(epoch=self.epoch) if self.phase is not ServerPhase.ADOPTING:
                self.phase = ServerPhase.SERVING
                self._goal = -1
                self._answer_head(Opened)
                self._drop()
                if not self._owned():
                    self._drop_all(self.disk)
                self._serve()
            case Freeze(epoch=self.epoch, goal=goal) if self.phase in {
                ServerPhase.SERVING,
                ServerPhase.FROZEN,
            }:
                self.phase = ServerPhase.FROZEN
                self._goal = goal
                self._advance()
                if self._is_closed:
                    self._save()
                self._report()

    @property
    def _is_closed(self) -> bool:
        """Whether it takes nothing any more, because this is where the epoch ends."""
        return self.phase is ServerPhase.FROZEN and self.version == self._goal

    def _owned(self) -> list[Slice]:
        return self.ownership.slices_of(self.server) if self.ownership else []

    def _adopt(self, ownership: Ownership, before: Ownership | None) -> None:
        self.phase = ServerPhase.ADOPTING
        self.ownership, self._before = ownership, before
        self._goal = -1
        self._durable = None
        self._safe = 0
        self._held.clear()
        self._waiting.clear()
        self._rounds.clear()
        self._measured.clear()
        self._asking.clear()
        self._missing.clear()
        self._copies.clear()
        self._lending.clear()
        self._saving.clear()
        here = [kept for kept in self.disk if kept.epoch == ownership.epoch]
        latest = max(here, key=lambda kept: kept.version, default=None)
        base = ownership if latest is None else latest
        self.version = base.version
        self.clocks, self.done = dict(base.clocks), dict(base.done)
        self._settled = dict(self.clocks)
        if latest:
            self._durable = latest
            if ownership.copies:
                self._want_copies(ownership)
            else:
                self._load()
        elif not self._owned():
            self._adopted()
        else:
            self._gather(before)

    def _load(self) -> None:
        """Go on from the snapshot."""
        self._copies.clear()
        if self._durable:
            self._do(LoadSnapshot(self._durable.epoch, self._durable.version))
            self._adopted()

    def _want_copies(self, ownership: Ownership) -> None:
        for piece in ownership.slices_of(self.server):
            peer = ownership.peer_of(piece, self.server)
            self._copies.setdefault(peer, ([], None))[0].append(piece)
        self._copies_asked = 0
        self._ask_for_copies()

    def _ask_for_copies(self) -> None:
        """Ask those that have not answered, or are behind others; in the end take the snapshot."""
        self._copies_asked += 1
        if self._copies_asked > _COPIES_ASKED_MAX:
            self._load()
            return
        newest = max((now.version for _, now in self._copies.values() if now), default=0)
        for peer, (_, now) in sorted(self._copies.items()):
            if now is None or now.version < newest:
                self._ask_for_copy(peer, newest)

    def _ask_for_copy(self, peer: int, version: int) -> None:
        fetch = FetchCopies(
            server=self.server,
            life=self.life,
            epoch=self.epoch,
            slices=self._copies[peer][0],
            version=version,
        )
        self._do(SendMessage(ToPeer(peer), fetch))

    def _copy(self, asked: FetchCopies) -> None:
        is_here = asked.epoch == self.epoch and self.phase in {
            ServerPhase.SERVING,
            ServerPhase.FROZEN,
        }
        if is_here and self.version < asked.version:
            self._lending[asked.server] = asked
            return
        answer = CopyContents(
            server=self.server,
            life=asked.life,
            epoch=asked.epoch,
            now=self._snapshot() if is_here else None,
        )
        if is_here:
            self._do(SendCopies(asked, answer))
        elif asked.epoch >= self.epoch:  # the answer to an older one is an ownership
            self._do(SendMessage(ToPeer(asked.server), answer))

    def _take_copies(self, message: CopyContents, payload: Payload) -> None:
        if (message.life, message.epoch) != (self.life, self.epoch):
            return
        if message.server not in self._copies:
            return
        if message.now is None:
            self._load()
            return
        slices, before = self._copies[message.server]
        if before and before.version >= message.now.version:
            return
        self._do(KeepSlices(tuple(slices), payload))
        self._copies[message.server] = (slices, message.now)
        found = [now for _, now in self._copies.values()]
        newest = max(now.version for now in found if now)
        for peer, (_, now) in sorted(self._copies.items()):
            if now and now.version < newest:  # it does that step in a moment
                self._ask_for_copy(peer, newest)
        if any(now is None or now.version != newest for now in found):
            return
        if self._durable and newest < self._durable.version:  # those were killed, too
            self._load()  # workers need not have what this snapshot holds and the copies do not
            return
        self._copies.clear()
        self.version, self.clocks = message.now.version, dict(message.now.clocks)
        # Workers that this server's disk says have left do not say so again.
        self.done = message.now.done | (self._durable.done if self._durable else {})
        self._settled = dict(self.clocks)
        self._do(TakeCopies())
        self._adopted()
        self._save_if_due()  # as those did that have the copies: all go back to one version

    def _gather(self, before: Ownership | None) -> None:
        """Ask the earlier owners for what comes from elsewhere."""
        had = set(before.slices_of(self.server)) if before else set()
        for piece in self._owned() if before else []:
            if before and piece not in had:
                self._missing.setdefault(before.owner_of(piece), []).append(piece)
        if self._missing:
            self._fetch()
        else:
            self._assemble()

    def _fetch(self) -> None:
        if self.ownership is None or self._before is None:
            return
        for owner, pieces in sorted(self._missing.items()):
            fetch = FetchSlices(
                server=self.server,
                epoch=self.epoch,
                base=self._before.epoch,
                version=self.ownership.version,
                slices=pieces,
            )
            self._do(SendMessage(ToPeer(owner), fetch))

    def _lend(self, asked: FetchSlices) -> None:
        if (asked.base, asked.version) in map(_name, self.disk):
            contents = SliceContents(server=self.server, epoch=asked.epoch, slices=asked.slices)
            self._do(SendSlices(asked, contents))

    def _take(self, message: SliceContents, payload: Payload) -> None:
        if message.epoch != self.epoch or self._missing.get(message.server) != message.slices:
            return
        del self._missing[message.server]
        self._do(KeepSlices(tuple(message.slices), payload))
        if not self._missing:
            self._assemble()

    def _assemble(self) -> None:
        ownership, before = self.ownership, self._before
        if ownership is None:
            return
        had = set(before.slices_of(self.server)) if before else set()
        own = [piece for piece in self._owned() if piece in had]
        here = [_name(kept) for kept in self.disk]
        is_lost = before and own and (before.epoch, ownership.version) not in here
        if is_lost or (before is None and ownership.epoch > 1):
            self._answer_head(SnapshotMissing)
            return
        self._do(AssembleSlices(ownership, before.epoch if before else None, tuple(own)))
        self._save()

    def _adopted(self) -> None:
        self.phase = ServerPhase.READY
        self._answer_head(Adopted)

    def _report(self) -> None:
        self._tell_head(
            Frozen(
                server=self.server,
                life=self.life,
                epoch=self.epoch,
                term=self._order[0],
                count=self._order[1],
                version=self.version,
                clocks=dict(self.clocks),
                done=dict(self.done),
                saved=sorted(kept.version for kept in self.disk if kept.epoch == self.epoch),
                traffic=sorted(self.traffic.items()),
            )
        )

    def _answer_head(self, kind: type[Adopted | Opened | SnapshotMissing]) -> None:
        self._tell_head(kind(server=self.server, life=self.life, epoch=self.epoch))

    # Where actions go.

    def _do(self, action: ServerAction) -> None:
        self._actions.append(action)

    def _tell_worker(self, worker: int, message: Message) -> None:
        self._do(SendMessage(ToRank(worker), message))

    def _tell_head(self, message: Message) -> None:
        self._do(SendMessage(ToHead(), message))


def _name(snapshot: Snapshot) -> tuple[int, int]:
    return snapshot.epoch, snapshot.version
