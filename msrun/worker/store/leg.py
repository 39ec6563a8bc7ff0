"""The way between the nodes: clients of other nodes at the store, and relays there.

To the store, a client of another node is a `StoreClient` like its own; only its line leads through
the network.  A relay parses nothing: it moves bytes between the connections of its node's workers
and the store, after it has admitted them as the store would.
"""

from __future__ import annotations

from collections.abc import Callable

from msrun.transport.loop import Loop
from msrun.transport.store_sockets import ALL, CHUNK_BYTES_MAX, RelaySocket, StoreSocket
from msrun.worker.store.keys import StoreKeys, StoreRefusal
from msrun.worker.store.server import Connection, LoopbackServer
from msrun.worker.store.wire import StoreClient


class _FarLine:
    """The way back to a client of another node."""

    def __init__(self, sock: StoreSocket, route: bytes, number: int) -> None:
        self._socket = sock
        self._route = route
        self._number = number

    def send(self, data: bytes) -> None:
        """Send `data` after all that was sent before."""
        self._socket.send(self._route, self._number, data)


class FarClients:
    """The clients of other nodes, at the store.

    Args:
        sock: The store's end of the network.
        keys: What the store holds.
        tell: Takes sentences about clients that were sent away.
    """

    def __init__(self, sock: StoreSocket, keys: StoreKeys, tell: Callable[[str], None]) -> None:
        self._socket = sock
        self._keys = keys
        self._tell = tell
        self._nodes: dict[bytes, dict[int, StoreClient]] = {}

    def serve(self) -> None:
        """Serve what has arrived."""
        while received := self._socket.receive():
            for route, (number, data) in received:
                self._take(route, number, data)

    def _take(self, route: bytes, number: int, data: bytes) -> None:
        clients = self._nodes.setdefault(route, {})
        if number == ALL:
            for client in clients.values():
                client.end()
            clients.clear()
        elif not data:
            if number in clients:
                clients.pop(number).end()
        else:
            if number not in clients:
                line = _FarLine(self._socket, route, number)
                clients[number] = StoreClient(self._keys, line)
            self._feed(clients[number], route, number, data)

    def _feed(self, client: StoreClient, route: bytes, number: int, data: bytes) -> None:
        try:
            client.feed(data)
        except StoreRefusal as refusal:
            self._tell(str(refusal))
            del self._nodes[route][number]
            client.end()
            self._socket.send(route, number, b"")


class Relay:
    """The clients of a node without the store.

    Args:
        sock: This node's end of the network.
        loop: Calls `serve` when the network has something.
    """

    def __init__(self, sock: RelaySocket, loop: Loop) -> None:
        self._socket = sock
        self._connections: dict[int, Connection] = {}
        self._last = ALL
        self.server: LoopbackServer
        loop.watch(sock.socket, self.serve)
        loop.watch(sock.monitor, self.mend)

    def open_feed(self, connection: Connection) -> _RelayFeed:
        """Return what takes the bytes of a new connection of this node."""
        self._last += 1
        self._connections[self._last] = connection
        return _RelayFeed(self, self._last)

    def serve(self) -> None:
        """Hand the answers that have arrived to their clients."""
        while received := self._socket.receive():
            for number, data in received:
                connection = self._connections.get(number)
                if connection is None:
                    continue
                if data:
                    connection.send(data)
                else:
                    self.server.close(connection)

    def mend(self) -> None:
        """End all clients when the connection to the store has broken: answers may be lost."""
        if self._socket.has_broken():
            for connection in list(self._connections.values()):
                self.server.close(connection)
            self.send(ALL, b"")

    def send(self, number: int, data: bytes) -> None:
        """Send bytes of a client, which waits for the network with all others."""
        while not self._socket.send(number, data):
            self.mend()
            if number not in self._connections:
                return

    def forget(self, number: int) -> None:
        """A client's connection has ended."""
        if self._connections.pop(number, None):
            self._socket.send(number, b"")


class _RelayFeed:
    """Takes the bytes of one client of a node without the store."""

    __slots__ = ("_number", "_relay")

    def __init__(self, relay: Relay, number: int) -> None:
        self._relay = relay
        self._number = number

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        for start in range(0, len(data), CHUNK_BYTES_MAX):
            self._relay.send(self._number, data[start : start + CHUNK_BYTES_MAX])

    def end(self) -> None:
        """The connection has ended."""
        self._relay.forget(self._number)
