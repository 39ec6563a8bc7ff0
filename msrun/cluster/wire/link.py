"""An ordered, lossless line over frames that may be lost, doubled, late or out of order.

ZeroMQ delivers in order over one connection, but a connection breaks, a peer restarts, and its
queues are bounded and drop what does not fit.  So both ends number the bodies that must arrive,
keep them until they are acknowledged, and send them again after a while; a receiver takes the next
number and drops every other (go-back-N).  The simplest scheme will do, because a line carries few
bodies: sending again those that followed a lost one costs little.

Until the first body is acknowledged the pause doubles, because the other end may not be there
yet, and it is longer where thousands of lines begin at once: the scheduler hears them one after the
other, and a repetition that comes before its turn only makes the queue longer.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import msgspec

from msrun.cluster.liveness.lease import Lease
from msrun.cluster.wire.messages import FromAgent, FromScheduler

RESEND_SECONDS = 1.0
RESEND_SECONDS_MAX = 4.0
# Seconds a scheduler takes for each node, if all of them come at once.
_RESEND_SECONDS_EACH = 0.002
# Times a body is sent again before its sender gives up: what can arrive has arrived long before.
RESENDS_MAX = 60
# Bodies that are sent again at once; the rest follows when these have arrived.
RESEND_MAX = 64


class Parcel(msgspec.Struct, frozen=True):
    """One numbered body, about `generation`."""

    seq: int
    generation: int
    body: FromAgent | FromScheduler


def first_resend(nnodes: int, lease: Lease) -> float:
    """Return the seconds after which a first body is sent again, if `nnodes` may come at once.

    At most half the fence, so that the stamp of a registration is recent when it arrives.
    """
    return max(RESEND_SECONDS, min(RESEND_SECONDS + nnodes * _RESEND_SECONDS_EACH, lease.fence / 2))


@dataclass(slots=True)
class OrderedLink:
    """One end of one line.

    Args:
        first: Seconds after which the first body is sent again.
        received: Number of the last body that was taken.
    """

    first: float = RESEND_SECONDS
    received: int = 0
    _sent: int = 0
    _unacknowledged: deque[Parcel] = field(default_factory=deque)
    _resend_at: float | None = None
    _pause: float = 0.0
    _resends: int = 0

    @property
    def deadline(self) -> float | None:
        """When `overdue` has something to send; None when all has arrived."""
        return self._resend_at

    def put(self, generation: int, body: FromAgent | FromScheduler, *, now: float) -> Parcel:
        """Number `body` and keep it; return what to send."""
        self._sent += 1
        parcel = Parcel(self._sent, generation, body)
        self._unacknowledged.append(parcel)
        if self._resend_at is None:
            self._pause = self.first if parcel.seq == 1 else RESEND_SECONDS
            self._resend_at = now + self._pause
        return parcel

    def take(self, seq: int) -> bool:
        """Return whether the body with number `seq` is the next one, and count it if so."""
        is_next = seq == self.received + 1
        self.received += is_next
        return is_next

    def acknowledge(self, ack: int, *, now: float) -> None:
        """Forget the bodies that have arrived: all up to number `ack`."""
        arrived = 0
        while self._unacknowledged and self._unacknowledged[0].seq <= ack:
            self._unacknowledged.popleft()
            arrived += 1
        if arrived:
            self._resends = 0
            self._pause = RESEND_SECONDS
            self._resend_at = now + RESEND_SECONDS if self._unacknowledged else None

    @property
    def refused(self) -> Parcel | None:
        """The body that the other end does not take, however often it is sent; None if it may.

        Not a first one, whose other end may not be there yet.  Times are counted and not seconds,
        so that whoever was frozen meanwhile sends it once and not too late.
        """
        if self._resends < RESENDS_MAX or self._unacknowledged[0].seq == 1:
            return None
        return self._unacknowledged[0]

    def overdue(self, *, now: float) -> list[Parcel]:
        """Return the bodies that must be sent again now."""
        if self._resend_at is None or now < self._resend_at:
            return []
        if self._unacknowledged[0].seq == 1:
            self._pause = max(self.first, min(self._pause * 2, RESEND_SECONDS_MAX))
        self._resend_at = now + self._pause
        self._resends += 1
        return list(itertools.islice(self._unacknowledged, RESEND_MAX))
