"""Decides whether a scheduler that has ended is started again."""

from __future__ import annotations

# A scheduler that ends this often in a minute, soon after its start each time, has a reason that
# the next one will meet too.  One that ran for longer does not count: something outside ended it.
_SHORT_RUNS_MAX = 5
_MINUTE = 60.0
_SOON_SECONDS = 3.0


class CrashLoopGuard:
    """Counts schedulers that ended soon after their start."""

    def __init__(self) -> None:
        self._began_at = 0.0
        self._short: list[float] = []

    def began(self, now: float) -> None:
        """Take note of a new one."""
        self._began_at = now

    def may_begin_again(self, now: float) -> bool:
        """Note that the last one has ended; return whether another is worth a try."""
        self._short = [at for at in self._short if now - at < _MINUTE]
        if now - self._began_at < _SOON_SECONDS:
            self._short.append(now)
        return len(self._short) <= _SHORT_RUNS_MAX
