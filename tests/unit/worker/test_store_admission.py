"""Whose a loopback connection is, by the kernel."""

import os
import socket
import subprocess
import sys

import pytest

from msrun.worker.store import admission
from msrun.worker.store.admission import (
    LoopbackAdmission,
    choose_finder,
    users_by_netlink,
    users_by_proc,
)

OTHER = 1001
CONNECT = """
import os, socket
"127.0.0.1".encode("idna")  # which is read from files that the other user may not see
os.setuid({})
with socket.create_connection(("127.0.0.1", {})) as sock:
    print(flush=True)
    sock.recv(1)
"""
FINDERS = pytest.mark.parametrize("find", [users_by_netlink, users_by_proc])
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def listening(request):
    host = "127.0.0.1" if request.param == socket.AF_INET else "::1"
    try:
        sock = socket.create_server((host, 0), family=request.param)
    except OSError as error:
        pytest.skip(f"no {host}: {error.strerror}")
    with sock:
        yield sock


@pytest.fixture
def pair(listening):
    """A client and what was accepted of it."""
    client = socket.create_connection(listening.getsockname()[:2])
    with client, listening.accept()[0] as accepted:
        yield client, accepted


@FINDERS
def test_ones_own_connection(find, pair):
    assert find([pair[1]]) == [os.geteuid()]


@FINDERS
def test_a_connection_that_nobody_holds_any_more_is_nobodys(find, pair):
    client, accepted = pair
    client.sendall(b"request")
    client.close()

    assert find([accepted]) == [None]


@FINDERS
def test_a_client_that_reset_its_connection_is_nobody(find, pair):
    client, accepted = pair
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()

    assert find([accepted]) == [None]


@FINDERS
def test_a_client_of_ipv6_that_reaches_ipv4(find):
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.socket(socket.AF_INET6) as client,
    ):
        client.connect(("::ffff:127.0.0.1", listening.getsockname()[1]))
        with listening.accept()[0] as accepted:
            assert find([accepted]) == [os.geteuid()]


@FINDERS
def test_more_connections_than_are_asked_about_at_once(find):
    with socket.create_server(("127.0.0.1", 0), backlog=300) as listening:
        clients = [socket.create_connection(listening.getsockname()) for _ in range(200)]
        accepted = [listening.accept()[0] for _ in clients]
        clients[77].close()
        users = find(accepted)
        for sock in (*clients, *accepted):
            sock.close()

    assert [n for n, user in enumerate(users) if user != os.geteuid()] == [77]


@as_root
@FINDERS
def test_another_users_connection(find):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        program = CONNECT.format(OTHER, listening.getsockname()[1])
        command = [sys.executable, "-I", "-S", "-c", program]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            assert other.stdout.readline()
            with listening.accept()[0] as accepted:
                assert find([accepted]) == [OTHER]


def test_who_is_not_the_user_is_reset_and_counted(pair):
    client, accepted = pair
    gate = LoopbackAdmission(users_by_netlink, os.geteuid() + 1)

    assert gate.admit([accepted]) == []
    assert gate.refused == 1
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_whose_user_cannot_be_found_is_refused(pair):
    def find(_):
        raise OSError

    gate = LoopbackAdmission(find, os.geteuid())

    assert gate.admit([pair[1]]) == []
    assert gate.refused == 1


def test_without_a_gate_everybody_comes_in(pair):
    assert LoopbackAdmission(None, 12345).admit([pair[1]]) == [pair[1]]


def test_the_kernel_has_a_way_here():
    assert choose_finder()


def test_the_list_of_all_sockets_is_the_second_way_and_there_may_be_none():
    def broken(_):
        raise OSError

    def gullible(accepted):
        return [os.geteuid()] * len(accepted)

    ways = {"first": broken, "second": users_by_proc}

    assert choose_finder(ways) == ("second", users_by_proc)
    assert choose_finder({"first": broken}) is None
    # It takes a socket that nobody holds for one of ours.
    assert choose_finder({"first": gullible}) is None
    assert choose_finder(admission.FINDERS)[1] is users_by_netlink
