"""The sockets of the control connection: authenticated, bounded, on one interface.

The scheduler has a ROUTER socket, each agent a DEALER socket with one identity for its life, each
tool that controls the job a DEALER socket with a key of its own.  ZeroMQ gives reconnection,
framing and CURVE; the protocol above (`cluster.wire`) gives order and delivery.  This module adds:

- *Bounds on strangers and on key holders.*  Frame size, queue length, time of a handshake and
  frames taken at once are all limited, so that no peer can take the memory or all of the time of
  the loop.
- *A node cannot speak as another.*  All agents share one key, so the routing id, 16 random bytes
  that an agent tells the scheduler alone, shows which connection belongs to which incarnation of a
  node.
- *Early knowledge of an end.*  TCP timeouts of seconds, and monitors that say whether a connection
  was admitted, rejected, met silence or broke; from these an agent can say why it has no scheduler.

Garbage is dropped and counted; it is never an error of this process.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import socket
import struct
from collections import Counter
from typing import NamedTuple

import zmq

from msrun.cluster.wire import codec, control_messages
from msrun.cluster.wire.messages import Envelope
from msrun.errors import ProtocolError, UsageError, VersionError
from msrun.transport import frames
from msrun.transport.curve import admit, identify, take_over
from msrun.transport.gate import Gate
from msrun.transport.keys import key_pair
from msrun.transport.loop import Loop

SCHEDULER = "scheduler"
AGENT = "agent"
CONTROL = "control"
# Strangers are sent away within 5 s, also the last of a crowd.  An agent gives up before the
# scheduler does, so that it can say that nothing answers instead of being disconnected.
_HANDSHAKE_MS = 4_700
_ANSWER_MS = 3_200
# All nodes of a job may come at once, and each handshake is half a millisecond of arithmetic.
_HANDSHAKE_MS_EACH = 2
_CROWD_MAX = 20_000
_THREADS_MAX = 4
_NODES_OF_A_THREAD = 250
# A connection that was cut is given up early, so that a new one is there as soon as the network
# heals.  The kernel's timers cost us nothing; each of ZeroMQ's own heartbeats walks the timers of
# all connections.
_UNANSWERED_MS = 3_000
_IDLE_SECONDS = 3
_PROBE_SECONDS = 1
_CONNECT_MS = 1_000
_RECONNECT_MS = (20, 500)
_QUEUE_MAX = 64
_CURVE_BYTES = 64
_BACKLOG = 4096
_SRCFD = int(zmq.SRCFD)
# Frames that are taken at once, so that no sender keeps the loop from its other work.
_FRAMES_MAX = 1024
# Earlier versions let a stranger crash or block a CURVE server (CVE-2019-13132, CVE-2020-15166),
# and let a peer grow one unfinished message without end.
_LIBZMQ_MIN = (4, 3, 5)

# Kinds of frames and connections that a scheduler drops, in words for its log.
STRANGERS = "connections that ended before any message"
GARBAGE = "frames that are no message"
FORGED = "frames in the name of another connection's node"


def check_library(version: tuple[int, ...], *, has_curve: bool) -> None:
    """Refuse a libzmq that cannot keep strangers out.

    Raises:
        UsageError: It is too old, or was built without CURVE.
    """
    own = ".".join(map(str, version))
    hint = "pip install --upgrade pyzmq brings a libzmq that can"
    if version < _LIBZMQ_MIN:
        least = ".".join(map(str, _LIBZMQ_MIN))
        msg = f"libzmq is version {own}, and the control connection needs {least} or newer"
        raise UsageError(msg, hint=hint)
    if not has_curve:
        msg = f"libzmq {own} was built without CURVE, which authenticates the control connection"
        raise UsageError(msg, hint=hint)


def check_own_library() -> None:
    """Refuse this process's libzmq as `check_library` does."""
    check_library(zmq.zmq_version_info(), has_curve=zmq.has("curve"))


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


def handshake_milliseconds(nnodes: int, milliseconds: int) -> int:
    """Return the milliseconds of a handshake among `nnodes` at once; alone it takes fewer."""
    return milliseconds + min(nnodes, _CROWD_MAX) * _HANDSHAKE_MS_EACH


def io_threads(nnodes: int, cpus: int) -> int:
    """Return the number of ZeroMQ threads for the connections of `nnodes` on `cpus` CPUs.

    One thread admits some 1,500 nodes a second; most of the time is the arithmetic of CURVE.
    """
    return max(1, min(_THREADS_MAX, cpus // 2, 1 + nnodes // _NODES_OF_A_THREAD))


def _next_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """Return the next event of a monitor and its value.

    Source: zmq_socket_monitor(3).  pyzmq's own reader loads asyncio, which every job would pay for.
    """
    event, value = struct.unpack("=Hi", monitor.recv_multipart()[0])
    return event, value


def _bound(sock: zmq.Socket[bytes]) -> None:
    """Set every limit that does not depend on the end."""
    sock.setsockopt(zmq.LINGER, 0)
    # This limit includes CURVE's own bytes around a frame; the codec has the exact one.
    sock.setsockopt(zmq.MAXMSGSIZE, codec.FRAME_BYTES_MAX + _CURVE_BYTES)
    sock.setsockopt(zmq.RCVHWM, _QUEUE_MAX)
    sock.setsockopt(zmq.TCP_MAXRT, _UNANSWERED_MS)
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _IDLE_SECONDS)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _PROBE_SECONDS)
    sock.setsockopt(zmq.IPV6, 1)


class Asked(NamedTuple):
    """A frame from a tool that controls the job; `route` leads an answer back."""

    route: bytes
    frame: bytes


_Life = tuple[str, str, int]


def _life(envelope: Envelope) -> _Life:
    return envelope.job_id, envelope.node_id, envelope.incarnation


class SchedulerSocket:
    """The scheduler's end: serves the agents that hold the job's key, and tools that control it.

    An agent's routing id is 16 random bytes that it tells nobody else.  It shows that a further
    connection is of the same agent, and may take the place of one that broke; no other holder of
    the key can send or receive as that incarnation of the node.

    Args:
        context: ZeroMQ context, owned by the caller.
        listening: An already listening socket; owned by this object from now on.
        secret: The job's secret; None serves everybody who can reach the socket.
        nnodes: Nodes that may come, at most.
    """

    dropped: Counter[str]
    """Number of dropped frames and connections by kind; the caller may clear it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listening: socket.socket,
        secret: bytes | None,
        nnodes: int = 1,
    ) -> None:
        self.gate: Gate | None = None
        self.dropped = Counter()
        self._routes: dict[_Life, bytes] = {}
        self._lives: dict[bytes, _Life] = {}
        self._nodes: dict[int, str] = {}
        self._asked: list[Asked] = []
        self.socket = context.socket(zmq.ROUTER)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        _bound(self.socket)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, handshake_milliseconds(nnodes, _HANDSHAKE_MS))
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if secret is not None:
            self.gate = admit(self.socket, context, secret, SCHEDULER, AGENT, CONTROL)
        host, port = listening.getsockname()[:2]
        take_over(self.socket, listening, endpoint(host, port))

    def receive(self) -> list[Envelope]:
        """Return messages that wait; garbage from a key holder is dropped."""
        messages: list[Envelope] = []
        for _ in range(_FRAMES_MAX):
            try:
                route, *parts = frames.receive(self.socket)
            except zmq.Again:
                break
            descriptor = route.get(_SRCFD)
            self._nodes.setdefault(descriptor, "")
            if len(parts) == 1 and self._is_control(parts[0]):
                self._asked.append(Asked(route.bytes, parts[0].bytes))
                continue
            envelope = self._decode(route.bytes, parts)
            if envelope is not None:
                self._nodes[descriptor] = envelope.node_id
                messages.append(envelope)
        return messages

    def _decode(self, route: bytes, parts: list[zmq.Frame]) -> Envelope | None:
        """Return an agent's message; None for garbage, or a message in another node's name."""
        try:
            envelope = codec.decode(parts[0].buffer) if len(parts) == 1 else None
        except VersionError:
            with contextlib.suppress(zmq.ZMQError):
                frames.send(self.socket, [route, codec.VERSION_FRAME])
            return None
        except ProtocolError:
            envelope = None
        if envelope is None:
            self.dropped[GARBAGE] += 1
            return None
        life = _life(envelope)
        is_one_life = self._lives.setdefault(route, life) == life
        if not is_one_life or self._routes.setdefault(life, route) != route:
            self.dropped[FORGED] += 1
            return None
        return envelope

    def _is_control(self, frame: zmq.Frame) -> bool:
        """Whether a tool that controls the job sent `frame`: by its key, else by its content."""
        if self.gate is None:
            return control_messages.is_question(frame.buffer)
        return bool(frame.get("User-Id") == CONTROL)

    def asked(self) -> list[Asked]:
        """Return the frames of tools that control the job, as found by `receive`."""
        asked, self._asked = self._asked, []
        return asked

    def answer(self, route: bytes, frame: bytes) -> None:
        """Send `frame` along `route`; dropped when that connection has ended."""
        with contextlib.suppress(zmq.ZMQError):
            frames.send(self.socket, [route, frame])

    def broken(self) -> list[str]:
        """Return the nodes of connections that have ended; they may have others by now."""
        nodes = []
        while self.monitor.poll(0):
            _, descriptor = _next_event(self.monitor)
            node_id = self._nodes.pop(descriptor, None)
            if node_id is None:
                self.dropped[STRANGERS] += 1
            elif node_id:
                nodes.append(node_id)
        return nodes

    def send(self, envelope: Envelope) -> None:
        """Send `envelope` to its node; dropped when that incarnation is not connected."""
        route = self._routes.get(_life(envelope))
        if route is None:
            return
        # The route stays: it is valid again once the agent has reconnected.
        with contextlib.suppress(zmq.ZMQError):
            frames.send(self.socket, [route, codec.encode(envelope)])


class ConnectionState(enum.Enum):
    """A change in an agent's connection.

    UP: The scheduler is there and has admitted this node.
    DOWN: The connection was ended by the other side, or broke.
    REJECTED: The other side is no scheduler of this job, or does not admit this node.
    SILENT: The other side accepted the connection and sent nothing.
    RETRYING: ZeroMQ will connect again by itself, which it does not after a protocol error.
    """

    UP = "up"
    DOWN = "down"
    REJECTED = "rejected"
    SILENT = "silent"
    RETRYING = "retrying"


_LINES: dict[int, ConnectionState] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: ConnectionState.UP,
    zmq.EVENT_DISCONNECTED: ConnectionState.DOWN,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: ConnectionState.REJECTED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: ConnectionState.REJECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: ConnectionState.REJECTED,
    zmq.EVENT_CONNECT_RETRIED: ConnectionState.RETRYING,
}

# Errors of a handshake when the other side ended the connection.  After a timeout ZeroMQ reports
# the errno that its thread had last: EAGAIN, or that of another connection.
_ENDS = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED})


class AgentSocket:
    """An agent's end.

    Args:
        context: ZeroMQ context, owned by the caller.
        address: ZeroMQ address of the scheduler.
        secret: The job's secret; None connects without authentication.
        nnodes: Nodes that may connect to it, at most.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        secret: bytes | None,
        nnodes: int = 1,
    ) -> None:
        self._address = address
        self._has_failed = False
        self.socket = context.socket(zmq.DEALER)
        _bound(self.socket)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, handshake_milliseconds(nnodes, _ANSWER_MS))
        self.socket.setsockopt(zmq.SNDHWM, _QUEUE_MAX)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self.monitor = self.socket.get_monitor_socket(sum(_LINES))
        # One for all of its connections, and its own secret: see `SchedulerSocket`.  The
        # first byte must not be zero.
        self.socket.setsockopt(zmq.ROUTING_ID, b"a" + os.urandom(16))
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        if secret is not None:
            identify(self.socket, secret, AGENT, SCHEDULER)
        self.socket.connect(address)

    def send(self, envelope: Envelope) -> None:
        """Queue `envelope`; it leaves as soon as there is a connection.

        Dropped when the queue is full: a body that must arrive is sent again anyway.
        """
        with contextlib.suppress(zmq.Again):
            self.socket.send(codec.encode(envelope), zmq.NOBLOCK)

    def reconnect(self) -> None:
        """Connect again, where ZeroMQ has given the address up."""
        with contextlib.suppress(zmq.ZMQError):  # it has forgotten the address already
            self.socket.disconnect(self._address)
        self.socket.connect(self._address)

    def line(self) -> list[ConnectionState]:
        """Return the changes of the connection since the last call."""
        lines = []
        while self.monitor.poll(0):
            event, value = _next_event(self.monitor)
            line = _LINES[event]
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value not in _ENDS:
                line = ConnectionState.SILENT
            if (
                line is not ConnectionState.DOWN or not self._has_failed
            ):  # else the end has been told
                lines.append(line)
            self._has_failed = line in (ConnectionState.REJECTED, ConnectionState.SILENT)
        return lines

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
    """The keys that control a job, and do not suffice to join it: Z85, as ZeroMQ takes them."""

    public: str
    secret: str
    scheduler: str


def control_keys(secret: bytes) -> ControlKeys:
    """Return the keys for control of the job of `secret`."""
    own, scheduler = key_pair(secret, CONTROL), key_pair(secret, SCHEDULER)
    return ControlKeys(own.public.decode(), own.secret.decode(), scheduler.public.decode())


class ControlSocket:
    """The end of a tool that controls a job: one question, one answer.

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
        self._has_been_answered = False
        self.socket = context.socket(zmq.DEALER)
        _bound(self.socket)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[1])
        self.monitor = self.socket.get_monitor_socket(sum(_LINES))
        if keys is not None:
            self.socket.curve_publickey = keys.public.encode()
            self.socket.curve_secretkey = keys.secret.encode()
            self.socket.curve_serverkey = keys.scheduler.encode()
        self.socket.connect(address)

    def ask(self, question: bytes, timeout: float) -> bytes | ConnectionState | None:
        """Return the frame that answers `question`; None when none comes in `timeout` seconds.

        A `ConnectionState` says why there can be none.
        """
        with contextlib.suppress(zmq.ZMQError):  # without a connection it waits for one
            self.socket.send(question)
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        deadline = Loop.now() + timeout
        while ready := dict(poller.poll(max(0, int((deadline - Loop.now()) * 1000)))):
            if self.socket in ready:
                self._has_been_answered = True
                return self.socket.recv()
            line = _LINES[_next_event(self.monitor)[0]]
            # A peer that has answered has the right key: if a later handshake fails, it has ended.
            if line is ConnectionState.REJECTED and not self._has_been_answered:
                return line
        return None
