"""What a store says: to the launcher's console, and not more often than a stranger may cause."""

from __future__ import annotations

import contextlib
import os
import time

_SECONDS = 60.0
_LINES_MAX = 20


class Teller:
    """Writes sentences to stderr, of each kind only so many."""

    def __init__(self) -> None:
        self._lines = 0
        self._refused = 0
        self._next = 0.0

    def __call__(self, sentence: str) -> None:
        """Say `sentence`, unless too many have been said."""
        self._lines += 1
        if self._lines > _LINES_MAX:
            return
        last = (
            "; nothing more is said about the store's clients" if self._lines == _LINES_MAX else ""
        )
        _write(f"{sentence}{last}")

    def refused(self, count: int) -> None:
        """Say how many connections of other users have been refused, at most once a minute."""
        if count == self._refused or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SECONDS
        self._refused = count
        connections = "a connection" if count == 1 else f"{count} connections"
        _write(f"refused {connections} of others than the job's user")


def _write(sentence: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"msrun: store: {sentence}\n".encode(errors="replace"))
