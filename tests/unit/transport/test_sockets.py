"""The control connection between real sockets: who gets through, and what does not."""

import contextlib
import socket
import time

import pytest
import zmq

from msrun.cluster.wire import codec
from msrun.cluster.wire.messages import Envelope, LogPart, Stop
from msrun.transport.keys import key_pair
from msrun.transport.loop import new_context, wait_readable
from msrun.transport.sockets import (
    FORGED,
    GARBAGE,
    STRANGERS,
    AgentSocket,
    ConnectionState,
    SchedulerSocket,
    endpoint,
    listen,
)

SECRET = bytes(range(32))
PATIENCE = 10.0
# A refused handshake shows only as silence; the next client proves that it was refused.
SILENCE = 0.05


def envelope(node="a", data=b""):
    body = LogPart(inquiry=1, data=data)
    return Envelope(job_id="j", node_id=node, incarnation=1, generation=0, body=body)


STOP = Envelope(job_id="j", node_id="a", incarnation=1, generation=0, body=Stop(reason="why"))


class Server:
    """A scheduler's socket with the loop that it needs."""

    def __init__(self, secret):
        self.context = new_context()
        listening = listen("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self.end = SchedulerSocket(self.context, listening, secret)

    def receive(self, timeout=PATIENCE):
        """Answer handshakes until messages arrive or `timeout` seconds are over."""
        poller = zmq.Poller()
        sources = [self.end.socket, *([self.end.gate.socket] if self.end.gate else [])]
        for source in sources:
            poller.register(source, zmq.POLLIN)
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            for source, _ in poller.poll(left * 1000):
                if source is not self.end.socket:
                    self.end.gate.answer()
                elif messages := self.end.receive():
                    return messages
        return []

    def close(self):
        self.context.destroy(linger=0)


class Wire:
    """A port at which no scheduler answers by itself."""

    def __init__(self, listening):
        self.port = listening.getsockname()[1]


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:

        def start_server(secret=SECRET):
            server = Server(secret)
            stack.callback(server.close)
            return server

        yield start_server


@pytest.fixture
def connect():
    contexts = []  # one each, as in its process: ZeroMQ's thread has one errno for all of its own
    kept = []  # a socket that is dropped before it is closed is a warning

    def context():
        contexts.append(new_context())
        return contexts[-1]

    def connect_agent(server, secret=SECRET):
        kept.append(AgentSocket(context(), endpoint("127.0.0.1", server.port), secret))
        return kept[-1]

    def new_socket():
        kept.append(context().socket(zmq.DEALER))
        return kept[-1]

    connect_agent.new_socket = new_socket
    yield connect_agent
    for each in contexts:
        each.destroy(linger=0)


def assert_serves(server, connect, secret=SECRET):
    agent = connect(server, secret)
    agent.send(envelope("good"))
    assert server.receive() == [envelope("good")]


@pytest.mark.parametrize("secret", [SECRET, None], ids=["with a key", "insecure"])
def test_messages_go_both_ways(start, connect, secret):
    server = start(secret)
    agent = connect(server, secret)
    agent.send(envelope())
    received = server.receive()
    server.end.send(STOP)

    assert received == [envelope()]
    assert wait_readable(agent.socket, PATIENCE)
    assert agent.receive() == [STOP]


def test_each_node_gets_its_own_messages(start, connect):
    server = start()
    agents = {node: connect(server) for node in "ab"}
    received = []
    for node, agent in agents.items():
        agent.send(envelope(node))
        received += server.receive()
    server.end.send(STOP)

    assert received == [envelope("a"), envelope("b")]
    assert wait_readable(agents["a"].socket, PATIENCE)
    assert (agents["a"].receive(), agents["b"].receive()) == ([STOP], [])


def test_a_message_to_an_unknown_node_is_dropped(start, connect):
    server = start()
    server.end.send(STOP)

    assert_serves(server, connect)


@pytest.mark.parametrize("secret", [None, bytes(32)], ids=["no key", "another job's key"])
def test_nobody_else_gets_a_message_through(start, connect, secret):
    server = start()
    stranger = connect(server, secret)
    stranger.send(envelope("bad"))

    assert server.receive(SILENCE) == []
    assert_serves(server, connect)


def test_knowing_the_schedulers_public_key_is_not_enough(start, connect):
    server = start()
    public, private = zmq.curve_keypair()
    stranger = connect.new_socket()
    stranger.curve_publickey, stranger.curve_secretkey = public, private
    stranger.curve_serverkey = key_pair(SECRET, "scheduler").public
    stranger.connect(endpoint("127.0.0.1", server.port))
    stranger.send(codec.encode(envelope("bad")))

    assert server.receive(SILENCE) == []
    assert_serves(server, connect)


def test_an_agent_with_a_key_does_not_talk_to_an_insecure_scheduler(start, connect):
    server = start(None)
    connect(server, SECRET).send(envelope())

    assert server.receive(SILENCE) == []


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 4096,
        b"\xff" + b"\xff" * 7 + b"\xff\x7f\x03\0CURVE",
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(60),
        b"",
    ],
    ids=["http", "zeros", "a large length", "plain greeting", "nothing"],
)
def test_garbage_on_the_port_hurts_nobody(start, connect, garbage):
    server = start()
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(garbage)
        assert server.receive(SILENCE) == []
        assert_serves(server, connect)


def send_raw(connect, server, *frames):
    agent = connect(server)
    agent.socket.send_multipart(frames)
    return agent


@pytest.mark.parametrize(
    "frames",
    [[b"garbage"], [b""], [b"two", b"frames"], [b"\x81" * 1000]],
    ids=["bytes", "empty", "two frames", "nested"],
)
def test_garbage_of_a_key_holder_is_dropped(start, connect, frames):
    server = start()
    send_raw(connect, server, *frames).send(envelope())

    assert server.receive() == [envelope()]


def test_an_oversized_frame_is_not_received(start, connect):
    server = start()
    send_raw(connect, server, bytes(codec.FRAME_BYTES_MAX * 2))

    assert server.receive(SILENCE) == []
    assert_serves(server, connect)


def test_the_largest_frame_is_received(start, connect):
    server = start()
    overhead = len(codec.encode(envelope(data=b"x" * 60_000))) - 60_000
    largest = envelope(data=b"x" * (codec.FRAME_BYTES_MAX - overhead))
    connect(server).send(largest)

    assert len(codec.encode(largest)) == codec.FRAME_BYTES_MAX
    assert server.receive() == [largest]


def test_an_agent_may_connect_before_the_scheduler_lives(connect):
    listening = listen("127.0.0.1", 0)
    connect(Wire(listening), None).send(envelope())
    context = new_context()
    end = SchedulerSocket(context, listening, None)
    arrived = wait_readable(end.socket, PATIENCE)
    messages = end.receive()
    context.destroy(linger=0)

    assert arrived
    assert messages == [envelope()]


def copy(source, sink):
    """Pass on what `source` has; return whether it is still open."""
    data = source.recv(1 << 16)
    sink.sendall(data)
    return bool(data)


def test_a_node_is_reached_after_its_connection_broke(start, connect):
    server = start(None)
    with listen("127.0.0.1", 0) as wire:
        wire.settimeout(PATIENCE)
        agent = connect(Wire(wire), None)
        near, _ = wire.accept()
        far = socket.create_connection(("127.0.0.1", server.port))
        agent.send(envelope())
        pump_until(near, far, server.end.socket)
        assert server.end.receive() == [envelope()]
        near.close()
        far.close()

        near, _ = wire.accept()
        far = socket.create_connection(("127.0.0.1", server.port))
        deadline = time.monotonic() + PATIENCE
        received = []
        while not received and time.monotonic() < deadline:
            # A message to a node that is not connected is dropped, so it is repeated.
            server.end.send(STOP)
            pump_until(near, far, agent.socket, timeout=0.05)
            received = agent.receive()
        near.close()
        far.close()

    assert received[:1] == [STOP]


def pump_until(near, far, goal, timeout=PATIENCE):
    """Pass bytes on between two TCP sockets until `goal` is readable."""
    poller = zmq.Poller()
    for source in (near, far, goal):
        poller.register(source, zmq.POLLIN)
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(poller.poll(left * 1000))
        if goal in ready:
            return
        if near.fileno() in ready:
            copy(near, far)
        if far.fileno() in ready:
            copy(far, near)


# Whose words they are.


def test_a_key_holder_cannot_take_the_place_of_another(start, connect):
    """S-11: not by name and life, which others may know, but not its routing id."""
    server = start()
    node, thief = connect(server), connect(server)
    node.send(envelope())
    received = server.receive()
    thief.send(envelope(data=b"a lie"))
    deadline = time.monotonic() + PATIENCE
    while not server.end.dropped and time.monotonic() < deadline:
        received += server.receive(SILENCE)
    server.end.send(STOP)

    assert received == [envelope()]
    assert wait_readable(node.socket, PATIENCE)
    assert (node.receive(), thief.receive()) == ([STOP], [])
    assert server.end.dropped == {FORGED: 1}
    assert len({agent.socket.getsockopt(zmq.ROUTING_ID) for agent in (node, thief)}) == 2


def test_a_key_holder_cannot_take_a_place_before_it_is_taken(start, connect):
    server = start()
    node, thief = connect(server), connect(server)
    thief.send(envelope("thief"))
    received = server.receive()
    thief.send(envelope())
    received += server.receive(SILENCE)
    node.send(envelope())
    received += server.receive()

    assert received == [envelope("thief"), envelope()]


def test_a_stranger_with_the_same_routing_id_changes_nothing(start, connect):
    server = start()
    node = connect(server)
    node.send(envelope())
    received = server.receive()
    stranger = connect.new_socket()
    stranger.setsockopt(zmq.ROUTING_ID, node.socket.getsockopt(zmq.ROUTING_ID))
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.curve_serverkey = key_pair(SECRET, "scheduler").public
    stranger.connect(endpoint("127.0.0.1", server.port))
    stranger.send(codec.encode(envelope("bad")))
    received += server.receive(SILENCE)
    server.end.send(STOP)

    assert received == [envelope()]
    assert wait_readable(node.socket, PATIENCE)
    assert node.receive() == [STOP]


def test_a_node_of_another_job_does_not_take_the_place_of_ours(start, connect):
    server = start()
    ours, theirs = connect(server), connect(server)
    other = Envelope(job_id="other", node_id="a", incarnation=2)
    ours.send(envelope())
    received = server.receive()
    theirs.send(other)
    received += server.receive()
    server.end.send(STOP)

    assert received == [envelope(), other]
    assert wait_readable(ours.socket, PATIENCE)
    assert (ours.receive(), theirs.receive()) == ([STOP], [])


def record(server, connect, messages):
    """Pass on a conversation; return the bytes of the agent, and the open connections."""
    with listen("127.0.0.1", 0) as wire:
        wire.settimeout(PATIENCE)
        agent = connect(Wire(wire))
        near, _ = wire.accept()
    far = socket.create_connection(("127.0.0.1", server.port))
    poller = zmq.Poller()
    sources = (near, far, server.end.socket, server.end.gate.socket)
    for source in sources:
        poller.register(source, zmq.POLLIN)
    for message in messages:
        agent.send(message)
    recorded, received = b"", []
    deadline = time.monotonic() + PATIENCE
    while len(received) < len(messages) and time.monotonic() < deadline:
        ready = dict(poller.poll(PATIENCE * 1000))
        if near.fileno() in ready:
            recorded += (data := near.recv(1 << 16))
            far.sendall(data)
        if far.fileno() in ready:
            copy(far, near)
        if server.end.gate.socket in ready:
            server.end.gate.answer()
        received += server.end.receive()
    assert received == messages
    return recorded, near, far


def test_a_recorded_conversation_says_nothing_the_second_time(start, connect):
    """S-10."""
    server = start()
    recorded, near, far = record(server, connect, [envelope(), envelope()])
    with near, far, socket.create_connection(("127.0.0.1", server.port)) as replay:
        replay.sendall(recorded)
        assert server.receive(0.2) == []
    assert_serves(server, connect)


def test_a_recorded_frame_in_the_same_connection_ends_it(start, connect):
    server = start()
    message = envelope(data=b"x" * 300)
    recorded, near, far = record(server, connect, [message])
    start_of_box = recorded.rindex(b"\x07MESSAGE")
    frame = recorded[start_of_box - 9 :]  # a flag and 8 bytes of length before it
    with near, far:
        far.sendall(frame)
        assert server.receive(0.2) == []
        far.settimeout(PATIENCE)
        while far.recv(1 << 16):  # what was on its way before
            pass

    assert int.from_bytes(frame[1:9]) == len(frame) - 9
    assert_serves(server, connect)


# What is dropped is counted.


def test_strangers_and_garbage_are_counted(start, connect):
    server = start()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    # Before the agent comes, which may get the descriptor of one of them.
    deadline = time.monotonic() + PATIENCE
    while server.end.dropped[STRANGERS] < 3 and time.monotonic() < deadline:
        server.end.monitor.poll(100)
        assert server.end.broken() == []
    agent = send_raw(connect, server, b"garbage")
    agent.send(envelope())
    received = server.receive()

    assert received == [envelope()]
    assert server.end.dropped == {STRANGERS: 3, GARBAGE: 1}


# What an agent learns of what it is connected to.


def until_line(agent, wanted):
    """Return what became of an agent's connection, up to the line that is waited for."""
    lines = []
    deadline = time.monotonic() + PATIENCE
    while wanted not in lines and time.monotonic() < deadline:
        agent.monitor.poll(100)
        lines += agent.line()
    return lines


def test_an_agent_connects_again_after_something_else_answered(start, connect):
    """ZeroMQ itself does not."""
    server = start()
    with listen("127.0.0.1", 0) as wire:
        wire.settimeout(PATIENCE)
        agent = connect(Wire(wire))
        other, _ = wire.accept()
        other.recv(64)
        other.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        other.close()
        lines = until_line(agent, ConnectionState.DOWN)
        agent.reconnect()
        near, _ = wire.accept()
    far = socket.create_connection(("127.0.0.1", server.port))
    agent.send(envelope())
    with near, far:
        received = pass_on(server, near, far)

    assert lines == [ConnectionState.DOWN]
    assert received == [envelope()]


def pass_on(server, near, far):
    """Pass bytes on both ways until the server has a message; return what it got."""
    received = []
    deadline = time.monotonic() + PATIENCE
    while not received and time.monotonic() < deadline:
        pump_until(near, far, server.end.gate.socket, timeout=0.05)
        received = server.receive(0.01)
    return received


def test_another_key_and_silence_are_told_apart(start, connect):
    server = start()
    with listen("127.0.0.1", 0) as silent:
        agent = connect(Wire(silent))
        stranger = connect(server, bytes(32))
        rejected = until_line(stranger, ConnectionState.REJECTED)
        silence = until_line(agent, ConnectionState.SILENT)

    assert rejected[:1] == [ConnectionState.REJECTED]
    assert ConnectionState.DOWN not in rejected
    assert set(silence) - {ConnectionState.RETRYING} == {ConnectionState.SILENT}
