"""Who is at the other end of a loopback connection, by the kernel, before a byte of it is read.

The kernel keeps the user of each socket.  netlink's socket diagnosis finds the peer's socket by the
addresses and ports of the connection (INET_DIAG, a few microseconds each, many in one call); where
a kernel has none, /proc/net/tcp lists all sockets.

Only an established socket that a process holds counts.  One that its process has closed belongs to
nobody, and the kernel reports it as user 0: without this rule, any user could connect, send a
request, close, and pass for root.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_TCP_ESTABLISHED = 1
_ALL_STATES = 0xFFFFFFFF
_NO_COOKIE = b"\xff" * 8
# Of netlink(7) and linux/inet_diag.h: header; family, protocol, extensions, padding, states; then
# the socket's id, of which only the ports are in network byte order here.
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI")
_PORTS = struct.Struct("!HH")
_ANSWER = struct.Struct("=BBxx")
_USER_AND_INODE = struct.Struct("=II")
_USER_AT = 4 + 48 + 12
_ASKED_AT_ONCE = 64
_ANSWER_SECONDS = 1.0

User = int | None
Find = Callable[[Sequence[socket.socket]], list[User]]


def users_by_netlink(accepted: Sequence[socket.socket]) -> list[User]:
    """Return the user at the other end of each socket, None for one that nobody holds.

    Raises:
        OSError: The kernel has no socket diagnosis.
    """
    users: list[User] = [None] * len(accepted)
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(_ANSWER_SECONDS)
        for first in range(0, len(accepted), _ASKED_AT_ONCE):
            questions = {}
            for number, sock in enumerate(accepted[first : first + _ASKED_AT_ONCE], first):
                if question := _question(sock, number):
                    questions[number] = question
            if questions:
                netlink.sendall(b"".join(questions.values()))
            waiting = set(questions)
            while waiting:
                for number, user in _answers(netlink.recv(1 << 16)):
                    users[number] = user
                    waiting.discard(number)
    return users


def _question(sock: socket.socket, number: int) -> bytes:
    """Return the message that asks for the socket at the other end; empty when it has gone."""
    try:
        peer, own = sock.getpeername(), sock.getsockname()
    except OSError:
        return b""
    there, here = (socket.inet_pton(sock.family, name[0]) for name in (peer, own))
    wanted = (
        _REQUEST.pack(sock.family, socket.IPPROTO_TCP, 0, _ALL_STATES)
        + _PORTS.pack(peer[1], own[1])
        + there.ljust(16, b"\0")
        + here.ljust(16, b"\0")
        + bytes(4)  # any interface
        + _NO_COOKIE
    )
    length = _HEADER.size + len(wanted)
    return _HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, number, 0) + wanted


def _answers(data: bytes) -> Iterable[tuple[int, User]]:
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, _, number, _ = _HEADER.unpack_from(data, at)
        yield number, _user(data[at + _HEADER.size : at + length], kind)
        at += max(_HEADER.size, -(-length // 4) * 4)


def _user(body: bytes, kind: int) -> User:
    if kind != _SOCK_DIAG_BY_FAMILY or len(body) < _USER_AT + _USER_AND_INODE.size:
        return None
    _, state = _ANSWER.unpack_from(body)
    user, inode = _USER_AND_INODE.unpack_from(body, _USER_AT)
    return user if state == _TCP_ESTABLISHED and inode else None


def users_by_proc(accepted: Sequence[socket.socket]) -> list[User]:
    """Return what `users_by_netlink` does, from the lists of all sockets.

    Raises:
        OSError: There are no such lists.
    """
    found: dict[tuple[str, str], User] = {}
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net", table)
        if table == "tcp6" and not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            state, user, inode = int(fields[3], 16), int(fields[7]), int(fields[9])
            if state == _TCP_ESTABLISHED and inode:
                found[_plain(fields[1]), _plain(fields[2])] = user
    return [_listed(sock, found) for sock in accepted]


def _listed(sock: socket.socket, found: dict[tuple[str, str], User]) -> User:
    try:
        peer, own = sock.getpeername(), sock.getsockname()
    except OSError:
        return None
    there, here = (_as_listed(sock.family, name) for name in (peer, own))
    return found.get((there, here))


def _as_listed(family: int, name: tuple[str, int]) -> str:
    """Return address and port as the kernel lists them: words of 32 bits in host byte order."""
    packed = socket.inet_pton(family, name[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{name[1]:04X}"


_MAPPED = "".join(f"{word:08X}" for word in struct.unpack("=3I", bytes(10) + b"\xff\xff"))


def _plain(address: str) -> str:
    """Return an IPv4 address as such, also one that a socket of IPv6 has."""
    return address.removeprefix(_MAPPED)


FINDERS: dict[str, Find] = {
    "the kernel's socket diagnosis": users_by_netlink,
    "/proc/net/tcp": users_by_proc,
}


def choose_finder(finders: Mapping[str, Find] = FINDERS) -> tuple[str, Find] | None:
    """Return the name of the first of `finders` that tells our own user from nobody, and that way.

    None when this kernel has no such way.
    """
    for name, find in finders.items():  # the later ones may take long
        if _can_be_trusted(find):
            return name, find
    return None


def _can_be_trusted(find: Find) -> bool:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname()) as own:
            accepted, _ = listening.accept()
            finds_us = _finds(find, accepted, os.geteuid())
            own.close()
        with accepted:
            return finds_us and _finds(find, accepted, None)


def _finds(find: Find, accepted: socket.socket, user: User) -> bool:
    try:
        return find([accepted]) == [user]
    except (OSError, ValueError, IndexError, struct.error):
        return False


class LoopbackAdmission:
    """Lets in the connections of one user, and resets all others at once.

    Args:
        find: Tells whose a connection is; None lets everybody in.
        user: Who may come in.
    """

    def __init__(self, find: Find | None, user: int) -> None:
        self._find = find
        self._user = user
        self.refused = 0

    def admit(self, accepted: list[socket.socket]) -> list[socket.socket]:
        """Return the sockets that may stay; the others are closed and counted in `refused`."""
        if self._find is None or not accepted:
            return accepted
        try:
            users = self._find(accepted)
        except (OSError, ValueError):  # nobody is let in whose user is not known
            users = [None] * len(accepted)
        admitted = []
        for sock, user in zip(accepted, users, strict=True):
            if user == self._user:
                admitted.append(sock)
            else:
                self.refused += 1
                _reset(sock)
        return admitted


def _reset(sock: socket.socket) -> None:
    """Close `sock` so that its peer knows at once and no state of it stays here."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        sock.close()
