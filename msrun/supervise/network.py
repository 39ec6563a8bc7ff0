"""Addresses as this machine sees them: of names, of its own, and of its way to another."""

from __future__ import annotations

import socket
from ipaddress import ip_address

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_NOBODY = "192.0.2.1"  # RFC 5737's: the way to it is the one out of this machine
_CONNECT_SECONDS = 2.0
_DISCARD_PORT = 9  # any would do: connecting a datagram socket sends nothing


def resolve(host: str) -> tuple[str, ...]:
    """Return the numeric addresses of `host`, IPv4 first, each once; none when it is unknown."""
    try:
        entries = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return ordered({str(address[0]) for family, *_, address in entries if family in _FAMILIES})


def is_own(address: str) -> bool:
    """Tell whether the numeric `address` is one of this machine's.

    The kernel reaches its own addresses from the same address, so the way to it tells.  A
    successful bind proves nothing where `ip_nonlocal_bind` is set.
    """
    return ip_address(address).is_loopback or address_to(address) == address


def address_to(address: str) -> str | None:
    """Return our address on the way to the numeric `address`, None when there is no way."""
    family = socket.AF_INET if ip_address(address).version == 4 else socket.AF_INET6  # noqa: PLR2004
    try:
        peer = socket.getaddrinfo(address, _DISCARD_PORT, family, socket.SOCK_DGRAM)[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def reaches(address: str, port: int) -> bool:
    """Tell whether somebody listens on `port` of the numeric `address`; nothing is sent."""
    try:
        with socket.create_connection((address, port), _CONNECT_SECONDS):
            return True
    except OSError:
        return False


def own_addresses() -> tuple[str, ...]:
    """Return the addresses by which other machines may reach this one, IPv4 first."""
    return tuple(address for address in ordered(set(_interfaces())) if _is_for_others(address))


def interface_of(address: str) -> str:
    """Return the name of the interface that has the numeric `address`, empty when none has."""
    return _interfaces().get(address, "")


def interface_to(host: str) -> str:
    """Return the name of our interface on the way to `host`, or else out of this machine."""
    peers = (*resolve(host), _NOBODY, *own_addresses())
    ways = (way for way in map(address_to, peers) if way and _is_for_others(way))
    return interface_of(next(ways, ""))


def is_named() -> bool:
    """Whether this machine's own name resolves to an address that others can reach."""
    return any(map(_is_for_others, resolve(socket.gethostname())))


def _interfaces() -> dict[str, str]:
    """Return each address of this machine with the name of its interface."""
    import psutil  # A job of one node asks for none.

    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in _FAMILIES
    }


def ordered(addresses: set[str]) -> tuple[str, ...]:
    """Return numeric addresses in the order that every machine gives them."""
    return tuple(sorted(addresses, key=lambda a: (ip_address(a).version, int(ip_address(a)), a)))


def _is_for_others(address: str) -> bool:
    number = ip_address(address)
    return not (number.is_loopback or number.is_link_local)
