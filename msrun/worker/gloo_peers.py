"""Whose the connections of a new gloo group are, before anything that came through them is used.

Gloo takes every connection that begins with the number of one that it waits for, and these are
small.  Another user of the machine can so take the place of a rank while a group forms, and answer
what ranks exchange; objects are unpickled.  Gloo has no check of its own but TLS, which few builds
have.  But it makes all connections of a group while the group is made, and none later, so one look
in between suffices: the kernel says which user holds the other end of each, as it does for the
store (`store/admission.py`), and no group is returned that has a connection of somebody else.

Gloo gives no list of its connections.  Each of its devices has an epoll of its own, which appears
while a group is made, or has been there for groups that share the device.  It waits for the
listening socket, for every connected pair, and, with EPOLLONESHOT, for the first bytes of
connections that are not yet a pair.  /proc tells all that.

The ranks then wait for each other.  A rank whose script ends at once would otherwise close its
connections before another had looked, and be taken for a stranger that has gone.  Groups that are
derived in C++ have no store here, so for these that is left.

Only in jobs on one node: which user of another host holds a connection, no kernel tells.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import re
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from msrun import environ
from msrun.errors import AuthenticationError, MsrunError, UsageError
from msrun.worker.store.admission import Find, choose_finder

_MODULE = "torch.distributed.distributed_c10d"
_DESCRIPTORS = "/proc/self/fd"
_EPOLL = "anon_inode:[eventpoll]"
_WATCHED = re.compile(r"^tfd:\s*(\d+) events:\s*([0-9a-f]+)", re.MULTILINE)
_TCP_ESTABLISHED = 1
# In which a rank accepts a connection that the kernel has made for it already.
_ACCEPT_SECONDS = 60.0
_NEXT_LOOK_SECONDS = 0.001
# What makes groups by itself, in C++, from one that is there.
_FROM_OTHERS = ("split_group", "merge_remote_group")


def install() -> None:
    """Have every gloo group of this process checked, if it is of a job on one node.

    Where torch is not loaded yet, this waits for it and costs nothing.
    """
    try:
        who = environ.rank_identity(environ.current())
    except MsrunError:  # a program that needs none, or will say so itself
        return
    if who.world_size == 1 or who.local_world_size != who.world_size:
        return
    if module := sys.modules.get(_MODULE):
        _wrap(module)
    else:
        sys.meta_path.insert(0, _GroupFinder())


class _GroupFinder(MetaPathFinder):
    """Wraps torch's groups as soon as their module has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as all others do, and see to it that it is wrapped."""
        if fullname != _MODULE:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        loader, load = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
            load(module)
            _wrap(module)

        vars(loader)["exec_module"] = exec_module
        return spec


def _wrap(module: ModuleType) -> None:
    gloo = getattr(module, "ProcessGroupGloo", None)
    if gloo is None:
        return
    seen = _Devices()
    make, is_option = gloo.__init__, getattr(gloo, "_Options", ())

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # Options may name devices that other groups have, too.
        are_shared = any(isinstance(each, is_option) for each in (*args, *kwargs.values()))
        with seen.connections(are_shared=are_shared) as connections:
            make(self, *args, **kwargs)
            if _check(connections, self.size() - 1):
                _meet(args[0] if args else kwargs["store"], self.size())

    gloo.__init__ = init
    for name in _FROM_OTHERS:
        if derive := getattr(module.ProcessGroup, name, None):
            setattr(module.ProcessGroup, name, _checked(derive, seen))


def _checked(derive: Callable[..., Any], seen: _Devices) -> Callable[..., Any]:
    """Return a method that makes a group and returns it, or None on ranks outside of it."""

    @functools.wraps(derive)
    def derived(*args: Any, **kwargs: Any) -> Any:
        with seen.connections(are_shared=True) as connections:
            group = derive(*args, **kwargs)
            # A group of another backend has none.
            if group is not None and (found := list(connections)):
                _check(found, group.size() - 1)
        return group

    return derived


def _meet(store: Any, ranks: int) -> None:
    """Return when all ranks of a group are here.

    A barrier of the group itself would be one of its collectives, which torch numbers.

    Args:
        store: Of this group alone.
        ranks: Of the group.
    """
    if store.add("msrun/checked", 1) == ranks:
        store.set("msrun/all_checked", "")
    store.wait(["msrun/all_checked"])


class _Devices:
    """The epolls of all gloo devices that this process has had."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    @contextlib.contextmanager
    def connections(self, *, are_shared: bool) -> Iterator[Iterator[socket.socket]]:
        """Yield what gives a copy of each connection that has been made since; it is closed then.

        Args:
            are_shared: Whether a device may have connections of other groups, too.
        """
        before = _epolls()
        known = self._known & before if are_shared else set()
        old = {epoll: _paired(epoll) for epoll in known}
        with contextlib.ExitStack() as opened:

            def made() -> Iterator[socket.socket]:
                new = _epolls() - before
                self._known |= new
                for epoll in known | new:
                    for descriptor in _paired(epoll) - old.get(epoll, set()):
                        if sock := _copy(descriptor):
                            yield opened.enter_context(sock)

            yield made()


@functools.cache
def _finder() -> Find | None:
    chosen = choose_finder()
    return chosen and chosen[1]


def _check(connections: Iterable[socket.socket], peers: int) -> bool:
    """Refuse a group with a connection whose other end is not this user's.

    Args:
        connections: Of the group.
        peers: Ranks of the group besides this one.

    Returns:
        Whether there were connections to check.

    Raises:
        AuthenticationError: Another user, or nobody, holds the other end of a connection.
        UsageError: Connections will be made later.
    """
    find = _finder()
    if find is None or not peers:  # --insecure opens the job's store to all users, too
        return False
    waiting = list(connections)
    if not waiting:
        raise UsageError(
            f"gloo has yet to connect the {peers + 1} ranks of a new process group, and whose its "
            "connections will be cannot be checked then",
            hint="unset TORCH_GLOO_LAZY_INIT; without it, the other ranks have ended",
        )
    if len(waiting) < peers:  # gloo forgets what is closed
        raise _refusal("nobody")
    deadline = time.monotonic() + _ACCEPT_SECONDS
    while waiting := _not_known(waiting, find):
        if time.monotonic() > deadline:
            raise _refusal("nobody")
        select.select([], [], [], _NEXT_LOOK_SECONDS)
    return True


def _not_known(connections: list[socket.socket], find: Find) -> list[socket.socket]:
    """Return those of the connections that their peer has yet to accept.

    Raises:
        AuthenticationError: Another user, or nobody, holds the other end of one.
    """
    later = []
    for sock, user in zip(connections, find(connections), strict=True):
        if user == os.geteuid():
            continue
        if user is not None:
            raise _refusal(_name(user))
        if not _is_established(sock):
            raise _refusal("nobody")
        later.append(sock)
    return later


def _refusal(who: str) -> AuthenticationError:
    if who == "nobody":
        return AuthenticationError(
            "the other end of a connection of a new process group is closed: its rank has ended, "
            "or a stranger had taken its place"
        )
    return AuthenticationError(
        f"{who} of this machine has taken the place of a rank in a new process group, whose ports "
        "take every connection; nothing that came from there was used",
        hint="run the job where that user cannot reach its loopback interface, as in a container",
    )


def _name(user: int) -> str:
    try:
        return f"user {user} ({pwd.getpwuid(user).pw_name})"
    except KeyError:
        return f"user {user}"


def _is_established(sock: socket.socket) -> bool:
    """Tell whether the other side has not closed the connection."""
    try:
        (state,) = struct.unpack("B", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1))
    except OSError:
        return False
    return bool(state == _TCP_ESTABLISHED)


def _epolls() -> set[int]:
    """Return the descriptors of all epolls of this process."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - `Path` takes several times as long
        with contextlib.suppress(OSError):  # closed since it was listed
            if os.readlink(f"{_DESCRIPTORS}/{name}") == _EPOLL:  # noqa: PTH115
                found.add(int(name))
    return found


def _paired(epoll: int) -> set[int]:
    """Return what an epoll waits for, but for the first bytes of connections."""
    try:
        with open(f"/proc/self/fdinfo/{epoll}") as file:  # noqa: PTH123
            watched = _WATCHED.findall(file.read())
    except OSError:
        return set()
    return {int(number) for number, events in watched if not int(events, 16) & select.EPOLLONESHOT}


def _copy(descriptor: int) -> socket.socket | None:
    """Return another descriptor of a connected TCP socket; None of anything else."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    try:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.getpeername()
            return sock
    except OSError:  # it listens
        pass
    sock.close()
    return None
