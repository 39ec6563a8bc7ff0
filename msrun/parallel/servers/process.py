"""A parameter server as a process: it drives the machine of `msrun.cluster.servers.server`.

One loop does everything: it receives, steps, answers and writes snapshots, straight from the live
tensors, so that a server needs no second copy of what it holds.  Server 0 has the coordinator
beside itself.  The machines send again whatever is lost, so this file sends and forgets.

A *session* is what servers do for one life of the job's ranks.  Ranks that start again begin a new
one, with the contents of a checkpoint or the model's first weights.  A server that starts again
while the ranks live finds its session, and a snapshot, on its disk.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from msrun import environ
from msrun.cluster.servers.events import (
    ApplyStep,
    Arrived,
    AssembleSlices,
    DropSnapshots,
    KeepSlices,
    LoadSnapshot,
    Saved,
    SaveSnapshot,
    SendMessage,
    SendRows,
    SendSlices,
    ServerAction,
    ServerEvent,
)
from msrun.cluster.servers.messages import Adopt, Header, Rows
from msrun.cluster.servers.ownership import Slice
from msrun.cluster.servers.server import ServerState
from msrun.cluster.tick import Tick
from msrun.environ import ServersPlace
from msrun.errors import ProtocolError, UsageError
from msrun.parallel.servers.addresses import AddressBook, read_key
from msrun.parallel.servers.disk import ServerDisk, contents_of, slices_of
from msrun.parallel.servers.head import Head
from msrun.parallel.servers.rows import (
    RowGradients,
    ServerRows,
    SliceGradients,
    SliceState,
    WorkerPush,
)
from msrun.parallel.servers.shared_memory import SharedRegion
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
    SessionPlan,
    Setup,
    Share,
    Shared,
    WantContents,
    actor_of,
    decode,
    encode,
)
from msrun.transport.data_sockets import DataConnection, DataListener
from msrun.transport.loop import Loop, new_context
from msrun.transport.sockets import listen

# What a pull asks of a table beside rows by their numbers: all rows, and with them the state.
WHOLE = "whole"
STATE = "state"
# As `WHOLE`, until the rank's next pull: on one node it may be the live rows of a sync server.
LENT = "lent"
_MEET_SECONDS = 0.3


def push_of(payload: Mapping[str, Any]) -> WorkerPush:
    """Return a push from its payload."""
    gradients: dict[str, RowGradients | SliceGradients] = {}
    for table, part in payload["gradients"].items():
        if isinstance(part, dict):
            gradients[table] = SliceGradients(part)
        else:
            ids, values, is_sparse = part
            gradients[table] = RowGradients(ids=ids, values=values, is_sparse=is_sparse)
    return WorkerPush(gradients=gradients, options=payload["options"])


class ServerSession:
    """What a server holds in one session: its machine, its rows, and what it still waits for.

    Args:
        server: Its number.
        life: Of the process.
        plan: Of the session.
        disk: Of the server.
        near: The ranks that share memory with it.
        send: Sends a word and a payload to an actor.
    """

    def __init__(
        self,
        server: int,
        life: int,
        plan: SessionPlan,
        disk: ServerDisk,
        *,
        near: NearRanks,
        send: Callable[[Actor, Header, Any], None],
    ) -> None:
        self.plan = plan
        self._near = near
        self._server = server
        self._disk = disk
        self._send = send
        self._rows = ServerRows(plan.counts, plan.recipe)
        self._events: deque[ServerEvent] = deque()
        self._kept: dict[Slice, SliceState] = {}
        # The first ownership waits here until the ranks have sent the contents.
        self._adopt: Adopt | None = None
        self._first: dict[Slice, SliceState] = {}
        self._machine = ServerState(
            server=server, life=life, rules=plan.rules, disk=disk.snapshots()
        )

    def deadline(self) -> float | None:
        """Return when `Tick` is due; None where nothing is."""
        return self._machine.deadline()

    def feed(self, event: ServerEvent, now: float) -> None:
        """Let the machine have an event, and do what follows."""
        if isinstance(event, Arrived) and isinstance(event.message, Adopt):
            adopt = event.message
            if self._needs_contents(adopt):
                self._adopt = adopt
                self.want()
                return
        self._events.append(event)
        while self._events:
            for action in self._machine.handle(self._events.popleft(), now=now):
                self._act(action)

    def _needs_contents(self, adopt: Adopt) -> bool:
        is_first = adopt.before is None and adopt.ownership.epoch == 1
        owned = set(adopt.ownership.slices_of(self._server))
        is_new = self._machine.epoch == 0 and not self._machine.disk
        return is_first and is_new and not owned <= self._first.keys()

    def want(self) -> None:
        """Ask the ranks for the first contents that are missing."""
        if self._adopt is None:
            return
        asked: dict[int, dict[str, list[int]]] = {}
        for piece in self._adopt.ownership.slices_of(self._server):
            if piece not in self._first:
                of_rank = asked.setdefault(self.plan.suppliers[piece.table], {})
                of_rank.setdefault(piece.table, []).append(piece.index)
        for rank, slices in asked.items():
            self._send((RANK, rank), WantContents(slices=slices), None)

    def take(self, contents: Any, now: float) -> None:
        """Take first contents; with the last of them the ownership begins."""
        if self._adopt is None:
            return
        self._first |= slices_of(contents)
        if not self._needs_contents(self._adopt):
            adopt, self._adopt = self._adopt, None
            self.feed(Arrived(adopt), now)

    def _act(self, action: ServerAction) -> None:
        match action:
            case SendMessage(to=to, message=message, payload=payload):
                self._send(actor_of(to), message, payload)
            case SendRows(message=message, ask=ask):
                self._send((RANK, message.worker), message, self._read(message, ask))
            case ApplyStep(version=version, pushes=pushes):
                self._apply(version, pushes)
            case SaveSnapshot(snapshot=snapshot):
                self._disk.save(snapshot, self._rows.here())
                self._events.append(Saved(snapshot.epoch, snapshot.version))
            case DropSnapshots(which=which):
                self._disk.drop(which)
            case LoadSnapshot(epoch=epoch, version=version):
                self._rows.replace(self._disk.load(epoch, version))
            case KeepSlices(payload=payload):
                self._kept |= slices_of(payload)  # type: ignore[arg-type]
            case SendSlices(asked=asked, message=message):
                here = self._disk.load(asked.base, asked.version)
                lent = contents_of({piece: here[piece] for piece in asked.slices})
                self._send((SERVER, asked.server), message, lent)
            case AssembleSlices():
                self._assemble(action)

    def _apply(self, version: int, pushes: Sequence[tuple[int, Any]]) -> None:
        given = {rank: push_of(payload) for rank, payload in pushes}
        self._rows.apply(list(given.values()))
        for rank, push in given.items():
            self._rows.note(rank, push, version)

    def _assemble(self, action: AssembleSlices) -> None:
        if action.base is None:
            found = self._first
        else:
            here = self._disk.load(action.base, action.ownership.version) if action.own else {}
            found = self._kept | {piece: here[piece] for piece in action.own}
        owned = action.ownership.slices_of(self._server)
        self._rows.replace({piece: found[piece] for piece in owned})
        self._kept, self._first = {}, {}

    def _read(self, message: Rows, ask: Any) -> dict[str, Any]:
        """Return what a pull asks for."""
        rows: dict[str, Any] = {}
        lent: list[torch.Tensor] = []
        region = self._near.memory_for(message.worker)
        for table, ids in (ask or {}).items():
            if isinstance(ids, torch.Tensor):
                found = self._rows.read(table, ids, region.empty if region else None)
                rows[table] = found
                lent.append(found)
            elif isinstance(ids, list):
                rows[table] = self._changed(message, table, ids, region)
                lent.append(rows[table][2])
            elif ids == LENT and region:
                is_live = self.plan.rules.is_sync
                pieces = self._rows.lend(table, region.empty, is_live=is_live)
                rows[table] = {piece.index: each for piece, each in pieces.items()}
                lent.extend(pieces.values())
            else:
                rows[table] = {
                    piece.index: [at_rest.rows, at_rest.state] if ids == STATE else at_rest.rows
                    for piece, at_rest in self._rows.here(table).items()
                }
        self._near.lend(message.worker, message.part, lent if region else [])
        return rows

    def _changed(
        self, message: Rows, table: str, ask: list[torch.Tensor], region: SharedRegion | None
    ) -> list[Any]:
        """Return which rows a rank's cache has as they are, and the others with their state."""
        ids, versions = ask
        fresh = self._rows.are_fresh(table, message.worker, ids, versions, message.version)
        changed = ids[~fresh]
        rows = self._rows.read(table, changed, region.empty if region else None)
        return [message.version, fresh, rows, *self._rows.read_state(table, changed)]


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
        self._connections: dict[int, DataConnection] = {}
        self._session: ServerSession | None = None
        self._head: Head | None = None
        if place.server == 0:
            self._head = Head(ServerDisk(folder / "head"), place.count, self._send_of_head)
        read, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        loop.watch(read, lambda: self._on_store(read))
        self._book = AddressBook(
            master, place.count, self._store_changed, own=(place.server, address)
        )
        self._is_known = False
        # For this process itself: the coordinator and server 0 talk to each other.
        self._inbox: deque[tuple[Packet, Any]] = deque()

    def run(self) -> int:
        """Serve until the process is told to end; return its exit code."""
        self._loop.on_signals([signal.SIGTERM, signal.SIGINT], lambda _: self._loop.stop())
        self._loop.run(self._deadline, self._tick)
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
        if self._is_known or session is None:
            return
        # The ranks are in this session since before this process: it has started again.
        self._is_known = True
        if not session or self._session is not None:
            return
        self._meet()
        plan = self._disk.plan()
        if plan is not None and plan.session == session:
            self._begin(plan)
        if self._head:
            self._head.go_on(session, self._loop.now())
        self._settle()

    def _meet(self) -> None:
        """Connect to all other servers, so that the first words to them are not lost."""
        others = set(self._book.addresses) - {self._place.server}
        connections = [self._connection(server) for server in others]
        until = self._loop.now() + _MEET_SECONDS
        for connection in connections:
            if connection:
                connection.wait_up(max(0, int((until - self._loop.now()) * 1000)))

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
        if self._head and self._head.failure:
            self._loop.stop()

    def _receive(self) -> None:
        for route, parts in self._listener.receive():
            try:
                packet, payload = decode(parts, self._near.regions)
            except ProtocolError:
                continue
            self._routes[packet.sender] = route
            if payload is NOT_HERE:
                self._send(packet.sender, Shared(token=""))
            elif isinstance(packet.word, Share | CanRead):
                if answer := self._near.hear(packet.sender, route, packet.word):
                    self._send(packet.sender, answer)
            else:
                self._deliver(packet, payload)
        self._settle()

    def _deliver(self, packet: Packet, payload: Any) -> None:
        now = self._loop.now()
        if packet.target[0] == HEAD:
            if self._head:
                if isinstance(packet.word, Setup):
                    self._meet()
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
        elif session is None or packet.session != session.plan.session:
            return
        elif isinstance(word, Hail):
            session.want()
        elif isinstance(word, FirstContents):
            session.take(payload, now)
        else:
            session.feed(Arrived(word, payload), now)  # type: ignore[arg-type]

    def _begin(self, plan: SessionPlan) -> None:
        self._near.end_session()
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
        number = 0 if kind == HEAD else number
        if number == self._place.server:  # nothing on the way to oneself is lost
            self._inbox.append((packet, payload))
        elif connection := self._connection(number):
            connection.send(encode(packet, payload))

    def _connection(self, server: int) -> DataConnection | None:
        address = self._book.addresses.get(server)
        known = self._connections.get(server)
        if address is None or (known and known.address == address):
            return known
        if known:
            known.close()
        made = DataConnection(self._context, address, self._secret, self._peers)
        self._connections[server] = made
        return made


def main() -> int:
    """Be the parameter server that the environment names, until told to end."""
    env = environ.current()
    place = environ.servers_place(env)
    master = environ.master(env)
    if place.server < 0 or master is None:
        raise UsageError("a parameter server is started by msrun, with --server-num")
    torch.set_grad_enabled(False)
    loop = Loop()
    directory = place.directory or tempfile.mkdtemp(prefix="msrun-servers-")
    return ServerProcess(place, master, Path(directory), loop).run()


if __name__ == "__main__":
    sys.exit(main())
