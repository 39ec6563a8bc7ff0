"""Whether a scheduler that has ended is started again."""

from __future__ import annotations

# A scheduler that ends this often in a minute, soon each time, will not do better the next.
_SHORT_LIVES_MAX = 5
_MINUTE = 60.0
_SOON_SECONDS = 3.0


class CrashLoopGuard:
    """Tells whether a scheduler that has ended is worth another one."""

    def __init__(self) -> None:
        self._began_at = 0.0
        self._short: list[float] = []

    def began(self, now: float) -> None:
        """Take note of a new one."""
        self._began_at = now

    def may_begin_again(self, now: float) -> bool:
        """Return whether the last one, which has ended, did not just fail like those before."""
        self._short = [at for at in self._short if now - at < _MINUTE]
        if now - self._began_at < _SOON_SECONDS:
            self._short.append(now)
        return len(self._short) <= _SHORT_LIVES_MAX
