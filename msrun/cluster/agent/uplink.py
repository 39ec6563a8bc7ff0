"""An agent's end of the line to the scheduler: sessions, signs of life, the lease.

It turns frames into the events of `AgentState` and its bodies into frames.  A *session* begins with
a registration; frames of another session are dropped, so that nothing said before it can do harm.
The lease is counted from the time at which the latest answered frame *left* here, not from its
answer: the scheduler may have heard nothing since.  All times are of the agent's own monotonic
clock, which the scheduler only echoes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from msrun.cluster.agent.events import (
    Forgotten,
    Reached,
    SchedulerLost,
    SchedulerMessage,
    SchedulerSilent,
)
from msrun.cluster.liveness.lease import Lease
from msrun.cluster.wire.link import RESEND_SECONDS, OrderedLink
from msrun.cluster.wire.messages import (
    DumpStacks,
    Envelope,
    Finish,
    FromAgent,
    FromScheduler,
    Hung,
    ReadLog,
    Refused,
    Register,
    Restarting,
    Serve,
    SignalRanks,
    Start,
    Stop,
    Unknown,
    Waiting,
)

UplinkEvent = SchedulerMessage | SchedulerSilent | SchedulerLost | Forgotten | Reached

_OF_SCHEDULER = (
    Start,
    Stop,
    Serve,
    Restarting,
    Finish,
    Refused,
    Waiting,
    Unknown,
    DumpStacks,
    ReadLog,
    SignalRanks,
    Hung,
)


@dataclass(slots=True, kw_only=True)
class Uplink:
    """The line of one incarnation of one node.

    Args:
        job_id: The job.
        node_id: The node.
        incarnation: Random number of this start of its launcher.
        lease: How long it may go on alone.
        first_resend: Seconds after which it registers again if there is no answer.
    """

    job_id: str
    node_id: str
    incarnation: int
    lease: Lease
    first_resend: float = RESEND_SECONDS
    _session: int = 0
    _link: OrderedLink = field(default_factory=OrderedLink)
    _term: int = 0
    _follows: int | None = None
    _echo: float | None = None
    _beat_at: float | None = None
    _is_cut: bool = False
    _has_given_up: bool = False

    def join(self, generation: int, register: Register, *, now: float) -> list[Envelope]:
        """Begin a new session with `register` as its first body."""
        self._session += 1
        self._link = OrderedLink(self.first_resend)
        body = msgspec.structs.replace(register, follows=self._follows)
        return self.send(generation, body, now=now)

    def send(self, generation: int, body: FromAgent, *, now: float) -> list[Envelope]:
        """Return the frame that carries `body`, which also asks for a sign of life."""
        parcel = self._link.put(generation, body, now=now)
        return [self._frame(now, parcel.seq, generation, body)]

    def ask(self, *, now: float) -> list[Envelope]:
        """Return a frame that asks the scheduler for a sign of life."""
        return [self._frame(now)]

    @property
    def live_until(self) -> float | None:
        """Time by which no worker may live unless there is another answer; None for ever."""
        if self._echo is None or self.lease.kill == float("inf"):
            return None
        return self._echo + self.lease.kill

    def deadline(self) -> float | None:
        """Time by which `tick` must be called; None when there is none."""
        due = [at for at in (self._link.deadline, self._beat_at, self._cut_at()) if at is not None]
        return min(due, default=None)

    def tick(self, *, now: float) -> tuple[list[UplinkEvent], list[Envelope]]:
        """Return the events and frames that are due."""
        frames = [
            self._frame(now, parcel.seq, parcel.generation, parcel.body)
            for parcel in self._link.overdue(now=now)
        ]
        # Every frame with a stamp asks for an answer, so one that is sent again is a sign of life
        # too.
        if not frames and self._beat_at is not None and now >= self._beat_at:
            frames.append(self._frame(now))
        refused = None if self._has_given_up else self._link.refused
        if refused:
            self._has_given_up = True
            what = type(refused.body).__name__
            reason = f"the scheduler did not take a message of this node ({what}, sent many times)"
            return [SchedulerLost(reason)], []
        cut_at = self._cut_at()
        if cut_at is None or now < cut_at:
            return [], frames
        self._is_cut = True
        return [SchedulerSilent()], frames

    def receive(
        self, envelope: Envelope, *, now: float
    ) -> tuple[list[UplinkEvent], list[Envelope]]:
        """Return the events in a frame of the scheduler, and the frames that answer it."""
        # Late frames of an earlier session or incarnation are about a past that is over.
        mine = (self.job_id, self.incarnation, self._session)
        if (envelope.job_id, envelope.incarnation, envelope.session) != mine:
            return [], []
        body = envelope.body
        is_another = 0 < self._term < envelope.term
        self._term = max(self._term, envelope.term)
        if isinstance(body, Unknown):
            self._follows = body.known
        # A scheduler with a higher term is a new one, which knows nothing of this session.
        if is_another or isinstance(body, Unknown):
            return [Forgotten()], []
        events: list[UplinkEvent] = self._echoed(envelope.stamp, now)
        self._link.acknowledge(envelope.ack, now=now)
        if not envelope.seq:
            return events, []
        if self._link.take(envelope.seq) and isinstance(body, _OF_SCHEDULER):
            age = 0.0 if self._echo is None else now - envelope.stamp
            events.append(SchedulerMessage(envelope.generation, body, age))
        return events, [self._frame(0.0)]

    def _echoed(self, stamp: float, now: float) -> list[UplinkEvent]:
        """Count the lease from `stamp`, the time at which the latest answered frame was sent."""
        if not stamp or (self._echo is not None and stamp <= self._echo):
            return []
        # An answer to a frame that is older than the fence comes too late to end the cut.
        is_late = now >= stamp + self.lease.fence
        is_news = self._echo is None or (self._is_cut and not is_late)
        if self._echo is None:
            self._ask_from(stamp)
        self._echo = stamp
        self._is_cut = self._is_cut and is_late
        return [Reached()] if is_news else []

    def _ask_from(self, at: float) -> None:
        """Ask for the next sign of life some time after `at`.

        Before the first answer there is nothing to ask for: a registration is sent again.
        """
        if self.lease.heartbeat != float("inf"):
            self._beat_at = at + self.lease.heartbeat

    def _cut_at(self) -> float | None:
        return None if self._is_cut else self._fence_at()

    def _fence_at(self) -> float | None:
        if self._echo is None or self.lease.fence == float("inf"):
            return None
        return self._echo + self.lease.fence

    def _frame(
        self,
        stamp: float,
        seq: int = 0,
        generation: int = -1,
        body: FromAgent | FromScheduler | None = None,
    ) -> Envelope:
        if stamp and self._echo is not None:
            self._ask_from(stamp)
        return Envelope(
            job_id=self.job_id,
            node_id=self.node_id,
            incarnation=self.incarnation,
            session=self._session,
            seq=seq,
            ack=self._link.received,
            stamp=stamp,
            term=self._term,
            generation=generation,
            body=body,
        )
