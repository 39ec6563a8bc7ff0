"""Where the output of a job goes: to a file or terminal at once, else through this process.

A notebook's `sys.stdout` is no file: it sends text to the browser.  Nor is one that a test or
`contextlib.redirect_stdout` has put there.  Their output is read from a pipe and written to them.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import subprocess
import sys
from typing import Any

_READ_BYTES = 1 << 16


class OutputStream:
    """One of a job's two streams.

    Args:
        target: `sys.stdout` or `sys.stderr` of the program; None without one.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._reading = -1
        self._child = _descriptor(target)
        self._is_piped = False

    @property
    def child(self) -> int:
        """What the launcher's process gets as its stream."""
        if self._child is None:
            self._reading, self._child = os.pipe2(os.O_CLOEXEC)
            self._is_piped = True
        return self._child

    def started(self) -> None:
        """Give up the end of the pipe that the launcher has."""
        if self._is_piped and self._child is not None:
            os.close(self._child)
            self._is_piped = False

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 when there is nothing to pass on."""
        return self._reading

    def pump(self) -> bool:
        """Pass on what is there to be read; return whether there may be more."""
        data = os.read(self._reading, _READ_BYTES)
        self._write(self._decoder.decode(data, final=not data))
        if not data:
            self.close()
        return bool(data)

    def close(self) -> None:
        """Give up the pipe."""
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1
        self.started()

    def _write(self, text: str) -> None:
        # A target that is closed or broken is no reason to stop the job, or to stop reading.
        with contextlib.suppress(Exception):
            if text:
                self._target.write(text)
                self._target.flush()


def own_streams() -> tuple[OutputStream, OutputStream]:
    """Return the streams of a job that writes where this program does."""
    return OutputStream(sys.stdout), OutputStream(sys.stderr)


def _descriptor(target: Any) -> int | None:
    """Return the descriptor behind a stream that is a file or terminal; None of any other."""
    if target is None:
        return subprocess.DEVNULL
    if not isinstance(target, io.TextIOWrapper):
        return None
    try:
        target.flush()
        return target.fileno()
    except (OSError, ValueError):
        return None
