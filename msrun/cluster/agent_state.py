"""Agent side of the protocol: a state machine that does no IO.

Phases: JOINING -> RUNNING -> STOPPING -> SWEEPING -> JOINING ... -> FINISHED.  The
agent acts on what the scheduler says; only when the scheduler is gone, or deaf to
its user's signal, does it stop its workers and find a verdict by itself.
"""

from __future__ import annotations

import enum
import math
import signal
from dataclasses import dataclass, field

import msgspec

from msrun.cluster import verdict as verdicts
from msrun.cluster.messages import (
    Drained,
    Finish,
    FromAgent,
    FromScheduler,
    Interrupted,
    NodeFailed,
    Refused,
    Register,
    Restarting,
    Start,
    Stop,
    WorkerExited,
)
from msrun.cluster.verdict import RankExit, Verdict
from msrun.errors import ExitCode

SCHEDULER_PATIENCE = 2.0
SWEEP_PATIENCE = 8.0
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


class Phase(enum.Enum):
    """What this node's agent is doing."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    SWEEPING = "sweeping"
    FINISHED = "finished"


class Received(msgspec.Struct, frozen=True):
    """The scheduler said something about `generation`."""

    generation: int
    body: FromScheduler


class TreeReady(msgspec.Struct, frozen=True):
    """The forkserver takes orders; or cannot, when `error` says why."""

    error: str | None = None


class WorkerEnded(msgspec.Struct, frozen=True):
    """A worker of `generation` ended."""

    generation: int
    exit: RankExit


class Swept(msgspec.Struct, frozen=True):
    """Nothing is left of `generation` but what is `stuck`."""

    generation: int
    stuck: tuple[str, ...] = ()


class TreeLost(msgspec.Struct, frozen=True):
    """The reaper or the forkserver ended; no more workers can be started or swept."""

    reason: str
    code: int


class SchedulerLost(msgspec.Struct, frozen=True):
    """The scheduler ended; `verdict` is what it had written down, if it had."""

    reason: str
    verdict: Verdict | None = None


class Signalled(msgspec.Struct, frozen=True):
    """This process got a signal."""

    signum: int


class Tick(msgspec.Struct, frozen=True):
    """Time passed and nothing else happened."""


Event = Received | TreeReady | WorkerEnded | Swept | TreeLost | SchedulerLost | Signalled | Tick


class Send(msgspec.Struct, frozen=True):
    """Send `body` to the scheduler, about `generation`."""

    generation: int
    body: FromAgent


class StartWorkers(msgspec.Struct, frozen=True):
    """Start this node's workers of `generation`."""

    generation: int
    start: Start


class SignalWorkers(msgspec.Struct, frozen=True):
    """Send `signum` to the workers of `ranks`."""

    ranks: tuple[int, ...]
    signum: int


class Sweep(msgspec.Struct, frozen=True):
    """Kill whatever is left of `generation`."""

    generation: int


class Announce(msgspec.Struct, frozen=True):
    """Tell the user that the job goes on after a failure."""

    restarting: Restarting


class Conclude(msgspec.Struct, frozen=True):
    """End everything on this node and exit with the verdict's code."""

    verdict: Verdict


Action = Send | StartWorkers | SignalWorkers | Sweep | Announce | Conclude


@dataclass(slots=True, kw_only=True)
class AgentState:
    """One node of a job, from registration to the verdict.

    Args:
        job_id: The job.
        register: What this node registers with.
        grace: Seconds between SIGTERM and SIGKILL of a worker.
        form_by: Time by which the first workers must have been started; inf waits.
        generation: The last generation that was started here; -1 before the first.
    """

    job_id: str
    register: Register
    grace: float
    form_by: float = math.inf
    generation: int = -1
    phase: Phase = Phase.JOINING
    live: set[int] = field(default_factory=set)
    _ready: bool = False
    _tree_lost: bool = False
    _pending: tuple[int, Start] | None = None
    _swept: Swept | None = None
    _nnodes: int = 1
    _interrupts: int = 0
    _own_verdict: Verdict | None = None
    _due: float | None = None

    def begin(self) -> list[Action]:
        """Return the first actions."""
        return [Send(-1, self.register)]

    def handle(self, event: Event, *, now: float) -> list[Action]:  # noqa: PLR0911 - one line a case
        """Apply `event` at time `now` and return what the caller must do, in order."""
        if self.phase is Phase.FINISHED:
            return []
        match event:
            case Received(generation=generation, body=body):
                return self._received(generation, body, now)
            case TreeReady(error=error):
                return self._tree_is_ready(error)
            case WorkerEnded():
                return self._worker_ended(event, now)
            case Swept():
                return self._after_sweep(event, now)
            case TreeLost():
                return self._tree_was_lost(event, now)
            case SchedulerLost():
                return self._scheduler_was_lost(event, now)
            case Signalled(signum=signum):
                return self._signalled(signum, now)
        return self._check_deadline(now)

    def deadline(self) -> float | None:
        """Time by which `Tick` must be sent if nothing else is; None when there is none."""
        if self._due is not None or self.generation >= 0 or self.form_by == math.inf:
            return self._due
        return self.form_by

    def _received(self, generation: int, body: FromScheduler, now: float) -> list[Action]:
        actions: list[Action] = []  # as for a message that only an agent sends
        match body:
            case Start():
                actions = self._start(generation, body)
            case Stop(signum=signum):
                actions = self._stop(generation, signum, now)
            case Restarting():
                actions = [Announce(body)]
            case Finish(verdict=verdict):
                actions = self._conclude(verdict)
            case Refused(reason=reason):
                actions = self._conclude(self._internal(reason, ExitCode.USAGE))
        return actions

    def _start(self, generation: int, start: Start) -> list[Action]:
        if self._own_verdict or generation <= self.generation:
            return []
        self._pending = (generation, start)
        self._nnodes = start.nnodes
        return self._start_if_possible()

    def _tree_is_ready(self, error: str | None) -> list[Action]:
        if error is not None:
            return [self._send(NodeFailed(reason=error, code=ExitCode.USAGE))]
        self._ready = True
        return self._start_if_possible()

    def _start_if_possible(self) -> list[Action]:
        if not self._ready or self._pending is None or self.phase is not Phase.JOINING:
            return []
        self.generation, start = self._pending
        self._pending = None
        self.phase = Phase.RUNNING
        self.live = set(range(start.first_rank, start.first_rank + start.count))
        return [StartWorkers(self.generation, start)]

    def _worker_ended(self, event: WorkerEnded, now: float) -> list[Action]:
        if event.generation != self.generation:
            return []
        self.live.discard(event.exit.rank)
        end = self._without_our_signal(event.exit)
        actions: list[Action] = [self._send(WorkerExited(exit=end))]
        if not self.live:
            if self.phase is Phase.STOPPING:
                actions += self._sweep(now)
            elif self.phase is Phase.SWEEPING:
                actions += self._drained_if_done(now)
        return actions

    def _without_our_signal(self, end: RankExit) -> RankExit:
        """Return `end` as it would have been without what we did meanwhile."""
        end = msgspec.structs.replace(end, swept=self.phase is Phase.SWEEPING)
        is_stopping = self.phase in (Phase.STOPPING, Phase.SWEEPING)
        if is_stopping and end.error and end.signum in _OURS:
            # It had raised and was on its way out, which Python goes with code 1.
            return msgspec.structs.replace(end, code=1, signum=None)
        return end

    def _stop(self, generation: int, signum: int, now: float) -> list[Action]:
        if self._pending and self._pending[0] == generation:
            self._pending = None
            self.generation = generation
            return self._drained([], now)
        if generation != self.generation or self.phase is not Phase.RUNNING:
            return []
        return self._begin_stop(now, signum)

    def _begin_stop(self, now: float, signum: int = signal.SIGTERM) -> list[Action]:
        self.phase = Phase.STOPPING
        if self._tree_lost:
            self.live.clear()
            self._swept = Swept(self.generation)
            return self._drained_if_done(now)
        if not self.live:
            return self._sweep(now)
        self._due = now + self.grace
        ranks = tuple(sorted(self.live))
        # A stopped process acts on a signal only once it is continued.
        return [SignalWorkers(ranks, signum), SignalWorkers(ranks, signal.SIGCONT)]

    def _sweep(self, now: float) -> list[Action]:
        self.phase = Phase.SWEEPING
        self._swept = None
        self._due = now + SWEEP_PATIENCE
        return [Sweep(self.generation)]

    def _after_sweep(self, event: Swept, now: float) -> list[Action]:
        if event.generation != self.generation or self.phase is not Phase.SWEEPING:
            return []
        self._swept = event
        return self._drained_if_done(now)

    def _drained_if_done(self, now: float) -> list[Action]:
        """Report once the reaper has swept and every end of a worker was told."""
        if self._swept is None or (self.live and not self._swept.stuck):
            return []
        stuck = list(self._swept.stuck)
        if self._own_verdict:
            return self._conclude(msgspec.structs.replace(self._own_verdict, stuck=stuck))
        return self._drained(stuck, now)

    def _drained(self, stuck: list[str], now: float) -> list[Action]:
        self.phase = Phase.JOINING
        self._due = now + self._patience() if self._interrupts else None
        return [self._send(Drained(stuck=stuck))]

    def _patience(self) -> float:
        """Return the seconds that the scheduler may take to answer a signal."""
        if self.phase is Phase.JOINING and self._nnodes > 1:
            # It may first have to wait until the other nodes are drained.
            return self.grace + SWEEP_PATIENCE + SCHEDULER_PATIENCE
        return SCHEDULER_PATIENCE

    def _tree_was_lost(self, event: TreeLost, now: float) -> list[Action]:
        if self._tree_lost:
            return []
        self._tree_lost = True
        self._ready = False
        actions: list[Action] = [self._send(NodeFailed(reason=event.reason, code=event.code))]
        if self.phase in (Phase.STOPPING, Phase.SWEEPING):
            actions += self._begin_stop(now)
        return actions

    def _scheduler_was_lost(self, event: SchedulerLost, now: float) -> list[Action]:
        if event.verdict:
            return self._conclude(event.verdict)
        return self._stop_alone(self._internal(event.reason, ExitCode.INTERNAL), now)

    def _signalled(self, signum: int, now: float) -> list[Action]:
        if signum in FORWARDED:
            return [SignalWorkers(tuple(sorted(self.live)), signum)] if self.live else []
        self._interrupts += 1
        if self._interrupts > 1:
            if self.phase in (Phase.RUNNING, Phase.STOPPING) and not self._tree_lost:
                return self._sweep(now)
            return []
        if self.phase in (Phase.JOINING, Phase.RUNNING):
            self._due = now + self._patience()
        return [self._send(Interrupted(signum=signum))]

    def _stop_alone(self, verdict: Verdict, now: float) -> list[Action]:
        """Stop without a scheduler and exit with `verdict`."""
        if self._own_verdict is None:
            self._own_verdict = verdict
        if self.phase is Phase.RUNNING:
            return self._begin_stop(now)
        return self._conclude(self._own_verdict) if self.phase is Phase.JOINING else []

    def _check_deadline(self, now: float) -> list[Action]:
        due = self.deadline()
        if due is None or now < due:
            return []
        if self._due is None:
            return self._not_formed(now)
        self._due = None
        match self.phase:
            case Phase.STOPPING:
                return self._sweep(now)
            case Phase.SWEEPING:
                silent = "forkserver" if self._swept else "reaper"
                self._swept = Swept(self.generation, (f"the {silent} does not answer",))
                return self._drained_if_done(now)
        reason = f"the scheduler did not answer within {self._patience():g}s"
        return self._stop_alone(self._internal(reason, ExitCode.INTERNAL), now)

    def _not_formed(self, now: float) -> list[Action]:
        self.form_by = math.inf
        if self._pending:
            reason = "the forkserver has not finished its imports"
            hint = "something in --preload may wait for ever; --join-timeout sets the limit"
        else:
            reason = "the scheduler has not answered"
            hint = "scheduler.log in the log directory says what it did"
        verdict = self._internal(f"the job did not form in time: {reason}", ExitCode.JOIN_TIMEOUT)
        return self._stop_alone(msgspec.structs.replace(verdict, hint=hint), now)

    def _internal(self, reason: str, code: int) -> Verdict:
        return verdicts.internal(self.job_id, reason, generation=self.generation, code=code)

    def _conclude(self, verdict: Verdict) -> list[Action]:
        self.phase = Phase.FINISHED
        self._due = None
        return [Conclude(verdict)]

    def _send(self, body: FromAgent) -> Send:
        return Send(self.generation, body)
