"""Detects that this process was frozen: stopped by a signal, a debugger or its machine.

Messages of the time of the freeze still wait in its sockets, so that it must read them before it
takes any node for lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from msrun.cluster.liveness.lease import Lease

_LOOK_SECONDS = 0.5
# Seconds: a busy machine delays its processes by less.
_LATE_SECONDS = 2.0


@dataclass(slots=True, kw_only=True)
class FreezeDetector:
    """Looks at the clock often enough to notice every freeze that matters.

    Args:
        lease: How long nodes may be silent; much shorter freezes do not matter.
        look_at: When it looks next.
    """

    lease: Lease
    look_at: float

    def deadline(self) -> float:
        """Time by which `tick` must be called."""
        return self.look_at

    def tick(self, *, now: float) -> bool:
        """Return whether this process was frozen until now."""
        late = now - self.look_at
        if late >= 0:
            self.look_at = now + min(self.lease.heartbeat, _LOOK_SECONDS)
        return late > min(self.lease.heartbeat, _LATE_SECONDS)
