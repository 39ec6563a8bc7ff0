"""Strangers, garbage and oversized frames at a parameter server: they change and grow nothing."""

import ast
import contextlib
import importlib.util
import os
import secrets
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_jobs import ServerJob
from test_server_memory import resident
from test_server_starts import PLAN

import msrun
from msrun.errors import ProtocolError, UsageError
from msrun.parallel.servers.addresses import read_key
from msrun.parallel.servers.wire import (
    HEAD,
    RANK,
    SERVER,
    Begin,
    Begun,
    Hail,
    Packet,
    decode,
    encode,
)
from msrun.transport.data_sockets import FRAME_BYTES_MAX, DataConnection
from msrun.transport.loop import new_context

pytestmark = pytest.mark.torch

PATIENCE = 20
BEGIN = encode(
    Packet(session=PLAN.session, sender=(HEAD, 0), target=(SERVER, 1), word=Begin(plan=PLAN))
)


@pytest.fixture
def start(tmp_path):
    """Start server 1 of a job whose coordinator is the test; return its job, port and pid."""
    jobs = []

    def start_server(*, key):
        job = ServerJob(tmp_path, 2, 1, key=key, numbers=[1])
        jobs.append(job)
        said = job.store.get("msrun_servers/1").decode()
        return job, int(said.split()[0]), job.processes[1].pid

    yield start_server
    for job in jobs:
        assert job.end() == [0]


@contextlib.contextmanager
def connected(port, secret):
    """Connect as a peer of the job does."""
    context = new_context()
    connection = DataConnection(context, ("127.0.0.1", port), secret, peers=4)
    yield connection
    connection.close()
    context.term()


def is_heard(connection):
    """Return whether the server answers the coordinator of its job."""
    assert connection.wait_up(PATIENCE * 1000)
    connection.receive()  # what it has said of itself
    assert connection.send(BEGIN)
    while connection.socket.poll(PATIENCE * 1000):
        if Begun() in [decode(parts)[0].word for parts in connection.receive()]:
            return True
    return False


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


def frame_of(size, flags=0x02):
    """Return the first bytes of a frame that is said to have `size` bytes."""
    return bytes([flags]) + size.to_bytes(8, "big")


@contextlib.contextmanager
def by_hand(port):
    """Speak ZeroMQ without a library that has limits of its own."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as raw:
        raw.sendall(GREETING + READY)
        answer = b""
        while b"READY" not in answer:
            data = raw.recv(4096)
            assert data, "the server has ended the connection"
            answer += data
        yield raw


def has_ended(raw):
    """Return whether the server ends a connection."""
    with contextlib.suppress(ConnectionResetError):
        while raw.recv(4096):
            pass
    return True


def test_strangers_are_sent_away_and_grow_nothing(start, tmp_path):
    """They have no key, one of their own, or speak something else."""
    _, port, pid = start(key=True)
    with connected(port, read_key(str(tmp_path))) as ours:
        assert is_heard(ours)
        before = resident(pid)
        for secret in (None, secrets.token_bytes(32)):
            with connected(port, secret) as stranger:
                assert not stranger.wait_up(500)
        for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 16), GREETING + READY, GREETING):
            with (
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as raw,
                contextlib.suppress(BrokenPipeError, ConnectionResetError),
            ):
                raw.sendall(data + frame_of(FRAME_BYTES_MAX))
                assert has_ended(raw)

        assert is_heard(ours)
        assert resident(pid) - before < 8 << 20


def test_without_a_key_anybody_is_heard_who_reaches_the_socket(start):
    """So a job has one unless its user says `--insecure`."""
    _, port, _ = start(key=False)
    with connected(port, None) as anybody:
        assert is_heard(anybody)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no key of the parameter servers: {}: No such file or directory"),
        ("", "{} holds no key of 32 bytes in hexadecimal digits"),
        ("abc", "{} holds no key of 32 bytes in hexadecimal digits"),
    ],
)
def test_without_a_whole_key_nobody_is_served(text, said, tmp_path):
    """A file that was lost or cut short must not open a server to all."""
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)

    with pytest.raises(UsageError) as raised:
        read_key(str(tmp_path))

    assert str(raised.value) == said.format(path)


def test_a_frame_longer_than_any_tensor_ends_its_connection(start):
    _, port, pid = start(key=False)
    before = resident(pid)
    with by_hand(port) as raw:
        raw.sendall(frame_of(FRAME_BYTES_MAX + 100))
        assert has_ended(raw)
    with by_hand(port) as raw:
        raw.sendall(frame_of(FRAME_BYTES_MAX) + bytes(1000))  # the rest never comes

        with connected(port, None) as other:
            assert is_heard(other)
        assert resident(pid) - before < 8 << 20


def test_what_is_no_message_is_dropped_and_the_log_says_so(start, capfd):
    _, port, pid = start(key=False)
    from_nobody = Packet(session=PLAN.session, sender=(RANK, 7), target=(SERVER, 1), word=Hail())
    before = resident(pid)
    with connected(port, None) as peer:
        assert peer.wait_up(PATIENCE * 1000)
        for parts in ([b"\x80"], [os.urandom(1 << 20)], [*BEGIN, b"one too many"]):
            assert peer.send(parts)
        for _ in range(20):
            assert peer.send(encode(from_nobody, torch.zeros(1 << 18)))
            assert peer.socket.poll(0) == 0
        assert is_heard(peer)

    assert resident(pid) - before < 16 << 20
    lines = [line for line in capfd.readouterr().out.splitlines() if "has dropped" in line]
    said = "msrun: this server has dropped {} message(s): no message of parameter servers: "
    assert lines[0].startswith(said.format(1))
    assert lines[1] == said.format(10) + "from rank 7"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$", "@", "a"]), inner, max_size=2)
    ),
    max_leaves=6,
)
KINDS = st.sampled_from(["float32", "int64", "bool", "complex128", "pickle", "__class__"])
SIZES = st.lists(st.integers(-2, 3) | st.integers(-(2**63), 2**64 - 1), max_size=3)
TENSORS = st.builds(lambda mark, kind, sizes: {mark: [kind, *sizes]}, st.just("$"), KINDS, SIZES)


@settings(max_examples=300, deadline=None)
@example(tree={"$": ["float32", *[2**63] * 20, 1.5]}, frames=[b""])
@given(tree=JSON | TENSORS, frames=st.lists(st.binary(max_size=40), max_size=3))
def test_whatever_a_head_says_of_its_frames_is_a_message_or_none(tree, frames):
    [head] = encode(
        Packet(session=PLAN.session, sender=(RANK, 0), target=(SERVER, 0), word=Hail()), tree
    )

    with contextlib.suppress(ProtocolError):
        packet, _ = decode([head, *frames])
        assert packet.word == Hail()


@settings(max_examples=300, deadline=None)
@given(frames=st.lists(st.binary(max_size=60), min_size=1, max_size=3), data=st.data())
def test_any_bytes_are_a_message_or_none(frames, data):
    for at in range(data.draw(st.integers(0, 3))):
        mutated = bytearray(BEGIN[0])
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
        frames[at % len(frames)] = bytes(mutated)

    with contextlib.suppress(ProtocolError):
        assert isinstance(decode(frames)[0], Packet)


def imports_of(tree):
    """Return the modules that a source imports, and the functions of torch that it calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def test_servers_and_what_they_keep_on_disk_need_no_pickle():
    rooms = ["parallel/servers", "cluster/servers"]
    home = Path(msrun.__file__).parent
    files = [*(path for room in rooms for path in (home / room).rglob("*.py"))]
    files.append(Path(importlib.util.find_spec("msrun.transport.data_sockets").origin))
    found = {name for path in files for name in imports_of(ast.parse(path.read_text()))}

    assert {"torch", "zmq", "msgspec"} <= {name.partition(".")[0] for name in found}
    unpickle = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "torch.load", "torch.save"}
    assert not unpickle & found
    assert not {name for name in found if name.endswith(("_pyobj", "_object"))}
