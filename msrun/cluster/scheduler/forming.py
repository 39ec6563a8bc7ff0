"""The times of forming: when a generation may start, and when missing nodes are given up."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Seconds after which waiting nodes are told which nodes are missing, and again after each arrival.
WAITING_SECONDS = 3.0
# Seconds after a freeze of the scheduler, for nodes that came during it.
HEARING_SECONDS = 10.0


@dataclass(slots=True, kw_only=True)
class Forming:
    """The time from which, and up to which, nodes are waited for.

    Args:
        join_timeout: Seconds in which they must register; inf waits.
        last_call: Seconds for which more nodes than the fewest are waited for.
        give_up_at: When the job fails for want of nodes.
        resume_at: Before which no generation starts; None before the first, which
            alone waits for more nodes than it needs.
    """

    join_timeout: float
    last_call: float
    give_up_at: float
    resume_at: float | None = None
    _enough_since: float | None = None
    _report_at: float | None = None

    def again(self, at: float, *, now: float) -> None:
        """Form another generation, no earlier than `at`."""
        self.resume_at = at
        self.give_up_at = at + self.join_timeout
        self._enough_since = None
        self._report_at = now + WAITING_SECONDS

    def someone_came(self, *, now: float) -> None:
        """Note that the nodes that wait have something new to hear."""
        self._report_at = self._report_at or now + WAITING_SECONDS

    def woke(self, *, now: float) -> None:
        """Extend the deadlines, so that nodes that came during a freeze are heard first."""
        until = now + min(self.join_timeout, HEARING_SECONDS)
        self.give_up_at = max(self.give_up_at, until)
        if self._enough_since is not None:
            wanted = now + min(self.last_call, HEARING_SECONDS) - self.last_call
            self._enough_since = max(self._enough_since, wanted)

    def is_due(self, *, is_enough: bool, is_full: bool, now: float) -> bool:
        """Return whether the generation starts now, with the nodes that are there."""
        if not is_enough:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        return now >= self._start_at(is_full=is_full)

    def is_over(self, *, now: float) -> bool:
        """Return whether the time to register is over."""
        return self._enough_since is None and now >= self.give_up_at

    def report_is_due(self, *, now: float) -> bool:
        """Return whether to tell the waiting nodes which are missing; true once each time."""
        if self._report_at is None or now < self._report_at:
            return False
        self._report_at = None
        return True

    def deadline(self, *, is_full: bool) -> float | None:
        """Return when the next of these deadlines is; None when there is none."""
        at = self.give_up_at if self._enough_since is None else self._start_at(is_full=is_full)
        due = at if self._report_at is None else min(at, self._report_at)
        return due if due != math.inf else None

    def _start_at(self, *, is_full: bool) -> float:
        if self.resume_at is not None:
            return self.resume_at
        return (self._enough_since or 0.0) + (0.0 if is_full else self.last_call)
