"""Logs of workers: where they lie, their last lines, and how they show on a console."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import stat
import struct
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msrun.bounded_file import open_regular, open_to_read
from msrun.errors import UsageError

STDOUT, STDERR = 1, 2
BOTH = frozenset((STDOUT, STDERR))
# Name of the file in which a worker notes how its streams take turns, and one note: the positions
# of stdout and stderr in the log.
SAMPLES = "samples"
SAMPLE = struct.Struct("=QQ")
LINE_CHARS_MAX = 4096
_GAP_NOTE = re.compile(rb"\[msrun\] [0-9]+ bytes are left out: --log-limit\n")
_COLOUR = re.compile(r"(\x1b\[[0-9;]*[mK])")
# Not from within a run of carriage returns: a long one would be gone through again and again.
_LINE_END = re.compile(r"(?<!\r)(?:\r++(?:\n|(?=[^\r\n]))|\n)")
_TAIL_BYTES_MAX = 64 * 1024
_TAIL_LINE_CHARS_MAX = 400
_READ_BYTES = 64 * 1024
_SAMPLES_BYTES_MAX = 1 << 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
# What others may not have: any access to a new log, writing to one that goes on.
_OPEN, _WRITABLE = 0o077, 0o022
_libc = ctypes.CDLL(None, use_errno=True)


class LogGap(NamedTuple):
    """The bytes from `start` up to `end` of a log, which `--log-limit` has taken from its midst."""

    start: int
    end: int

    def note(self) -> bytes:
        """Return the line that stands in their place."""
        return f"[msrun] {self.end - self.start} bytes are left out: --log-limit\n".encode()


def joined(partial: bytes, data: bytes) -> bytes:
    """Return `data` behind an incomplete line; that of a gap begins a line of its own."""
    return partial + (b"\n" if partial and _GAP_NOTE.match(data) else b"") + data


def make_log_dir(path: str) -> None:
    """Make the directory `path` for this user alone; one that exists is kept as it is.

    Raises:
        UsageError: The file system has no directories of ours, as /proc, or none just now.
    """
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        msg = f"--log-dir {path} cannot be made: {error.strerror}"
        raise UsageError(msg, hint="choose another directory") from None


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
    descriptor = open_regular(path, flags)
    try:
        _lock(descriptor)
        if not _is_ours(os.fstat(descriptor), _OPEN):
            os.unlink(path)  # noqa: PTH108 - of this file all paths are text
            os.close(descriptor)
            descriptor = open_regular(path, flags | os.O_EXCL)
            _lock(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    return descriptor


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        # Some network file systems have no locks; the name of the directory must do.
        return


def create(path: str) -> int:
    """Return a descriptor that appends to a new file `path` of this user alone.

    Raises:
        OSError: It cannot be made.
    """
    _forget_others(path, _OPEN)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
    return open_regular(path, flags)


def create_or_reopen(path: str) -> int:
    """Open a log of ours to go on with it; make it where there is none.

    One that its user has let others read goes on: what it says must not be lost.

    Raises:
        OSError: It cannot be made.
    """
    _forget_others(path, _WRITABLE)
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)


def _forget_others(path: str, modes: int) -> None:
    """Remove a file of others, or to which others have any of `modes`, from where a log goes."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISREG(status.st_mode) and not _is_ours(status, modes):
        os.unlink(path)  # noqa: PTH108 - of this file all paths are text


def _is_ours(status: os.stat_result, modes: int) -> bool:
    is_own = status.st_uid == os.geteuid() and status.st_nlink <= 1
    return is_own and not status.st_mode & modes


def reopen(path: str) -> int:
    """Open a log of ours to go on with it."""
    return open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)


def printable(text: str) -> str:
    """Return `text` with control characters made visible, so that it cannot act on a terminal."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text
    )


def render_line(prefix: str, raw: bytes) -> str:
    """Return one line of a worker's log that was written before somebody asked for it."""
    text = raw.decode(errors="replace")
    if "\r" in text:
        # A progress bar: only its last state is worth a line.
        text = text.rstrip("\r").rpartition("\r")[2]
    if len(text) > LINE_CHARS_MAX:
        text = f"{text[:LINE_CHARS_MAX]}... [{len(text) - LINE_CHARS_MAX} more characters]"
    return prefix + printable(text)


def harmless(text: str) -> str:
    """Return `text` as `printable` does, but for colours."""
    if text.isprintable():
        return text
    return "".join(
        piece if at % 2 else printable(piece) for at, piece in enumerate(_COLOUR.split(text))
    )


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


def punch_hole(descriptor: int, start: int, length: int) -> None:
    """Give the blocks of a range of a file back; it reads as NUL bytes from now on.

    Source: fallocate(2), which Python lacks.

    Raises:
        OSError: The file system cannot do so.
    """
    offset, count = ctypes.c_int64(start), ctypes.c_int64(length)
    if _libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, count):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class StreamSplit:
    """Tells which bytes of a log were written to stdout and which to stderr.

    Both streams of a worker append to one file, so that it has everything in the order in which it
    was written.  The file is opened once for each of them, and the kernel keeps two positions:
    each is the end of what was written last to that stream.  One look at both, a *sample*, tells
    the two latest runs apart: up to the smaller position the bytes are of one stream, from there
    up to the larger of the other.  A Python worker samples whenever a stream writes after the other
    one (`worker/stdio.py`), so its own writes are told apart exactly.  What other code writes to
    the descriptors is told apart by our samples, as exactly as these are frequent.
    """

    def __init__(self) -> None:
        self._logs: list[int] = []
        self._notes = b""
        self._samples: int | None = None
        self._offset = self._forgotten = 0
        self._known = 0
        self._runs: deque[tuple[int, int]] = deque()

    def attach(self, logs: Sequence[int], samples: int, start: int) -> None:
        """Go on with a new worker, after the end of an earlier one with the same log.

        Args:
            logs: The log, opened for stdout and for stderr; owned by this object from now on.
            samples: The worker's own samples, opened for reading and writing; owned too.
            start: Size of the log.
        """
        self.look()
        self.close()
        self._logs, self._samples, self._notes = list(logs), samples, b""
        self._offset = self._forgotten = 0
        self._add(start, STDOUT)

    def close(self) -> None:
        """Close the log and the samples."""
        for descriptor in self._logs if self._samples is None else (*self._logs, self._samples):
            os.close(descriptor)
        self._logs, self._samples = [], None

    def look(self) -> int:
        """Take a sample; return the end of the bytes of which the stream is known."""
        if not self._logs:
            return self._known
        out, err = (os.lseek(descriptor, 0, os.SEEK_CUR) for descriptor in self._logs)
        # Of what was written between these two calls, the rest is for the next look.
        while out != (again := os.lseek(self._logs[0], 0, os.SEEK_CUR)):
            out, err = again, os.lseek(self._logs[1], 0, os.SEEK_CUR)
        # The worker's samples come first: it has taken those that lead to ours before.
        if max(out, err) > self._known:
            for earlier in self._read_samples():
                self._sample(*earlier)
            self._sample(out, err)
        return self._known

    def take(self, start: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield stream and bytes of each run in `data`, which begins at byte `start` of the log."""
        at = start
        while at < start + len(data):
            while self._runs and self._runs[0][0] <= at:
                self._runs.popleft()
            end, stream = self._runs[0] if self._runs else (start + len(data), STDOUT)
            end = min(end, start + len(data))
            yield stream, data[at - start : end - start]
            at = end

    def _read_samples(self) -> list[tuple[int, int]]:
        data = b""
        while self._samples is not None and (
            piece := os.pread(self._samples, _READ_BYTES, self._offset + len(data))
        ):
            data += piece
        self._offset += len(data)
        self._forget_samples()
        self._notes += data
        whole = len(self._notes) - len(self._notes) % SAMPLE.size
        notes, self._notes = self._notes[:whole], self._notes[whole:]
        return list(SAMPLE.iter_unpack(notes))

    def _forget_samples(self) -> None:
        """Give the space of the samples back that were read, however many a worker writes."""
        if self._samples is None or self._offset - self._forgotten < _SAMPLES_BYTES_MAX:
            return
        with contextlib.suppress(OSError):  # as where no file system has holes
            punch_hole(self._samples, 0, self._offset)
        self._forgotten = self._offset

    def _sample(self, out: int, err: int) -> None:
        for end, stream in sorted(((out, STDOUT), (err, STDERR))):
            self._add(end, stream)

    def _add(self, end: int, stream: int) -> None:
        if end > self._known:
            self._runs.append((end, stream))
            self._known = end


class _Lines:
    """Cuts the text of one stream into pieces that can be shown: lines, and states of a bar."""

    def __init__(self, prefix: str, *, is_live: bool) -> None:
        self._prefix = prefix
        self._is_live = is_live
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""
        self._shown = 0
        self._is_open = False

    def feed(self, data: bytes, *, final: bool = False) -> Iterator[str]:
        """Yield what `data` adds to the screen.

        Args:
            data: Bytes of the stream.
            final: Yield an unfinished line too.
        """
        text = self._rest + self._decode(data)
        at = 0
        for end in _LINE_END.finditer(text):
            body, at = text[at : end.start()], end.end()
            if end[0].endswith("\n"):
                yield self._piece(body, "\n")
            elif body or self._is_open:
                # A carriage return redraws the line, as progress bars do.
                yield self._piece(body, "\r")
        self._rest = text[at:]
        if self._rest and (final or len(self._rest) > _READ_BYTES):
            yield self._piece(self._rest.rstrip("\r"), "\n")
            self._rest = ""
        elif self._is_live and (body := self._rest.rstrip("\r")) and len(body) <= LINE_CHARS_MAX:
            yield self._piece(body, "")
            self._rest = self._rest[len(body) :]
        elif final and self._is_open:
            yield self._piece("", "\n")

    def note(self, line: bytes) -> Iterator[str]:
        """Yield `line` as one of its own."""
        return self.feed(b"\n" * bool(self._rest or self._is_open) + line)

    def interrupt(self) -> None:
        """Begin again with the prefix: something else was shown in the midst of the line."""
        self._is_open, self._shown = False, 0

    def _piece(self, body: str, end: str) -> str:
        prefix = "" if self._is_open else self._prefix
        room = max(0, LINE_CHARS_MAX - self._shown)
        self._is_open = not end
        self._shown = 0 if end else self._shown + len(body)
        if len(body) > room:
            body = f"{body[:room]}... [{len(body) - room} more characters]"
        return prefix + harmless(body) + end


class _Raw:
    """Passes the text of a worker that has a terminal on as it is."""

    def __init__(self) -> None:
        self._decode = getincrementaldecoder("utf-8")("replace").decode

    def feed(self, data: bytes, *, final: bool = False) -> Iterator[str]:
        """Yield the text of `data`."""
        if text := self._decode(data, final):
            yield text

    def note(self, line: bytes) -> Iterator[str]:
        """Yield `line` as one of its own."""
        return self.feed(b"\r\n" + line.replace(b"\n", b"\r\n"))

    def interrupt(self) -> None:
        """Another line has begun; the worker knows nothing of it."""


class Tail:
    """Follows one log of a worker.

    Args:
        path: The log.
        prefix: Put before each line.
        start: First byte to show.
        stream: Stream that the log is of.
        split: Tells the streams apart in a log of both; None where nobody asks.
        shown: Streams to show.
        is_live: Show unfinished lines at once.
        is_raw: Show everything as it is, control characters too, without prefix.
        gap_of: Returns which bytes are gone from the midst of a log.
    """

    def __init__(
        self,
        path: str,
        prefix: str,
        start: int = 0,
        *,
        stream: int = STDOUT,
        split: StreamSplit | None = None,
        shown: frozenset[int] = BOTH,
        is_live: bool = False,
        is_raw: bool = False,
        gap_of: Callable[[str], LogGap | None] = lambda _: None,
    ) -> None:
        self.path = path
        self._gap_of = gap_of
        self._offset = start
        self._stream = stream
        self._split = split
        self._lines: dict[int, _Lines | _Raw] = {
            each: _Raw() if is_raw else _Lines(prefix, is_live=is_live) for each in shown
        }

    def read(self, *, final: bool = False) -> list[tuple[int, str]]:
        """Return stream and text of what was added, at most a bounded piece of the log.

        Args:
            final: Return an unfinished last line too.
        """
        gap = self._gap_of(self.path)
        missed = self._skip(gap)
        data = self._read(gap)
        parts = [(self._stream, data)]
        if self._split:
            parts = list(self._split.take(self._offset, data))
        self._offset += len(data)
        first = min(self._lines)
        pieces = [(first, text) for text in self._lines[first].note(missed)] if missed else []
        pieces += [
            (stream, text)
            for stream, part in parts
            if stream in self._lines
            for text in self._lines[stream].feed(part)
        ]
        if final and not data:
            for stream, lines in self._lines.items():
                pieces += ((stream, text) for text in lines.feed(b"", final=True))
        return pieces

    def interrupt(self) -> None:
        """Something else was shown in the midst of a line of this log."""
        for lines in self._lines.values():
            lines.interrupt()

    def _skip(self, gap: LogGap | None) -> bytes:
        """Go on after the bytes that are gone; return the line that says so."""
        if gap is None or not gap.start <= self._offset < gap.end:
            return b""
        missed = LogGap(self._offset, gap.end).note()
        self._offset = gap.end
        return missed

    def _read(self, gap: LogGap | None) -> bytes:
        try:
            size = os.stat(self.path).st_size  # noqa: PTH116 - some µs less, 20 times a second
            end = min(size, self._split.look()) if self._split else size
            if gap and self._offset < gap.start:
                end = min(end, gap.start)
            if end <= self._offset:
                return b""
            with open_to_read(self.path) as file:
                file.seek(self._offset)
                return file.read(min(_READ_BYTES, end - self._offset))
        except OSError:
            return b""


def open_to_change(path: str) -> int:
    """Return a descriptor that reads and writes anywhere in a log of ours.

    Raises:
        OSError: It cannot be opened, or is something else.
    """
    return open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
