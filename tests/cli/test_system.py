"""The real answers about this machine's addresses and ports."""

import os
import socket
from pathlib import Path

import pytest
from ports import free_port

from msrun.cli.system import RealSystem


@pytest.fixture
def real():
    return RealSystem()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_busy_port(real, listener):
    assert real.port_problem("127.0.0.1", listener) == f"is in use by pid {os.getpid()} ({name()})"


def name():
    return Path("/proc/self/comm").read_text().rstrip("\n")


def test_a_free_port(real):
    port = free_port()

    assert real.port_problem("127.0.0.1", port) is None
    assert real.port_problem(socket.gethostname(), port) is None


def test_a_port_of_another_machine(real):
    # 192.0.2.0/24 is reserved for documentation, so nobody has it.
    assert real.port_problem("192.0.2.77", 29500) == (
        "of 192.0.2.77 cannot be used: Cannot assign requested address"
    )


def test_addresses_are_those_of_this_machine(real):
    assert real.resolve("127.0.0.1") == ("127.0.0.1",)
    assert real.is_own("127.0.0.1")
    assert real.address_to("127.0.0.1") == "127.0.0.1"
    assert [address for address in real.own_addresses() if not real.is_own(address)] == []


def test_six_hex_digits(real):
    assert len(real.token()) == 6
    assert int(real.token(), 16) >= 0
