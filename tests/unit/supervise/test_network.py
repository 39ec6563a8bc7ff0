"""Addresses as this machine sees them."""

import socket

import pytest

from msrun.supervise import network

# RFC 5737 and RFC 3849 reserve these for documentation, so nobody has them.
NOBODYS = ("192.0.2.77", "2001:db8::77")


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("10.1.2.3", ("10.1.2.3",)),
        ("fd00:0::1", ("fd00::1",)),
        ("127.0.0.1", ("127.0.0.1",)),
    ],
)
def test_an_address_resolves_to_itself(host, addresses):
    assert network.resolve(host) == addresses


def test_localhost_is_loopback():
    assert "127.0.0.1" in network.resolve("localhost")


@pytest.mark.parametrize("host", ["-.invalid", "a" * 300, "\udcff", "é" * 70, "a\0b"])
def test_names_that_nobody_has(host):
    assert network.resolve(host) == ()


def test_every_machine_orders_addresses_alike():
    given = {"fd00::2", "10.0.0.10", "10.0.0.9", "fd00::10", "9.255.0.1"}

    assert network.ordered(given) == ("9.255.0.1", "10.0.0.9", "10.0.0.10", "fd00::2", "fd00::10")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.4.5", "::1"])
def test_loopback_is_ours(address):
    assert network.is_own(address)


def test_every_address_of_an_interface_is_ours():
    own = network.own_addresses()

    assert [address for address in own if not network.is_own(address)] == []
    assert not {"127.0.0.1", "::1"} & set(own)


def test_every_address_is_that_of_an_interface():
    names = {name for _, name in socket.if_nameindex()}

    assert network.interface_of("127.0.0.1") == "lo"
    assert {network.interface_of(address) for address in network.own_addresses()} <= names
    assert network.interface_of(NOBODYS[0]) == ""


@pytest.mark.parametrize("address", NOBODYS)
def test_an_address_of_another_machine_is_not_ours(address):
    assert not network.is_own(address)


@pytest.mark.parametrize("address", NOBODYS)
def test_the_way_to_another_machine_starts_at_an_address_of_ours(address):
    way = network.address_to(address)

    assert way is None or network.is_own(way)


def test_the_way_to_loopback_is_loopback():
    assert network.address_to("127.0.0.1") == "127.0.0.1"


def test_an_address_that_can_be_bound_need_not_be_ours():
    # Any address may be bound here, as everywhere where `ip_nonlocal_bind` is set.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_IP, 15, 1)  # IP_FREEBIND
        probe.bind((NOBODYS[0], 0))

        assert not network.is_own(NOBODYS[0])


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid", "192.0.2.1"])
def test_the_interface_to_others_is_never_loopback(host):
    interfaces = {network.interface_of(address) for address in network.own_addresses()}

    assert network.interface_to(host) in (interfaces or {""})
