"""Standard output that goes straight to a file and outlives a full disk."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from msrun.supervise import logs

_SURVIVABLE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}

# From here on, out of the way of programs that count on small numbers.
_OWN_DESCRIPTORS = 101


class LogFile(io.FileIO):
    """A descriptor with whole writes, which never fail for lack of space.

    Bytes that do not fit are dropped and counted; when there is space again the count is
    written first, so a reader knows that lines are missing.
    """

    dropped = 0
    turn: _Turn | None = None
    starts_line = True

    def write(self, data: Any, /) -> int:
        """Write all of `data`, or count it as dropped; return its length in bytes."""
        turn = self.turn
        if turn is not None:
            try:
                if self.starts_line:
                    if os.lseek(turn.other, 0, os.SEEK_CUR) != turn.seen:
                        turn.note()
                elif turn.by[0] != turn.own:
                    turn.note()
            except OSError:  # the program has closed what is not its own, or the disk is full
                self.turn = None
            turn.by[0] = turn.own
            self.starts_line = data[-1:] == b"\n"
        if self.dropped or type(data) is not bytes:
            return self._write_or_drop(data)
        # What happens always is quick: many programs print in small pieces.
        try:
            written = super().write(data) or 0
        except OSError as error:
            if error.errno not in _SURVIVABLE:
                raise
            written = 0
        length = len(data)
        if written < length:
            self._write_or_drop(memoryview(data)[written:])
        return length

    def _write_or_drop(self, data: Any) -> int:
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


def redirect(
    path: str, descriptors: Sequence[int] = (1, 2), *, append: bool, banner: str = ""
) -> None:
    """Send `descriptors` to the file `path`, made with mode 0600.

    Raises:
        OSError: The file cannot be opened; nothing was redirected.
    """
    opened = logs.create_or_reopen(path) if append else logs.create(path)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    os.close(opened)
    if banner:
        LogFile(descriptors[0], "w", closefd=False).write(banner.encode())


def redirect_to(streams: Sequence[int], *, banner: str = "") -> None:
    """Send descriptor 1 to the first of `streams`, 2 to the second, and close these."""
    for descriptor, opened in zip((1, 2), streams, strict=True):
        os.dup2(opened, descriptor)
        os.close(opened)
    if banner:
        LogFile(1, "w", closefd=False).write(banner.encode())


def tell_apart(samples: str | None) -> None:
    """Note in the file `samples`, if the launcher made it, how stdout and stderr take turns.

    Both go to one log, opened once for each; `logs.StreamSplit` reads the notes.
    """
    try:
        opened = os.open(samples or "", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return
    # Whatever the program does to descriptors 1 and 2, these lead to the log.
    notes, out, err = (
        fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _OWN_DESCRIPTORS)
        for descriptor in (opened, 1, 2)
    )
    os.close(opened)
    by = [0]
    for stream, own, other in ((sys.stdout, out, err), (sys.stderr, err, out)):
        raw = getattr(stream, "buffer", None)
        if isinstance(raw, LogFile):
            raw.turn = _Turn(notes, own, other, by, is_first=own == out)


class _Turn:
    """Notes where the runs of one stream in a log begin.

    A position of the log is the end of what was written last to its stream, by whoever.  Both are
    noted before a write of Python's to one stream where the other has been written to meanwhile.
    Within a line nobody looks, but for Python's own change of the stream: that costs a system call.

    Args:
        notes: File of the notes, opened for appending.
        own: The log of this stream.
        other: The log of the other stream.
        by: Of which stream the last write was, as its log, for both to share.
        is_first: This is stdout.
    """

    def __init__(self, notes: int, own: int, other: int, by: list[int], *, is_first: bool) -> None:
        self._notes = notes
        self.own, self.other, self.by = own, other, by
        self._is_first = is_first
        self.seen = 0
        """Position of the other stream when it was looked at last; of an open file at first 0."""

    def note(self) -> None:
        """Note what has been written so far.

        Raises:
            OSError: That is not possible any more.
        """
        self.seen = os.lseek(self.other, 0, os.SEEK_CUR)
        ends = (os.lseek(self.own, 0, os.SEEK_CUR), self.seen)
        os.write(self._notes, logs.SAMPLE.pack(*(ends if self._is_first else ends[::-1])))
