"""The server of torch's file timers: ends a process whose `timer.expires` has run out.

`torch.distributed.elastic.timer.FileTimerClient` writes one line of JSON for each timer that a
process acquires or releases (torch 2.13, file_based_local_timer.py), to a FIFO that it finds by
TORCHELASTIC_TIMER_FILE.  torchrun, whose server is a thread, sends the signal to the process and
to itself; here the end of the process is like any other, and the job goes on from that.

A process is held by a pidfd from its first timer on, so that its number cannot mean another one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msrun.errors import UsageError
from msrun.transport.loop import Loop

_READ_BYTES = 1 << 16
# A client's line is written in one piece, which a pipe takes up to this length.
_LINE_BYTES_MAX = 4096
_TIMERS_MAX = 10_000
# Above what Linux counts to.
_PID_LIMIT = 1 << 30


@dataclass(slots=True)
class _Process:
    """A process with timers.

    Args:
        descriptor: Its pidfd.
        timers: Name of a timer -> when it expires, and the signal that follows.
    """

    descriptor: int
    timers: dict[str, tuple[float, int]] = field(default_factory=dict)

    @property
    def due(self) -> float:
        """When the first of the timers expires; inf without one."""
        return min((at for at, _ in self.timers.values()), default=math.inf)


class TimerServer:
    """Serves the timers of this node's processes.

    Args:
        path: The FIFO.
        loop: This process's loop.
        tell: Takes the pid, what has expired, and the signal that the process gets, 0 for none.

    Raises:
        UsageError: The FIFO cannot be made, or something else is there.
    """

    def __init__(self, path: str, loop: Loop, tell: Callable[[int, str, int], None]) -> None:
        self._loop = loop
        self._tell = tell
        self._rest = b""
        self._processes: dict[int, _Process] = {}
        self._descriptor = _make(path)
        loop.watch(self._descriptor, self.receive)

    def receive(self) -> None:
        """Take what clients have written; what is no request of theirs is dropped."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._descriptor, _READ_BYTES):
                *lines, rest = (self._rest + data).split(b"\n")
                self._rest = rest[:_LINE_BYTES_MAX]
                for line in lines:
                    self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            request = json.loads(line)
            pid, name = int(request["pid"]), str(request["scope_id"])
            expires_at, signum = float(request["expiration_time"]), int(request["signal"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return
        if expires_at < 0:
            self._release(pid, name)
        elif 0 < pid < _PID_LIMIT and math.isfinite(expires_at) and signum < signal.NSIG:
            self._acquire(pid, name, expires_at - Loop.wall_time(), signum)

    def _acquire(self, pid: int, name: str, seconds: float, signum: int) -> None:
        owner = self._processes.get(pid)
        if owner is None:
            try:
                owner = self._processes[pid] = _Process(os.pidfd_open(pid))
            except OSError:  # it has ended, or we have no descriptor left
                return
        if len(owner.timers) < _TIMERS_MAX:
            owner.timers[name] = (self._loop.now() + seconds, signum)

    def _release(self, pid: int, name: str) -> None:
        if owner := self._processes.get(pid):
            owner.timers.pop(name, None)
            if not owner.timers:
                self._forget(pid)

    def _forget(self, pid: int) -> None:
        os.close(self._processes.pop(pid).descriptor)

    def deadline(self) -> float | None:
        """Return when the next timer expires."""
        due = min((owner.due for owner in self._processes.values()), default=math.inf)
        return None if math.isinf(due) else due

    def tick(self) -> None:
        """Send their signals to the processes whose timers have expired."""
        now = self._loop.now()
        for pid, owner in list(self._processes.items()):
            expired = sorted(
                (at, name, signum) for name, (at, signum) in owner.timers.items() if at <= now
            )
            if not expired:
                continue
            # The first that has one, as there; the other timers of the process are forgotten.
            _, name, signum = next((each for each in expired if each[2] > 0), expired[0])
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(owner.descriptor, max(0, signum))
                self._tell(pid, name, max(0, signum))
            self._forget(pid)

    def close(self) -> None:
        """Forget all timers."""
        for pid in list(self._processes):
            self._forget(pid)
        self._loop.forget(self._descriptor)
        os.close(self._descriptor)


def _make(path: str) -> int:
    """Make the FIFO `path`, or take that of an earlier run; return both of its ends in one."""
    what = f"environment TORCHELASTIC_TIMER_FILE={path}"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        if not stat.S_ISFIFO(Path(path).lstat().st_mode):
            raise UsageError(f"{what} is there and no FIFO", hint="name another file")
        # With its own end for writing, this one never sees an end of the file.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{what} cannot be made: {error.strerror}") from None
