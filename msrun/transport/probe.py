"""Probes whether anything listens at an address, without blocking."""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msrun.transport.loop import Loop

PROBE_SECONDS = 4.0
# Of connections under way at a time, so that no limit of open files is met.
_PROBES_MAX = 256
# An agent that was killed ends before its tree, which holds its sockets until it is gone.
_WATCH_FIRST = 0.02
_WATCH_LAST = 0.25
_WATCH_TIMES = 24
# Where there is no free descriptor: strangers hold them until their handshakes are over.
_NO_FILES = (errno.EMFILE, errno.ENFILE)
_RETRY_SECONDS = 0.25

Answer = Callable[[int], None]


@dataclass(slots=True)
class _Probe:
    host: str
    port: int
    answer: Answer


class Prober:
    """Connects to addresses, at most 256 at a time.

    Args:
        loop: This process's loop.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: deque[_Probe] = deque()
        # By descriptor.  They have a poller of their own, since each that the loop knew would make
        # everything else slower that it waits for.
        self._open: dict[int, tuple[socket.socket, _Probe, float]] = {}
        self._poller = select.epoll()
        loop.watch(self._poller.fileno(), self._on_ready)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._retry_at: float | None = None

    def probe(self, host: str, port: int, answer: Answer) -> None:
        """Call `answer` with 0 when `host` takes a connection to `port`, else with an errno.

        ECONNREFUSED says that the machine is up and nothing listens there; ETIMEDOUT that
        there was no answer within `PROBE_SECONDS`; EADDRNOTAVAIL that `host` is no numeric
        address, and looking up a name would hold up everything else.
        """
        if not _is_numeric(host):
            answer(errno.EADDRNOTAVAIL)
            return
        self._waiting.append(_Probe(host, port, answer))
        self._start()

    def watch_end(self, host: str, port: int, ended: Callable[[], None]) -> None:
        """Call `ended` once the machine at `host` is up and nothing listens at `port` any more.

        As long as something listens it looks again, at last four times a second, for some 5 s.
        """
        self._watch(host, port, ended, _WATCH_FIRST, _WATCH_TIMES)

    def _watch(
        self, host: str, port: int, ended: Callable[[], None], pause: float, times: int
    ) -> None:
        def on_answer(code: int) -> None:
            if code == errno.ECONNREFUSED:
                ended()
            # A connection that waits to be accepted is reset when what listens ends just then.
            elif code in (0, errno.ECONNRESET) and times:
                longer = min(2 * pause, _WATCH_LAST)
                again = partial(self._watch, host, port, ended, longer, times - 1)
                self._later.append((self._loop.now() + pause, again))

        self.probe(host, port, on_answer)

    def deadline(self) -> float | None:
        """Time by which `tick` must be called; None when there is none."""
        # The first that was opened has to be looked at first.
        dues = [due for _, _, due in itertools.islice(self._open.values(), 1)]
        dues += [due for due, _ in self._later]
        return min(dues if self._retry_at is None else [*dues, self._retry_at], default=None)

    def tick(self) -> None:
        """Give up the connections that take too long, and begin the retries that are due."""
        now = self._loop.now()
        due = [again for at, again in self._later if at <= now]
        self._later = [(at, again) for at, again in self._later if at > now]
        for again in due:
            again()
        self._on_ready()  # this process may have been frozen, which its kernel was not
        for descriptor in [fd for fd, (_, _, due) in self._open.items() if due <= now]:
            self._end(descriptor, errno.ETIMEDOUT)
        if self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._open) < _PROBES_MAX and self._retry_at is None:
            probe = self._waiting[0]
            try:
                sock = socket.socket(_family(probe.host), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            except OSError as error:
                if error.errno not in _NO_FILES:
                    raise
                self._retry_at = self._loop.now() + _RETRY_SECONDS
                return
            self._waiting.popleft()
            self._open[sock.fileno()] = (sock, probe, self._loop.now() + PROBE_SECONDS)
            code = sock.connect_ex((probe.host, probe.port))
            if code == errno.EINPROGRESS:
                self._poller.register(sock, select.EPOLLOUT)
            else:
                self._end(sock.fileno(), code)

    def _on_ready(self) -> None:
        """End the connections that are there, or have failed."""
        for descriptor, _ in self._poller.poll(0):
            sock, _, _ = self._open[descriptor]
            self._end(descriptor, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        self._start()

    def _end(self, descriptor: int, code: int) -> None:
        sock, probe, _ = self._open.pop(descriptor)
        sock.close()
        probe.answer(code)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_numeric(host: str) -> bool:
    try:
        socket.inet_pton(_family(host), host.partition("%")[0])
    except OSError:
        return False
    return True


def describe(code: int) -> str:
    """Return the words for the errno `code` of a connection."""
    return os.strerror(code).lower()
