"""What strangers do to the port of a job of several nodes, and what a key holder can.

While it lasts, who has the key joins at once; after it, the job forms, runs and ends as if
nothing had been.  The numbers are those of the promise: a join within a second, 64 MiB, one
line of the log a second.
"""

import contextlib
import math
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from ports import free_port
from support import PATIENCE, shell, until

from msrun.cluster.verdict import RankExit
from msrun.cluster.wire.messages import (
    Drained,
    Envelope,
    Interrupted,
    NodeFailed,
    Unknown,
    WorkerExited,
)
from msrun.job import SCHEDULER_LOOPBACK
from msrun.supervise.secret import read_secret
from msrun.transport.loop import new_context, wait_readable
from msrun.transport.sockets import AgentSocket, endpoint

pytestmark = pytest.mark.process

WAIT = shell("echo up; until [ -e go ]; do sleep 0.01; done")
MIB = 1 << 20
ANSWER = 0.2
ATTACKER = str(Path(__file__).with_name("attacker.py"))
CURVE_GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE".ljust(64, b"\0")
NULL_GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL".ljust(64, b"\0")
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


class Siege:
    """A job of two nodes, of which the second is not there, and what is known of its scheduler."""

    def __init__(self, msrun, folder, *, is_insecure=False, **options):
        self.msrun = msrun
        self.is_insecure = is_insecure
        self.secret_file = folder / "secret"
        self.secret_bytes = os.urandom(32)
        self.secret_file.write_bytes(self.secret_bytes)
        self.secret_file.chmod(0o600)
        self.secret = None if is_insecure else read_secret(str(self.secret_file))
        self.port = free_port()
        self.job = self.start_node(0, **options)
        self.lives = 0
        self.joins = []
        self.began_at = time.monotonic()
        until(self.logged, "for the scheduler")
        self.join()
        self.scheduler = self.job.find("msrun scheduler")
        self.memory = self.scheduler.memory_info().rss

    def start_node(self, rank, **options):
        own = {"--master-port": self.port, "--node-rank": rank, "--workers-per-node": 1}
        own |= {"--nnodes": 2, "--master-addr": "localhost"}
        name = [] if rank == 0 else ["--job-id", self.job.name]
        key = ["--insecure"] if self.is_insecure else ["--secret-file", self.secret_file]
        words = [word for option in own.items() for word in option]
        return self.msrun(*name, *words, *key, *WAIT, **options)

    def logged(self):
        path = self.job.logs / "scheduler.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if "phase=" in line or "dropped" in line]

    def says(self, body):
        """Return a frame of a node that has not registered."""
        self.lives += 1
        who = {"job_id": self.job.name, "node_id": "probe", "incarnation": self.lives}
        return Envelope(**who, stamp=1.0, generation=0, body=body)

    def join(self, body=None):
        """Connect with the key, say `body` and get the answer; note how long that takes."""
        began_at = time.monotonic()
        context = new_context()
        agent = AgentSocket(context, endpoint(SCHEDULER_LOOPBACK, self.port), self.secret)
        agent.send(self.says(body))
        answered = wait_readable(agent.socket, PATIENCE)
        bodies = [envelope.body for envelope in agent.receive()]
        context.destroy(linger=0)
        assert answered, "a node with the key got no answer"
        assert bodies == [Unknown()]
        self.joins.append(time.monotonic() - began_at)

    def assert_unharmed(self):
        """Let the second node come and the job end; then look at what it cost."""
        assert peak_memory(self.scheduler.pid) - self.memory <= 64 * MIB
        assert sorted(self.joins)[max(0, math.ceil(0.99 * len(self.joins)) - 1)] <= 1.0
        second = self.start_node(1)
        for rank, node in enumerate((self.job, second)):
            node.until_logged("up", rank)
        assert self.scheduler.is_running()
        (self.job.folder / "go").touch()
        assert [self.job.wait(), second.wait()] == [0, 0]
        dropped = [line for line in self.logged() if "dropped" in line]
        assert len(dropped) <= time.monotonic() - self.began_at + 1
        assert "warning" not in self.job.err


@pytest.fixture
def siege(msrun, tmp_path):
    return Siege(msrun, tmp_path)


@pytest.fixture(autouse=True)
def open_files():
    """Let this process play many strangers."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def peak_memory(pid):
    """Return the most bytes of memory that a process has held at a time."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def visit(port, *greetings, start=b"", more=b"", most=0):
    """Send `greetings`, each with an answer, then `start`, then `more` up to `most` bytes.

    What is sent before the peer has taken a greeting would be taken for a part of it.
    Return how much of `more` was taken before the connection was ended or left standing.
    """
    with socket.create_connection((SCHEDULER_LOOPBACK, port), timeout=1.0) as stranger:
        sent = 0
        try:
            for greeting in greetings:
                stranger.sendall(greeting)
                if select.select([stranger], [], [], ANSWER)[0]:
                    stranger.recv(4096)
            stranger.sendall(start)
            while sent < most:
                stranger.sendall(more)
                sent += len(more)
        except OSError:
            pass
        return sent


def crowd(port, count, data=b""):
    """Return `count` strangers who have sent `data` and now wait."""
    strangers = []
    for _ in range(count):
        stranger = socket.create_connection((SCHEDULER_LOOPBACK, port), timeout=PATIENCE)
        strangers.append(stranger)
        with contextlib.suppress(OSError):
            stranger.sendall(data)
        stranger.settimeout(0)
    return strangers


def are_gone(strangers):
    """Whether all of them have been sent away; those who have are closed."""
    poller = select.poll()
    by_descriptor = {stranger.fileno(): stranger for stranger in strangers}
    for stranger in strangers:
        poller.register(stranger, select.POLLIN)
    for descriptor, _ in poller.poll(0):
        stranger = by_descriptor[descriptor]
        try:
            is_open = bool(stranger.recv(4096))
        except OSError:
            is_open = False
        if not is_open:
            strangers.remove(stranger)
            stranger.close()
    return not strangers


# Strangers.


def test_random_bytes_and_http_have_no_effect(siege):
    """S-01."""
    for count in range(300):
        visit(siege.port, os.urandom(4096))
        visit(siege.port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if count % 30 == 0:
            siege.join()

    until(lambda: sum(strangers(siege)) >= 500, "for the strangers in the log")
    siege.assert_unharmed()


def strangers(siege):
    """Return the numbers of connections of strangers that the log tells of."""
    for line in siege.logged():
        if " connections that ended before any message" in line:
            yield int(line.split(" connections that ended")[0].rpartition(" ")[2])


@pytest.mark.slow
def test_strangers_who_wait_are_sent_away(siege):
    """S-02."""
    waiting = crowd(siege.port, 1000) + crowd(siege.port, 1000, CURVE_GREETING[:11])
    began_at = time.monotonic()
    until(lambda: siege.join() or are_gone(waiting), "for the end of the handshakes")

    assert time.monotonic() - began_at <= 5
    siege.assert_unharmed()


@pytest.mark.parametrize(
    ("files", "count"), [(256, 250), pytest.param(1024, 2000, marks=pytest.mark.slow)]
)
def test_who_has_the_key_joins_although_strangers_hold_all_files(msrun, tmp_path, files, count):
    """S-02 and S-03; 1024 files are enough for two nodes, so that nobody is warned."""
    siege = Siege(msrun, tmp_path, wrapper=["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"])
    assert siege.scheduler.rlimit(psutil.RLIMIT_NOFILE) == (files, files)
    waiting = crowd(siege.port, count // 2) + crowd(siege.port, count // 2, CURVE_GREETING[:11])
    until(lambda: siege.scheduler.num_fds() >= files, "for the last file")
    siege.assert_unharmed()

    log_text = (siege.job.logs / "scheduler.log").read_text()
    assert (f"open files are limited to {files}" in log_text) == (files == 256)
    until(lambda: are_gone(waiting), "for the end of the strangers")


ENDLESS = {
    "one frame": (b"\x02" + struct.pack(">Q", 511 * MIB), bytes(MIB)),
    "parts": (b"", (b"\x01\xff" + bytes(255)) * 4000),
    "empty parts": (b"", b"\x01\x00" * 500_000),
    "commands": (b"", (b"\x06" + struct.pack(">Q", 60_000) + bytes(60_000)) * 16),
} | {
    f"a frame of {length:x} bytes": (b"\x06" + struct.pack(">Q", length), bytes(MIB))
    for length in (2**62, 2**40, 8 << 30, 2 << 20)
}


def test_what_is_too_long_or_never_ends_is_cut_and_fills_no_memory(siege):
    """S-04 and S-05."""
    taken = {
        (kind, name): visit(siege.port, *greetings, start=start, more=more, most=64 * MIB)
        for kind, (start, more) in ENDLESS.items()
        for name, *greetings in (("curve", CURVE_GREETING), ("null", NULL_GREETING, READY))
        for _ in range(3)
    }
    siege.join()

    assert {kind: size for kind, size in taken.items() if size > 16 * MIB} == {}
    siege.assert_unharmed()


CROWDS = [
    pytest.param(2, 1000, 1.5, id="2,000"),
    pytest.param(4, 2500, 10.0, id="10,000", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("attackers", "connections", "seconds"), CROWDS)
def test_who_has_the_key_joins_through_a_crowd(siege, attackers, connections, seconds):
    """S-13."""
    words = [sys.executable, ATTACKER, str(connections), str(seconds), str(siege.port)]
    processes = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(attackers)
    ]
    siege.joins.clear()
    while any(process.poll() is None for process in processes):
        siege.join()
    opened = [int(process.communicate()[0]) for process in processes]

    print(f"{sum(opened)} strangers; the slowest of {len(siege.joins)} joins:")
    print(*(f"{seconds:.3f}" for seconds in sorted(siege.joins)[-5:]))
    assert sum(opened) == attackers * connections
    siege.assert_unharmed()


# Key holders.


def test_who_has_not_registered_changes_nothing(siege):
    """S-06: there is no state but the job's, and only its nodes change that."""
    how = RankExit(rank=0, node_rank=0, host="x", local_rank=0, pid=1, code=7, ran_for=1.0)
    (log,) = siege.job.runtime.glob("msrun/*/scheduler.wal")
    before = log.read_bytes()
    for body in (
        WorkerExited(exit=how, at=1.0),
        Drained(),
        Interrupted(signum=15),
        NodeFailed(reason="because", code=3),
    ):
        siege.join(body)

    assert log.read_bytes() == before
    siege.assert_unharmed()


@pytest.mark.parametrize(
    "limit", [192 * MIB, pytest.param(None, marks=pytest.mark.slow)], ids=["192 MiB", "its own"]
)
def test_an_admitted_peers_endless_message_costs_the_scheduler_at_most_its_life(
    msrun, tmp_path, limit
):
    """S-12: its memory is bounded, and another one goes on where it was.

    libzmq sends no message whose end it does not have, so the peer is one of our own making,
    which without keys is a few bytes.
    """
    siege = Siege(msrun, tmp_path, is_insecure=True)
    if limit:
        siege.scheduler.rlimit(psutil.RLIMIT_DATA, (limit, psutil.RLIM_INFINITY))
    bound, _ = siege.scheduler.rlimit(psutil.RLIMIT_DATA)
    second = siege.start_node(1)
    second.until_logged("up", 1)
    part = b"\x03" + struct.pack(">Q", 60_000) + bytes(60_000)
    taken = visit(siege.port, NULL_GREETING, READY, more=part, most=4 * bound)

    print(f"{taken / MIB:.0f} MiB were taken before the connection ended")
    assert bound / 4 < taken < 2 * bound
    (siege.job.folder / "go").touch()
    assert [siege.job.wait(), second.wait()] == [0, 0]
    assert siege.job.verdict()["code"] == 0


def test_another_key_is_an_error_within_seconds(siege):
    """S-09."""
    siege.secret_file.write_bytes(os.urandom(32))
    second = siege.start_node(1)
    second.until_begun()

    assert second.wait(5) == 122
    assert "refuses this node: it has another secret" in second.block()
    siege.secret_file.write_bytes(siege.secret_bytes)
    siege.assert_unharmed()


# What a node finds at the scheduler's port instead of a scheduler.


@pytest.fixture
def serve():
    """Answer every connection to a port with the same bytes; an empty answer keeps it open."""
    with contextlib.ExitStack() as stack:

        def start(answer):
            server = stack.enter_context(socket.create_server((SCHEDULER_LOOPBACK, 0)))
            thread = threading.Thread(target=serve_all, args=(server, answer))
            stack.callback(thread.join)
            stack.callback(server.shutdown, socket.SHUT_RDWR)
            thread.start()
            return server.getsockname()[1]

        yield start


def serve_all(server, answer):
    kept = []
    with contextlib.suppress(OSError):
        while True:
            kept.append(server.accept()[0])
            if answer:
                kept[-1].recv(64)
                kept[-1].sendall(answer)
                kept.pop().close()
    for connection in kept:
        connection.close()


@pytest.fixture
def lonely(msrun, tmp_path):
    """Start the second node of a job whose first has something else at its port."""
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)

    def start(port):
        words = ["--nnodes", 2, "--master-addr", "localhost", "--master-port", port]
        words += ["--node-rank", 1, "--secret-file", secret, "--workers-per-node", 1]
        return msrun(*words, *shell("true"))

    return start


def test_a_port_that_keeps_silent_is_named_within_seconds(lonely, serve):
    """S-07."""
    node = lonely(serve(b""))
    began_at = node.until_begun()
    node.until_said("does not answer as a scheduler does: it is overloaded or stopped, or another")
    took = time.monotonic() - began_at
    node.send(signal.SIGTERM)

    assert node.wait() == 143
    assert took <= 5
    assert node.err.count("does not answer as a scheduler does") == 1


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", NULL_GREETING], ids=["http", "without keys"]
)
def test_a_port_of_another_program_is_an_error_within_seconds(lonely, serve, answer):
    """S-08."""
    node = lonely(serve(answer))
    node.until_begun()

    assert node.wait(5) == 122
    assert "or is no scheduler of msrun" in node.block()
