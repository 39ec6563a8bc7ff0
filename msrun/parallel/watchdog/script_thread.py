"""The thread of a script, as another thread sees it.

Frames of a thread that runs are not safe to follow: an interpreter ended by a segmentation fault
in `f_back` (Python 3.11), which profilers know.  `faulthandler`, which reads all threads, met one
that C++ had just made and ended so too.  A thread that waits has frames that stay as they are.  So
frames are asked for only where the thread has used next to no time of a core since the last look.

A wait in which the host spins, as for a stream of a GPU, is not seen; NCCL has its own watchdog.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

import psutil

_IDLE_SHARE = 0.1  # of a core, in the time between two looks of a thread that waits


class ScriptThread:
    """The thread that makes this object.

    Args:
        seconds: Between two looks.
    """

    def __init__(self, seconds: float) -> None:
        self._ident, self._native = threading.get_ident(), threading.get_native_id()
        self._idle = _IDLE_SHARE * seconds
        self._used: float | None = None
        self._process = psutil.Process()

    def waiting(self) -> FrameType | None:
        """Return the innermost frame if the thread has waited since the last look; else None."""
        before, self._used = self._used, self._core_seconds()
        if before is None or self._used is None or self._used - before > self._idle:
            return None
        return self.frame()

    def frame(self) -> FrameType | None:
        """Return the innermost frame, of a thread that is known to wait."""
        return sys._current_frames().get(self._ident)  # noqa: SLF001 - that is its name

    def _core_seconds(self) -> float | None:
        """Return how long the thread has run on a core; None if the system does not say."""
        try:
            threads = self._process.threads()
        except psutil.Error:
            return None
        found = (each for each in threads if each.id == self._native)
        return next((each.user_time + each.system_time for each in found), None)
