"""A rank's connections to the parameter servers: a thread drives the machine of a worker.

The script pulls and pushes; the thread sends, sends again, and votes.  A step of the servers is
done when each rank's next pull says that all servers have its push (decision 0045).  The thread
says so as soon as it is true, with a pull of nothing: so no rank waits for another that evaluates,
saves or has ended its loop.  The script's own pull takes the place of that one, or follows it.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from msrun.cluster.servers.events import (
    Arrived,
    BeginAt,
    DeliverNorms,
    DeliverRows,
    Finished,
    Reconnected,
    SendMessage,
    StepBegins,
    StepEnds,
    StepMeasures,
    Unrecoverable,
    WorkerAction,
    WorkerEvent,
    WorkerLeft,
)
from msrun.cluster.servers.messages import AskOwnership, Measure, Pull, Push
from msrun.cluster.servers.worker import WorkerPhase, WorkerState
from msrun.cluster.tick import Tick
from msrun.environ import ServersPlace
from msrun.errors import MsrunError, ProtocolError, RanksDisagreeError
from msrun.parallel.servers.addresses import AddressBook, read_key
from msrun.parallel.servers.outgoing import Commit, OutgoingPush
from msrun.parallel.servers.routing import divided_ask
from msrun.parallel.servers.sharing import NearServers
from msrun.parallel.servers.wire import (
    HEAD,
    NOT_HERE,
    RANK,
    SERVER,
    Actor,
    FirstContents,
    Hail,
    JobEnds,
    Packet,
    SessionPlan,
    Setup,
    Shared,
    WantContents,
    Word,
    actor_of,
    decode,
    encode,
)
from msrun.transport.data_sockets import ConnectionPoll, DataConnection
from msrun.transport.loop import Loop, new_context

_GREET_SECONDS = 0.02
# A server without a connection for that long may have been killed since the store named it.
_LATE_SECONDS = 0.2
# Between two looks for a server that was killed: longer where more ranks look into one store.
_SEARCH_SECONDS, _SEARCH_SECONDS_A_RANK = 0.02, 1e-4
_WORRY_SECONDS = 10.0
_SILENT_SECONDS = 600.0
_LEAVE_SECONDS = 60.0
_MEMORY_HINT = "use fewer rows at once, or give the process more memory (ulimit -d, its container)"
_SERVER_MEMORY_HINT = (
    "start more servers (--server-num), or give them more memory (ulimit -d, their container)"
)
# Where a script may ask for something.
_READY = frozenset({WorkerPhase.IDLE, WorkerPhase.PULLING, WorkerPhase.COMPUTING})

Owners = Mapping[str, list[int]]
# Table and numbers of its slices -> what a server begins with.
Supply = Callable[[str, list[int]], dict[int, list[Any]]]


class PulledRows:
    """What all servers sent for one pull, and who owned what then.

    It is the rank's until its next pull or push: servers of this node lend their memory for it.
    """

    def __init__(self, owners: Owners, parts: Mapping[int, Any]) -> None:
        self.owners = owners
        self._parts = parts

    def rows(self, table: str) -> dict[int, Tensor]:
        """Return the rows of a table, by server."""
        return {server: part[table] for server, part in self._parts.items() if table in part}

    def slices(self, table: str) -> dict[int, Any]:
        """Return what was asked of whole slices of a table, by their numbers."""
        return {
            index: piece
            for part in self._parts.values()
            for index, piece in part.get(table, {}).items()
        }


class ServersClient:
    """The end of one rank.

    Args:
        place: Where the servers of the job are.
        master: Host and port of the store.
        rank: This rank.
        shares: Whether it shares memory with servers of its node.
    """

    def __init__(
        self, place: ServersPlace, master: tuple[str, int], rank: int, *, shares: bool
    ) -> None:
        self._place = place
        self._rank = rank
        self._secret = read_key(place.directory)
        self._peers = place.count + place.ranks
        self._near = NearServers(is_wanted=shares)
        # Makes tensors that servers of this node read in place.
        self.empty = self._near.empty
        self._context = new_context()
        self._poll = ConnectionPoll()
        self._connections: dict[int, DataConnection] = {}
        self._plan: SessionPlan | None = None
        self._machine: WorkerState | None = None
        self._supply: Supply | None = None
        self._greeted: set[int] = set()
        self._greet_due = self._late_at = 0.0
        self._has_way = False
        self._commands: deque[tuple[str, Any]] = deque()
        self._is_asked = False
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._split: tuple[object, int, dict[int, Any]] = (None, 0, {})
        self._broken: set[int] = set()
        self._heard: dict[int, float] = {}
        self._has_begun = self._is_over = False
        self._has_left = threading.Event()
        self.failure: MsrunError | None = None
        self._book = AddressBook(master, place.count, self._poll.wake)
        self._thread = threading.Thread(target=self._run, name="msrun-servers", daemon=True)
        self._thread.start()

    # For the script.

    def begin(self, plan: SessionPlan, supply: Supply) -> None:
        """Begin a session; `supply` gives first contents, in the thread, until all have theirs."""
        self._command("begin", (plan, supply))
        if self._rank == 0:
            self._book.announce(plan.session)

    def pull(self, ask: Mapping[str, Any]) -> PulledRows:
        """Return rows as they are now.

        Args:
            ask: Table -> row numbers; these and the versions that a cache has; a mapping for the
                state of rows; or a word for whole slices: see `server_session`.

        Raises:
            MsrunError: The servers cannot go on, or are silent for long.
        """
        self.ask(ask)
        found: PulledRows = self.answer()
        return found

    def ask(self, ask: Mapping[str, Any]) -> None:
        """Ask as `pull` does, and return at once; `answer` has what comes."""
        self._command("pull", ask)

    def measure(self, gradients: OutgoingPush) -> list[dict[str, float]]:
        """Return of each server, by table, the `power_of` the sum of all ranks' gradients.

        Raises:
            MsrunError: As `pull`; or another rank does not measure in this step.
        """
        self._command("measure", gradients)
        found: Any = self.answer()
        return list(found)

    def push(self, gradients: OutgoingPush | Commit) -> None:
        """Send the gradients of this step, and return at once; they must not change any more.

        Raises:
            MsrunError: As `pull`.
        """
        if self.failure is not None:
            raise self.failure
        self._command("push", gradients)

    def leave(self) -> bool:
        """Do no further step; return whether the servers have all of this rank's on disk."""
        if self.failure is not None or self._plan is None or not self._thread.is_alive():
            return False
        self._command("leave", None)
        return self._has_left.wait(_LEAVE_SECONDS)

    def close(self) -> None:
        """End the thread."""
        self._is_over = True
        self._poll.wake()
        self._thread.join(_LEAVE_SECONDS)
        self._book.close()

    def _command(self, name: str, words: Any) -> None:
        self._commands.append((name, words))
        self._poll.wake()

    def answer(self) -> Any:
        """Return the answer to the oldest `ask`: `PulledRows`.

        Raises:
            MsrunError: As `pull`.
        """
        has_told = False
        since = Loop.now()
        while True:
            if self.failure is not None:
                raise self.failure
            try:
                answer = self._answers.get(timeout=1.0)
            except queue.Empty:
                silent = self._silent(since)
                if silent and not has_told:
                    has_told = True
                    names = ", ".join(map(str, silent))
                    text = f"msrun: rank {self._rank} waits for parameter server {names}"
                    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a person waits too
                continue
            if isinstance(answer, MsrunError):
                raise answer
            return answer

    def _silent(self, since: float) -> list[int]:
        """Return the servers that have said nothing for a while.

        Raises:
            MsrunError: One has said nothing for very long.
        """
        now = Loop.now()
        heard = {n: max(since, self._heard.get(n, 0.0)) for n in range(self._book.total)}
        for server, at in heard.items():
            if now - at > _SILENT_SECONDS:
                text = f"parameter server {server} said nothing for {_SILENT_SECONDS:.0f} s"
                raise MsrunError(text, hint="look at its log, and at the verdict of the job")
        return [server for server, at in heard.items() if now - at > _WORRY_SECONDS]

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._poll.wait(self._deadline())
                for server in list(self._connections):
                    self._receive(server)
                self._connect()
                self._look()
                self._obey()
                self._greet()
                self._feed(Tick())
        except Exception as error:  # noqa: BLE001 - the script raises it
            self._fail(MsrunError(f"the connection to the parameter servers ended: {error!r}"))
        for connection in self._connections.values():
            connection.close()

    def _fail(self, error: MsrunError) -> None:
        self.failure = error
        self._answers.put(error)
        self._has_left.set()

    def _deadline(self) -> float | None:
        if self._machine is None:
            return None
        if self._broken:
            return Loop.now() + _SEARCH_SECONDS + _SEARCH_SECONDS_A_RANK * self._place.ranks
        due = self._machine.deadline() if self._has_way else None
        if self._machine.ownership is None:
            due = min(self._greet_due, self._greet_due if due is None else due)
        return due

    def _connect(self) -> None:
        """Connect to servers whose addresses are new."""
        for server, address in self._book.addresses.items():
            known = self._connections.get(server)
            if known and known.address == address:
                continue
            if known:
                self._poll.forget(known)
                known.close()
            made = DataConnection(self._context, address, self._secret, self._peers)
            self._connections[server] = made
            self._poll.watch(made)
            self._greeted.discard(server)
        for server in [server for server in self._connections if server >= self._book.total]:
            ended = self._connections.pop(server)  # after `msrun scale`
            self._poll.forget(ended)
            ended.close()
            self._broken.discard(server)

    def _look(self) -> None:
        """Look for the new addresses of servers whose connections broke."""
        for server, connection in self._connections.items():
            if connection.changed():
                (self._broken.discard if connection.is_up else self._broken.add)(server)
                if connection.is_up:
                    self._share(server)
                    self._feed(Reconnected(server))
            if connection.has_given_up() and self.failure is None:
                text = f"rank {self._rank} has no memory for what parameter server {server} sends"
                self._fail(MsrunError(text, hint=_MEMORY_HINT))
            if (nbytes := connection.refused_bytes()) and self.failure is None:
                text = f"parameter server {server} takes no message of {nbytes} bytes: it ends its "
                text += f"connection each time that rank {self._rank} sends it"
                self._fail(MsrunError(text, hint=_SERVER_MEMORY_HINT))
        if self._broken:
            self._book.search()

    def _share(self, server: int) -> None:
        if offer := self._near.offer(server):
            self._post((SERVER, server), offer)

    def _receive(self, server: int) -> None:
        for parts in self._connections[server].receive():
            try:
                packet, payload = decode(parts, self._near.regions)
            except ProtocolError:
                continue
            plan, word = self._plan, packet.word
            if isinstance(word, Shared) and word.token:
                if answer := self._near.hear(server, word):
                    self._post((SERVER, server), answer)
                continue
            if payload is NOT_HERE or isinstance(word, Shared):
                self._share(server)
                self._feed(Reconnected(server))  # that message is lost
                continue
            if plan is None or packet.session != plan.session:
                continue
            self._heard[server] = Loop.now()
            if isinstance(word, JobEnds):
                self._fail(MsrunError(f"the parameter servers cannot go on: {word.reason}"))
            elif isinstance(word, WantContents):
                self._give(packet.sender, word)
            else:
                self._feed(Arrived(word, payload))  # type: ignore[arg-type]

    def _give(self, server: Actor, word: WantContents) -> None:
        if supply := self._supply:
            payload = {table: supply(table, pieces) for table, pieces in word.slices.items()}
            self._post(server, FirstContents(), payload)
        elif self._has_begun:  # a server asks only as long as it never had any
            text = f"parameter server {server[1]} started again without what it had on its disk"
            hint = "ranks that start again (--max-restarts) go on from a checkpoint: rt.resume"
            self._fail(MsrunError(text, hint=hint))

    def _obey(self) -> None:
        """Do what the script asks for, as far as the machine is ready for it."""
        while self._commands:
            name, words = self._commands[0]
            if name == "begin":
                self._start(*words)
            elif not self._do(name, words):
                break
            self._commands.popleft()
        machine = self._machine
        if machine and machine.phase is WorkerPhase.IDLE:
            self._feed(StepBegins({}))

    def _start(self, plan: SessionPlan, supply: Supply) -> None:
        self._plan, self._supply = plan, supply
        self._machine = WorkerState(worker=self._rank, life=0, rules=plan.rules)
        self._has_begun = self._has_way = False
        self._greeted.clear()
        self._greet_due, self._late_at = 0.0, Loop.now() + _LATE_SECONDS

    def _do(self, name: str, words: Any) -> bool:
        """Return whether a command could be done."""
        machine = self._machine
        if machine is None:
            return False
        is_ready = machine.phase in _READY
        match name:
            case "pull" if is_ready and not self._is_asked:
                self._is_asked = True
                self._feed(StepBegins(words))
            case "push" if machine.phase is WorkerPhase.COMPUTING and not self._is_asked:
                self._feed(StepEnds(words, is_commit=isinstance(words, Commit)))
            case "measure" if machine.phase is WorkerPhase.COMPUTING and not self._is_asked:
                self._is_asked = True
                self._feed(StepMeasures(words))
            case "leave" if is_ready and not self._is_asked:
                self._feed(Finished())
            case _:
                return False
        return True

    def _greet(self) -> None:
        """Let all servers know this rank, and rank 0 tell the coordinator what it wants."""
        plan, machine = self._plan, self._machine
        now = Loop.now()
        if plan is None or machine is None or machine.ownership or now < self._greet_due:
            return
        everyone = set(range(self._book.total))
        waiting = everyone - self._greeted
        for server in waiting:
            is_told = self._post((SERVER, server), Hail())
            if server == 0 and is_told and self._rank == 0:
                is_told = self._post((HEAD, 0), Setup(plan=plan))
            self._has_way |= server == 0 and is_told
            if is_told:
                self._greeted.add(server)
        if not self._greeted >= everyone:
            self._greet_due = now + _GREET_SECONDS
            if now >= self._late_at:
                self._late_at = now + _LATE_SECONDS
                self._book.search()
        else:  # again, until there is an ownership
            self._greeted.clear()
            self._greet_due = now + plan.rules.retry
            self._book.search()

    def _feed(self, event: WorkerEvent) -> None:
        machine = self._machine
        if machine is None or not self._has_way:
            return
        events, before = deque([event]), (machine.phase, self._is_asked)
        while events:
            for action in machine.handle(events.popleft(), now=Loop.now()):
                self._act(machine, action)
            if machine.phase is WorkerPhase.IDLE and not self._commands:
                events.append(StepBegins({}))
        # Else a command that has to wait would keep this thread awake.
        if self._commands and (machine.phase, self._is_asked) != before:
            self._poll.wake()

    def _act(self, machine: WorkerState, action: WorkerAction) -> None:
        match action:
            case SendMessage(to=to, message=message, payload=payload):
                if isinstance(message, Pull | Push | Measure) and payload is not None:
                    payload = self._part(machine, payload, actor_of(to)[1])
                self._post(actor_of(to), message, payload)  # type: ignore[arg-type]
                if isinstance(message, AskOwnership):  # something was silent
                    self._book.search()
            case DeliverRows(rows=rows):
                self._deliver(machine, rows)
            case Unrecoverable(reason=reason):
                self._fail(ProtocolError(f"parameter {reason}"))
            case DeliverNorms(norms=norms, absent=absent):
                self._is_asked = False
                self._answers.put(self._disagreement(absent[0]) if absent else list(norms.values()))
            case BeginAt():
                if self._has_begun:
                    self._fail(MsrunError("the parameter servers went back to earlier steps"))
                self._has_begun, self._supply = True, None
            case WorkerLeft():
                self._has_left.set()

    def _deliver(self, machine: WorkerState, rows: Mapping[int, Any]) -> None:
        for connection in self._connections.values():
            connection.progress()
        if self._is_asked and machine.ownership:
            self._is_asked = False
            self._answers.put(PulledRows(machine.ownership.owners, rows))

    def _disagreement(self, other: int) -> MsrunError:
        return RanksDisagreeError(
            f"parallel.servers: rank {self._rank} takes a norm of gradients, and rank {other} has "
            "done this step without it",
            hint="all ranks take it together: clip on every rank, or on none",
        )

    def _part(self, machine: WorkerState, payload: Any, server: int) -> Any:
        """Return what of a pull or a push is for one server."""
        ownership = machine.ownership
        if ownership is None:
            return {}
        if isinstance(payload, OutgoingPush | Commit):
            return payload.part(server, ownership)
        known, epoch, parts = self._split
        if known is not payload or epoch != machine.epoch:
            parts = divided_ask(payload, ownership.owners)
            self._split = (payload, machine.epoch, parts)
        return parts.get(server, {})

    def _post(self, to: Actor, word: Word, payload: Any = None) -> bool:
        kind, number = to
        connection = self._connections.get(0 if kind == HEAD else number)
        session = self._plan.session if self._plan else ""
        packet = Packet(session=session, sender=(RANK, self._rank), target=to, word=word)
        if connection is None:  # one that came with a new ownership
            self._book.search()
            return False
        return connection.send(encode(packet, payload, self._near.region_for(number)))
