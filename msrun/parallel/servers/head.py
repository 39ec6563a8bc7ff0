"""The coordinator's driver: a part of server 0, whose disk has its log.

Rank 0 asks for a session (`Setup`).  The coordinator has all servers begin it (`Begin`), again and
again until each has answered, and then drives its machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msrun.cluster.servers.coordinator import CoordinatorState
from msrun.cluster.servers.events import (
    Arrived,
    CoordinatorEvent,
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
        send: Sends a word.
    """

    def __init__(self, disk: ServerDisk, servers: int, send: Send) -> None:
        self._disk = disk
        self._servers = servers
        self._send = send
        self._term = disk.count_start()
        self._plan: SessionPlan | None = None
        self._machine: CoordinatorState | None = None
        self._begun: set[int] = set()
        self._begin_due = 0.0
        self._asking: dict[int, AskOwnership] = {}
        self.failure = ""

    def go_on(self, session: str, now: float) -> None:
        """Go on with the session on disk, if it is this one."""
        plan = self._disk.plan()
        if plan is not None and plan.session == session and self._plan is None:
            self._start(plan, now)

    def deadline(self) -> float | None:
        """Return when `tick` is due; None where nothing is."""
        if self._plan is None or self._machine is None or self.failure:
            return None
        dues = [self._machine.deadline()]
        dues.append(self._begin_due if len(self._begun) < self._servers else None)
        return min((due for due in dues if due is not None), default=None)

    def tick(self, now: float) -> None:
        """Send again what was not answered."""
        if self._plan is None or self.failure:
            return
        if now >= self._begin_due and len(self._begun) < self._servers:
            for server in set(range(self._servers)) - self._begun:
                self._send((SERVER, server), Begin(plan=self._plan), self._plan.session)
            self._begin_due = now + self._plan.rules.retry
        self._feed(Tick(), now)

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
            servers=decision.servers if decision else tuple(range(self._servers)),
            workers=decision.workers if decision else tuple(range(plan.workers)),
            decision=decision,
        )
        self._begun.clear()
        self._asking.clear()
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
                case ServersReleased():
                    pass  # their processes end with the job
                case Unrecoverable(reason=reason):
                    self.failure = reason
                    for rank in range(self._plan.workers):
                        self._send((RANK, rank), JobEnds(reason=reason), self._plan.session)
