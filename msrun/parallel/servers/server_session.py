"""What a server holds in one session: its machine, its rows, and what it still waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from msrun.cluster.servers.events import (
    ApplyStep,
    Arrived,
    AssembleSlices,
    DropSnapshots,
    KeepSlices,
    LoadSnapshot,
    Saved,
    SaveSnapshot,
    SendCopies,
    SendMessage,
    SendNorms,
    SendRows,
    SendSlices,
    ServerAction,
    ServerEvent,
    TakeCopies,
)
from msrun.cluster.servers.messages import Adopt, FetchSlices, FromPeer, Header, Norms, Rows
from msrun.cluster.servers.ownership import Slice
from msrun.cluster.servers.server import ServerPhase, ServerState
from msrun.cluster.tick import Tick
from msrun.errors import MsrunError
from msrun.parallel.servers.disk import ServerDisk, contents_of, slices_of
from msrun.parallel.servers.first_rows.filling import Filling
from msrun.parallel.servers.rows import ServerRows, SliceState, push_of, trim
from msrun.parallel.servers.shared_memory import SharedRegion
from msrun.parallel.servers.sharing import NearRanks
from msrun.parallel.servers.wire import (
    RANK,
    SERVER,
    Actor,
    JobEnds,
    SessionPlan,
    WantContents,
    actor_of,
)

# What a pull asks of a table beside rows by their numbers: all rows, and with them the state.  A
# mapping asks for the state of rows `ids`: of one key, or with "" of all.
WHOLE = "whole"
STATE = "state"
# As `WHOLE`, until the rank's next pull: on one node it may be the live rows of a sync server.
LENT = "lent"
_SIGN_SECONDS = 5.0


def _say(text: str) -> None:
    """Tell the log of this server."""
    print(f"msrun: this server {text}", flush=True)  # noqa: T201 - its log


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
        # What makes contents that no rank has, and when ranks are to hear that it goes on.
        self._filling: Filling | None = None
        self._sign_due = 0.0
        # Large parts of memory were freed, or are once this event is over.
        self._has_garbage = False
        # Rank -> the latest that it said before this server could answer, so that it need not say
        # it again.
        self._early: dict[int, Arrived] = {}
        # The measurement that was answered last, and its answer.
        self._norms: tuple[tuple[float, ...], dict[str, float]] = ((), {})
        self._machine = ServerState(
            server=server,
            life=life,
            rules=plan.rules,
            disk=disk.snapshots(),
            traffic=self._rows.traffic,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of rows and optimizer state."""
        return self._rows.nbytes

    def deadline(self) -> float | None:
        """Return when `Tick` is due; None where nothing is."""
        return 0.0 if self._filling else self._machine.deadline()

    def tidy(self) -> None:
        """Give back memory, before the next event."""
        if self._has_garbage:
            self._has_garbage = False
            trim()

    def feed(self, event: ServerEvent, now: float) -> None:
        """Let the machine have an event, and do what follows."""
        if isinstance(event, Arrived) and isinstance(event.message, Adopt):
            adopt = event.message
            if self._needs_contents(adopt):
                self._adopt = adopt
                self.want()
                self._begin_filling(adopt, now)
                return
        match event:
            case Arrived(message=FromPeer(worker=worker)) if not self._is_open:
                self._early[worker] = event
                return
            case Tick() if self._filling:
                self._fill(now)
        self._events.append(event)
        while self._events:
            for action in self._machine.handle(self._events.popleft(), now=now):
                self._act(action)
            if self._early and self._is_open and not self._events:
                self._events.extend(self._early.values())
                self._early.clear()

    @property
    def _is_open(self) -> bool:
        """Whether the machine listens to ranks."""
        return self._machine.phase in {ServerPhase.SERVING, ServerPhase.FROZEN}

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
            if piece not in self._first and piece.table not in self.plan.sources:
                of_rank = asked.setdefault(self.plan.suppliers[piece.table], {})
                of_rank.setdefault(piece.table, []).append(piece.index)
        for rank, slices in asked.items():
            self._send((RANK, rank), WantContents(slices=slices), None)

    def take(self, contents: Any, now: float) -> None:
        """Take first contents of a rank; with the last of them the ownership begins."""
        if self._adopt is not None:
            self._first |= slices_of(contents)
            self._adopt_if_ready(now)

    def _adopt_if_ready(self, now: float) -> None:
        if self._adopt and not self._needs_contents(self._adopt):
            adopt, self._adopt = self._adopt, None
            self.feed(Arrived(adopt), now)

    def _begin_filling(self, adopt: Adopt, now: float) -> None:
        """Begin to make what no rank has, unless that is so."""
        owned = adopt.ownership.slices_of(self._server)
        wanted = [p for p in owned if p.table in self.plan.sources and p not in self._first]
        if wanted and self._filling is None:
            _say(f"makes {len(wanted)} slices of tables that no rank has")
            self._filling = Filling(self.plan.sources, self.plan.counts, wanted)
            self._sign_due = now + _SIGN_SECONDS

    def _fill(self, now: float) -> None:
        """Make a block of what no rank has."""
        filling = self._filling
        if filling is None:
            return
        try:
            is_done = filling.advance()
        except MsrunError as error:
            self._filling = None
            _say(f"cannot go on: {error}")
            for rank in range(self.plan.workers):
                self._send((RANK, rank), JobEnds(reason=str(error)), None)
            return
        if is_done:
            self._first |= filling.slices
            filling.slices.clear()  # so that each slice is freed once the machine has it
            self._filling = None
            self._adopt_if_ready(now)
            if self._adopt:  # another one than when it began
                self._begin_filling(self._adopt, now)
        elif now >= self._sign_due:  # ranks give up a server that says nothing for long
            self._sign_due = now + _SIGN_SECONDS
            for rank in range(self.plan.workers):
                self._send((RANK, rank), WantContents(slices={}), None)

    def end(self) -> None:
        """Give up, and have no memory any more: another session follows."""
        if self._filling:
            self._filling.close()
        self._filling, self._adopt = None, None
        self._kept, self._first = {}, {}
        self._rows.replace({})
        trim()

    def _act(self, action: ServerAction) -> None:
        match action:
            case SendMessage(to=to, message=message, payload=payload):
                self._send(actor_of(to), message, payload)
            case SendRows(message=message, ask=ask):
                self._send((RANK, message.worker), message, self._read(message, ask))
            case SendNorms(message=message, pushes=pushes):
                self._send((RANK, message.worker), message, self._norms_of(message, pushes))
            case ApplyStep(version=version, pushes=pushes):
                self._apply(version, pushes)
            case SaveSnapshot(snapshot=snapshot):
                self._disk.save(snapshot, self._rows.here())
                self._has_garbage = True
                self._events.append(Saved(snapshot.epoch, snapshot.version))
            case DropSnapshots(which=which):
                self._disk.drop(which)
            case SendSlices() | SendCopies():
                self._lend(action)
            case _:
                self._replace(action)

    def _lend(self, action: SendSlices | SendCopies) -> None:
        """Send slices to another server, of a snapshot or as they are."""
        asked = action.asked
        if isinstance(asked, FetchSlices):
            here = self._disk.load(asked.base, asked.version)
            lent = {piece: here[piece] for piece in asked.slices}
        else:
            lent = {piece: self._rows.copy(piece) for piece in asked.slices}
        self._send((SERVER, asked.server), action.message, contents_of(lent))

    def _replace(self, action: ServerAction) -> None:
        """Have other contents, or a part of those to come."""
        match action:
            case KeepSlices(payload=payload):
                self._kept |= slices_of(payload)  # type: ignore[arg-type]
            case LoadSnapshot(epoch=epoch, version=version):
                self._kept, self._has_garbage = {}, True
                self._rows.replace(self._disk.load(epoch, version))
                _say(f"goes on from its snapshot of step {version}")
            case TakeCopies():
                kept, self._kept, self._has_garbage = self._kept, {}, True
                self._rows.replace(kept)
                _say(f"goes on with copies of step {self._machine.version}")
            case AssembleSlices():
                self._assemble(action)

    def _apply(self, version: int, pushes: Sequence[tuple[int, Any]]) -> None:
        given = {rank: push_of(payload) for rank, payload in pushes}
        self._rows.apply(list(given.values()))
        for rank, push in given.items():
            self._rows.note(rank, push, version)

    def _norms_of(self, message: Norms, pushes: Sequence[tuple[int, Any]]) -> dict[str, float]:
        """Return the powers of the slices that this server owns; each rank asks for the same."""
        order = float(dict(pushes)[message.worker]["order"])
        which = (message.epoch, message.asked, message.round, order)
        if self._norms[0] != which:
            own = [piece for table in self.plan.counts for piece in self._own(table)]
            given = [push_of(payload) for _, payload in pushes]
            self._norms = (which, self._rows.powers(given, order, own))
        return self._norms[1]

    def _assemble(self, action: AssembleSlices) -> None:
        if action.base is None:
            found = self._first
        else:
            here = self._disk.load(action.base, action.ownership.version) if action.own else {}
            found = self._kept | {piece: here[piece] for piece in action.own}
        owned = {piece: found[piece] for piece in action.ownership.slices_of(self._server)}
        found.clear()
        self._kept, self._first = {}, {}
        self._rows.replace(owned)
        self._has_garbage = True

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
            elif isinstance(ids, dict):
                state, of_all = self._rows.read_state(table, ids["ids"])
                rows[table] = state[ids["state"]] if ids["state"] else [state, of_all]
            elif isinstance(ids, list):
                rows[table] = self._changed(message, table, ids, region)
                lent.append(rows[table][2])
            elif ids == LENT and region:
                is_live = self.plan.rules.is_sync
                pieces = self._rows.lend(self._own(table), region.empty, is_live=is_live)
                rows[table] = {piece.index: each for piece, each in pieces.items()}
                lent.extend(pieces.values())
            else:
                here = {piece: self._rows.here(table)[piece] for piece in self._own(table)}
                for piece, at_rest in here.items():
                    self._rows.count_bytes(piece, at_rest.rows)
                rows[table] = {
                    piece.index: [at_rest.rows, at_rest.state] if ids == STATE else at_rest.rows
                    for piece, at_rest in here.items()
                }
        self._near.lend(message.worker, message.part, lent if region else [])
        return rows

    def _own(self, table: str) -> list[Slice]:
        """Return the slices of a table that this server owns, and not those it has copies of."""
        owner = self._machine.ownership
        return [
            piece
            for piece in self._rows.here(table)
            if owner is None or owner.owner_of(piece) == self._server
        ]

    def _changed(
        self, message: Rows, table: str, ask: list[torch.Tensor], region: SharedRegion | None
    ) -> list[Any]:
        """Return which rows a rank's cache has as they are, and the others with their state."""
        ids, versions = ask
        fresh = self._rows.are_fresh(table, message.worker, ids, versions, message.version)
        changed = ids[~fresh]
        rows = self._rows.read(table, changed, region.empty if region else None)
        return [message.version, fresh, rows, *self._rows.read_state(table, changed)]
