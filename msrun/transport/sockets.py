"""The two ends of the control connection: authenticated, bounded, on one interface."""

from __future__ import annotations

import contextlib
import enum
import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from msrun.cluster import codec, control_messages
from msrun.cluster.messages import Envelope
from msrun.errors import ProtocolError, VersionError
from msrun.transport.keys import KeyPair, key_pair

SCHEDULER = "scheduler"
AGENT = "agent"
CONTROL = "control"
_DOMAIN = "msrun"
_HANDSHAKE_MS = 5_000
# A connection that was cut is given up early, so that a new one is there as soon as it heals.
_HEARTBEAT_MS = 1_000
_HEARTBEAT_TIMEOUT_MS = 3_000
_CONNECT_MS = 1_000
_RECONNECT_MS = (20, 500)
_QUEUE_MAX = 64
_CURVE_BYTES = 64
_BACKLOG = 4096


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket on `host`; port 0 takes a free one.

    Raises:
        OSError: The address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    sock.listen(_BACKLOG)
    return sock


def endpoint(host: str, port: int) -> str:
    """Return the ZeroMQ address of a host and port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Gate:
    """Admits to one context's CURVE servers the holders of known keys, and nobody else.

    Source: ZeroMQ RFC 27 (ZAP), whose requests arrive on a socket of the same context,
    so that the process's own loop answers them and no thread is needed.

    Args:
        context: ZeroMQ context of the servers.
        allowed: Public key -> the role of whoever holds it, which its frames then carry.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], allowed: Mapping[bytes, str]
    ) -> None:
        self._allowed = {z85.decode(key): role for key, role in allowed.items()}
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer one handshake that asks for admission."""
        version, request, domain, _, _, mechanism, *credentials = self.socket.recv_multipart()
        is_ours = domain == _DOMAIN.encode() and mechanism == b"CURVE" and len(credentials) == 1
        role = self._allowed.get(credentials[0]) if is_ours else None
        status = [b"200", b"OK"] if role else [b"400", b"unknown key"]
        self.socket.send_multipart([version, request, *status, (role or "").encode(), b""])


def _bound(sock: zmq.Socket[bytes]) -> None:
    """Set every limit that does not depend on the end."""
    sock.setsockopt(zmq.LINGER, 0)
    # The limit counts what CURVE puts around a frame; the codec has the exact one.
    sock.setsockopt(zmq.MAXMSGSIZE, codec.FRAME_BYTES_MAX + _CURVE_BYTES)
    sock.setsockopt(zmq.RCVHWM, _QUEUE_MAX)
    sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    sock.setsockopt(zmq.IPV6, 1)


class Asked(NamedTuple):
    """A frame of somebody who controls the job; `route` leads an answer back."""

    route: bytes
    frame: bytes


class SchedulerSocket:
    """The scheduler's end: serves every agent that holds the job's key, and who controls it.

    Args:
        context: ZeroMQ context, owned by the caller.
        listening: An already listening socket; owned by this object from now on.
        secret: The job's secret; None serves everybody who can reach the socket.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listening: socket.socket,
        secret: bytes | None,
    ) -> None:
        self.gate: Gate | None = None
        self._routes: dict[str, bytes] = {}
        self._nodes: dict[int, str] = {}
        self._asked: list[Asked] = []
        self.socket = context.socket(zmq.ROUTER)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        _bound(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if secret is not None:
            self._authenticate(context, secret)
        host, port = listening.getsockname()[:2]
        self.socket.setsockopt(zmq.USE_FD, listening.detach())
        self.socket.bind(endpoint(host, port))

    def _authenticate(self, context: zmq.Context[zmq.Socket[bytes]], secret: bytes) -> None:
        roles = (AGENT, CONTROL)
        self.gate = Gate(context, {key_pair(secret, role).public: role for role in roles})
        own = key_pair(secret, SCHEDULER)
        self.socket.curve_server = True
        self.socket.curve_publickey = own.public
        self.socket.curve_secretkey = own.secret
        self.socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def receive(self) -> list[Envelope]:
        """Return the messages that wait; garbage from a key holder is dropped."""
        messages: list[Envelope] = []
        while True:
            try:
                route, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return messages
            if len(frames) != 1:
                continue
            if self._is_control(frames[0]):
                self._asked.append(Asked(route.bytes, frames[0].bytes))
                continue
            try:
                envelope = codec.decode(frames[0].buffer)
            except VersionError:
                with contextlib.suppress(zmq.ZMQError):
                    self.socket.send_multipart([route.bytes, codec.VERSION_FRAME], zmq.NOBLOCK)
                continue
            except ProtocolError:
                continue
            self._routes[envelope.node_id] = route.bytes
            self._nodes[frames[0].get(zmq.SRCFD)] = envelope.node_id
            messages.append(envelope)

    def _is_control(self, frame: zmq.Frame) -> bool:
        """Tell who sent `frame`: by the key; without keys, by what it says it is."""
        if self.gate is None:
            return control_messages.is_question(frame.buffer)
        return bool(frame.get("User-Id") == CONTROL)

    def asked(self) -> list[Asked]:
        """Return what those who control the job have sent, as found by `receive`."""
        asked, self._asked = self._asked, []
        return asked

    def answer(self, route: bytes, frame: bytes) -> None:
        """Send `frame` to who asked; dropped when they have left."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([route, frame], zmq.NOBLOCK)

    def broken(self) -> list[str]:
        """Return the nodes of connections that have ended; they may have others by now."""
        nodes = []
        while self.monitor.poll(0):
            descriptor = recv_monitor_message(self.monitor)["value"]
            if node_id := self._nodes.pop(descriptor, None):
                nodes.append(node_id)
        return nodes

    def send(self, envelope: Envelope) -> None:
        """Send `envelope` to its node; dropped when that node is not connected."""
        route = self._routes.get(envelope.node_id)
        if route is None:
            return
        try:
            self.socket.send_multipart([route, codec.encode(envelope)], zmq.NOBLOCK)
        except zmq.ZMQError:
            # The route stays: it is valid again once the agent has reconnected.
            return


class Line(enum.Enum):
    """What became of an agent's connection."""

    UP = "up"
    DOWN = "down"
    REJECTED = "rejected"
    SILENT = "silent"


_LINES = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Line.UP,
    zmq.EVENT_DISCONNECTED: Line.DOWN,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Line.REJECTED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Line.REJECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: Line.SILENT,
}


class AgentSocket:
    """An agent's end.

    Args:
        context: ZeroMQ context, owned by the caller.
        address: ZeroMQ address of the scheduler.
        secret: The job's secret; None connects without authentication.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, secret: bytes | None
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        _bound(self.socket)
        self.socket.setsockopt(zmq.SNDHWM, _QUEUE_MAX)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self.monitor = self.socket.get_monitor_socket(sum(_LINES))
        # One identity for all of its connections, so that an agent whose connection broke
        # need not speak first to be reached again.  The first byte must not be zero.
        self.socket.setsockopt(zmq.ROUTING_ID, b"a" + os.urandom(16))
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        if secret is not None:
            own: KeyPair = key_pair(secret, AGENT)
            self.socket.curve_publickey = own.public
            self.socket.curve_secretkey = own.secret
            self.socket.curve_serverkey = key_pair(secret, SCHEDULER).public
        self.socket.connect(address)

    def send(self, envelope: Envelope) -> None:
        """Queue `envelope`; it leaves as soon as there is a connection.

        Dropped when too much waits: what has to arrive is sent again anyway.
        """
        with contextlib.suppress(zmq.Again):
            self.socket.send(codec.encode(envelope), zmq.NOBLOCK)

    def line(self) -> list[Line]:
        """Return what has happened to the connection since the last call."""
        events = []
        while self.monitor.poll(0):
            events.append(_LINES[zmq.Event(recv_monitor_message(self.monitor)["event"])])
        return events

    def receive(self) -> list[Envelope]:
        """Return the messages that wait; garbage is dropped.

        Raises:
            VersionError: The scheduler speaks another version of the protocol.
        """
        messages: list[Envelope] = []
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(codec.decode(frame))
            except VersionError:
                raise
            except ProtocolError:
                continue


class ControlKeys(NamedTuple):
    """What it takes to control a job, which is too little to join it: Z85, as ZeroMQ takes it."""

    public: str
    secret: str
    scheduler: str


def control_keys(secret: bytes) -> ControlKeys:
    """Return the keys of those who control the job of `secret`."""
    own, scheduler = key_pair(secret, CONTROL), key_pair(secret, SCHEDULER)
    return ControlKeys(own.public.decode(), own.secret.decode(), scheduler.public.decode())


class ControlSocket:
    """The end of somebody who controls a job: one question, one answer.

    Args:
        context: ZeroMQ context, owned by the caller.
        address: ZeroMQ address of the scheduler.
        keys: As of `control_keys`; None connects without authentication.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: ControlKeys | None,
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        _bound(self.socket)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[1])
        self.monitor = self.socket.get_monitor_socket(sum(_LINES))
        if keys is not None:
            self.socket.curve_publickey = keys.public.encode()
            self.socket.curve_secretkey = keys.secret.encode()
            self.socket.curve_serverkey = keys.scheduler.encode()
        self.socket.connect(address)

    def ask(self, question: bytes, timeout: float) -> bytes | Line | None:
        """Return the frame that answers `question`; None when none comes in `timeout` seconds.

        A `Line` says why there can be none.
        """
        with contextlib.suppress(zmq.ZMQError):  # without a connection it waits for one
            self.socket.send(question)
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        while found := dict(poller.poll(int(timeout * 1000))):
            if self.socket in found:
                return self.socket.recv()
            line = _LINES[zmq.Event(recv_monitor_message(self.monitor)["event"])]
            if line in (Line.REJECTED, Line.SILENT):
                return line
        return None
