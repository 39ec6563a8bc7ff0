"""What the scheduler drops, in at most one line of its log a second."""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger(__name__)

_SECONDS = 1.0


class Dropped:
    """Counts what strangers and broken peers send, by kind.

    Args:
        counts: What was dropped and has not been told; whoever drops something counts it here.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._quiet_until = 0.0

    def deadline(self) -> float | None:
        """Time by which `tick` must be called; None when there is nothing to tell."""
        return self._quiet_until if self._counts else None

    def tick(self, *, now: float) -> None:
        """Tell what there is to tell, if the last line is long enough ago."""
        if not self._counts or now < self._quiet_until:
            return
        self._quiet_until = now + _SECONDS
        log.warning("dropped %s", ", ".join(f"{n} {what}" for what, n in self._counts.items()))
        self._counts.clear()
