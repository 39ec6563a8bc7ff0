"""Standard output that goes straight to a file and outlives a full disk."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

_SURVIVABLE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}


class LogFile(io.FileIO):
    """A descriptor with whole writes, which never fail for lack of space.

    Bytes that do not fit are dropped and counted; when there is space again the count is
    written first, so a reader knows that lines are missing.
    """

    dropped = 0

    def write(self, data: Any, /) -> int:
        """Write all of `data`, or count it as dropped; return its length in bytes."""
        view = memoryview(data).cast("B")
        if self.dropped:
            marker = f"[msrun] {self.dropped} bytes lost: the log's disk was full\n".encode()
            if self._write_all(memoryview(marker)):
                self.dropped += len(view)
                return len(view)
            self.dropped = 0
        self.dropped = self._write_all(view)
        return len(view)

    def _write_all(self, view: memoryview) -> int:
        """Write `view` as far as there is space; return the number of bytes left over."""
        try:
            while view:
                view = view[super().write(view) or 0 :]
        except OSError as error:
            if error.errno not in _SURVIVABLE:
                raise
        return len(view)


def install() -> None:
    """Put unbuffered streams that survive a full disk on descriptors 1 and 2.

    They are unbuffered as with `python -u`, so that nothing printed is lost when the process
    is killed.
    """
    sys.stdout = sys.__stdout__ = _stream(1, "<stdout>", sys.__stdout__, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "<stderr>", sys.__stderr__, "backslashreplace")  # type: ignore[misc]


def _stream(descriptor: int, name: str, old: io.TextIOBase | None, errors: str) -> io.TextIOWrapper:
    raw = LogFile(descriptor, "w", closefd=False)
    raw.name = name
    encoding = getattr(old, "encoding", None) or "utf-8"
    stream = io.TextIOWrapper(
        raw,  # as `python -u` does: no buffer between text and file
        encoding=encoding,
        errors=getattr(old, "errors", None) or errors,
        write_through=True,
    )
    stream.mode = "w"  # type: ignore[misc]  # typeshed has it read-only; the interpreter sets it too
    return stream


def redirect(path: str, *, append: bool, banner: str = "") -> None:
    """Send descriptors 1 and 2 to the file `path`, made with mode 0600.

    Raises:
        OSError: The file cannot be opened; nothing was redirected.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags if append else flags | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    if banner:
        LogFile(1, "w", closefd=False).write(banner.encode())
