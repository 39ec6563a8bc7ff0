"""The one poll loop and the one clock of a process of ours."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable

import zmq

Handler = Callable[[], None]


def new_context(threads: int = 1) -> zmq.Context[zmq.Socket[bytes]]:
    """Return a ZeroMQ context of this process's own, with so many threads for its connections."""
    return zmq.Context(threads)


class Loop:
    """Calls handlers when sockets are readable, signals arrive or a time has come.

    Args:
        rest: Seconds between two looks at the sockets.  With thousands of nodes, looking and waking
            cost more than handling a message, and after a rest several messages wait.
    """

    def __init__(self, rest: float = 0.0) -> None:
        self._rest = rest
        self._poller = zmq.Poller()
        self._handlers: dict[object, Handler] = {}
        self._signals: dict[int, Callable[[int], None]] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopped = False
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self.watch(self._wake_read, self._dispatch_signals)

    @staticmethod
    def now() -> float:
        """Return seconds of the monotonic clock."""
        return time.monotonic()

    @staticmethod
    def wall_time() -> float:
        """Return seconds since 1970, in which other programs say when something is to happen."""
        return time.time()

    def watch(self, source: int | zmq.Socket[bytes], handler: Handler) -> None:
        """Call `handler` whenever `source` is readable."""
        self._poller.register(source, zmq.POLLIN)
        self._handlers[source] = handler

    def forget(self, source: int | zmq.Socket[bytes]) -> None:
        """Stop watching `source`."""
        if self._handlers.pop(source, None):
            self._poller.unregister(source)

    def on_signals(self, signums: Iterable[int], handler: Callable[[int], None]) -> None:
        """Call `handler` with the number of each of `signums` that arrives.

        A SIGHUP that was ignored when this process started stays ignored, as `nohup` asks.
        """
        for signum in signums:
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            self._signals[signum] = handler
            signal.signal(signum, lambda *_: None)

    def stop(self) -> None:
        """Have `run` return."""
        self._stopped = True

    def run(self, deadline: Callable[[], float | None], tick: Handler) -> None:
        """Serve until `stop`; call `tick` whenever `deadline()` has come."""
        while not self._stopped:
            due = deadline()
            if due is not None and due <= self.now():
                tick()
                continue
            timeout = None if due is None else max(1, int((due - self.now()) * 1000) + 1)
            for source, _ in self._poller.poll(timeout):
                handler = self._handlers.get(source)
                if handler and not self._stopped:
                    handler()
            if self._rest:
                pause(self._rest)

    def close(self) -> None:
        """Give up the signal pipe."""
        signal.set_wakeup_fd(-1)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _dispatch_signals(self) -> None:
        received = b""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._wake_read, 4096):
                received += data
        for signum in received:
            if handler := self._signals.get(signum):
                handler(signum)


def wait_readable(source: socket.socket | int, timeout: float) -> bool:
    """Return whether `source` becomes readable within `timeout` seconds."""
    poller = zmq.Poller()
    poller.register(source, zmq.POLLIN)
    return bool(poller.poll(int(timeout * 1000)))


def pause(seconds: float) -> None:
    """Wait, where there is nothing to wait for but the time."""
    time.sleep(seconds)  # a poller without sockets returns at once
