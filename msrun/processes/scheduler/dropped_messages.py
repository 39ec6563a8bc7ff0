"""Reports dropped messages in at most one line of the scheduler's log a second."""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger(__name__)

_SECONDS = 1.0


class Dropped:
    """The messages of strangers and broken peers, counted by kind.

    Args:
        counts: Dropped messages that are not in the log yet; sockets count them here.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._quiet_until = 0.0

    def deadline(self) -> float | None:
        """Time by which `tick` must be called; None if nothing was dropped."""
        return self._quiet_until if self._counts else None

    def tick(self, *, now: float) -> None:
        """Write a line, if anything was dropped and the last line is a second old."""
        if not self._counts or now < self._quiet_until:
            return
        self._quiet_until = now + _SECONDS
        log.warning("dropped %s", ", ".join(f"{n} {what}" for what, n in self._counts.items()))
        self._counts.clear()
