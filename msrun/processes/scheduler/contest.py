"""Two lives of one node at once: which may take part.

A launcher that registers as a node which is there already may be that node, started anew, or a
second launcher beside the first: one in another session has another private directory, and meets
no lock of the first.  Taking its word for it would run two generations of ranks at once, until the
first has found out that it is not heard any more.  So its registration is held until the first life
is over: nothing listens any more on the socket that all its processes hold, or its lease has ended.
If the first still speaks meanwhile, both live, and the second is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from msrun.cluster.wire.messages import Envelope, Refused, Register
from msrun.errors import ExitCode

# Seconds of words of the first life after which it is no life that was just ending.
_SPEAKS_SECONDS = 1.0
# How long one look at the first life's socket takes (`Prober.watch_end`).
_WATCH_SECONDS = 5.0


@dataclass(slots=True)
class _Claim:
    envelope: Envelope
    since: float
    watched_at: float = float("-inf")


class Contests:
    """The registrations that are held back, one for each node."""

    def __init__(self) -> None:
        self._claims: dict[str, _Claim] = {}

    def __contains__(self, node_id: str) -> bool:
        """Whether a registration of the node is held back."""
        return node_id in self._claims

    def claim(self, envelope: Envelope, *, heard_at: float, now: float) -> Refused | None:
        """Hold a registration back; return the refusal if the earlier life still speaks.

        Args:
            envelope: The registration.
            heard_at: When the earlier life was heard last.
            now: The time.
        """
        node_id = envelope.node_id
        claim = self._claims.get(node_id)
        if claim is None or claim.envelope.incarnation != envelope.incarnation:
            self._claims[node_id] = _Claim(envelope, now)
            return None
        claim.envelope = envelope
        if heard_at < claim.since + _SPEAKS_SECONDS:
            return None
        del self._claims[node_id]
        host = envelope.body.host if isinstance(envelope.body, Register) else node_id
        reason = (
            f"node {host} takes part in job {envelope.job_id} already: another launcher of it runs "
            "there; stop that one first, or choose another --job-id"
        )
        return Refused(reason=reason, code=ExitCode.USAGE)

    def must_watch(self, node_id: str, *, now: float) -> bool:
        """Whether to look now whether the earlier life of a node is over; counts as done."""
        claim = self._claims.get(node_id)
        if claim is None or now - claim.watched_at < _WATCH_SECONDS:
            return False
        claim.watched_at = now
        return True

    def over(self, node_id: str) -> Envelope | None:
        """Return the registration that waited for the end of a node's earlier life."""
        claim = self._claims.pop(node_id, None)
        return claim.envelope if claim else None
