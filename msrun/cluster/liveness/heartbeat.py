"""Whether a process of ours on this node still does its work: reaper, forkserver, scheduler, store.

A process that somebody stopped is woken after a while, because nobody else will.  One that does not
answer for longer, though it is not stopped, is given up.  Times in which the agent itself did not
run count for neither.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

LOOK_SECONDS = 1.0
# Between two looks; a longer time means that the agent itself did not run.
_LOOK_SECONDS_MAX = 3.0
ASK_SECONDS = 5.0
# Less than the fence of a lease of 10 s; longer than who stops a process for a look needs.
STOPPED_SECONDS = 5.0
# On a machine that swaps, a healthy process may need seconds for an answer.
SILENT_SECONDS = 20.0
WAKE_SIGNAL = signal.SIGCONT
_STOPPED = "T"
# A debugger has it, or it has ended.
_EXCUSED = ("t", "Z", "X", None)


class Finding(enum.Enum):
    """What to do about a process of ours."""

    WAKE = "wake"
    GIVE_UP = "give up"


@dataclass(slots=True)
class HelperLife:
    """One process of ours.

    Args:
        heard_at: When it last answered; None as long as it cannot be asked.
    """

    heard_at: float | None = None
    _stopped_at: float | None = None
    _is_given_up: bool = False

    def hear(self, *, now: float) -> None:
        """Take an answer."""
        self.heard_at = now

    def silence(self, *, now: float) -> float:
        """Return the seconds since it last answered."""
        return 0.0 if self.heard_at is None else now - self.heard_at

    def look(self, state: str | None, *, now: float, awake_since: float) -> Finding | None:
        """Return what to do about it.

        Args:
            state: The kernel's letter for its state; None when it is gone.
            now: The time.
            awake_since: Since when the agent has been running without a break.
        """
        if state == _STOPPED:
            if self._stopped_at is None or self._stopped_at < awake_since:
                self._stopped_at = now
            if now - self._stopped_at >= STOPPED_SECONDS:
                self._stopped_at = now
                return Finding.WAKE
        else:
            self._stopped_at = None
        if state in _EXCUSED:
            self.heard_at = None if self.heard_at is None else now
        if self.heard_at is None or self._is_given_up:
            return None
        if now - max(self.heard_at, awake_since) < SILENT_SECONDS:
            return None
        self._is_given_up = True
        return Finding.GIVE_UP


@dataclass(slots=True)
class Wakefulness:
    """Since when this process has been running without a break, by how often it looks."""

    since: float = 0.0
    _looked_at: float = 0.0

    def look(self, *, now: float) -> float:
        """Take the time of a look, and return since when this process has been running."""
        if now - self._looked_at > _LOOK_SECONDS_MAX:
            self.since = now
        self._looked_at = now
        return self.since
