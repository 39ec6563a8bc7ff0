"""Servers, workers and a coordinator under a virtual clock: the real machines, and an observer.

`ServerWorld` does what it is told, one input at a time, and knows no chance; `server_faults` tells
it.  A slice is a number that depends on every gradient that was ever added to it, and on their
order; a gradient depends on all rows that its worker saw.  So a push that is lost, added twice, too
late or in another order changes all numbers after it, and one process (`Oracle`) says which they
must be.
"""

from dataclasses import dataclass, field

from server_oracle import Oracle, factor_of, gradients, initial, scaled, stepped, total

from msrun.cluster.servers import coordinator, events, server, worker
from msrun.cluster.servers.messages import Measure, Push, WorkerStep
from msrun.cluster.servers.ownership import Slice, Table
from msrun.cluster.tick import Tick

HEAD = ("head", 0)


class ServersViolationError(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True, kw_only=True)
class ServersBuild:
    """What a world is made of; mutants put something else in one of these places."""

    server: type = server.ServerState
    worker: type = worker.WorkerState
    coordinator: type = coordinator.CoordinatorState
    log: bool = True


@dataclass(slots=True)
class Disk:
    """What outlives the process of a server."""

    snapshots: dict = field(default_factory=dict)
    rows: dict = field(default_factory=dict)


@dataclass(slots=True)
class ServerLife:
    """One life of one server: its machine and its rows."""

    state: object
    rows: dict = field(default_factory=dict)
    kept: dict = field(default_factory=dict)


@dataclass(slots=True)
class WorkerLife:
    """One life of one worker: its machine, and a script that computes."""

    state: object
    values: dict = field(default_factory=dict)
    began: int = -1
    computing: int = 0
    pulls: int = 0
    grads: dict = field(default_factory=dict)
    factors: list = field(default_factory=list)
    has_left: bool = False


class NullDriver:
    """Whom a world tells what its machines ask for; this one does nothing about it."""

    def sent(self, number):
        """A message was sent."""

    def saving(self, rank, life, which):
        """A server writes a snapshot."""

    def computing(self, rank, life, token):
        """A worker computes."""

    def going_on(self, rank, life):
        """The script of a worker goes on with its next step."""

    def woken(self, actor):
        """An actor has to do something at its deadline."""


class ServerWorld:
    """One job.  An input is a method's name and its words; `do` applies it."""

    def __init__(
        self,
        *,
        rules,
        tables,
        servers,
        workers,
        lengths,
        build=None,
        driver=None,
        parts=1,
        rounds=0,
        nodes=1,
    ):
        self.parts, self.rounds, self.nodes = parts, rounds, nodes
        self.rules, self.build = rules, build or ServersBuild()
        self.driver = driver or NullDriver()
        self.tables = tuple(Table(name=n, rows=r, row_bytes=4, slices=s) for n, r, s in tables)
        self.servers, self.workers, self.lengths = tuple(servers), tuple(workers), lengths
        pieces = [Slice(t.name, index) for t in self.tables for index in range(t.slices)]
        self.oracle = Oracle(pieces, lengths, rounds)
        self.now = 0.0
        self.lives = {}
        self.alive = {}
        self.disks = {}
        self.messages = []
        self.decision = None
        self.terms = 0
        self.kills = {"server": 0, "worker": 0, "head": 0}
        self.has_other_workers = False
        self.rollbacks = 0
        self.copied = self.loaded = 0  # how often a server that was killed went on, and from what
        self.given = {}  # clocks that workers were given for pushes that they never made
        self.left = set()
        self.outputs = []

    def require(self, is_kept, promise, *facts):
        if not is_kept:
            raise ServersViolationError(f"{promise} {' '.join(map(str, facts))}".strip())

    def do(self, at, verb, *words):
        self.now = at
        try:
            getattr(self, verb)(*words)
        except ServersViolationError:
            raise
        except Exception as error:
            raise ServersViolationError(f"raised: {error!r}") from error

    # Processes.

    def start(self, kind, rank):
        """Start a process, which finds what its earlier lives left behind."""
        actor = (kind, rank)
        if actor in self.alive:
            return
        life = self.lives[actor] = self.lives.get(actor, -1) + 1
        if kind == "server":
            disk = self.disks.setdefault(rank, Disk())
            state = self.build.server(
                server=rank, life=life, rules=self.rules, disk=list(disk.snapshots.values())
            )
            self.alive[actor] = ServerLife(state)
        elif kind == "worker":
            state = self.build.worker(worker=rank, life=life, rules=self.rules)
            self.alive[actor] = WorkerLife(state)
        else:
            decision = self.decision if self.build.log else None
            self.alive[actor] = self.build.coordinator(
                term=life,
                rules=self.rules,
                tables=self.tables,
                servers=decision.servers if decision else self.servers,
                workers=decision.workers if decision else self.workers,
                decision=decision,
                nodes=self.nodes,
            )
        self.tick(kind, rank)

    def kill(self, kind, rank):
        """Kill a process at once."""
        if self.alive.pop((kind, rank), None) is not None:
            self.kills[kind] += 1

    def machine(self, actor):
        life = self.alive.get(actor)
        return getattr(life, "state", life)

    def deadline(self, actor):
        machine = self.machine(actor)
        return None if machine is None else machine.deadline()

    def tick(self, kind, rank):
        actor = (kind, rank)
        self._tell(actor, Tick())
        due = self.deadline(actor)
        self.require(due is None or due > self.now, "S6 a deadline is not acted on", actor)

    def scale(self, servers, workers):
        """Ask for other servers and workers."""
        self.has_other_workers |= set(workers) != set(self.workers)
        self.servers, self.workers = tuple(servers), tuple(workers)
        self._tell(HEAD, events.Scale(self.servers, self.workers))

    def arrive(self, number):
        """Deliver a message; it may come late, twice or after others."""
        to, message, payload = self.messages[number]
        self._tell(to, events.Arrived(message, payload))

    def saved(self, rank, life, epoch, version):
        """Tell a server that its snapshot is on disk."""
        if self.lives.get(("server", rank)) == life:
            self._tell(("server", rank), events.Saved(epoch, version))

    def computed(self, rank, life, token):
        """Let the script of a worker have its gradients."""
        me = self.alive.get(("worker", rank))
        if me is None or self.lives["worker", rank] != life or me.computing != token:
            return
        if me.pulls < 2 * self.parts - 1:
            self._pull(("worker", rank))
            return
        if not self.rounds:
            self._tell(("worker", rank), events.StepEnds(self.compute(rank, me)))
            return
        if not me.factors:
            me.grads = self.compute(rank, me)
        if len(me.factors) < self.rounds:
            self._tell(("worker", rank), events.StepMeasures(me.grads))
        elif (rank + me.state.clock) % 2:  # the gradients again, or what they are multiplied by
            self._tell(("worker", rank), events.StepEnds(me.grads))
        else:
            self._tell(("worker", rank), events.StepEnds(me.factors[-1], is_commit=True))

    def compute(self, rank, me):
        """Return the gradients of a worker's step."""
        return gradients(rank, me.state.clock, me.values)

    def ask(self, _rank, _clock):
        """Return which rows a worker needs."""
        return "all"

    def _tell(self, actor, event):
        machine = self.machine(actor)
        if machine is None:
            return
        for action in machine.handle(event, now=self.now):
            if self.machine(actor) is not machine:
                return
            getattr(self, f"_{type(action).__name__}")(actor, action)
        self.driver.woken(actor)

    # Actions of all.

    def _SendMessage(self, actor, action):  # noqa: N802 - as the action
        to = {"ToRank": "worker", "ToPeer": "server"}.get(type(action.to).__name__)
        target = (to, action.to.worker if to == "worker" else action.to.server) if to else HEAD
        message, payload = action.message, action.payload
        is_whole = isinstance(message, Measure) or (
            isinstance(message, Push) and not message.is_commit
        )
        if is_whole and payload is not None:
            payload = self.part(payload, self.machine(actor).ownership, target[1])
        if isinstance(message, WorkerStep):
            self._check_safe(self.machine(actor).ownership, message)
        self._post(target, message, payload)

    def part(self, payload, ownership, rank):
        """Return what is for one server."""
        return {piece: payload[piece] for piece in ownership.slices_of(rank)}

    def _check_safe(self, ownership, step):
        """What a worker takes for safe is on all disks."""
        if ownership.epoch < self.decision.ownership.epoch:
            return
        for rank in ownership.servers:
            clocks = [
                each.clocks[step.worker]
                for each in self.disks[rank].snapshots.values()
                if step.worker in each.clocks
            ]
            self.require(max(clocks, default=0) >= step.safe, "S3 not on disk", rank, step)

    def _post(self, target, message, payload):
        self.messages.append((target, message, payload))
        self.outputs.append(f"-> {target[0]} {target[1]} {message!r}")
        self.driver.sent(len(self.messages) - 1)

    def _Unrecoverable(self, actor, action):  # noqa: N802
        promise = "S5 rows are lost for good" if actor == HEAD else "S7 too stale on the wire:"
        raise ServersViolationError(f"{promise} {action.reason}")

    # Actions of servers.

    def _SendRows(self, actor, action):  # noqa: N802
        self._post(("worker", action.message.worker), action.message, dict(self.alive[actor].rows))

    def _SendNorms(self, _actor, action):  # noqa: N802
        self._post(("worker", action.message.worker), action.message, total(dict(action.pushes)))

    def _SendSlices(self, actor, action):  # noqa: N802
        asked = action.asked
        rows = self.disks[actor[1]].rows[asked.base, asked.version]
        self._post(
            ("server", asked.server), action.message, {piece: rows[piece] for piece in asked.slices}
        )

    def _ApplyStep(self, actor, action):  # noqa: N802
        life = self.alive[actor]
        pushes = []
        for rank, part in action.pushes:
            if isinstance(part, events.Committed):
                part = scaled(part.gradients, part.commit)  # noqa: PLW2901
            pushes.append((rank, part))
            self.require(part.keys() == life.rows.keys(), "S2 a push for other slices", actor, rank)
        for piece, (value, before) in life.rows.items():
            terms = [(rank, part[piece]) for rank, part in pushes]
            counts = dict(before)
            for rank, _ in terms:
                counts[rank] = counts.get(rank, 0) + 1
            life.rows[piece] = (stepped(value, action.version, terms), counts)

    def _SendCopies(self, actor, action):  # noqa: N802
        asked, rows = action.asked, self.alive[actor].rows
        self._post(
            ("server", asked.server),
            action.message,
            {p: rows[p] for p in asked.slices if p in rows},
        )

    def _TakeCopies(self, actor, _action):  # noqa: N802
        life = self.alive[actor]
        life.rows, life.kept = life.kept, {}
        held = set(life.state.ownership.slices_of(actor[1]))
        self.require(life.rows.keys() == held, "S4 rows are lost on the way", held)
        self.copied += 1

    def _LoadSnapshot(self, actor, action):  # noqa: N802
        self.alive[actor].kept = {}
        self.loaded += self.machine(actor).version > 0
        self.alive[actor].rows = dict(self.disks[actor[1]].rows[action.epoch, action.version])

    def _KeepSlices(self, actor, action):  # noqa: N802
        self.alive[actor].kept |= action.payload

    def _AssembleSlices(self, actor, action):  # noqa: N802
        life, ownership = self.alive[actor], action.ownership
        if action.base is None:
            rows = {piece: (initial(piece), {}) for piece in ownership.slices_of(actor[1])}
        else:
            disk = self.disks[actor[1]].rows.get((action.base, ownership.version), {})
            rows = {piece: disk[piece] for piece in action.own} | life.kept
        life.kept = {}
        owned = set(ownership.slices_of(actor[1]))
        self.require(rows.keys() == owned, "S4 rows are lost on the way", owned - rows.keys())
        life.rows = rows

    def _SaveSnapshot(self, actor, action):  # noqa: N802
        snapshot = action.snapshot
        rows = dict(self.alive[actor].rows)
        which = (snapshot.epoch, snapshot.version)
        self.driver.saving(actor[1], self.lives[actor], (which, snapshot, rows))

    def write(self, rank, life, which, snapshot, rows):
        """Let a snapshot be on disk, unless its server was killed before."""
        if ("server", rank) in self.alive and self.lives["server", rank] == life:
            disk = self.disks[rank]
            disk.snapshots[which], disk.rows[which] = snapshot, rows

    def _DropSnapshots(self, actor, action):  # noqa: N802
        disk = self.disks[actor[1]]
        for which in action.which:
            disk.snapshots.pop(which, None)
            disk.rows.pop(which, None)

    # Actions of workers.

    def _DeliverRows(self, actor, action):  # noqa: N802
        me = self.alive[actor]
        rows = {piece: row for part in action.rows.values() for piece, row in part.items()}
        me.values = {piece: value for piece, (value, _) in rows.items()}
        if self.rules.is_sync:
            is_right = me.values == self.oracle.at(action.clock)
            self.require(is_right, "S1 rows of another curve", actor, action.clock)
        else:
            self._check_stale(actor, action.clock, rows)
        me.factors = []
        me.computing += 1
        self.driver.computing(actor[1], self.lives[actor], me.computing)

    def _DeliverNorms(self, actor, action):  # noqa: N802
        me = self.alive[actor]
        self.require(not action.absent, "S10 a worker that measures is taken for absent", action)
        norms = {piece: each for part in action.norms.values() for piece, each in part.items()}
        self.require(norms.keys() == me.values.keys(), "S10 norms of a part of all rows", norms)
        me.factors.append(factor_of(norms))
        if len(me.factors) < self.rounds or (actor[1] + me.state.clock) % 2:
            me.grads = scaled(me.grads, me.factors[-1])
        me.computing += 1
        self.driver.computing(actor[1], self.lives[actor], me.computing)

    def _check_stale(self, actor, clock, rows):
        workers = self.machine(actor).ownership.workers
        going = [rank for rank in workers if rank not in self.left]
        if self.kills["worker"] or self.rollbacks:
            return
        for piece, (_, counts) in rows.items():
            for rank in going:
                count = counts.get(rank, 0) + self.given.get(rank, 0)
                is_fresh = clock - count <= self.rules.staleness or count >= self.lengths[rank]
                self.require(is_fresh, "S7 too stale", actor, clock, piece, counts)
                self.require(count <= self._end_of(rank), "S2 a push counts twice", counts)

    def _end_of(self, rank):
        return max(self.lengths[rank], self.given.get(rank, 0))

    def _StepDone(self, actor, _action):  # noqa: N802
        self.driver.going_on(actor[1], self.lives[actor])

    def _BeginAt(self, actor, action):  # noqa: N802
        me = self.alive[actor]
        is_first = me.began < 0
        # Gradients of other workers are not replayed: what a killed server lost is done again.
        is_replayed = not (self.kills["server"] and self.has_other_workers)
        # Norms of the gradients of other workers do not count.
        is_measured = self.rounds and self.has_other_workers
        is_needed = is_first or self.kills["worker"] or not is_replayed or is_measured
        self.require(is_needed, "S8 steps are undone for nothing", actor)
        me.began, me.computing = action.clock, me.computing + 1
        self.driver.going_on(actor[1], self.lives[actor])

    def go_on(self, rank, life):
        """Let the script of a worker go on with its next step, or end."""
        actor = ("worker", rank)
        if actor in self.alive and self.lives[actor] == life:
            clock = self.alive[actor].state.clock
            is_over = clock >= self.lengths[rank]
            if is_over:
                self._tell(actor, events.Finished())
                return
            self.alive[actor].pulls = 0
            for _ in range(self.parts):  # each takes the place of the one before it
                self._pull(actor)

    def _pull(self, actor):
        me = self.alive[actor]
        me.pulls += 1
        self._tell(actor, events.StepBegins(self.ask(actor[1], me.state.clock)))

    def _WorkerLeft(self, actor, _action):  # noqa: N802
        self.alive[actor].has_left = True
        self.left.add(actor[1])

    # Actions of the coordinator.

    def _WriteDecision(self, _actor, action):  # noqa: N802
        before, self.decision = self.decision, action.decision
        ownership = self.decision.ownership
        if before and ownership.epoch == before.ownership.epoch:
            return
        self.outputs.append(f"decided {ownership!r}")
        if before:
            is_same = before.ownership.workers == ownership.workers and before.pool == (
                self.decision.pool
            )
            self.rollbacks += is_same
            both = self.kills["worker"] and self.kills["server"]
            self.require(not is_same or both, "S8 steps are undone for nothing")
            fresh = set(ownership.workers) - set(before.ownership.workers)
            self.given |= {rank: ownership.clocks[rank] for rank in fresh}
        self.oracle.decide(ownership.version, ownership.workers)

    def _ServersReleased(self, _actor, action):  # noqa: N802
        for rank in action.servers:
            self.alive.pop(("server", rank), None)

    # The end.

    def rest(self):
        """Let nothing happen any more: everything is done, and on disk."""
        ownership = self.decision.ownership
        waiting = [rank for rank in ownership.workers if rank not in self.left]
        self.require(not waiting, "S6 workers wait for ever", waiting)
        found = {}
        for rank in ownership.servers:
            disk = self.disks[rank]
            which = max(each for each in disk.snapshots if each[0] == ownership.epoch)
            for piece, row in disk.rows[which].items():
                self.require(found.setdefault(piece, row) == row, "S9 a copy is another", piece)
        end = max(self.lengths[rank] for rank in ownership.workers)
        if self.rules.is_sync:
            values = {piece: value for piece, (value, _) in found.items()}
            self.require(values == self.oracle.at(end), "S1 other weights at the end")
        elif not self.kills["worker"]:
            for piece, (_, counts) in found.items():
                for rank in ownership.workers:
                    count = counts.get(rank, 0) + self.given.get(rank, 0)
                    self.require(count == self._end_of(rank), "S2 a push is lost", piece, counts)
