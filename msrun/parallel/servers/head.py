"""The coordinator's driver: a part of server 0, whose disk has its log.

Rank 0 asks for a session (`Setup`).  The coordinator has all servers begin it (`Begin`), again and
again until each has answered, and then drives its machine.  Where there are to be other servers
than before, it waits until the new ones are in the session, so that no rank waits for their start,
and has those end that are too many, once nobody needs anything of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from msrun.cluster.servers.coordinator import CoordinatorState
from msrun.cluster.servers.events import (
    Arrived,
    CoordinatorEvent,
    DivisionRecord,
    Scale,
    SendMessage,
    ServersReleased,
    Unrecoverable,
    WriteDecision,
)
from msrun.cluster.servers.messages import AskOwnership, Header
from msrun.cluster.tick import Tick
from msrun.parallel.servers.disk import ServerDisk
from msrun.parallel.servers.wire import (
    RANK,
    SERVER,
    Actor,
    Begin,
    Begun,
    JobEnds,
    Packet,
    Released,
    SessionPlan,
    Setup,
    actor_of,
)

# Sends a word to an actor, in a session.
Send = Callable[[Actor, Header, str], None]


class Head:
    """The coordinator of one job.

    Args:
        disk: Where its log is.
        servers: Number of servers.
        nodes: Number of nodes with servers.
        send: Sends a word.
    """

    def __init__(self, disk: ServerDisk, servers: int, nodes: int, send: Send) -> None:
        self._disk = disk
        self._nodes = nodes
        self._wanted = servers
        self._send = send
        self._term = disk.count_start()
        self._plan: SessionPlan | None = None
        self._machine: CoordinatorState | None = None
        self._begun: set[int] = set()
        self._begin_due = 0.0
        self._asking: dict[int, AskOwnership] = {}
        self._release_due = 0.0
        self._told = 0
        self.known: Collection[int] = ()
        self.failure = ""

    @property
    def total(self) -> int:
        """How many servers there are, with those that still have what others need."""
        machine = self._machine
        decision = machine.decision if machine else None
        numbers = set(self.known)  # one too many is known until it has ended
        if decision:
            numbers.update(decision.pool, decision.before.servers if decision.before else ())
        return max(self._wanted, max(numbers, default=0) + 1)

    def scale(self, servers: int, now: float) -> None:
        """Have so many servers."""
        if servers != self._wanted:
            self._wanted = servers
            self._begin_due = now
            self.tick(now)

    def go_on(self, session: str, now: float) -> None:
        """Go on with the session on disk, if it is this one."""
        plan = self._disk.plan() if self._plan is None else None
        if plan is not None and plan.session == session:
            self._start(plan, now)

    def deadline(self) -> float | None:
        """Return when `tick` is due; None where nothing is."""
        if self._plan is None or self._machine is None or self.failure:
            return None
        dues = [self._machine.deadline()]
        dues.append(self._begin_due if self._unbegun() else None)
        dues.append(self._release_due if self._needless() else None)
        return min((due for due in dues if due is not None), default=None)

    def tick(self, now: float) -> None:
        """Send again what was not answered."""
        if self._plan is None or self.failure:
            return
        if now >= self._begin_due and (unbegun := self._unbegun()):
            for server in unbegun:
                self._send((SERVER, server), Begin(plan=self._plan), self._plan.session)
            self._begin_due = now + self._plan.rules.retry
        self._feed(Tick(), now)
        self._scale_if_ready(now)
        if now >= self._release_due and (needless := self._needless()):
            for server in needless:
                self._send((SERVER, server), Released(), self._plan.session)
            self._release_due = now + self._plan.rules.retry

    def _unbegun(self) -> set[int]:
        return set(range(self.total)) - self._begun

    def _needless(self) -> list[int]:
        """Return the servers that are one too many, and have nothing that anybody needs."""
        decision = self._machine.decision if self._machine else None
        if decision is None or decision.before or len(decision.pool) != self._wanted:
            return []
        return [server for server in self.known if server >= self._wanted]

    def _scale_if_ready(self, now: float) -> None:
        machine, wanted = self._machine, tuple(range(self._wanted))
        if machine is None or machine.decision is None or machine.servers == wanted:
            return
        if self._begun.issuperset(wanted):
            self._feed(Scale(wanted, machine.workers), now)

    def receive(self, packet: Packet, now: float) -> None:
        """Take a message for the coordinator."""
        word: Any = packet.word
        if isinstance(word, Setup):
            if self._plan is None or word.plan.session != self._plan.session:
                self._disk.write_plan(word.plan)
                self._start(word.plan, now)
            return
        if self._plan is None or packet.session != self._plan.session:
            return
        if self.failure:
            self._send(packet.sender, JobEnds(reason=self.failure), packet.session)
        elif isinstance(word, Begun):
            self._begun.add(packet.sender[1])
            self._scale_if_ready(now)
        else:
            if isinstance(word, AskOwnership):
                self._asking[word.worker] = word
            self._feed(Arrived(word), now)

    def _start(self, plan: SessionPlan, now: float) -> None:
        decision = self._disk.decision()
        self._plan = plan
        self._machine = CoordinatorState(
            term=self._term,
            rules=plan.rules,
            tables=tuple(plan.tables),
            servers=decision.servers if decision else tuple(range(self._wanted)),
            workers=decision.workers if decision else tuple(range(plan.workers)),
            decision=decision,
            nodes=self._nodes,
        )
        self._begun.clear()
        self._asking.clear()
        self._told = decision.ownership.epoch if decision else 0
        self._begin_due = now
        self.tick(now)

    def _feed(self, event: CoordinatorEvent, now: float) -> None:
        if self._machine is None or self._plan is None:
            return
        self._act(event, now)
        if not self._machine.is_changing and self._asking:  # they need not ask again
            asking, self._asking = self._asking, {}
            for ask in asking.values():
                self._act(Arrived(ask), now)

    def _act(self, event: CoordinatorEvent, now: float) -> None:
        if self._machine is None or self._plan is None:
            return
        for action in self._machine.handle(event, now=now):
            match action:
                case SendMessage(to=to, message=message):
                    self._send(actor_of(to), message, self._plan.session)
                case WriteDecision(decision=decision):
                    self._disk.write_decision(decision)
                    self._tell(decision)
                case ServersReleased():
                    self._release_due = now
                case Unrecoverable(reason=reason):
                    self.failure = reason
                    for rank in range(self._plan.workers):
                        self._send((RANK, rank), JobEnds(reason=reason), self._plan.session)

    def _tell(self, decision: DivisionRecord) -> None:
        """Write to the log of server 0 who owns how much from now on."""
        ownership = decision.ownership
        if self._plan is None or ownership.epoch == self._told:
            return
        self._told = ownership.epoch
        sizes = {table.name: table for table in self._plan.tables}
        owned = {
            server: sum(sizes[each.table].bytes_of(each.index) for each in slices)
            for server in decision.pool
            for slices in [ownership.slices_of(server)]
        }
        said = ", ".join(f"{nbytes} bytes on server {server}" for server, nbytes in owned.items())
        text = f"msrun: epoch {ownership.epoch} from step {ownership.version} on: {said}"
        print(text, flush=True)  # noqa: T201 - its log
