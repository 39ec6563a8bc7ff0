"""The state machine that decides who owns what.  It does no IO and knows no row.

An ownership changes when servers or workers are added or removed (`Scale`), and when a server has
lost pushes that no worker can send again (`NeedRollback`).  Both are one procedure:

1. *Freeze.*  All servers stop answering pulls and report.  What is on its way still gets done: a
   step that one server has done, all can do.  When all have done the same steps, each takes a
   snapshot there.  For a rollback this is left out: the newest version that all have on disk is it.
2. *Decide.*  The next ownership begins at that version.  It is written to the log first.
3. *Adopt.*  The new owners take slices from snapshots of the old, and put all they own on disk.
4. *Open.*  When all have, workers are served again, and snapshots of the old ownership are dropped.

Until step 4 the old snapshots are all there, so any process may die at any moment.  The machine
looks at what each server lacks (`_wanted`) and orders that, again and again until it is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from msrun.cluster.servers.events import (
    NEVER,
    Arrived,
    CoordinatorAction,
    CoordinatorEvent,
    DivisionRecord,
    Rules,
    Scale,
    SendMessage,
    ServersReleased,
    ToPeer,
    ToRank,
    Unrecoverable,
    WriteDecision,
)
from msrun.cluster.servers.messages import (
    Adopt,
    Adopted,
    AskOwnership,
    CoordinatorOrder,
    Freeze,
    Frozen,
    Message,
    Moved,
    NeedRollback,
    Open,
    Opened,
    ServerHello,
    SnapshotMissing,
)
from msrun.cluster.servers.ownership import Ownership, Table, balance, mirrored


class Outstanding(msgspec.Struct, frozen=True):
    """What a server was ordered, and has not reported yet.

    Args:
        order: The order, without its number.
        first: The number with which it was sent first.
        at: When it was sent last.
    """

    order: CoordinatorOrder
    first: int
    at: float


@dataclass(slots=True, kw_only=True)
class CoordinatorState:
    """One life of the coordinator.

    Args:
        term: How many coordinators there were before.
        rules: What the user asked for.
        tables: The parameters that servers own.
        servers: Those that were asked for.
        workers: Those that were asked for.
        decision: The last one in the log; None for a new job.
        nodes: Number of nodes with servers: number i is on node i modulo that.
    """

    term: int
    rules: Rules
    tables: tuple[Table, ...]
    servers: tuple[int, ...]
    workers: tuple[int, ...]
    decision: DivisionRecord | None = None
    nodes: int = 1
    _is_rollback: bool = False
    _lives: dict[int, int] = field(default_factory=dict)
    _adopted: set[int] = field(default_factory=set)
    _opened: set[int] = field(default_factory=set)
    _is_complete: bool = False
    _reports: dict[int, Frozen] = field(default_factory=dict)
    _sent: dict[int, Outstanding] = field(default_factory=dict)
    _count: int = 0
    _is_over: bool = False
    _actions: list[CoordinatorAction] = field(default_factory=list)

    @property
    def ownership(self) -> Ownership | None:
        """The current one, decided but not always adopted."""
        return self.decision.ownership if self.decision else None

    @property
    def is_changing(self) -> bool:
        """Whether workers wait for an ownership."""
        return not self._is_complete or self._is_asked

    @property
    def _is_asked(self) -> bool:
        """Whether there is a reason for another ownership than the current one."""
        if self.decision is None or self._is_rollback:
            return True
        pool, workers = self.decision.pool, self.decision.ownership.workers
        return (pool, workers) != (self.servers, self.workers)

    def deadline(self) -> float | None:
        """Return when `Tick` is due; None where nothing is."""
        if self.decision is None:
            return -math.inf
        dues = [sent.at + self.rules.retry for sent in self._sent.values()]
        due = min(dues, default=NEVER)
        return None if due == NEVER else due

    def handle(self, event: CoordinatorEvent, *, now: float) -> list[CoordinatorAction]:
        """Return what follows from `event`, in order."""
        self._actions = []
        match event:
            case Arrived(message=message):
                self._hear(message)
            case Scale(servers=servers, workers=workers):
                self.servers, self.workers = tuple(sorted(servers)), tuple(sorted(workers))
                if self.decision:
                    self._log(self.decision.ownership, self.decision.before, self.decision.pool)
        if not self._is_over:
            self._decide()
        if not self._is_over:
            self._order(now)
        return self._actions

    def _hear(self, message: Message) -> None:
        ownership = self.ownership
        match message:
            case ServerHello(server=server, life=life):
                if life >= self._lives.get(server, 0):
                    self._forget(server, life)
            case AskOwnership(worker=worker, epoch=epoch):
                # One that never had a part and has none yet waits until it gets one.
                if ownership and (epoch or worker in ownership.clocks):
                    self._tell(worker, epoch)
            case NeedRollback(worker=worker, epoch=epoch):
                if ownership and epoch == ownership.epoch:
                    self._is_rollback = True
                self._tell(worker, epoch)
            case Adopted() | Opened() | Frozen() | SnapshotMissing():
                self._note(message)

    def _forget(self, server: int, life: int) -> None:
        """A server has begun, and has no state before it adopts one."""
        self._lives[server] = life
        self._adopted.discard(server)
        self._opened.discard(server)
        self._reports.pop(server, None)
        self._sent.pop(server, None)

    def _note(self, message: Adopted | Opened | Frozen | SnapshotMissing) -> None:
        ownership, server = self.ownership, message.server
        if ownership is None or message.epoch != ownership.epoch:
            return
        if message.life < self._lives.get(server, 0):
            return
        if message.life > self._lives.get(server, 0):
            self._forget(server, message.life)  # its own word of that was overtaken
        match message:
            case Adopted():
                self._adopted.add(server)
                self._is_complete = self._is_complete or self._members() <= self._adopted
            case Opened():
                self._opened.add(server)
                if self._members() <= self._opened:
                    self._release()
            case Frozen(term=self.term, count=count) if self._is_answer(server, count):
                self._reports[server] = message
            case SnapshotMissing() if server not in self._adopted:
                self._end(f"server {server} has no snapshot of version {ownership.version} on disk")

    def _is_answer(self, server: int, count: int) -> bool:
        """Whether a report answers what the server was ordered last, which may be said again.

        A report from before that order says nothing: the server may have gone on since.
        """
        order = self._sent.get(server)
        is_newer = self._reports[server].count <= count if server in self._reports else True
        return (
            order is not None
            and isinstance(order.order, Freeze)
            and count >= order.first
            and is_newer
        )

    def _members(self) -> set[int]:
        """Return the servers of the current ownership and of the one before it."""
        if self.decision is None:
            return set()
        before = self.decision.before
        return {*self.decision.ownership.servers, *(before.servers if before else ())}

    def _release(self) -> None:
        if self.decision is None or self.decision.before is None:
            return
        used = {*self.decision.ownership.servers, *self.servers}
        unused = set(self.decision.before.servers) - used
        self._log(self.decision.ownership, None, self.decision.pool)
        if unused:
            self._actions.append(ServersReleased(tuple(sorted(unused))))

    def _end(self, reason: str) -> None:
        self._is_over = True
        self._sent.clear()
        self._actions.append(Unrecoverable(reason))

    # Decisions.

    def _decide(self) -> None:
        """Write the next ownership when all that it depends on is known."""
        ownership = self.ownership
        if ownership is None:
            clocks = dict.fromkeys(self.workers, 0)
            self._write(0, clocks, {}, None)
            return
        if not self._is_complete or not self._is_asked:
            return
        reports = [self._reports.get(server) for server in ownership.servers]
        known = [report for report in reports if report is not None]
        if len(known) < len(reports):
            return
        if self._is_rollback:
            common = set.intersection(*(set(report.saved) for report in known))
            if not common:
                self._end("no version is on the disks of all servers")
                return
            version = max(common)
        else:
            version = self._goal(known)
            if version < 0 or not all(version in report.saved for report in known):
                return
            if any(report.version != version for report in known) or not self._is_ordered(version):
                return
        self._write(version, *self._clocks_at(version, known[0]), ownership)

    def _is_ordered(self, goal: int) -> bool:
        """Whether all reports answer the order to stop at `goal`, behind which no server goes."""
        for server, report in self._reports.items():
            sent = self._sent.get(server)
            order = sent.order if sent else None
            if sent is None or not isinstance(order, Freeze) or order.goal != goal:
                return False
            if report.count < sent.first:
                return False
        return True

    def _goal(self, reports: Iterable[Frozen]) -> int:
        """Return where the epoch can end; -1 while servers wait for pushes that others have."""
        reports = list(reports)
        if self.rules.is_sync:
            return max(report.version for report in reports)
        first = reports[0]
        is_level = all(
            (report.clocks, report.version) == (first.clocks, first.version) for report in reports
        )
        return first.version if is_level else -1

    def _clocks_at(self, version: int, report: Frozen) -> tuple[dict[int, int], dict[int, int]]:
        """Return the clock of each worker at `version`, and of those that have left by then."""
        done = {worker: clock for worker, clock in report.done.items() if worker in self.workers}
        if self.rules.is_sync:
            done = {worker: clock for worker, clock in done.items() if clock <= version}
            return {worker: done.get(worker, version) for worker in self.workers}, done
        going = [clock for worker, clock in report.clocks.items() if worker not in report.done]
        fresh = min(going, default=max(report.clocks.values(), default=0))
        return {worker: report.clocks.get(worker, fresh) for worker in self.workers}, done

    def _write(
        self,
        version: int,
        clocks: dict[int, int],
        done: dict[int, int],
        before: Ownership | None,
    ) -> None:
        traffic = [pair for report in self._reports.values() for pair in report.traffic]
        owners = balance(
            self.tables,
            self.servers,
            before=before.owners if before else None,
            traffic=dict(traffic),
        )
        epoch = before.epoch + 1 if before else 1
        is_same = before is not None and before.clocks.keys() == clocks.keys()
        node_of = {server: server % self.nodes for server in self.servers}
        ownership = Ownership(
            epoch=epoch,
            branch=before.branch if before and is_same else epoch,
            version=version,
            clocks=clocks,
            done=done,
            owners=owners,
            copies=mirrored(owners, node_of) if self.rules.replicas else {},
        )
        self._is_rollback = self._is_complete = False
        self._adopted.clear()
        self._opened.clear()
        self._reports.clear()
        self._sent.clear()
        self._log(ownership, before, self.servers)

    def _log(self, ownership: Ownership, before: Ownership | None, pool: tuple[int, ...]) -> None:
        self.decision = DivisionRecord(
            ownership=ownership,
            before=before,
            pool=pool,
            servers=self.servers,
            workers=self.workers,
        )
        self._actions.append(WriteDecision(self.decision))

    # Orders.

    def _wanted(self, server: int) -> CoordinatorOrder | None:
        """Return what to order a server now; None where it lacks nothing."""
        decision = self.decision
        if decision is None:
            return None
        ownership = decision.ownership
        if server not in self._adopted:
            return Adopt(term=self.term, count=0, ownership=ownership, before=decision.before)
        if not self._is_complete:
            return None
        if server not in self._opened:
            return Open(term=self.term, count=0, epoch=ownership.epoch)
        if self._is_asked and self._members() <= self._opened:
            is_known = self._reports.keys() == set(ownership.servers)
            goal = self._goal(self._reports.values()) if is_known else -1
            goal = -1 if self._is_rollback else goal
            return Freeze(term=self.term, count=0, epoch=ownership.epoch, goal=goal)
        return None

    def _order(self, now: float) -> None:
        members = self._members()
        self._sent = {server: sent for server, sent in self._sent.items() if server in members}
        for server in sorted(members):
            wanted = self._wanted(server)
            sent = self._sent.get(server)
            if wanted is None:
                self._sent.pop(server, None)
                continue
            is_new = sent is None or sent.order != wanted
            if is_new or (sent and now >= sent.at + self.rules.retry):
                self._count += 1
                order = msgspec.structs.replace(wanted, count=self._count)
                self._actions.append(SendMessage(ToPeer(server), order))
                first = self._count if sent is None or is_new else sent.first
                self._sent[server] = Outstanding(wanted, first, now)

    def _tell(self, worker: int, epoch: int) -> None:
        """Tell a worker about an ownership that is newer than the one it knows."""
        ownership = self.ownership
        if ownership and self._is_complete and epoch < ownership.epoch:
            self._actions.append(SendMessage(ToRank(worker), Moved(ownership=ownership)))
