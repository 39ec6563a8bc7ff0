"""The real answers about this machine's addresses and ports."""

import os
import socket
from pathlib import Path

import pytest

from msrun.cli.world import RealWorld


@pytest.fixture
def real():
    return RealWorld()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.3.4.5", socket.gethostname()])
def test_this_machine(real, host):
    assert real.is_local(host) is True


def test_another_machine(real):
    # 192.0.2.0/24 is reserved for documentation, so nobody has it.
    assert real.is_local("192.0.2.1") is False


@pytest.mark.parametrize("host", ["-.invalid", "a" * 300, "\udcff", "é" * 70])
def test_names_that_nobody_has(real, host):
    assert real.is_local(host) is None


def test_a_busy_port(real, listener):
    assert real.port_problem("127.0.0.1", listener) == f"is in use by pid {os.getpid()} ({name()})"


def name():
    return Path("/proc/self/comm").read_text().rstrip("\n")


def test_a_free_port(real):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    assert real.port_problem("127.0.0.1", port) is None
    assert real.port_problem(socket.gethostname(), port) is None


def test_six_hex_digits(real):
    assert len(real.token()) == 6
    assert int(real.token(), 16) >= 0
