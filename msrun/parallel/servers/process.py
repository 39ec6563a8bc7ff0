"""A parameter server as a process: it drives the machine of `msrun.cluster.servers.server`.

One loop does everything: it receives, steps, answers and writes snapshots, straight from the live
tensors, so that a server needs no second copy of what it holds.  Server 0 has the coordinator
beside itself.  The machines send again whatever is lost, but only after a second or more.  So that
no server waits for that after a kill, this file loses little:

- *An answer goes back along the connection by which its question came.*  So whoever asks a server
  that knows only an old address of it is answered at once.
- *What was sent to a server before its connection is up is sent when it is* (`_held`): without a
  payload, and not much of it.
- *What comes before this process knows its session waits until then* (`_early`).

A *session* is what servers do for one life of the job's ranks.  Ranks that start again begin a new
one, with the contents of a checkpoint or the model's first weights.  A server that starts again
while the ranks live finds its session, and a snapshot, on its disk.  What ranks of an earlier
session have sent may come late: it is dropped, so that it neither ends a later session nor counts
in one (`_is_late`).
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import torch

from msrun import environ
from msrun.cluster.servers.events import (
    Arrived,
)
from msrun.cluster.servers.messages import Header
from msrun.cluster.tick import Tick
from msrun.environ import ServersPlace
from msrun.errors import MsrunError, ProtocolError, UsageError
from msrun.job import SERVERS_MAX
from msrun.parallel.servers.addresses import AddressBook, read_count, read_key
from msrun.parallel.servers.disk import ServerDisk
from msrun.parallel.servers.head import Head
from msrun.parallel.servers.server_session import ServerSession
from msrun.parallel.servers.sharing import NearRanks
from msrun.parallel.servers.wire import (
    HEAD,
    NOT_HERE,
    RANK,
    SERVER,
    Actor,
    Begin,
    Begun,
    CanRead,
    FirstContents,
    Hail,
    Packet,
    Released,
    SessionPlan,
    Setup,
    Share,
    Shared,
    Word,
    decode,
    encode,
    session_order,
)
from msrun.transport.data_sockets import DataConnection, DataListener
from msrun.transport.loop import Loop, new_context
from msrun.transport.sockets import listen

# Messages that wait for a connection to one server; more of them are dropped.
_HELD_MAX = 32
_LINE_CHARS_MAX = 300


class ServerProcess:
    """The process of one server.

    Args:
        place: Where the servers of the job are.
        master: Host and port of the store.
        folder: Private directory of this node.
        loop: This process's loop.
    """

    def __init__(
        self, place: ServersPlace, master: tuple[str, int], folder: Path, loop: Loop
    ) -> None:
        self._place = place
        self._loop = loop
        self._secret = read_key(place.directory)
        self._disk = ServerDisk(folder / f"server-{place.server}")
        self._life = self._disk.count_start()
        # Generation and count of the latest session that this process has heard of.
        self._latest = _order_on(self._disk)
        self._peers = place.count + place.ranks
        self._context = new_context()
        listening = listen(place.address, 0)
        address = (place.address, listening.getsockname()[1])
        self._listener = DataListener(self._context, listening, self._secret, self._peers)
        loop.watch(self._listener.socket, self._receive)
        if self._listener.gate:
            self._listener.gate.serve(loop)
        self._near = NearRanks()
        self._routes: dict[Actor, bytes] = {}
        # Server -> the route to it along the connection that it has made.
        self._ways: dict[int, bytes] = {}
        self._connections: dict[int, DataConnection] = {}
        self._held: dict[int, deque[Packet]] = {}
        # What came before the session was known: the latest of each sender.
        self._early: dict[tuple[Actor, Actor], tuple[Packet, Any]] = {}
        self._session: ServerSession | None = None
        self._head: Head | None = None
        wanted = None
        if place.server == 0:
            wanted = partial(read_count, place.directory)
            count = wanted() or place.count
            disk = ServerDisk(folder / "head")
            self._latest = max(self._latest, _order_on(disk))
            self._head = Head(disk, count, place.nodes, self._send_of_head)
        read, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        loop.watch(read, lambda: self._on_store(read))
        self._book = AddressBook(
            master,
            place.count,
            self._store_changed,
            own=(place.server, address),
            wanted=wanted,
        )
        self._is_known = False
        self._counted = 0
        self._dropped = 0
        # For this process itself: the coordinator and server 0 talk to each other.
        self._inbox: deque[tuple[Packet, Any]] = deque()

    def run(self) -> int:
        """Serve until the process is told to end; return its exit code."""
        self._loop.on_signals([signal.SIGTERM, signal.SIGINT], lambda _: self._loop.stop())
        try:
            self._loop.run(self._deadline, self._tick)
        except (MemoryError, RuntimeError, OSError) as error:
            if (lacking := lacking_memory(error)) is None:
                raise
            held = self._session.nbytes if self._session else 0
            text = f"parameter server {self._place.server} has no memory for {lacking}"
            text += f", beside {held} bytes of rows and their optimizer's state"
            hint = "start more servers (--server-num), or give it more memory (ulimit -d, its "
            hint += "container)"
            raise MsrunError(text, hint=hint) from None
        self._book.close()
        failure = self._head.failure if self._head else ""
        if failure:
            print(f"msrun: parameter servers cannot go on: {failure}", file=sys.stderr, flush=True)  # noqa: T201 - its log
        return 1 if failure else 0

    def _store_changed(self) -> None:
        """Wake the loop, from the thread that reads the store."""
        os.write(self._wake, b"w")

    def _on_store(self, read: int) -> None:
        os.read(read, 4096)
        session = self._book.session
        if self._head:
            self._head.known = tuple(self._book.addresses)
        for server in list(self._held):
            self._connection(server)
        # The ranks may be in this session since before this process: then it has started again.
        if session and self._session is None:
            plan = self._disk.plan()
            if plan is not None and plan.session == session:
                self._begin(plan)
        if session and self._head:
            self._head.go_on(session, self._loop.now())
        if session is not None and not self._is_known:
            self._is_known = True
            early, self._early = self._early, {}
            self._inbox.extend(early.values())
        self._scale()

    def _scale(self) -> None:
        """Have as many servers as the launcher says."""
        if self._head and self._book.wanted:
            self._head.scale(self._book.wanted, self._loop.now())
        self._settle()

    def _deadline(self) -> float | None:
        dues = [self._session.deadline() if self._session else None]
        dues.append(self._head.deadline() if self._head else None)
        return min((due for due in dues if due is not None), default=None)

    def _tick(self) -> None:
        now = self._loop.now()
        if self._session:
            self._session.feed(Tick(), now)
        if self._head:
            self._head.tick(now)
        self._settle()

    def _settle(self) -> None:
        """Deliver what this process has sent to itself, one after the other."""
        while self._inbox:
            self._deliver(*self._inbox.popleft())
        if self._head and self._head.total != self._counted:
            self._counted = self._head.total
            self._book.count(self._counted)
        if self._head and self._head.failure:
            self._loop.stop()

    def _receive(self) -> None:
        if self._session:
            self._session.tidy()
        for route, parts in self._listener.receive():
            self._take(route, parts)
        self._settle()

    def _receive_answers(self, connection: DataConnection) -> None:
        for parts in connection.receive():
            self._take(b"", parts)
        self._settle()

    def _take(self, route: bytes, parts: list[memoryview]) -> None:
        """Take a message, which came along `route` or as an answer."""
        try:
            packet, payload = decode(parts, self._near.regions)
            self._check_sender(packet.sender)
        except ProtocolError as error:
            self._drop(error)
            return
        if self._is_late(packet):
            return
        if route and packet.sender[0] == RANK:
            self._routes[packet.sender] = route
        elif route:
            self._ways[_server_of(packet.sender)] = route
        if payload is NOT_HERE:
            self._send(packet.sender, Shared(token=""))
        elif isinstance(packet.word, Share | CanRead):
            if answer := self._near.hear(packet.sender, route, packet.word):
                self._send(packet.sender, answer)
        else:
            self._deliver(packet, payload)

    def _is_late(self, packet: Packet) -> bool:
        """Whether a message belongs to an earlier session than the latest one."""
        word = packet.word
        if isinstance(word, Setup | Begin):
            order = session_order(word.plan.session)
            self._latest = max(self._latest, order)
            return order < self._latest
        return bool(packet.session) and session_order(packet.session) < self._latest

    def _check_sender(self, sender: Actor) -> None:
        """Refuse a sender that no job of this size has: what is kept of each must not grow.

        Raises:
            ProtocolError: There is none.
        """
        kind, number = sender
        most = {RANK: self._place.ranks, SERVER: SERVERS_MAX, HEAD: 1}.get(kind, 0)
        if not 0 <= number < most:
            raise ProtocolError(f"no message of parameter servers: from {kind} {number}")

    def _drop(self, error: ProtocolError) -> None:
        """Tell the log of what is dropped: of the first, the tenth, the hundredth and so on."""
        self._dropped += 1
        if str(self._dropped).strip("0") == "1":
            text = f"msrun: this server has dropped {self._dropped} message(s): {error}"
            print(text[:_LINE_CHARS_MAX], flush=True)  # noqa: T201 - its log

    def _deliver(self, packet: Packet, payload: Any) -> None:
        now = self._loop.now()
        if not self._is_known and not isinstance(packet.word, Setup | Begin | Released):
            self._early[packet.sender, packet.target] = packet, payload
            return
        if packet.target[0] == HEAD:
            if self._head:
                self._head.receive(packet, now)
            return
        # A port may have been another server's, which its peers still look for there.
        if packet.target != (SERVER, self._place.server):
            return
        session, word = self._session, packet.word
        if isinstance(word, Begin):
            if session is None or session.plan.session != word.plan.session:
                self._disk.write_plan(word.plan)
                self._begin(word.plan)
            self._send((HEAD, 0), Begun())
        elif session and packet.session == session.plan.session:
            self._hear(session, word, payload)

    def _hear(self, session: ServerSession, word: Word, payload: Any) -> None:
        now = self._loop.now()
        if isinstance(word, Released):
            self._book.withdraw()
            self._loop.stop()
        elif isinstance(word, Hail):
            session.want()
        elif isinstance(word, FirstContents):
            session.take(payload, now)
        else:
            session.feed(Arrived(word, payload), now)  # type: ignore[arg-type]

    def _begin(self, plan: SessionPlan) -> None:
        self._near.end_session()
        if self._session:
            self._session.end()
        self._session = ServerSession(
            self._place.server, self._life, plan, self._disk, near=self._near, send=self._send
        )
        self._session.feed(Tick(), self._loop.now())

    def _send_of_head(self, to: Actor, word: Header, session: str) -> None:
        packet = Packet(session=session, sender=(HEAD, 0), target=to, word=word)  # type: ignore[arg-type]
        self._post(packet, None)

    def _send(self, to: Actor, word: Header, payload: Any = None) -> None:
        session = self._session.plan.session if self._session else ""
        sender = (SERVER, self._place.server)
        packet = Packet(session=session, sender=sender, target=to, word=word)  # type: ignore[arg-type]
        self._post(packet, payload)

    def _post(self, packet: Packet, payload: Any) -> None:
        kind, number = packet.target
        if kind == RANK:
            if route := self._routes.get(packet.target):
                region = self._near.region_for(packet.target, route)
                self._listener.send(route, encode(packet, payload, region))
            return
        number = _server_of(packet.target)
        if number == self._place.server:  # nothing on the way to oneself is lost
            self._inbox.append((packet, payload))
            return
        parts = encode(packet, payload)
        way = self._ways.get(number)
        if way and self._listener.send(way, parts):
            return
        connection = self._connection(number)
        if connection is None or not connection.send(parts):
            self._book.search()
            if payload is None:
                self._held.setdefault(number, deque(maxlen=_HELD_MAX)).append(packet)

    def _connection(self, server: int) -> DataConnection | None:
        address = self._book.addresses.get(server)
        known = self._connections.get(server)
        if address is None or (known and known.address == address):
            return known
        if known:
            self._loop.forget(known.socket)
            self._loop.forget(known.monitor)
            known.close()
        made = DataConnection(self._context, address, self._secret, self._peers)
        self._connections[server] = made
        self._loop.watch(made.socket, partial(self._receive_answers, made))
        self._loop.watch(made.monitor, partial(self._on_change, server, made))
        return made

    def _on_change(self, server: int, connection: DataConnection) -> None:
        """Send what waits for a connection that is up now."""
        if connection.changed() and connection.is_up:
            for packet in self._held.pop(server, ()):
                connection.send(encode(packet, None))


def lacking_memory(error: Exception) -> str | None:
    """Return what there was no memory for; None of another error."""
    if isinstance(error, RuntimeError):  # of torch's allocator
        found = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
        return f"{found[1]} more bytes" if found else None
    is_lacking = isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM
    return "a step or a message" if is_lacking else None


def _order_on(disk: ServerDisk) -> tuple[int, int]:
    """Return the order of the session on a disk; before all others where there is none."""
    plan = disk.plan()
    return session_order(plan.session) if plan else (0, 0)


def _server_of(actor: Actor) -> int:
    """Return which server an actor is, or is beside."""
    return 0 if actor[0] == HEAD else actor[1]


def main() -> int:
    """Be the parameter server that the environment names, until told to end."""
    env = environ.current()
    place = environ.servers_place(env)
    master = environ.master(env)
    if place.server < 0 or not place.directory or master is None:
        raise UsageError("a parameter server is started by msrun, with --server-num")
    torch.set_grad_enabled(False)
    return ServerProcess(place, master, Path(place.directory), Loop()).run()


if __name__ == "__main__":
    sys.exit(main())
