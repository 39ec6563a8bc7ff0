"""The console of a launcher: our own messages on stderr, lines of chosen workers on stdout.

Nothing here waits for a reader: a console that does not take more is left alone until
it does, and the workers, which write to their own files, never notice.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

import msgspec

from msrun import environ
from msrun.supervise.logs import Tail, printable

# Bytes that a pipe which polls as writable takes without blocking: PIPE_BUF.
_CHUNK_BYTES = 4096
_CHUNKS_EACH_TIME = 64
_PATIENCE_MS = 1000
_ERASE = "\r\x1b[2K"


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where the job stands on this node.

    Args:
        phase: Such as `forming`.
        running: Workers that run.
        workers: Workers there are to be.
        generation: The generation.
        elapsed: Seconds since the launcher started.
    """

    phase: str
    running: int
    workers: int
    generation: int
    elapsed: float

    def render(self) -> str:
        """Return one line without the name of the node."""
        minutes, seconds = divmod(int(self.elapsed), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        again = f"  generation {self.generation}" if self.generation > 0 else ""
        return f"{self.phase} {self.running}/{self.workers}  {clock}{again}"


class Console:
    """The console of a launcher whose output goes to pipes or files.

    Args:
        journal: Descriptor of the file that gets all of our own words, with the time.
        tails: The workers' logs to show.
    """

    is_live = False
    """Whether `show` wants to be called now and then."""

    def __init__(self, journal: int, tails: Sequence[Tail]) -> None:
        self._journal = journal
        self._tails = deque(tails)
        self._pending = {1: b"", 2: b""}
        # Both streams may lead to one place, where a line of one must not begin in the midst of
        # a line of the other.
        self._place = {1: 1, 2: 2 if streams_differ() else 1}
        self._in_line = {1: False, 2: False}
        self._unfinished: dict[int, Tail | None] = {1: None, 2: None}
        self._has_reader = {1: True, 2: True}
        self._is_heard = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the terminal as it was found."""

    def follow(self, tails: Sequence[Tail]) -> None:
        """Show these logs from now on, and go on with those that are shown already."""
        known = {tail.path for tail in self._tails}
        self._tails.extend(tail for tail in tails if tail.path not in known)

    def say(self, text: str) -> None:
        """Show `text`, in our own words, and write it down."""
        safe = "\n".join(map(printable, text.splitlines()))
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        with contextlib.suppress(OSError):
            os.write(self._journal, f"{at} {safe}\n".encode(errors="backslashreplace"))
        self._show(safe)

    def show(self, status: NodeStatus) -> None:
        """Show where the job stands, where there is a place for it."""

    def pause(self) -> None:
        """Take away what would stand in the way of a shell."""

    def pump(self) -> bool:
        """Show what is new of the workers; return whether there may be more."""
        for _ in range(_CHUNKS_EACH_TIME):
            if not (any(self._pending.values()) or self._take_pieces()):
                return False
            waiting = [stream for stream, data in self._pending.items() if data]
            ready = [stream for stream in waiting if _is_writable(stream)]
            if not ready:
                return True
            for stream in ready:
                self._write_some(stream)
        return True

    def finish(self, now: Callable[[], float], *, total: float) -> None:
        """Show the rest of the workers' lines.

        Gives up, and says so, when no reader takes any for `_PATIENCE_MS`, or after
        `total` seconds.

        Args:
            now: The clock.
            total: Seconds.
        """
        started = taken_at = now()
        while any(self._has_reader.values()):
            if not self.pump() and not self._take_pieces(final=True):
                return
            waiting = [stream for stream, data in self._pending.items() if data]
            if not waiting or any(_is_writable(stream, wait_ms=50) for stream in waiting):
                taken_at = now()
            if now() - taken_at > _PATIENCE_MS / 1000 or now() - started > total:
                self._show("msrun: the console is too slow; the logs have the rest")
                return

    def _show(self, text: str) -> None:
        # A reader that did not take a message in time is not waited for again: the next message
        # may be about a stop.
        wait_ms = _PATIENCE_MS if self._is_heard else 0
        start = "\n" if self._in_line[self._place[2]] else ""
        data = f"{start}{text}\n".encode(errors="backslashreplace")
        self._is_heard = write_bounded(2, data, wait_ms)
        self._in_line[self._place[2]] = False
        if start and (tail := self._unfinished[self._place[2]]):
            tail.interrupt()
            self._unfinished[self._place[2]] = None

    def _take_pieces(self, *, final: bool = False) -> bool:
        """Make the new pieces of one log wait for their readers; return whether there are any."""
        for _ in range(len(self._tails)):
            tail = self._tails[0]
            self._tails.rotate(-1)
            if pieces := tail.read(final=final):
                for stream, text in pieces:
                    if self._has_reader[stream]:
                        self._append(tail, stream, text)
                return True
        return False

    def _append(self, tail: Tail, stream: int, text: str) -> None:
        place = self._place[stream]
        other = self._unfinished[place]
        if other and other is not tail:
            other.interrupt()
            self._pending[stream] += b"\n"
        self._pending[stream] += text.encode(errors="backslashreplace")
        self._unfinished[place] = None if text.endswith("\n") else tail

    def _write_some(self, stream: int) -> None:
        data = self._pending[stream]
        try:
            written = os.write(stream, data[:_CHUNK_BYTES])
        except OSError:
            # The reader has closed the pipe; the job goes on.
            self._has_reader[stream] = False
            self._pending[stream] = b""
            return
        self._in_line[self._place[stream]] = data[written - 1 : written] != b"\n"
        self._pending[stream] = data[written:]


class LiveConsole(Console):
    """The console of a launcher at a terminal: the last line tells where the job stands.

    The line is there only as long as the cursor is at the start of a line: a progress bar or a
    prompt of a worker has the line to itself.

    Args:
        journal: As of `Console`.
        tails: As of `Console`.
        name: Beginning of the line.
    """

    def __init__(self, journal: int, tails: Sequence[Tail], name: str) -> None:
        super().__init__(journal, tails)
        self._name = name
        self._shown = ""
        term, self._has_colours = environ.terminal()
        self.is_live = term not in ("", "dumb", "unknown")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the line away and leave the terminal as it was found."""
        self._erase()
        self.is_live = False

    def show(self, status: NodeStatus) -> None:
        """Replace the line by the present state of the job."""
        line = status.render()
        is_free = not any(self._in_line.values()) and not any(self._pending.values())
        if not (self.is_live and is_free and line != self._shown and _is_writable(2)):
            return
        name = self._name[: _width()]
        line_start = line[: max(0, _width() - len(name) - 2)]
        colour = "\x1b[36m" if self._has_colours else ""
        text = f"{_ERASE}\x1b[1m{name}\x1b[0m  {colour}{line_start}\x1b[0m"
        write_bounded(2, text.encode(errors="backslashreplace"))
        self._shown = line

    def pause(self) -> None:
        """Take the line away; `show` brings it back."""
        self._erase()

    def _show(self, text: str) -> None:
        self._erase()
        super()._show(text)

    def _write_some(self, stream: int) -> None:
        self._erase()
        super()._write_some(stream)

    def _erase(self) -> None:
        if self._shown:
            write_bounded(2, _ERASE.encode())
            self._shown = ""


def open_console(journal: int, tails: Sequence[Tail], name: str) -> Console:
    """Return the console that fits where our output goes."""
    if is_terminal():
        return LiveConsole(journal, tails, name)
    return Console(journal, tails)


def streams_differ() -> bool:
    """Return whether our standard output and our standard error lead to different places."""
    try:
        return not os.path.samestat(os.fstat(1), os.fstat(2))
    except OSError:
        return True


def is_terminal() -> bool:
    """Return whether a person reads both of our streams."""
    return os.isatty(1) and os.isatty(2)


def write_bounded(descriptor: int, data: bytes, wait_ms: int = _PATIENCE_MS) -> bool:
    """Write `data` as far as a reader takes it within `wait_ms`; return whether it took all."""
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data and poller.poll(wait_ms):
            data = data[os.write(descriptor, data[:_CHUNK_BYTES]) :]
    return not data


def _width() -> int:
    """Return the columns in which a line can be erased again."""
    try:
        columns = os.get_terminal_size(2).columns
    except OSError:
        columns = 0
    return (columns or 80) - 1


def _is_writable(descriptor: int, *, wait_ms: int = 0) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLOUT | select.POLLERR) for _, event in poller.poll(wait_ms))
