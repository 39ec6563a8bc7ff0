"""The console of a launcher: our own messages on stderr, lines of chosen workers on stdout.

Nothing here waits for a reader: a console that does not take more is left alone until
it does, and the workers, which write to their own files, never notice.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self, cast

import msgspec

from msrun.supervise.logs import Tail, printable

if TYPE_CHECKING:
    from rich.live import Live

# Bytes that a pipe which polls as writable takes without blocking: PIPE_BUF.
_CHUNK_BYTES = 4096
_CHUNKS_EACH_TIME = 64
_PATIENCE_MS = 1000


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
    """The console of a launcher whose output goes to a pipe or a file.

    Args:
        journal: Descriptor of the file that gets all of our own words, with the time.
        tails: The workers' logs to show.
    """

    is_live = False
    """Whether `show` wants to be called now and then."""

    def __init__(self, journal: int, tails: Sequence[Tail]) -> None:
        self._journal = journal
        self._tails = tails
        self._pending = b""
        self._has_reader = True
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
        self._tails = [*self._tails, *(tail for tail in tails if tail.path not in known)]

    def say(self, text: str) -> None:
        """Show `text`, in our own words, and write it down."""
        safe = "\n".join(map(printable, text.splitlines()))
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        with contextlib.suppress(OSError):
            os.write(self._journal, f"{at} {safe}\n".encode(errors="backslashreplace"))
        self._show(safe)

    def show(self, status: NodeStatus) -> None:
        """Show where the job stands, where there is a place for it."""

    def pump(self) -> bool:
        """Show new lines of the workers; return whether there may be more."""
        for _ in range(_CHUNKS_EACH_TIME):
            if not self._pending:
                self._pending = self._next_lines()
            if not self._pending or not self._has_reader:
                return False
            if not _is_writable(1):
                return True
            self._write_some()
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
        while self._has_reader:
            if not self.pump():
                self._pending = self._next_lines(final=True)
                if not self._pending:
                    return
            if _is_writable(1, wait_ms=50):
                taken_at = now()
            if now() - taken_at > _PATIENCE_MS / 1000 or now() - started > total:
                self._show("msrun: the console is too slow; the logs have the rest")
                return

    def _show(self, text: str) -> None:
        # A reader that did not take a message in time is not waited for again: the next message
        # may be about a stop.
        wait_ms = _PATIENCE_MS if self._is_heard else 0
        self._is_heard = write_bounded(2, f"{text}\n".encode(errors="backslashreplace"), wait_ms)

    def _next_lines(self, *, final: bool = False) -> bytes:
        for tail in self._tails:
            if lines := tail.read(final=final):
                return ("\n".join(lines) + "\n").encode(errors="backslashreplace")
        return b""

    def _write_some(self) -> None:
        try:
            written = os.write(1, self._pending[:_CHUNK_BYTES])
        except OSError:
            # The reader has closed the pipe; the job goes on.
            self._has_reader = False
            return
        self._pending = self._pending[written:]


class LiveConsole(Console):
    """The console of a launcher at a terminal: one line that tells where the job stands.

    Args:
        journal: As of `Console`.
        tails: As of `Console`.
        name: Beginning of the line.
    """

    is_live = True

    def __init__(self, journal: int, tails: Sequence[Tail], name: str) -> None:
        super().__init__(journal, tails)
        self._name = name
        self._live: Live | None = None
        self._shown = ""

    def __enter__(self) -> Self:
        from rich.console import Console as RichConsole  # Only a terminal needs them.
        from rich.live import Live

        rich = RichConsole(
            file=cast("IO[str]", _Terminal()), highlight=False, markup=False, emoji=False
        )
        self._live = Live(
            console=rich,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the line away and leave the terminal as it was found."""
        if self._live:
            self._live.stop()
            self._live = None

    def show(self, status: NodeStatus) -> None:
        """Replace the line by the present state of the job."""
        from rich.text import Text

        line = status.render()
        if self._live and line != self._shown and _is_writable(2):
            self._live.update(Text.assemble((self._name, "bold"), "  ", (line, "cyan")))
            self._live.refresh()
            self._shown = line

    def _show(self, text: str) -> None:
        if self._live is None:
            super()._show(text)
            return
        self._live.console.print(text, soft_wrap=True)

    def _write_some(self) -> None:
        lines, self._pending = self._pending, b""
        self._show(lines.decode(errors="replace").rstrip("\n"))


def open_console(journal: int, tails: Sequence[Tail], name: str) -> Console:
    """Return the console that fits where our output goes."""
    if is_terminal():
        return LiveConsole(journal, tails, name)
    return Console(journal, tails)


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


class _Terminal(io.TextIOBase):
    """Standard error for rich: a terminal that hangs or has gone is no error."""

    encoding = "utf-8"

    def write(self, text: str, /) -> int:
        write_bounded(2, text.encode(errors="backslashreplace"))
        return len(text)

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def _is_writable(descriptor: int, *, wait_ms: int = 0) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLOUT | select.POLLERR) for _, event in poller.poll(wait_ms))
