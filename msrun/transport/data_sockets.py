"""The sockets of parameter servers: messages of a head and raw buffers, which are not copied.

A server has one `DataListener`, which ranks and other servers connect to, each with a
`DataConnection`.  The bounds on strangers are those of the control connection (`sockets.py`).  A
message that cannot be queued at once is dropped, as one is that a broken connection loses: the
protocol above sends again whatever was not answered, and so no queue grows while a server is away.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence

import zmq

from msrun.transport import frames
from msrun.transport.curve import admit, identify, take_over
from msrun.transport.gate import Gate
from msrun.transport.loop import Loop
from msrun.transport.sockets import endpoint, handshake_milliseconds

# A frame is a tensor: as long as one message of other parameter servers may be.
FRAME_BYTES_MAX = (1 << 31) - 1
_SERVER = "parameter server"
_PEER = "parameter server peer"
_CURVE_BYTES = 64
_HANDSHAKE_MS = 4_700
_QUEUE_MAX = 64
_FRAMES_MAX = 1 << 16
_MESSAGES_MAX = 64
_CONNECT_MS = 1_000
_RECONNECT_MS = (10, 200)
_UP = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_DOWN = int(zmq.EVENT_DISCONNECTED)
# Follows at once where ZeroMQ makes a broken connection anew.
_RETRIED = int(zmq.EVENT_CONNECT_RETRIED)
_GIVEN_UP_SECONDS = 2.0
# A peer that breaks a connection so often, for so long, each time after so many bytes, cannot take
# them: networks that break let some of them pass.
_REFUSED_BYTES_MIN = 1 << 20
_REFUSED_TIMES = 5
_REFUSED_SECONDS = 5.0

Buffer = bytes | memoryview


def _bound(sock: zmq.Socket[bytes], peers: int) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX + _CURVE_BYTES)
    sock.setsockopt(zmq.RCVHWM, _QUEUE_MAX)
    sock.setsockopt(zmq.SNDHWM, _QUEUE_MAX)
    sock.setsockopt(zmq.HANDSHAKE_IVL, handshake_milliseconds(peers, _HANDSHAKE_MS))
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.IPV6, 1)


def _size(part: Buffer) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _send(sock: zmq.Socket[bytes], parts: Sequence[Buffer]) -> bool:
    """Send `parts` as one message without a copy; return whether it was queued."""
    try:
        for part in parts[:-1]:
            sock.send(part, frames.NOBLOCK | frames.SNDMORE, copy=False)
        sock.send(parts[-1], frames.NOBLOCK, copy=False)
    except zmq.ZMQError:
        return False
    return True


def _received(sock: zmq.Socket[bytes]) -> list[list[memoryview]]:
    """Return the messages that wait."""
    found = []
    for _ in range(_MESSAGES_MAX):
        try:
            parts = frames.receive(sock)
        except zmq.Again:
            break
        if len(parts) <= _FRAMES_MAX:
            found.append([part.buffer for part in parts])
    return found


class DataListener:
    """A server's end.

    Args:
        context: ZeroMQ context, owned by the caller.
        listening: A listening socket; owned by this object from now on.
        secret: Of the servers of this job; None lets everybody in who can reach the socket.
        peers: Ranks and servers that may come, at most.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listening: socket.socket,
        secret: bytes | None,
        peers: int,
    ) -> None:
        self.gate: Gate | None = None
        self.socket = context.socket(zmq.ROUTER)
        _bound(self.socket, peers)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if secret is not None:
            self.gate = admit(self.socket, context, secret, _SERVER, _PEER)
        host, port = listening.getsockname()[:2]
        take_over(self.socket, listening, endpoint(host, port))

    def receive(self) -> list[tuple[bytes, list[memoryview]]]:
        """Return messages that wait, each behind the route to its sender."""
        return [(bytes(route), parts) for route, *parts in _received(self.socket) if parts]

    def send(self, route: bytes, parts: Sequence[Buffer]) -> bool:
        """Send along `route`; return whether it was queued."""
        return _send(self.socket, [route, *parts])


class DataConnection:
    """The end of a rank, or of another server.

    Args:
        context: ZeroMQ context, owned by the caller.
        address: Host and port of the server.
        secret: As of `DataListener`.
        peers: As of `DataListener`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: tuple[str, int],
        secret: bytes | None,
        peers: int,
    ) -> None:
        self.address = address
        self.socket = context.socket(zmq.DEALER)
        _bound(self.socket, peers)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a server that is away
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        self.socket.setsockopt(zmq.ROUTING_ID, b"d" + os.urandom(16))
        self.monitor = self.socket.get_monitor_socket(_UP | _DOWN | _RETRIED)
        self.is_up = False
        # When it broke, as long as ZeroMQ does not make it anew.
        self._broke_at: float | None = None
        # Bytes of the largest message since it is up, and of those after which it broke: the
        # largest, how many, and when the first was.
        self._sent = self._refused = self._refusals = 0
        self._refused_since = 0.0
        if secret is not None:
            identify(self.socket, secret, _PEER, _SERVER)
        self.socket.connect(endpoint(*address))

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Send `parts`; return whether they were queued: else there is no connection now."""
        is_queued = _send(self.socket, parts)
        if is_queued:
            self._sent = max(self._sent, sum(map(_size, parts)))
        return is_queued

    def receive(self) -> list[list[memoryview]]:
        """Return the messages that wait."""
        return _received(self.socket)

    def changed(self) -> bool:
        """Return whether the connection came up or broke since the last call; `is_up` says which.

        Where it broke, ZeroMQ makes it anew, but see `has_given_up`.
        """
        before = self.is_up
        while self.monitor.poll(0):
            event, _ = struct.unpack("=Hi", self.monitor.recv_multipart()[0])
            has_broken = event == _DOWN and self.is_up
            self._broke_at = Loop.now() if has_broken else None
            if has_broken:
                self._note_break()
            self.is_up = event == _UP
        return self.is_up != before

    def _note_break(self) -> None:
        if self._sent >= _REFUSED_BYTES_MIN:
            self._refused_since = self._refused_since if self._refusals else Loop.now()
            self._refused = max(self._refused, self._sent)
            self._refusals += 1
        self._sent = 0

    def progress(self) -> None:
        """Note that the peer has taken what it was sent."""
        self._sent = self._refused = self._refusals = 0

    def refused_bytes(self) -> int:
        """Return the bytes of a message that the peer never takes; 0 where it takes all.

        A peer without memory for a message breaks the connection, and a new one stands until the
        message comes again.
        """
        is_for_good = (
            self._refusals >= _REFUSED_TIMES and Loop.now() > self._refused_since + _REFUSED_SECONDS
        )
        return self._refused if is_for_good else 0

    def has_given_up(self) -> bool:
        """Return whether ZeroMQ has ended the connection for good, as `changed` saw.

        It does so where something came that it could not take: without memory for a message it says
        nothing else.
        """
        return self._broke_at is not None and Loop.now() > self._broke_at + _GIVEN_UP_SECONDS

    def wait_up(self, milliseconds: int) -> bool:
        """Return whether the connection is up within a time."""
        return bool(self.socket.poll(milliseconds, zmq.POLLOUT))

    def close(self) -> None:
        """Give the connection up."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()


class ConnectionPoll:
    """Waits for connections and for `wake`, which any thread may call.

    A process has one `Loop`, which belongs to its main thread: in a rank, that is the script's.
    """

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller.register(self._read, zmq.POLLIN)

    def watch(self, connection: DataConnection) -> None:
        """Wait for messages on `connection`, too."""
        self._poller.register(connection.socket, zmq.POLLIN)
        self._poller.register(connection.monitor, zmq.POLLIN)

    def forget(self, connection: DataConnection) -> None:
        """Stop waiting for messages on `connection`."""
        self._poller.unregister(connection.socket)
        self._poller.unregister(connection.monitor)

    def wait(self, until: float | None) -> None:
        """Return when there is a message, a wake, or it is `until`."""
        seconds = None if until is None else max(0.0, until - Loop.now())
        self._poller.poll(None if seconds is None else int(seconds * 1000) + 1)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def wake(self) -> None:
        """Have `wait` return."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"w")

    def close(self) -> None:
        """Give up the pipe."""
        os.close(self._read)
        os.close(self._write)
