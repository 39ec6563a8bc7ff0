"""The state machine of a worker's side of the parameter servers.  It does no IO and knows no row.

Phases: JOINING -> GREETING -> IDLE -> PULLING -> COMPUTING <-> MEASURING, COMPUTING -> PUSHING ->
IDLE ... -> LEAVING -> LEFT; LOST where a server has lost what this worker cannot send again.

The machine looks at what each server lacks (`_wanted`) and sends that, again and again until it is
there.  So a lost answer, a server that was killed and a new ownership all need no case of their
own: each only changes what is lacking.

- What was not answered for a while may be on its way still, and large.  So it is not sent again at
  once: the server is asked what it has, and its answer comes behind whatever it got before.
- Gradients are kept until all servers have them on disk.
- A server that was killed says which push it expects; the kept pushes from there on go to it.
  It is asked for that in every phase: ranks that wait for its rows may be waited for by this one.
- A worker that was killed asks all servers for the next push they expect, and begins with the
  smallest.  It cannot send earlier ones.  If a server needs one, or is already past that step,
  the worker asks for a rollback.
- After a change of ownership the kept pushes go to whoever owns the slices now.

A step may measure its gradients before it pushes them, once or several times.  Measurements are
kept with the push and sent before it, to each life of each server: so a server that was killed has
what other workers still wait for, and a push need not repeat gradients that were measured.

A step may pull several times, as a script finds out which rows it needs: each pull is a *part* of
the step, and takes the place of one that was not answered yet.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TypeVar

from msrun.cluster.servers.events import (
    NEVER,
    Arrived,
    BeginAt,
    DeliverNorms,
    DeliverRows,
    Finished,
    Payload,
    Reconnected,
    Rules,
    SendMessage,
    StepBegins,
    StepDone,
    StepEnds,
    StepMeasures,
    ToHead,
    ToPeer,
    Unrecoverable,
    WorkerAction,
    WorkerEvent,
    WorkerLeft,
)
from msrun.cluster.servers.messages import (
    AskOwnership,
    FromServer,
    Leave,
    Measure,
    Message,
    Moved,
    NeedRollback,
    Norms,
    Pull,
    Push,
    Rows,
    Welcome,
    WorkerHello,
    WorkerStep,
)
from msrun.cluster.servers.ownership import Ownership

_InStep = TypeVar("_InStep", bound=WorkerStep)


class WorkerPhase(enum.Enum):
    """The state of a worker."""

    JOINING = "joining"
    GREETING = "greeting"
    IDLE = "idle"
    PULLING = "pulling"
    COMPUTING = "computing"
    MEASURING = "measuring"
    PUSHING = "pushing"
    LEAVING = "leaving"
    LEFT = "left"
    LOST = "lost"


# Where no push is under way.
_IN_STEP = frozenset({WorkerPhase.IDLE, WorkerPhase.PULLING, WorkerPhase.COMPUTING})


@dataclass(slots=True)
class ServerView:
    """What a worker knows of one server in one epoch.

    Args:
        clock: How many pushes of this worker it has.
        rounds: How many measurements of the step after these.
        durable: How many of them are on its disk.
        has_left: Its disk knows that this worker has left.
        life: Which life of it said so.
        sent: What it was sent last, without an answer that settles it.
        sent_at: When.
        is_asked: It was asked since whether that has come.
    """

    clock: int
    durable: int = 0
    rounds: int = 0
    has_left: bool = False
    life: int = -1
    sent: Message | None = None
    sent_at: float = -math.inf
    is_asked: bool = False


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """One life of one worker.

    Args:
        worker: Its rank.
        life: How many times it was started before.
        rules: What the user asked for.
        clock: The next step, or the current one.
    """

    worker: int
    life: int
    rules: Rules
    phase: WorkerPhase = WorkerPhase.JOINING
    ownership: Ownership | None = None
    clock: int = 0
    _floor: int = 0
    _settled: int = 0
    _views: dict[int, ServerView] = field(default_factory=dict)
    _welcomes: dict[int, Welcome] = field(default_factory=dict)
    _kept: dict[int, Payload] = field(default_factory=dict)
    # Clock -> the gradients of its measurements, and whether its push is a commit of the last one.
    _measured: dict[int, list[Payload]] = field(default_factory=dict)
    _commits: dict[int, bool] = field(default_factory=dict)
    _norms: dict[int, Payload] = field(default_factory=dict)
    _absent: set[int] = field(default_factory=set)
    _ask: Payload = None
    _part: int = 0
    _rows: dict[int, Payload] = field(default_factory=dict)
    _head_due: float = -math.inf
    _actions: list[WorkerAction] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        """The ownership that it knows; 0 before the first."""
        return self.ownership.epoch if self.ownership else 0

    @property
    def kept(self) -> tuple[int, ...]:
        """The clocks of the pushes that it can send again."""
        return tuple(sorted(self._kept))

    def deadline(self) -> float | None:
        """Return when `Tick` is due; None where nothing is."""
        retry = self.rules.retry
        is_going = self.phase not in {WorkerPhase.GREETING, WorkerPhase.LOST, WorkerPhase.LEFT}
        dues = [
            view.sent_at + retry
            for view in self._views.values()
            if view.sent is not None or is_going
        ]
        if self._needs_head:
            dues.append(self._head_due)
        due = min(dues, default=NEVER)
        return None if due == NEVER else due

    def handle(self, event: WorkerEvent, *, now: float) -> list[WorkerAction]:
        """Return what follows from `event`, in order.

        `StepBegins` and `Finished` are for a worker that has no push under way, `StepMeasures` and
        `StepEnds` for one that computes.
        """
        self._actions = []
        match event:
            case Arrived(message=Moved(ownership=ownership)):
                if ownership.epoch > self.epoch and self.phase is not WorkerPhase.LEFT:
                    self._move(ownership)
                    self._head_due = now + self.rules.retry
            case Arrived(message=FromServer() as message, payload=payload):
                self._hear(message, payload)
            case StepBegins(ask=ask) if self.phase in _IN_STEP:
                self._ask, self._rows = ask, {}
                self._part += 1
                self.phase = WorkerPhase.PULLING
            case StepMeasures(gradients=gradients) if self.phase is WorkerPhase.COMPUTING:
                self._measured.setdefault(self.clock, []).append(gradients)
                self._norms, self._absent = {}, set()
                self.phase = WorkerPhase.MEASURING
            case StepEnds(gradients=gradients, is_commit=is_commit) if (
                self.phase is WorkerPhase.COMPUTING
            ):
                self._kept[self.clock] = gradients
                self._commits[self.clock] = is_commit
                self.phase = WorkerPhase.PUSHING
            case Reconnected(server=server) if server in self._views:
                self._views[server].sent = None
                self._views[server].sent_at = -math.inf
            case Finished() if self.phase in _IN_STEP:
                self.phase = WorkerPhase.LEAVING
        self._progress()
        self._send(now)
        return self._actions

    # What servers say.

    def _hear(self, message: FromServer, payload: Payload) -> None:
        if (message.life, message.epoch) != (self.life, self.epoch):
            return
        view = self._views.get(message.server)
        if view is None or message.server_life < view.life:
            return
        is_new = message.server_life > view.life
        here, known = (message.clock, message.rounds), (view.clock, view.rounds)
        view.clock, view.rounds = here if is_new else max(known, here)
        view.durable = max(view.durable, message.durable)
        view.has_left = view.has_left or message.has_left
        view.life = message.server_life
        if view.is_asked and isinstance(message, Welcome):
            view.sent = None  # what is lacking now is lost
        if self.phase is WorkerPhase.GREETING and isinstance(message, Welcome):
            self._welcomes[message.server] = message
        elif isinstance(message, Rows) and self._is_awaited(message):
            self._take_rows(message, payload)
        elif isinstance(message, Norms) and self._is_measured(message):
            self._norms[message.server] = payload
            self._absent |= set(message.absent)
        if self._is_lost(message, view):
            self.phase = WorkerPhase.LOST

    def _take_rows(self, rows: Rows, payload: Payload) -> None:
        """Keep rows, unless the server has ignored how old they may be."""
        bound = self.rules.staleness
        if rows.asked - rows.oldest <= bound:
            self._rows[rows.server] = payload
            return
        text = f"server {rows.server} answered step {rows.asked} with rows that lack step "
        text += f"{rows.oldest} of a worker, and the staleness is {bound:g}"
        self._actions.append(Unrecoverable(text))

    def _is_awaited(self, rows: Rows) -> bool:
        is_last = (rows.asked, rows.part) == (self.clock, self._part)
        return self.phase is WorkerPhase.PULLING and is_last

    def _is_measured(self, norms: Norms) -> bool:
        rounds = len(self._measured.get(self.clock, ()))
        is_last = (norms.asked, norms.round) == (self.clock, rounds)
        return self.phase is WorkerPhase.MEASURING and is_last

    def _is_lost(self, message: FromServer, view: ServerView) -> bool:
        """Whether a server needs a push that this life cannot send, or has passed its step."""
        if not self.rules.is_sync or self.phase in {
            WorkerPhase.GREETING,
            WorkerPhase.LEFT,
        }:
            return False
        steps = self.clock + (self.phase is WorkerPhase.PUSHING)
        has_passed = message.version > steps and self.phase is not WorkerPhase.LEAVING
        return (has_passed and not _is_done_at(message, self.clock)) or view.clock < self._floor

    # Transitions.

    def _progress(self) -> None:
        """Go on where nothing is lacking any more."""
        if self.ownership is None:
            return
        self._forget()
        views = self._views.values()
        match self.phase:
            case WorkerPhase.GREETING if len(self._welcomes) == len(self._views):
                self._begin()
            case WorkerPhase.PULLING if len(self._rows) == len(self._views):
                self.phase = WorkerPhase.COMPUTING
                self._actions.append(DeliverRows(self.clock, dict(sorted(self._rows.items()))))
            case WorkerPhase.MEASURING if self._absent or len(self._norms) == len(self._views):
                self.phase = WorkerPhase.COMPUTING
                norms = dict(sorted(self._norms.items()))
                self._actions.append(DeliverNorms(self.clock, norms, tuple(sorted(self._absent))))
            case WorkerPhase.PUSHING if all(view.clock > self.clock for view in views):
                self.phase = WorkerPhase.IDLE
                self._actions.append(StepDone(self.clock))
                self.clock += 1
            case WorkerPhase.LEAVING if all(view.has_left for view in views):
                self.phase = WorkerPhase.LEFT
                self._actions.append(WorkerLeft())
        if self.phase is not WorkerPhase.GREETING:
            reached = min((view.clock for view in views), default=self.clock)
            self._settled = max(self._settled, reached)

    def _begin(self) -> None:
        """Choose the first step of this life from what the servers expect."""
        clocks = [welcome.clock for welcome in self._welcomes.values()]
        first = min(clocks) if self.rules.is_sync else max(clocks)
        self.phase = WorkerPhase.IDLE
        self._start_at(first)
        if self.rules.is_sync and any(
            welcome.version > first and not _is_done_at(welcome, first)
            for welcome in self._welcomes.values()
        ):
            self.phase = WorkerPhase.LOST
            self._actions.pop()

    def _start_at(self, clock: int) -> None:
        self.clock = self._floor = self._settled = clock
        self._kept.clear()
        self._commits.clear()
        self._measured.clear()
        self._actions.append(BeginAt(clock))

    def _forget(self) -> None:
        """Drop the gradients that all servers have on disk."""
        safe = self._safe
        for clock in [clock for clock in self._kept if clock < safe]:
            del self._kept[clock], self._commits[clock]
            self._measured.pop(clock, None)
        self._floor = max(self._floor, min(safe, self.clock))

    @property
    def _safe(self) -> int:
        return min((view.durable for view in self._views.values()), default=0)

    def _move(self, ownership: Ownership) -> None:
        """Go over to another ownership."""
        is_new = self.ownership is None
        branch = self.ownership.branch if self.ownership else 0
        before = self.ownership.clocks.keys() if self.ownership else set()
        self.ownership = ownership
        self._welcomes.clear()
        self._rows.clear()
        self._norms.clear()
        self._absent.clear()
        if self.worker not in ownership.clocks:
            self.phase = WorkerPhase.LEFT
            self._views.clear()
            self._actions.append(WorkerLeft())
            return
        base = ownership.clocks[self.worker]
        has_left = self.worker in ownership.done
        self._views = {
            server: ServerView(base, base, has_left=has_left) for server in ownership.servers
        }
        if is_new or self.phase in {WorkerPhase.GREETING, WorkerPhase.LOST}:
            self.phase = WorkerPhase.GREETING
        elif (
            base < self._floor
            or (branch != ownership.branch and self._is_ahead(base))
            or (before != ownership.clocks.keys() and self._has_norms_since(base))
        ):
            self.phase = WorkerPhase.IDLE
            self._start_at(base)
        else:
            self._settled = base

    def _has_norms_since(self, clock: int) -> bool:
        """Whether gradients that are not stepped yet depend on norms, and so on other workers."""
        return max(self._measured, default=-1) >= clock

    def _is_ahead(self, version: int) -> bool:
        """Whether this worker has seen rows of a later version, in sync training."""
        has_pulled = self.phase in {
            WorkerPhase.COMPUTING,
            WorkerPhase.MEASURING,
            WorkerPhase.PUSHING,
        }
        return self.rules.is_sync and self.clock + has_pulled > version + 1

    # What servers lack.

    def _wanted(self, server: int, view: ServerView, now: float) -> Message | None:
        """Return what to send to a server now."""
        hello = WorkerHello(worker=self.worker, life=self.life, epoch=self.epoch)
        if self.phase is WorkerPhase.GREETING:
            return None if server in self._welcomes else hello
        lacking = self._lacking(view)
        if lacking or self.phase in {WorkerPhase.LOST, WorkerPhase.LEFT}:
            return lacking
        is_awaited = self.phase is WorkerPhase.PULLING and server not in self._rows
        if is_awaited or self._is_ahead_of(view):
            return self._step(Pull, self.clock, part=self._part)
        if self.phase is WorkerPhase.MEASURING and server not in self._norms:
            rounds = len(self._measured[self.clock])
            return self._step(Measure, self.clock, round=rounds, is_again=True)
        if self.phase is WorkerPhase.LEAVING and not view.has_left:
            return self._step(Leave, self.clock)
        # One that has answered may have been killed since.  Then others wait for what it lacks of
        # this worker, also while this one computes, and this one may wait for them: in a collective
        # of that step.
        return hello if now >= view.sent_at + self.rules.retry else None

    def _is_ahead_of(self, view: ServerView) -> bool:
        """Whether a server does not know yet which pushes this life cannot send any more.

        It was killed after it had answered, and other workers wait for those pushes.
        """
        return not self.rules.is_sync and self.phase in _IN_STEP and view.clock < self._floor

    def _lacking(self, view: ServerView) -> Message | None:
        """Return what a server lacks of the measurements and pushes of this worker."""
        if self.phase in {WorkerPhase.LOST, WorkerPhase.LEFT}:
            return None
        clock = max(view.clock, self._floor)
        measured = len(self._measured.get(clock, ()))
        here = view.rounds if clock == view.clock else 0
        if here < measured:
            return self._step(Measure, clock, round=here + 1)
        if clock in self._kept:
            is_commit = self._commits[clock]
            return self._step(Push, clock, rounds=measured, is_commit=is_commit)
        return None

    def _step(self, kind: type[_InStep], clock: int, **more: int) -> _InStep:
        return kind(
            worker=self.worker,
            life=self.life,
            epoch=self.epoch,
            clock=clock,
            floor=self._floor,
            settled=self._settled,
            safe=self._safe,
            **more,
        )

    def _send(self, now: float) -> None:
        """Send what is lacking, and again what was not answered for a while."""
        is_late = False
        for server, view in sorted(self._views.items()):
            wanted = self._wanted(server, view, now)
            if wanted is None:
                view.sent = None
                continue
            is_again = _is_same(wanted, view.sent)
            if is_again and now < view.sent_at + self.rules.retry:
                continue
            is_late = is_late or is_again
            view.sent, view.sent_at = wanted, now
            view.is_asked = is_again and isinstance(wanted, Push | Pull)
            if view.is_asked:
                wanted = WorkerHello(worker=self.worker, life=self.life, epoch=self.epoch)
            self._actions.append(SendMessage(ToPeer(server), wanted, self._payload(wanted)))
        if (is_late or self._needs_head) and now >= self._head_due:
            kind = NeedRollback if self.phase is WorkerPhase.LOST else AskOwnership
            ask = kind(worker=self.worker, life=self.life, epoch=self.epoch)
            self._actions.append(SendMessage(ToHead(), ask))
            self._head_due = now + self.rules.retry

    def _payload(self, wanted: Message) -> Payload:
        match wanted:
            case Push(clock=clock):
                return self._kept[clock]
            case Measure(clock=clock, round=number, is_again=False):
                return self._measured[clock][number - 1]
            case Pull():
                return self._ask
        return None

    @property
    def _needs_head(self) -> bool:
        return self.phase in {WorkerPhase.JOINING, WorkerPhase.LOST}


def _is_done_at(message: FromServer, clock: int) -> bool:
    """Whether the worker has left with that clock, so that the version says nothing."""
    return message.is_done and message.clock == clock


def _is_same(wanted: Message, sent: Message | None) -> bool:
    """Whether two messages ask for the same, in whatever state of the worker."""
    if type(wanted) is not type(sent):
        return False
    return all(
        getattr(wanted, name, None) == getattr(sent, name, None)
        for name in ("clock", "part", "round")
    )
