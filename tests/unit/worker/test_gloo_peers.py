"""A new group whose connections are not all of this user is refused."""

import os
import select
import socket
import subprocess
import sys
import threading

import pytest

from msrun.errors import AuthenticationError, UsageError
from msrun.worker.gloo_peers import _check, _checked, _copy, _Devices, _paired

OTHER = 1001
CONNECT = """
import os, socket
"127.0.0.1".encode("idna")  # which is read from files that the other user may not see
os.setuid({})
with socket.create_connection(("127.0.0.1", {})) as sock:
    print(flush=True)
    sock.recv(1)
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def device():
    """What gloo has: a listening socket, and an epoll that waits for it and for a pipe."""
    reading, writing = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listening, select.epoll() as epoll:
        epoll.register(listening, select.EPOLLIN)
        epoll.register(reading, select.EPOLLIN)
        yield listening, epoll
    os.close(reading)
    os.close(writing)


@pytest.fixture
def connect(device):
    """Make a connection of this user; return both of its ends."""
    opened = []

    def make(events=select.EPOLLIN):
        listening, epoll = device
        client = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
        opened.extend((client, accepted))
        epoll.register(accepted, events)
        return client, accepted

    yield make
    for sock in opened:
        sock.close()


def check(epoll, peers):
    found = list(filter(None, map(_copy, _paired(epoll.fileno()))))
    try:
        _check(found, peers)
    finally:
        for sock in found:
            sock.close()


@pytest.fixture
def stranger(device):
    """Connect as another user; return what was accepted."""
    program = CONNECT.format(OTHER, device[0].getsockname()[1])
    command = [sys.executable, "-I", "-S", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        with device[0].accept()[0] as accepted:
            yield accepted


def test_ones_own_connections_pass(device, connect):
    connect()
    connect()

    check(device[1], 2)


def test_one_that_its_peer_has_yet_to_accept_is_waited_for(device):
    listening, epoll = device
    accepted = []
    later = threading.Timer(0.1, lambda: accepted.append(listening.accept()[0]))
    later.start()
    with socket.create_connection(listening.getsockname()) as client:
        epoll.register(client, select.EPOLLIN)
        check(epoll, 1)
        later.join(20)  # it has accepted, and may not have said so yet
        assert accepted
    accepted[0].close()


def test_one_that_is_closed_is_refused(device, connect):
    client, _ = connect()
    client.sendall(b"what is to be read")
    client.close()

    with pytest.raises(AuthenticationError, match="a connection of a new process group is closed"):
        check(device[1], 1)


@as_root
def test_another_users_is_refused_by_name(device, connect, stranger):
    connect()
    device[1].register(stranger, select.EPOLLIN)

    with pytest.raises(AuthenticationError, match=f"user {OTHER} .*has taken the place of a rank"):
        check(device[1], 2)


@as_root
def test_another_users_that_has_no_ranks_place_changes_nothing(device, connect, stranger):
    connect()
    device[1].register(stranger, select.EPOLLIN | select.EPOLLONESHOT)

    check(device[1], 1)


def test_connections_that_will_be_made_later_are_refused(device, connect):
    connect(select.EPOLLIN | select.EPOLLONESHOT)

    with pytest.raises(UsageError, match="gloo has yet to connect the 2 ranks of a new process"):
        check(device[1], 1)


def test_one_that_gloo_has_closed_is_missed(device, connect):
    connect()

    with pytest.raises(AuthenticationError, match="a connection of a new process group is closed"):
        check(device[1], 2)


class Group:
    """A group of two ranks."""

    def size(self):
        return 2


@pytest.fixture
def shared():
    """The epoll of a device that a group has, with one connection; other groups may use it."""
    seen = _Devices()
    reading, writing = os.pipe()
    with select.epoll() as other, socket.create_server(("127.0.0.1", 0)) as listening:
        other.register(reading, select.EPOLLIN)
        with seen.connections(are_shared=False) as connections:
            epoll = select.epoll()
            with epoll, socket.create_connection(listening.getsockname()) as client:
                epoll.register(client, select.EPOLLIN)
                with listening.accept()[0]:
                    _check(connections, 1)
                    yield seen, listening, epoll
    os.close(reading)
    os.close(writing)


def test_a_group_that_is_derived_from_another_is_looked_at(shared):
    seen, listening, epoll = shared
    opened = []

    def split(closes):
        opened.append(socket.create_connection(listening.getsockname()))
        opened.append(listening.accept()[0])
        epoll.register(opened[-1], select.EPOLLIN)
        if closes:
            opened[-2].close()
        return Group()

    derived = _checked(split, seen)
    try:
        assert derived(closes=False).size() == 2
        with pytest.raises(AuthenticationError, match="is closed"):
            derived(closes=True)
    finally:
        for sock in opened:
            sock.close()


def test_a_rank_outside_of_a_derived_group_has_none(shared):
    assert _checked(lambda: None, shared[0])() is None
