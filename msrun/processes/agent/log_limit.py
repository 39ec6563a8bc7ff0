"""Keeps the logs of a node's workers below `--log-limit`: their beginning and newest lines stay.

**The problem.**  Workers write to their logs themselves, through descriptors that they and their
children have.  So nobody can make a program go on in another file, and a log that is copied and
then emptied loses what is written in between.  Positions count, too: the console, `msrun logs` and
the file of each stream know a log by them.

**The idea.**  A hole.  The kernel takes the blocks in the midst of a file back and leaves its size
as it is (`fallocate(2)`, FALLOC_FL_PUNCH_HOLE), so all positions stay true and no byte outside of
the hole is touched, whoever writes meanwhile.  A line at its beginning says how much is missing.
While the job runs, the hole reads as NUL bytes, of which `tail` sees nothing; at the end, when
nobody writes any more, each such log is written anew without it.

A limit bounds all files of one rank together.  The largest loses its middle first, and as much of
it that a quarter of the limit is free again, so that holes are rare.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msrun.bounded_file import open_to_read
from msrun.errors import UsageError
from msrun.supervise.logs import LogGap, open_to_change, punch_hole
from msrun.units import render_size

_LOOK_SECONDS = 0.25
# How far the end of a line is looked for, so that a hole lies between two lines.
_LINE_BYTES = 16 * 1024
_COPY_BYTES = 1 << 20
# What stays of a file however much the other files of its rank have: a share of the limit.
_LEAST_SHARE = 16
_HEAD_SHARE = 4


class LogLimit:
    """Looks at the logs of this node's workers now and then.

    Args:
        limit: Bytes of all files of a rank together; None sets no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._groups: dict[str, tuple[str, ...]] = {}
        self._gaps: dict[str, LogGap] = {}
        self._told: set[str] = set()
        self._look_at: float | None = None

    def check(self, log_dir: str) -> None:
        """Refuse a limit that the file system of the logs cannot keep.

        Raises:
            UsageError: It has no holes.
        """
        if self._limit is None:
            return
        path = Path(log_dir, f".log-limit-{os.getpid()}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
            try:
                punch_hole(descriptor, 0, _LINE_BYTES)
            finally:
                path.unlink(missing_ok=True)
                os.close(descriptor)
        except OSError as error:
            msg = f"--log-limit: nothing can be taken from the midst of a file in {log_dir}"
            hint = "choose a --log-dir on another file system, or leave --log-limit out"
            raise UsageError(f"{msg}: {error.strerror}", hint=hint) from None

    def follow(self, name: str, paths: Iterable[str], *, now: float) -> None:
        """Keep these files together below the limit.

        Args:
            name: Whose they are, in words, such as `rank 3`.
            paths: The files.
            now: The time.
        """
        if self._limit is not None and (paths := tuple(paths)):
            self._groups[name] = paths
            self._look_at = now

    def gap(self, path: str) -> LogGap | None:
        """Return which bytes of a log are gone; None if none are."""
        return self._gaps.get(path)

    def deadline(self) -> float | None:
        """Time by which `tick` must be called; None when there is none."""
        return self._look_at

    def tick(self, *, now: float) -> list[str]:
        """Look at all logs when it is time; return a warning for each limit that first bites."""
        if self._look_at is None or now < self._look_at:
            return []
        self._look_at = now + _LOOK_SECONDS
        return [
            f"warning: {name} has reached --log-limit {render_size(self._limit or 0)}: {path} "
            "keeps its beginning and its newest lines"
            for name, paths in self._groups.items()
            if (path := self._keep(paths)) and self._is_first(name)
        ]

    def _is_first(self, name: str) -> bool:
        is_first = name not in self._told
        self._told.add(name)
        return is_first

    def _keep(self, paths: Sequence[str]) -> str:
        """Cut the largest of some logs if they are too large together; return it."""
        limit = self._limit or 0
        kept = {path: self._kept(path) for path in paths}
        if sum(kept.values()) <= limit:
            return ""
        path = max(kept, key=lambda path: kept[path])
        excess = sum(kept.values()) - limit * 3 // 4
        least = limit // _LEAST_SHARE
        # A worker may have put something else in its place.
        with contextlib.suppress(OSError):
            if self._cut(path, max(kept[path] - excess, least), least):
                return path
        return ""

    def _kept(self, path: str) -> int:
        """Return how much of a log is there."""
        try:
            size = os.stat(path).st_size  # noqa: PTH116 - some µs less, four times a second
        except OSError:
            return 0
        gap = self._gaps.get(path)
        if gap and size < gap.end:  # somebody has emptied it
            del self._gaps[path]
            gap = None
        return size - (gap.end - gap.start if gap else 0)

    def _cut(self, path: str, keep: int, least: int) -> bool:
        """Take so much from the midst of a log that about `keep` bytes stay; return if any."""
        descriptor = open_to_change(path)
        try:
            size = os.fstat(descriptor).st_size
            before = self._gaps.get(path)
            start = before.start if before else _line_end(descriptor, keep // _HEAD_SHARE)
            end = _line_start(descriptor, size - max(keep - start, least))
            if end < (before.end if before else start + least):
                return False
            # The earlier hole too: its first line is written again.
            punch_hole(descriptor, start, end - start)
            self._gaps[path] = gap = LogGap(start, end)
            os.pwrite(descriptor, gap.note(), start)
            return True
        finally:
            os.close(descriptor)

    def close_up(self) -> None:
        """Write each log with a hole anew without it, after the last writer has ended."""
        for paths in self._groups.values():
            for _ in paths:  # what was written since the last look, of the largest first
                self._keep(paths)
        for path, gap in self._gaps.items():
            draft = Path(f"{path}.{os.getpid()}")
            try:
                _copy(path, gap, draft)
                draft.replace(path)
            except OSError:  # as on a full disk: the hole stays, which takes no space
                draft.unlink(missing_ok=True)
        self._gaps.clear()
        self._look_at = None


def _line_end(descriptor: int, at: int) -> int:
    """Return the position after the last end of a line before `at`, or `at`."""
    first = max(0, at - _LINE_BYTES)
    found = os.pread(descriptor, at - first, first).rfind(b"\n")
    return first + found + 1 if found >= 0 else at


def _line_start(descriptor: int, at: int) -> int:
    """Return the position after the first end of a line after `at`, or `at`."""
    found = os.pread(descriptor, _LINE_BYTES, at).find(b"\n")
    return at + found + 1


def _copy(path: str, gap: LogGap, draft: Path) -> None:
    """Write what is there of the log at `path`.

    Raises:
        OSError: It cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open_to_read(path) as old, os.fdopen(os.open(draft, flags, 0o600), "wb") as new:
        if os.fstat(old.fileno()).st_size < gap.end:
            raise OSError(errno.ESTALE, "it was emptied", path)
        for piece in _pieces(old.fileno(), 0, gap.start):
            new.write(piece)
        new.write(gap.note())
        for piece in _pieces(old.fileno(), gap.end, None):
            new.write(piece)


def _pieces(descriptor: int, start: int, end: int | None) -> Iterator[bytes]:
    at = start
    while end is None or at < end:
        most = _COPY_BYTES if end is None else min(_COPY_BYTES, end - at)
        data = os.pread(descriptor, most, at)
        if not data:
            return
        yield data
        at += len(data)
