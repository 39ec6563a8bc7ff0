"""The store and relays of other nodes, with torch's protocol as a plain socket speaks it."""

import os
import socket
import struct
import threading

import pytest
import zmq

from msrun.transport.keys import new_secret
from msrun.transport.loop import Loop, new_context
from msrun.transport.store_sockets import CHUNK_BYTES_MAX, RelaySocket, StoreSocket
from msrun.worker.store import wire
from msrun.worker.store.keys import StoreKeys
from msrun.worker.store.leg import FarClients, Relay
from msrun.worker.store.server import LoopbackServer

HELLO = struct.pack("<BI", wire.VALIDATE, wire.VALIDATION)
PATIENCE = 20.0


def text(value):
    return struct.pack("<Q", len(value)) + value


class Node:
    """One end in a thread of its own; commands run between two of its events."""

    def __init__(self):
        self.context = new_context()
        self.poller = zmq.Poller()
        self.handlers = {}
        self.commands = []
        self.is_over = False
        self.thread = threading.Thread(target=self.run)

    def watch(self, source, handler):
        self.poller.register(source, zmq.POLLIN)
        self.handlers[source] = handler

    def forget(self, source):
        self.handlers.pop(source, None)
        self.poller.unregister(source)

    def run(self):
        while not self.is_over:
            for source, _ in self.poller.poll(10):
                self.handlers[source]()
            while self.commands:
                self.commands.pop()()
        self.context.destroy(linger=0)

    def close(self):
        self.is_over = True
        self.thread.join(PATIENCE)


class StoreNode(Node):
    def __init__(self, secret, port=0):
        super().__init__()
        listening = socket.create_server(("127.0.0.1", port), backlog=100)
        self.port = listening.getsockname()[1]
        self.socket = StoreSocket(self.context, listening, secret, 2)
        self.keys = StoreKeys(1 << 26)
        self.said = []
        far = FarClients(self.socket, self.keys, self.said.append)
        self.watch(self.socket.socket, far.serve)
        if self.socket.gate:
            self.socket.gate.serve(self)
        self.thread.start()


class RelayNode(Node):
    def __init__(self, port, secret):
        super().__init__()
        self.socket = RelaySocket(self.context, ("127.0.0.1", port), secret, 2)
        relay = Relay(self.socket, self)
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = listening.getsockname()
        self.server = relay.server = LoopbackServer(
            listening, lambda new: new, relay.open_feed, print
        )
        self.watch(relay.server.fileno(), relay.server.serve)
        self.thread.start()

    def close(self):
        super().close()
        for connection in list(self.server._connections.values()):
            connection.sock.close()
        self.server._listening.close()

    def connect(self):
        client = socket.create_connection(self.address, PATIENCE)
        client.sendall(HELLO)
        return client


@pytest.fixture
def secret():
    return new_secret()


@pytest.fixture
def nodes():
    started = []
    yield started.append
    for node in started:
        node.close()


@pytest.fixture
def store(secret, nodes):
    node = StoreNode(secret)
    nodes(node)
    return node


@pytest.fixture
def relay(store, secret, nodes):
    node = RelayNode(store.port, secret)
    nodes(node)
    return node


def ping(client, number=7):
    client.sendall(bytes([wire.PING]) + struct.pack("<I", number))
    got = b""
    while len(got) < 4 and (data := client.recv(4)):
        got += data
    return got


def read(client, count):
    data = b""
    while len(data) < count:
        data += client.recv(count - len(data))
    return data


def test_clients_of_a_relay_set_and_get_and_wait(relay):
    with relay.connect() as one, relay.connect() as two:
        two.sendall(bytes([wire.WAIT]) + struct.pack("<Q", 1) + text(b"k"))
        one.sendall(bytes([wire.SET]) + text(b"k") + text(b"v"))
        assert read(two, 1) == wire.STOP_WAITING
        two.sendall(bytes([wire.GET]) + text(b"k"))
        assert read(two, 9) == text(b"v")


@pytest.mark.parametrize("size", [CHUNK_BYTES_MAX - 1, CHUNK_BYTES_MAX, 8 << 20])
def test_a_value_of_any_size_comes_through_whole(relay, size):
    value = os.urandom(1 << 10) * (size >> 10) + bytes(size % (1 << 10))
    with relay.connect() as client:
        client.sendall(bytes([wire.SET]) + text(b"k") + text(value))
        client.sendall(bytes([wire.GET]) + text(b"k"))
        assert read(client, 8 + size) == text(value)


def test_a_client_that_ends_is_forgotten_at_the_store(relay, store):
    with relay.connect() as other:
        with relay.connect() as client:
            client.sendall(bytes([wire.WAIT]) + struct.pack("<Q", 1) + text(b"k"))
            client.sendall(bytes([wire.ADD]) + text(b"n") + struct.pack("<q", 1))
            assert read(client, 8)
            assert len(store.keys._missing) == 1
        assert ping(other) == struct.pack("<I", 7)

        assert not store.keys._missing


def test_a_client_that_is_refused_is_disconnected_and_no_other(relay, store):
    with relay.connect() as good, relay.connect() as bad:
        bad.sendall(bytes([99]))
        assert bad.recv(1) == b""
        assert ping(good) == struct.pack("<I", 7)
    assert store.said == ["request 99 is unknown"]


def test_who_has_another_secret_does_not_come_through(store, nodes):
    stranger = RelayNode(store.port, new_secret())
    nodes(stranger)
    with stranger.connect() as client:
        client.sendall(bytes([wire.SET]) + text(b"k") + text(b"v"))
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            ping(client)
    assert store.keys.values == {}


def test_a_broken_connection_ends_its_clients_and_later_ones_are_served(
    relay, store, secret, nodes
):
    """As torch's own clients end when their connection breaks: an answer may have been lost."""
    with relay.connect() as client:
        assert ping(client) == struct.pack("<I", 7)
        store.close()
        assert client.recv(1) == b""
    nodes(StoreNode(secret, store.port))
    with relay.connect() as later:
        assert ping(later, 8) == struct.pack("<I", 8)


def test_a_relay_waits_for_a_store_that_is_not_there_yet(secret, nodes):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    relay = RelayNode(port, secret)
    nodes(relay)
    with relay.connect() as client:
        client.sendall(bytes([wire.PING]) + struct.pack("<I", 9))
        nodes(StoreNode(secret, port))
        assert read(client, 4) == struct.pack("<I", 9)


def test_without_keys_a_relay_comes_through(nodes):
    store = StoreNode(None)
    nodes(store)
    relay = RelayNode(store.port, None)
    nodes(relay)
    with relay.connect() as client:
        assert ping(client) == struct.pack("<I", 7)


def test_the_loop_of_a_process_is_as_these_nodes():
    assert {"watch", "forget"} <= set(dir(Loop))
