"""The scheduler's ends of the lines to all agents; decides that a silent node is lost.

It turns frames into the events of `SchedulerState` and its bodies into frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from msrun.cluster.liveness.lease import Lease
from msrun.cluster.scheduler.events import AgentMessage, Lost
from msrun.cluster.wire.link import RESEND_SECONDS, OrderedLink
from msrun.cluster.wire.messages import (
    TERM_MAX,
    Drained,
    Envelope,
    FromAgent,
    FromScheduler,
    Interrupted,
    LogPart,
    NodeFailed,
    Register,
    Running,
    ServerFailed,
    ServersChanged,
    Stack,
    Stalled,
    Unknown,
    Warmed,
    WorkerExited,
)

_OF_AGENT = (
    Register,
    Warmed,
    WorkerExited,
    Drained,
    Interrupted,
    NodeFailed,
    Running,
    Stalled,
    Stack,
    LogPart,
    ServersChanged,
    ServerFailed,
)
# All peers are looked at this often, since each has two deadlines that move all the time.
_CHECK_SECONDS = 0.25


@dataclass(slots=True)
class _Peer:
    incarnation: int
    session: int
    heard_at: float
    link: OrderedLink
    stamp: float = 0.0
    answer_by: float = math.inf


@dataclass(slots=True, kw_only=True)
class AgentLinks:
    """Every agent that has registered and is not lost.

    Args:
        job_id: The job.
        lease: How long one may be silent.
        term: Number of this scheduler among those of the job, from 1; never below the term that any
            agent has heard of.
        first_resend: Seconds after which an agent without an answer registers again.
    """

    job_id: str
    lease: Lease
    term: int
    first_resend: float = RESEND_SECONDS
    _peers: dict[str, _Peer] = field(default_factory=dict)
    _lost: dict[str, tuple[int, int]] = field(default_factory=dict)
    _over: set[tuple[str, int]] = field(default_factory=set)
    _check_at: float | None = None
    _awake_since: float = -math.inf

    def __contains__(self, node_id: str) -> bool:
        """Whether the node has registered and is not lost."""
        return node_id in self._peers

    def silence(self, node_id: str, *, now: float) -> float | None:
        """Return the seconds since a node's last sign of life; None for one that is not there."""
        peer = self._peers.get(node_id)
        return None if peer is None else now - peer.heard_at

    @property
    def all_delivered(self) -> bool:
        """Whether every body has reached its agent."""
        return all(peer.link.deadline is None for peer in self._peers.values())

    def expect(self, node_id: str, incarnation: int, *, now: float) -> None:
        """Expect a node to register: it is lost one lease from now unless it does."""
        self._peers[node_id] = self._new_peer(incarnation, 0, now)
        self._check_by(now)

    def send(
        self, node_id: str, generation: int, body: FromScheduler, *, now: float
    ) -> list[Envelope]:
        """Return the frame that carries `body`; none for a node that is not there."""
        peer = self._peers.get(node_id)
        if peer is None:
            return []
        parcel = peer.link.put(generation, body, now=now)
        self._check_by(now)
        return [self._frame(node_id, peer, parcel.seq, generation, body)]

    def has_earlier_life(self, envelope: Envelope) -> bool:
        """Whether `receive` would take this frame for the end of a life that is not lost yet."""
        peer = self._peers.get(envelope.node_id)
        return (
            peer is not None
            and peer.incarnation != envelope.incarnation
            and (envelope.node_id, envelope.incarnation) not in self._over
            and self._is_first(envelope)
            and self._follows(envelope)
        )

    def receive(
        self, envelope: Envelope, *, now: float
    ) -> tuple[list[Lost | AgentMessage], list[Envelope]]:
        """Return the events in a frame of an agent, and the frames that answer it."""
        if envelope.term > self.term:  # of an earlier scheduler, whose log was lost
            self.term = min(envelope.term + 1, TERM_MAX)
        node_id = envelope.node_id
        life = (envelope.incarnation, envelope.session)
        incarnation, session = self._last(node_id)
        is_another = incarnation != envelope.incarnation
        is_late = not is_another and envelope.session < session
        # A late frame of an earlier session, or of an incarnation that another has followed.
        if is_late or (node_id, envelope.incarnation) in self._over:
            return [], []
        events: list[Lost | AgentMessage] = []
        peer = self._peers.get(node_id)
        if peer is None or life != (incarnation, session):
            if not self._is_first(envelope) or (is_another and not self._follows(envelope)):
                return [], [self._unknown(envelope)] if envelope.stamp else []
            if is_another and incarnation is not None:
                events += self.lose(node_id, incarnation, "it was started anew")
                self._over.add((node_id, incarnation))
            peer = self._peers[node_id] = self._new_peer(*life, now)
        peer.heard_at = now
        peer.stamp = max(peer.stamp, envelope.stamp)
        peer.link.acknowledge(envelope.ack, now=now)
        self._check_by(now)
        body = envelope.body
        if envelope.seq and peer.link.take(envelope.seq) and isinstance(body, _OF_AGENT):
            events.append(AgentMessage(node_id, envelope.incarnation, envelope.generation, body))
            if isinstance(body, Register) and body.is_new:
                # Its `Start` or `Waiting` mostly follows at once and acknowledges it too.
                # Thousands may register together, so that saves as many frames.
                peer.answer_by = now + self._patience
                return events, []
        asks = envelope.seq or envelope.stamp
        return events, [self._frame(node_id, peer)] if asks else []

    def lose(self, node_id: str, incarnation: int, reason: str) -> list[Lost]:
        """Forget an incarnation of a node, after its last process has ended."""
        peer = self._peers.get(node_id)
        if peer is None or peer.incarnation != incarnation:
            return []
        del self._peers[node_id]
        self._lost[node_id] = (peer.incarnation, peer.session)
        return [Lost(node_id, peer.incarnation, reason, peer.heard_at)]

    def woke(self, *, now: float) -> None:
        """Count all leases from now: messages of a freeze still wait in the socket."""
        self._awake_since = now

    def deadline(self) -> float | None:
        """Time by which `tick` must be called; None when there is none."""
        return self._check_at

    def tick(self, *, now: float) -> tuple[list[Lost], list[Envelope]]:
        """Return the nodes that are lost by now, and the frames that are due."""
        if self._check_at is None or now < self._check_at:
            return [], []
        reason = f"no sign of life for {self.lease.lost:g}s"
        losses = [
            loss
            for node_id, peer in list(self._peers.items())
            if now - max(peer.heard_at, self._awake_since) >= self.lease.lost
            for loss in self.lose(node_id, peer.incarnation, reason)
        ]
        frames = [
            self._frame(node_id, peer, parcel.seq, parcel.generation, parcel.body)
            for node_id, peer in self._peers.items()
            for parcel in peer.link.overdue(now=now)
        ]
        frames += [
            self._frame(node_id, peer)
            for node_id, peer in self._peers.items()
            if peer.answer_by <= now
        ]
        must_look = any(map(self._must_look_at, self._peers.values()))
        self._check_at = now + _CHECK_SECONDS if must_look else None
        return losses, frames

    def _must_look_at(self, peer: _Peer) -> bool:
        is_mortal = self.lease.lost != math.inf
        return is_mortal or peer.link.deadline is not None or peer.answer_by != math.inf

    def _last(self, node_id: str) -> tuple[int | None, int]:
        """Return the last known incarnation of a node, lost or not, and its last session."""
        peer = self._peers.get(node_id)
        return (peer.incarnation, peer.session) if peer else self._lost.get(node_id, (None, 0))

    def _is_first(self, envelope: Envelope) -> bool:
        """Return whether a frame begins a session with this scheduler.

        A registration that was sent to an earlier scheduler may be old, and its node busy by now.
        The first scheduler has none before it.
        """
        is_lost = self._lost.get(envelope.node_id) == (envelope.incarnation, envelope.session)
        is_for_us = self.term in (envelope.term, 1)
        is_register = envelope.seq == 1 and isinstance(envelope.body, Register)
        return is_register and is_for_us and not is_lost

    def _follows(self, envelope: Envelope) -> bool:
        """Return whether an incarnation of a node is later than the last known one.

        It is if it has heard of that one.  A registration that does not name it may have been under
        way since before.  No clock could tell: a machine that is booted anew begins its own.
        """
        incarnation, _ = self._last(envelope.node_id)
        body = envelope.body
        return incarnation is None or (isinstance(body, Register) and body.follows == incarnation)

    def _new_peer(self, incarnation: int, session: int, now: float) -> _Peer:
        return _Peer(incarnation, session, now, OrderedLink(self.first_resend))

    @property
    def _patience(self) -> float:
        """Seconds in which a newcomer gets an answer, before it would register again."""
        return min(self.first_resend / 2, self.lease.heartbeat)

    def _check_by(self, now: float) -> None:
        if self._check_at is None:
            self._check_at = now + _CHECK_SECONDS

    def _frame(
        self,
        node_id: str,
        peer: _Peer,
        seq: int = 0,
        generation: int = -1,
        body: FromAgent | FromScheduler | None = None,
    ) -> Envelope:
        peer.answer_by = math.inf
        return Envelope(
            job_id=self.job_id,
            node_id=node_id,
            incarnation=peer.incarnation,
            session=peer.session,
            seq=seq,
            ack=peer.link.received,
            stamp=peer.stamp,
            term=self.term,
            generation=generation,
            body=body,
        )

    def _unknown(self, envelope: Envelope) -> Envelope:
        return Envelope(
            job_id=self.job_id,
            node_id=envelope.node_id,
            incarnation=envelope.incarnation,
            session=envelope.session,
            term=self.term,
            body=Unknown(known=self._last(envelope.node_id)[0]),
        )
