"""The loopback end of the store: accepts who may come in, and moves bytes.

One thread and one epoll: a request costs a few microseconds, and nothing of a client can block the
others.  A client that does not take its answers is not read from until it does.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable
from typing import Protocol

from msrun.worker.store.keys import StoreRefusal

_READ_BYTES = 64 << 10  # a larger buffer would be mapped and unmapped for each request
_UNSENT_MAX = 1 << 20
# Connections that are accepted before those that are there already are served again.
_ACCEPTED_MAX = 256
# Where a process has no descriptor left, `accept` would be tried again at once, for ever.
_NO_FILES_SECONDS = 0.05


class Feed(Protocol):
    """What takes the bytes of a client."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            StoreRefusal: The connection must end.
        """

    def end(self) -> None:
        """The connection has ended."""


class Connection:
    """One client's connection; `feed` is set by whom it was made for."""

    __slots__ = ("_server", "_unsent", "feed", "sock")

    def __init__(self, server: LoopbackServer, sock: socket.socket) -> None:
        self.sock = sock
        self.feed: Feed
        self._server = server
        self._unsent = bytearray()

    def send(self, data: bytes) -> None:
        """Send `data` after all that was sent before; it is kept while the client is slow."""
        if not self._unsent:
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:  # reading tells of the end
                return
            if sent == len(data):
                return
            data = data[sent:]
        self._unsent += data
        self._server.watch(self, is_read=len(self._unsent) < _UNSENT_MAX, is_written=True)

    def flush(self) -> None:
        """Send what waits."""
        try:
            sent = self.sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)
        del self._unsent[:sent]
        is_read = len(self._unsent) < _UNSENT_MAX
        self._server.watch(self, is_read=is_read, is_written=bool(self._unsent))


class LoopbackServer:
    """Serves the clients of a listening socket.

    Args:
        listening: The socket; owned by this object from now on.
        admit: Returns those of the sockets of new connections that may stay.
        open_feed: Returns what takes the bytes of a new connection.
        tell: Takes sentences about clients that were sent away.
    """

    def __init__(
        self,
        listening: socket.socket,
        admit: Callable[[list[socket.socket]], list[socket.socket]],
        open_feed: Callable[[Connection], Feed],
        tell: Callable[[str], None],
    ) -> None:
        listening.setblocking(False)  # noqa: FBT003 - positional only
        self._listening = listening
        self._admit = admit
        self._open_feed = open_feed
        self._tell = tell
        self._connections: dict[int, Connection] = {}
        self._epoll = select.epoll()
        self._epoll.register(listening, select.EPOLLIN)

    def fileno(self) -> int:
        """Return the descriptor that is readable when `serve` has work."""
        return self._epoll.fileno()

    def serve(self, timeout: float = 0.0) -> None:
        """Do what there is to do, waiting at most `timeout` seconds for it; -1 for ever."""
        connections = self._connections
        for descriptor, event in self._epoll.poll(timeout, 1024):
            connection = connections.get(descriptor)
            if connection is None:
                if descriptor == self._listening.fileno():
                    self._accept()
                continue
            if event & select.EPOLLOUT:
                connection.flush()
            if event & ~select.EPOLLOUT:
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close(connection)
            return
        try:
            connection.feed.feed(data)
        except StoreRefusal as refusal:
            self._tell(str(refusal))
            self.close(connection)

    def _accept(self) -> None:
        accepted: list[socket.socket] = []
        try:
            while len(accepted) < _ACCEPTED_MAX:
                accepted += self._listening.accept()[:1]
        except BlockingIOError:
            pass
        except OSError as error:
            self._tell(f"a connection could not be accepted: {error.strerror}")
            if not accepted:
                select.select([], [], [], _NO_FILES_SECONDS)
        for sock in self._admit(accepted):
            sock.setblocking(False)  # noqa: FBT003
            with contextlib.suppress(OSError):  # it may have ended already
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self, sock)
            connection.feed = self._open_feed(connection)
            self._connections[sock.fileno()] = connection
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def watch(self, connection: Connection, *, is_read: bool, is_written: bool) -> None:
        """Wait for what `connection` can do next."""
        if connection.sock.fileno() in self._connections:
            events = select.EPOLLIN * is_read | select.EPOLLOUT * is_written
            self._epoll.modify(connection.sock.fileno(), events)

    def close(self, connection: Connection) -> None:
        """End a connection."""
        if self._connections.pop(connection.sock.fileno(), None):
            self._epoll.unregister(connection.sock.fileno())
            connection.feed.end()
            connection.sock.close()
