"""Copies of the lines of all workers that have one of some texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from msrun import environ
from msrun.backend import WorkerPlan
from msrun.bounded_file import open_to_read
from msrun.job import JobSpec
from msrun.supervise import logs
from msrun.supervise.logs import STDERR, STDOUT, LogGap
from msrun.worker.stdio import LogFile

_READ_BYTES = 1024 * 1024
_NAMES = {STDOUT: "filtered_stdout", STDERR: "filtered_stderr"}


class LineFilters:
    """Copies lines of this node's workers, each with its prefix, to one file a stream.

    Args:
        job: The job.
        node: Name of the node in the files' names; empty in a job of one node.
        gap_of: As of `Tail`.
    """

    def __init__(self, job: JobSpec, node: str, gap_of: Callable[[str], LogGap | None]) -> None:
        self._job = job
        self._gap_of = gap_of
        self._node = node
        self.paths: list[str] = []
        """The files."""
        self._files: dict[int, LogFile] = {}
        self._sources: dict[str, _Source] = {}

    def open(self) -> None:
        """Make the files.

        Raises:
            OSError: One cannot be made.
        """
        for stream in self._job.filters:
            name = "_".join(filter(None, (_NAMES[stream], self._node)))
            path = str(Path(self._job.log_dir, f"{name}.log"))
            self._files[stream] = LogFile(logs.create(path), "w")
            self.paths.append(path)

    def follow(self, workers: Iterable[tuple[WorkerPlan, int]]) -> None:
        """Go through what these workers write.

        Args:
            workers: Each with the generation that it begins in.
        """
        for plan, generation in workers:
            own = {STDOUT: plan.out_file, STDERR: plan.err_file}
            for stream in self._files:
                path = own[stream]
                prefix = environ.line_prefix(self._job.role, plan.rank, plan.local_rank)
                start = _size(path) if generation else 0
                self._sources.setdefault(path, _Source(stream, prefix.encode(), start))

    def copy(self, *, final: bool = False) -> None:
        """Copy what is new.

        Args:
            final: Nothing more will be written.
        """
        for path, source in self._sources.items():
            texts = [text.encode() for text in self._job.filters[source.stream]]
            for line in source.lines(path, self._gap_of(path), final=final):
                if any(text in line for text in texts):
                    self._files[source.stream].write(source.prefix + line + b"\n")


class _Source:
    """One file of a stream, from which lines are copied."""

    def __init__(self, stream: int, prefix: bytes, offset: int) -> None:
        self.stream, self.prefix = stream, prefix
        self._offset = offset
        self._rest = b""

    def lines(self, path: str, gap: LogGap | None, *, final: bool) -> list[bytes]:
        """Return the lines that were added, all of them if `final`."""
        lines: list[bytes] = []
        if gap and gap.start <= self._offset < gap.end:
            self._offset, self._rest = gap.end, b""
        while data := _read(path, self._offset, gap):
            self._offset += len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            lines += whole
            if not final:
                break
        if final and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return lines


def _read(path: str, offset: int, gap: LogGap | None) -> bytes:
    if _size(path) <= offset:
        return b""
    most = gap.start - offset if gap and offset < gap.start else _READ_BYTES
    try:
        with open_to_read(path) as file:
            file.seek(offset)
            return file.read(min(most, _READ_BYTES))
    except OSError:
        return b""


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - some µs less, 20 times a second
    except OSError:
        return 0
