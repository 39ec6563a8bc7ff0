"""The terminal at which the launcher was started, and the one that the shown worker gets.

The worker's stdout and stderr are a pseudo terminal of its own, so that colours, widths and
progress bars are what they are without a launcher.  What it writes there goes to its log, byte for
byte, and the console shows the log.  Its stdin is the real terminal: line editing, echo and ^D are
the kernel's or readline's, and nothing stands between the keys and the worker.  A process of
another session may read from a terminal; the keys that make signals reach the launcher's process
group alone, which passes on what they mean.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Callable, Iterator
from typing import Any

from msrun.supervise import logs
from msrun.worker.stdio import LogFile

_COPY_BYTES = 64 * 1024
_SIZE_BYTES = struct.calcsize("HHHH")


class WorkerTerminal:
    """A pseudo terminal for the output of one worker after the other, with one log.

    Raises:
        OSError: There is none.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = os.openpty()
        os.set_blocking(self._ours, False)
        modes = termios.tcgetattr(self.theirs)
        # The log gets what was written: the real terminal makes its line ends itself.
        modes[1] &= ~termios.OPOST
        modes[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
        termios.tcsetattr(self.theirs, termios.TCSANOW, modes)
        self._log: LogFile | None = None
        self.follow_size()

    def fileno(self) -> int:
        """Return the descriptor to watch for output."""
        return self._ours

    def begin(self, log_file: str, *, append: bool) -> None:
        """Send the output to `log_file` from now on.

        Raises:
            OSError: The log cannot be opened.
        """
        if self._log is None:
            opener = logs.reopen if append else logs.create
            self._log = LogFile(opener(log_file), "w")

    def copy(self) -> None:
        """Take what the worker has written so far to its log; all of it, if it has ended."""
        with contextlib.suppress(BlockingIOError, OSError):
            while self._log and (data := os.read(self._ours, _COPY_BYTES)):
                self._log.write(data)

    def follow_size(self) -> None:
        """Give it the size of the real terminal."""
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(_SIZE_BYTES))
            fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)


def is_foreground() -> bool:
    """Return whether stdin is a terminal whose keys are meant for us."""
    if not os.isatty(0):
        return False
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # a terminal that controls no session, or another one
        return True


@contextlib.contextmanager
def modes_kept() -> Iterator[None]:
    """Leave the modes of the terminal as they were: a debugger that is killed does not."""
    before = _modes()
    try:
        yield
    finally:
        _set_modes(before)


def stop_with(tell_workers: Callable[[int], None]) -> None:
    """Stop this process as ^Z asks, and the workers; return when both go on.

    Args:
        tell_workers: Sends a signal to the process groups of all workers.
    """
    tell_workers(signal.SIGSTOP)
    now = _modes()
    ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    # Without a shell that could have us go on, the kernel ignores it.
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, ours)
    _set_modes(now)
    tell_workers(signal.SIGCONT)


def _modes() -> list[Any] | None:
    with contextlib.suppress(termios.error, OSError):
        return termios.tcgetattr(0) if is_foreground() else None
    return None


def _set_modes(modes: list[Any] | None) -> None:
    """Set the modes, unless a job in the background would be stopped for it."""
    with contextlib.suppress(termios.error, OSError):
        if modes and is_foreground() and termios.tcgetattr(0) != modes:
            termios.tcsetattr(0, termios.TCSADRAIN, modes)
