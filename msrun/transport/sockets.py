"""The two ends of the control connection: authenticated, bounded, on one interface."""

from __future__ import annotations

import contextlib
import os
import socket

import zmq
from zmq.utils import z85

from msrun.cluster import codec
from msrun.cluster.messages import Envelope
from msrun.errors import ProtocolError
from msrun.transport.keys import KeyPair, key_pair

SCHEDULER = "scheduler"
AGENT = "agent"
_DOMAIN = "msrun"
_HANDSHAKE_MS = 5_000
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 6_000
_RECEIVE_QUEUE_MAX = 64
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
    """Admits to one context's CURVE servers the holder of one public key, and nobody else.

    Source: ZeroMQ RFC 27 (ZAP), whose requests arrive on a socket of the same context,
    so that the process's own loop answers them and no thread is needed.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: bytes) -> None:
        self._allowed = z85.decode(allowed)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer one handshake that asks for admission."""
        version, request, domain, _, _, mechanism, *credentials = self.socket.recv_multipart()
        allowed = (
            domain == _DOMAIN.encode() and mechanism == b"CURVE" and credentials == [self._allowed]
        )
        status = [b"200", b"OK"] if allowed else [b"400", b"unknown key"]
        self.socket.send_multipart([version, request, *status, AGENT.encode(), b""])


def _bound(sock: zmq.Socket[bytes]) -> None:
    """Set every limit that does not depend on the end."""
    sock.setsockopt(zmq.LINGER, 0)
    # The limit counts what CURVE puts around a frame; the codec has the exact one.
    sock.setsockopt(zmq.MAXMSGSIZE, codec.FRAME_BYTES_MAX + _CURVE_BYTES)
    sock.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE_MAX)
    sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    sock.setsockopt(zmq.IPV6, 1)


class SchedulerSocket:
    """The scheduler's end: serves every agent that holds the job's key.

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
        self.socket = context.socket(zmq.ROUTER)
        _bound(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if secret is not None:
            self._authenticate(context, secret)
        host, port = listening.getsockname()[:2]
        self.socket.setsockopt(zmq.USE_FD, listening.detach())
        self.socket.bind(endpoint(host, port))

    def _authenticate(self, context: zmq.Context[zmq.Socket[bytes]], secret: bytes) -> None:
        self.gate = Gate(context, key_pair(secret, AGENT).public)
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
                route, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            if len(frames) != 1:
                continue
            try:
                envelope = codec.decode(frames[0])
            except ProtocolError:
                continue
            self._routes[envelope.node_id] = route
            messages.append(envelope)

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
        # One identity for all of its connections, so that an agent whose connection broke
        # need not speak first to be reached again.  The first byte must not be zero.
        self.socket.setsockopt(zmq.ROUTING_ID, b"a" + os.urandom(16))
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        if secret is not None:
            own: KeyPair = key_pair(secret, AGENT)
            self.socket.curve_publickey = own.public
            self.socket.curve_secretkey = own.secret
            self.socket.curve_serverkey = key_pair(secret, SCHEDULER).public
        self.socket.connect(address)

    def send(self, envelope: Envelope) -> None:
        """Queue `envelope`; it leaves as soon as the scheduler answers."""
        self.socket.send(codec.encode(envelope))

    def receive(self) -> list[Envelope]:
        """Return the messages that wait; garbage is dropped."""
        messages: list[Envelope] = []
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            with contextlib.suppress(ProtocolError):
                messages.append(codec.decode(frame))
