"""Logs of workers: where they lie, their last lines, and how they show on a console."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO

LINE_CHARS_MAX = 4096
_TAIL_BYTES_MAX = 64 * 1024
_TAIL_LINE_CHARS_MAX = 400
_READ_BYTES = 64 * 1024


def make_log_dir(path: str) -> None:
    """Make the directory `path` for this user alone; one that exists is kept as it is."""
    Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)


def banner(generation: int) -> str:
    """Return the line that separates two generations in one log."""
    return f"[msrun] generation {generation} starts here\n"


def claim(path: str) -> int:
    """Return a descriptor that appends to `path`, emptied, as long as no other process has it.

    Raises:
        BlockingIOError: Another process has it.
        OSError: It cannot be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    descriptor = _open_regular(path, flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        # Some network file systems have no locks; the name of the directory must do.
        pass
    os.ftruncate(descriptor, 0)
    return descriptor


def create(path: str) -> int:
    """Return a descriptor that appends to a new file `path` of this user alone.

    Raises:
        OSError: It cannot be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
    return _open_regular(path, flags)


def reopen(path: str) -> int:
    """Open a log of ours to go on with it."""
    return _open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)


def printable(text: str) -> str:
    """Return `text` with control characters made visible, so that it cannot act on a terminal."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text
    )


def render_line(prefix: str, raw: bytes) -> str:
    """Return one line of a worker's log as it is shown on the console."""
    text = raw.decode(errors="replace")
    if "\r" in text:
        # A progress bar: only its last state is worth a line.
        text = text.rstrip("\r").rpartition("\r")[2]
    if len(text) > LINE_CHARS_MAX:
        text = f"{text[:LINE_CHARS_MAX]}... [{len(text) - LINE_CHARS_MAX} more characters]"
    return prefix + printable(text)


def last_lines(path: str, count: int, *, start: int = 0) -> list[str]:
    """Return the last `count` lines of `path` after byte `start`, made safe to show."""
    try:
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(start, size - _TAIL_BYTES_MAX))
            # Bounded, since the worker may still write.
            data = file.read(_TAIL_BYTES_MAX)
    except OSError:
        return []
    lines = data.decode(errors="replace").splitlines()
    return [printable(line)[:_TAIL_LINE_CHARS_MAX] for line in lines if line.strip()][-count:]


class Tail:
    """Follows one worker's log, line by line.

    Args:
        path: The log.
        prefix: Put before each line.
        start: First byte to show.
    """

    def __init__(self, path: str, prefix: str, start: int = 0) -> None:
        self.path = path
        self._prefix = prefix
        self._offset = start
        self._partial = b""

    def read(self, *, final: bool = False) -> list[str]:
        """Return the whole lines that were added, at most a bounded piece of the log.

        Args:
            final: Return an unfinished last line too.
        """
        try:
            with open_to_read(self.path) as file:
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
        except OSError:
            data = b""
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        if self._partial and (len(self._partial) > _READ_BYTES or (final and not data)):
            lines.append(self._partial)
            self._partial = b""
        return [render_line(self._prefix, line) for line in lines]


def open_to_read(path: str) -> BinaryIO:
    """Open the regular file `path`, which a worker may have replaced, without waiting.

    A plain `open` of a FIFO waits for its other end, and who waits serves no signal and no peer.

    Raises:
        OSError: It cannot be opened, or is something else.
    """
    return os.fdopen(_open_regular(path, os.O_RDONLY), "rb")


def _open_regular(path: str, flags: int) -> int:
    # A regular file does not know O_NONBLOCK, so it changes nothing for who gets the descriptor.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", path)
    return descriptor
