"""How long each side goes on without a sign of life of the other.

The problem: a node that is cut off cannot be told apart from one that is dead, and its ranks must
not run twice.  The idea is a lease: the node stops its workers before the scheduler gives their
ranks to another node, and neither has to hear from the other to do so.

An agent stops its workers when the scheduler has not answered for `fence` seconds, and has killed
them `grace` seconds later.  The scheduler takes a silent node for lost only after `lost` seconds,
so that by then no worker of it lives: fence + grace < lost.  Both count from the moment at which
the *agent* spoke, each on its own monotonic clock; two clocks are never compared.  An agent that is
frozen can stop nothing: then its node's reaper kills the workers, fence + grace < kill < lost.

A cut that heals within fence - heartbeat, half a lease, changes nothing, wherever it falls between
two signs of life.
"""

from __future__ import annotations

import math

import msgspec

_FENCE = 0.7
_GRACE = 0.1
_KILL = 0.85
_HEARTBEAT = 0.2


class Lease(msgspec.Struct, frozen=True):
    """All times that follow from the length of a lease.

    Args:
        lost: Seconds of silence after which a node is lost; inf where there is one node.
    """

    lost: float = math.inf

    @property
    def fence(self) -> float:
        """Seconds without an answer after which an agent stops its workers."""
        return self.lost * _FENCE

    @property
    def grace(self) -> float:
        """Seconds that its workers then have between SIGTERM and SIGKILL."""
        return self.lost * _GRACE

    @property
    def kill(self) -> float:
        """Seconds without an answer after which the workers are killed without being asked."""
        return self.lost * _KILL

    @property
    def heartbeat(self) -> float:
        """Seconds between two signs of life of an agent."""
        return self.lost * _HEARTBEAT


def lease(seconds: float) -> Lease:
    """Return the times for a lease of `seconds`; 0 for one node, which none can lose."""
    return Lease(seconds or math.inf)
