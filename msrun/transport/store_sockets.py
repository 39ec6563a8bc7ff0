"""The sockets between the nodes' ends of a store: one CURVE connection a node, to that of rank 0.

A frame is the number of a client's connection on its node, and bytes of that client or for it;
without bytes, that connection has ended.  Number 0 is no client: all of that node have ended.
The bounds on strangers are those of the control connection (`sockets.py`).  Between holders of the
key nothing is dropped: a node that sends too fast waits, and answers wait for a node that is slow.
A connection that breaks takes the clients along, as a broken one of torch's own store would.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

import zmq

from msrun.errors import UsageError
from msrun.transport import frames
from msrun.transport.curve import admit, identify, take_over
from msrun.transport.gate import Gate
from msrun.transport.sockets import endpoint, handshake_milliseconds

CHUNK_BYTES_MAX = 64 << 10
ALL = 0
_SERVER = "store"
_RELAY = "store relay"
_NUMBER = struct.Struct("<I")
_CURVE_BYTES = 64
_HANDSHAKE_MS = 4_700
_WAITING_MAX = 1000
_SEND_MS = 200
# Where strangers fill the port's backlog, the kernel's own second attempt comes after a second.
_CONNECT_MS = 500
_RECONNECT_MS = (20, 500)
_FRAMES_MAX = 256

_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Message = tuple[int, bytes]


def _bound(sock: zmq.Socket[bytes], nnodes: int) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, CHUNK_BYTES_MAX + _NUMBER.size + _CURVE_BYTES)
    sock.setsockopt(zmq.RCVHWM, _WAITING_MAX)
    sock.setsockopt(zmq.HANDSHAKE_IVL, handshake_milliseconds(nnodes, _HANDSHAKE_MS))
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.IPV6, 1)


def _chunks(number: int, data: bytes) -> list[bytes]:
    head = _NUMBER.pack(number)
    starts = range(0, max(1, len(data)), CHUNK_BYTES_MAX)
    return [head + data[start : start + CHUNK_BYTES_MAX] for start in starts]


def _message(frame: bytes) -> Message | None:
    if len(frame) < _NUMBER.size:
        return None
    return _NUMBER.unpack_from(frame)[0], frame[_NUMBER.size :]


class StoreSocket:
    """The end at the store, which the relays of all other nodes connect to.

    Args:
        context: ZeroMQ context, owned by the caller.
        listening: A listening socket; owned by this object from now on.
        secret: Of this store; None lets everybody in.
        nnodes: Nodes that may come, at most.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listening: socket.socket,
        secret: bytes | None,
        nnodes: int,
    ) -> None:
        self.gate: Gate | None = None
        self.socket = context.socket(zmq.ROUTER)
        _bound(self.socket, nnodes)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if secret is not None:
            self.gate = admit(self.socket, context, secret, _SERVER, _RELAY)
        host, port = listening.getsockname()[:2]
        take_over(self.socket, listening, endpoint(host, port))

    def receive(self) -> list[tuple[bytes, Message]]:
        """Return messages that wait, each behind the route to its node."""
        received = []
        for _ in range(_FRAMES_MAX):
            try:
                route, *parts = frames.receive(self.socket)
            except zmq.Again:
                break
            message = _message(parts[0].bytes) if len(parts) == 1 else None
            if message:
                received.append((route.bytes, message))
        return received

    def send(self, route: bytes, number: int, data: bytes) -> None:
        """Send `data` to a client of the node at `route`; dropped when that node has gone."""
        for chunk in _chunks(number, data):
            with contextlib.suppress(zmq.ZMQError):
                frames.send(self.socket, [route, chunk])


class RelaySocket:
    """The end at a node without the store.

    Args:
        context: ZeroMQ context, owned by the caller.
        address: Host and port of the store's end.
        secret: As of `StoreSocket`.
        nnodes: As of `StoreSocket`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: tuple[str, int],
        secret: bytes | None,
        nnodes: int,
    ) -> None:
        self._address = endpoint(*address)
        self._is_up = False
        self.socket = context.socket(zmq.DEALER)
        _bound(self.socket, nnodes)
        self.socket.setsockopt(zmq.SNDHWM, _WAITING_MAX)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self.socket.setsockopt(zmq.SNDTIMEO, _SEND_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        self.socket.setsockopt(zmq.ROUTING_ID, b"r" + os.urandom(16))
        self.monitor = self.socket.get_monitor_socket(_BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if secret is not None:
            identify(self.socket, secret, _RELAY, _SERVER)
        self.socket.connect(self._address)

    def send(self, number: int, data: bytes) -> bool:
        """Send `data` of a client; return whether it left within a moment, else nothing did.

        Raises:
            UsageError: There are more bytes than one message takes.
        """
        (chunk, *more) = _chunks(number, data)
        if more:
            raise UsageError(f"{len(data)} bytes in one message")
        try:
            self.socket.send(chunk)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[Message]:
        """Return messages that wait."""
        received = []
        for _ in range(_FRAMES_MAX):
            try:
                message = _message(self.socket.recv(frames.NOBLOCK))
            except zmq.Again:
                break
            if message:
                received.append(message)
        return received

    def has_broken(self) -> bool:
        """Return whether the connection has broken since the last call; it is being made again."""
        is_broken = False
        while self.monitor.poll(0):
            event, _ = struct.unpack("=Hi", self.monitor.recv_multipart()[0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_up = True
                continue
            is_broken, self._is_up = is_broken or self._is_up, False
            if event != zmq.EVENT_DISCONNECTED:  # ZeroMQ gives an address up that rejects it
                with contextlib.suppress(zmq.ZMQError):
                    self.socket.disconnect(self._address)
                self.socket.connect(self._address)
        return is_broken
