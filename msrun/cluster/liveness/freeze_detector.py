"""Whether this process was frozen: stopped by a signal, a debugger or its machine.

What it was sent meanwhile waits in its sockets, so that it has to listen before it judges.
"""

from __future__ import annotations

from dataclasses import dataclass

from msrun.cluster.liveness.lease import Lease

_LOOK_SECONDS = 0.5
# A busy machine delays what it runs by less.
_LATE_SECONDS = 2.0


@dataclass(slots=True, kw_only=True)
class FreezeDetector:
    """Looks at the clock so often that no freeze is missed that matters.

    Args:
        lease: How long nodes may be silent, of which a shorter freeze is a small part.
        look_at: When it looks next.
    """

    lease: Lease
    look_at: float

    def deadline(self) -> float:
        """Time by which `tick` must be called."""
        return self.look_at

    def tick(self, *, now: float) -> bool:
        """Return whether nothing was done for long until now."""
        late = now - self.look_at
        if late >= 0:
            self.look_at = now + min(self.lease.heartbeat, _LOOK_SECONDS)
        return late > min(self.lease.heartbeat, _LATE_SECONDS)
