"""A job that a batch system runs, followed from here to its end."""

from __future__ import annotations

import signal
from collections.abc import Callable

from msrun.errors import signal_exit_code
from msrun.processes import first_process
from msrun.transport.loop import Loop

_POLL_SECONDS = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def follow(ended: Callable[[], int | None], cancel: Callable[[], None]) -> int:
    """Return the exit code of a job when it has ended; a signal cancels it first.

    Args:
        ended: Asks the batch system for the code, None while the job waits or runs.
        cancel: Has the batch system end the job.
    """
    loop = Loop()
    followed = _FollowedJob(loop, ended, cancel)
    try:
        loop.on_signals(_SIGNALS, followed.on_signal)
        # Commands that ask the batch system have ended whenever the loop goes on.
        first_process.reap_orphans(loop, tuple)
        loop.run(lambda: followed.due, followed.poll)
    finally:
        loop.close()
    return followed.code


class _FollowedJob:
    """The job, and when it is asked about again."""

    def __init__(
        self, loop: Loop, ended: Callable[[], int | None], cancel: Callable[[], None]
    ) -> None:
        self.due = loop.now()
        self.code = 0
        self._loop = loop
        self._ended = ended
        self._cancel = cancel
        self._signum = 0

    def poll(self) -> None:
        code = self._ended()
        self.due = self._loop.now() + _POLL_SECONDS
        if code is not None:
            self.code = signal_exit_code(self._signum) if self._signum else code
            self._loop.stop()

    def on_signal(self, signum: int) -> None:
        self._signum = signum
        self._cancel()
        self.due = self._loop.now()
