"""The agent's state machine: one node, from registration to the verdict.  It does no IO.

Phases: JOINING -> RUNNING -> STOPPING -> SWEEPING -> JOINING ... -> FINISHED.  Parameter servers
outlive the generations; where some live, LEAVING comes before FINISHED.  The scheduler
decides and the agent obeys, with three exceptions, which is where this machine is hard:

- *The scheduler is silent.*  After 0.7 lease another node may soon get these ranks, so the agent
  stops its workers unasked (`_cut`).  Their ends are not failures: the node registers anew and says
  that nothing runs.
- *The scheduler knows nothing of this node* (`Forgotten`), because it was started again.  The agent
  registers with everything a scheduler needs that knows nothing (`_join`): what runs, what was
  seen, how workers ended, which signals its user sent.
- *The scheduler is gone for good, or does not answer the user's signal.*  The agent stops its
  workers and reaches a verdict of its own (`_own_verdict`), but only after the sweep: no agent
  exits while a worker lives.

Invariants: a `Start` is carried out only if its generation is larger than the last one here, and
the news it answers is younger than the fence.  `Drained` is sent only after the reaper has swept
and the end of every worker was reported, or the time for that is over and `stuck` names the rest.
"""

# tidy: long file, one machine is read in one place: every transition of a node stands here.

from __future__ import annotations

import enum
import math
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from msrun.cluster import verdict as verdicts
from msrun.cluster.agent.events import (
    Action,
    Announce,
    Conclude,
    Event,
    Forgotten,
    ForwardSignal,
    GenerationSwept,
    Join,
    Reached,
    SchedulerLost,
    SchedulerMessage,
    SchedulerSilent,
    SendToScheduler,
    ServerEnded,
    ServerStarted,
    Signalled,
    SignalServers,
    StartWorkers,
    SweepGeneration,
    Tell,
    TreeLost,
    TreeReady,
    WorkerEnded,
)
from msrun.cluster.bounds import RankSet, clip, few
from msrun.cluster.liveness.lease import Lease
from msrun.cluster.verdict import RankExit, Verdict
from msrun.cluster.wire.messages import (
    Drained,
    Finish,
    FromAgent,
    Interrupted,
    NodeFailed,
    Refused,
    Register,
    Restarting,
    Serve,
    ServerFailed,
    Start,
    Stop,
    Waiting,
    Warmed,
    WorkerExited,
)
from msrun.errors import ExitCode

if TYPE_CHECKING:
    from msrun.cluster.agent.servers import NodeServers  # of jobs with servers alone

# Seconds that the scheduler may take to answer a signal of this node's user.
SCHEDULER_PATIENCE = 2.0
# A scheduler that has been silent for longer than its own restart takes is gone for good.
ABSENCE_PATIENCE = 60.0
# The reaper gives up on a process after 5 s, and its report must still get here.
SWEEP_PATIENCE = 8.0
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
# Ends of workers that one registration has room for; further ones follow one by one.
EXITS_MAX = 128
_REASON_BYTES_MAX = 2_000
_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


class AgentPhase(enum.Enum):
    """The state of this node's workers, from their agent's view."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    SWEEPING = "sweeping"
    LEAVING = "leaving"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True)
class AgentState:
    """One node of a job, from registration to the verdict.

    Args:
        job_id: The job.
        register: The registration of this node, without its state.
        grace: Seconds between SIGTERM and SIGKILL of a worker.
        forwarded: Signals that reach the workers and end nothing.
        form_by: Time by which the first workers must have been started; inf waits.
        join_timeout: Seconds that the scheduler waits for nodes, from when it is reached.
        lease: How long the workers may go on without the scheduler.
        scheduler: Where the scheduler is, in words.
        generation: The last generation that was started here; -1 before the first.
        servers: The parameter servers of this node; None in a job without any.
    """

    job_id: str
    register: Register
    grace: float
    form_by: float = math.inf
    join_timeout: float = 0.0
    lease: Lease = field(default_factory=Lease)
    scheduler: str = ""
    forwarded: tuple[int, ...] = FORWARDED
    servers: NodeServers | None = None
    generation: int = -1
    phase: AgentPhase = AgentPhase.JOINING
    live: set[int] = field(default_factory=set)
    _ready: bool = False
    _tree_lost: bool = False
    _pending: tuple[int, Start] | None = None
    _swept: GenerationSwept | None = None
    _nnodes: int = 1
    _interrupts: list[int] = field(default_factory=list)
    _exits: list[tuple[RankExit, float]] = field(default_factory=list)
    _stuck: list[str] = field(default_factory=list)
    _failure: NodeFailed | ServerFailed | None = None
    _was_reached: bool = False
    _is_cut: bool = False
    _reach_by: float | None = None
    _awaited: str = ""
    # The generation that ran while it stood by: a scheduler that has lost its log asks.
    _spared: int = -1
    _own_verdict: Verdict | None = None
    _due: float | None = None
    _stopping_at: float = -math.inf

    def begin(self) -> list[Action]:
        """Return the first actions."""
        return [Join(self.register)]

    def handle(self, event: Event, *, now: float) -> list[Action]:  # noqa: PLR0911 - one line a case
        """Apply `event` at time `now` and return what the caller must do, in order."""
        if self.phase is AgentPhase.FINISHED:
            return []
        if self.phase is AgentPhase.LEAVING:
            return self._while_leaving(event, now)
        match event:
            case SchedulerMessage() | Reached() | SchedulerSilent() | Forgotten() | SchedulerLost():
                return self._of_scheduler(event, now)
            case TreeReady(error=error):
                return self._tree_is_ready(error)
            case WorkerEnded():
                return self._worker_ended(event, now)
            case ServerStarted() | ServerEnded():
                return self._of_server(event, now)
            case GenerationSwept():
                return self._after_sweep(event, now)
            case TreeLost():
                return self._tree_was_lost(event, now)
            case Signalled(signum=signum):
                return self._signalled(signum, now)
        restarts = self.servers.restart(now=now) if self.servers else []
        return [*restarts, *self._check_deadline(now)]

    def deadline(self) -> float | None:
        """Time by which `Tick` must be sent if nothing else is; None when there is none."""
        if self.phase in (AgentPhase.LEAVING, AgentPhase.FINISHED):
            return self._due
        has_formed = self.generation >= 0 or self.form_by == math.inf
        first = None if has_formed or self._due is not None else self.form_by
        restart = self.servers.deadline() if self.servers else None
        dues = [due for due in (self._due, first, self._reach_by, restart) if due is not None]
        return min(dues, default=None)

    # The line to the scheduler.

    def _of_scheduler(
        self,
        event: SchedulerMessage | Reached | SchedulerSilent | Forgotten | SchedulerLost,
        now: float,
    ) -> list[Action]:
        match event:
            case SchedulerMessage():
                return self._received(event, now)
            case Reached():
                return self._reached(now)
            case SchedulerSilent():
                return self._cut(now)
            case Forgotten():
                # Without workers that it would be asked about, the node may get another place.
                is_idle = self.phase is AgentPhase.JOINING and self.servers
                kills = self.servers.kill() if self.servers and is_idle else []
                return [*kills, *self._join(now)]
        return self._scheduler_was_lost(event, now)

    def _join(self, now: float) -> list[Action]:
        """Register with everything that a scheduler needs which knows nothing of this node.

        A pending `Start` is dropped: a scheduler that still means it sends it again.
        """
        self._pending = None
        is_living = self.phase in (AgentPhase.RUNNING, AgentPhase.STOPPING, AgentPhase.SWEEPING)
        exits = self._ends(now)
        # Saying that the generation still runs, and `Drained` at the end, keeps the scheduler from
        # deciding before it has the messages between the two.
        has_more = len(exits) > EXITS_MAX or bool(self._interrupts and self.generation >= 0)
        register = msgspec.structs.replace(
            self.register,
            running=self.generation if is_living or has_more else -1,
            seen=self.generation,
            spared=self._spared,
            exits=exits[:EXITS_MAX],
            stuck=self._stuck,
            warm=self._ready,
        )
        actions: list[Action] = [Join(register)]
        actions += [self._send(WorkerExited(exit=end, at=now)) for end in exits[EXITS_MAX:]]
        if self.servers:
            actions.append(self._send(self.servers.report()))
        if self._failure:
            actions.append(self._send(self._failure))
        actions += [self._send(Interrupted(signum=signum)) for signum in self._interrupts]
        if has_more and not is_living:
            actions.append(self._send(Drained(stuck=self._stuck)))
        return actions

    def _ends(self, now: float) -> list[RankExit]:
        """Return how workers ended: the first failure in full, the others without their texts."""
        ends = [msgspec.structs.replace(end, age=end.age + now - at) for end, at in self._exits]
        if all(end.succeeded for end in ends):
            return [verdicts.bare(end) for end in ends]
        root = verdicts.root_cause((end, now - end.age) for end in ends)
        return [root, *(verdicts.bare(end) for end in ends if end is not root)]

    def _reached(self, now: float) -> list[Action]:
        if not self._was_reached:
            self._was_reached = True
            # The scheduler's own time to form ends before this one, so that its verdict, which
            # names the missing nodes, comes first.
            self.form_by = max(self.form_by, now + self.join_timeout + SCHEDULER_PATIENCE)
            return []
        self._reach_by = None
        return [Tell("the scheduler answers again")]

    def _cut(self, now: float) -> list[Action]:
        """Stop the workers before another node may get their ranks."""
        self._reach_by = now + ABSENCE_PATIENCE
        silence = f"the scheduler has been silent for {self.lease.fence:g}s"
        kills = self.servers.kill() if self.servers else []
        if self.phase is AgentPhase.JOINING:
            # The `Start` that waits for our imports will be too old; a new session drops it.
            joins = self._join(now) if self._pending else []
            return [Tell(silence, warn=True), *kills, *joins]
        self._is_cut = True
        told = Tell(f"{silence}: this node's workers are stopped", warn=True)
        if self.phase is AgentPhase.RUNNING:
            return [told, *kills, *self._begin_stop(now, grace=self.lease.grace)]
        if self.phase is AgentPhase.STOPPING and self._due is not None:
            self._due = min(self._due, now + self.lease.grace)
        return [told, *kills]

    def _received(self, event: SchedulerMessage, now: float) -> list[Action]:
        generation = event.generation
        actions: list[Action] = []  # none for a message that only agents send
        match event.body:
            case Start() as start:
                actions = self._start(generation, start, event.age, now)
            case Stop(signum=signum, servers=are_others):
                actions = self.servers.kill() if self.servers and are_others else []
                actions += self._stop(generation, signum, now)
            case Serve(servers=numbers, total=total) if self.servers:
                is_running = self.phase is AgentPhase.RUNNING and not self._pending
                actions = self.servers.assign(numbers, total, is_running=is_running)
            case Restarting() as restarting:
                actions = [Announce(restarting)]
            case Finish(verdict=verdict):
                actions = self._end(verdict, now)
            case Refused(reason=reason, code=code):
                actions = self._end(self._internal(reason, code), now)
            case Waiting(reason=reason, spare=spare):
                self._awaited = reason
                self._spared = max(self._spared, generation) if spare else self._spared
                self.form_by = math.inf if spare else self.form_by
                actions = [Tell(reason)]
        return actions

    # Generations.

    def _start(self, generation: int, start: Start, age: float, now: float) -> list[Action]:
        if self._own_verdict or generation <= self.generation:
            return []
        if age >= self.lease.fence:  # by now another node may have these ranks
            return self._join(now)
        self._pending = (generation, start)
        self._nnodes = start.nnodes
        return self._start_if_possible()

    def _tree_is_ready(self, error: str | None) -> list[Action]:
        if error is not None:
            reason = clip(error, _REASON_BYTES_MAX)
            self._failure = NodeFailed(reason=reason, code=ExitCode.USAGE)
            return [self._send(self._failure)]
        self._ready = True
        return [self._send(Warmed()), *self._start_if_possible()]

    def _start_if_possible(self) -> list[Action]:
        if not self._ready or self._pending is None or self.phase is not AgentPhase.JOINING:
            return []
        self.generation, start = self._pending
        self._pending = None
        self._exits, self._stuck = [], []
        self.phase = AgentPhase.RUNNING
        self.live = set(range(start.first_rank, start.first_rank + start.count))
        servers = self.servers.begin(start.node_rank, start.nnodes) if self.servers else []
        return [StartWorkers(self.generation, start), *servers]

    def _worker_ended(self, event: WorkerEnded, now: float) -> list[Action]:
        if event.generation != self.generation:
            return []
        self.live.discard(event.exit.rank)
        actions: list[Action] = []
        if not self._is_cut:  # else the node was lost, and its workers did not fail
            end = verdicts.fit(self._without_our_signal(event.exit, now))
            self._exits.append((end, now))
            actions = [self._send(WorkerExited(exit=end, at=now))]
        if not self.live:
            if self.phase is AgentPhase.STOPPING:
                actions += self._sweep(now)
            elif self.phase is AgentPhase.SWEEPING:
                actions += self._drained_if_done(now)
        return actions

    def _without_our_signal(self, end: RankExit, now: float) -> RankExit:
        """Return `end` as it would have been without the signals that we sent."""
        if end.succeeded and now - end.age < self._stopping_at:
            return end
        is_stopping = self.phase in (AgentPhase.STOPPING, AgentPhase.SWEEPING)
        is_swept = self.phase is AgentPhase.SWEEPING
        end = msgspec.structs.replace(end, stopped=is_stopping, swept=is_swept)
        if is_stopping and end.error and end.signum in _OURS:
            # It had raised and was on its way to exit, which Python does with code 1.
            return msgspec.structs.replace(end, code=1, signum=None)
        return end

    def _stop(self, generation: int, signum: int, now: float) -> list[Action]:
        if self._pending and self._pending[0] == generation:
            # Never started, so it is drained already; its number forbids a late `Start` of it.
            self._pending = None
            self.generation = generation
            return self._drained([], now)
        if generation == self.generation and self.phase is AgentPhase.STOPPING:
            return self._sweep(now) if signum == signal.SIGKILL else []
        if generation != self.generation or self.phase is not AgentPhase.RUNNING:
            return []
        return self._begin_stop(now, signum)

    def _begin_stop(
        self, now: float, signum: int = signal.SIGTERM, grace: float = math.inf
    ) -> list[Action]:
        self.phase, self._stopping_at = AgentPhase.STOPPING, now
        if self._tree_lost:
            # No process is left that could report the ends of the workers, so none is awaited.
            self.live.clear()
            self._swept = GenerationSwept(self.generation)
            return self._drained_if_done(now)
        if not self.live:
            return self._sweep(now)
        self._due = now + min(self.grace, grace)
        ranks = tuple(sorted(self.live))
        # A stopped process acts on a signal only once it is continued.
        return [ForwardSignal(ranks, signum), ForwardSignal(ranks, signal.SIGCONT)]

    def _told_of_kill(self) -> list[Action]:
        """Tell who asked for the end which workers are killed; the verdict names a signal alone."""
        if not self._interrupts or self._is_cut or not self.grace:
            return []
        ranks = RankSet.of(self.live)
        who = f"rank{'s' if len(ranks) > 1 else ''} {ranks}"
        had = f"had not ended {self.grace:g}s after the signal (--grace)"
        return [Tell(f"{who} {had}: killed", warn=True)]

    def _sweep(self, now: float) -> list[Action]:
        self.phase = AgentPhase.SWEEPING
        self._swept = None
        self._due = now + SWEEP_PATIENCE
        spare = self.servers.swept() if self.servers else ()
        return [SweepGeneration(self.generation, spare)]

    def _after_sweep(self, event: GenerationSwept, now: float) -> list[Action]:
        if event.generation != self.generation or self.phase is not AgentPhase.SWEEPING:
            return []
        self._swept = event
        return self._drained_if_done(now)

    def _drained_if_done(self, now: float) -> list[Action]:
        """Report once the reaper has swept and the end of every worker is known."""
        if self._swept is None or (self.live and not self._swept.stuck):
            return []
        stuck = few(self._swept.stuck)
        if self._own_verdict:
            return self._conclude(msgspec.structs.replace(self._own_verdict, stuck=stuck), now)
        return self._drained(stuck, now)

    def _drained(self, stuck: list[str], now: float) -> list[Action]:
        self.phase = AgentPhase.JOINING
        self._due = now + self._patience() if self._interrupts else None
        self._stuck = stuck
        if self._is_cut:
            self._is_cut = False
            return self._join(now)
        return [self._send(Drained(stuck=stuck))]

    def _patience(self) -> float:
        """Return the seconds that the scheduler may take to answer a signal."""
        if self.phase is AgentPhase.JOINING and self._nnodes > 1:
            # It may first have to wait until the other nodes are drained.
            return self.grace + SWEEP_PATIENCE + SCHEDULER_PATIENCE
        return SCHEDULER_PATIENCE

    def _tree_was_lost(self, event: TreeLost, now: float) -> list[Action]:
        if self._tree_lost:
            return []
        self._tree_lost = True
        self._ready = False
        reason = clip(event.reason, _REASON_BYTES_MAX)
        self._failure = NodeFailed(reason=reason, code=event.code)
        actions: list[Action] = [self._send(self._failure)]
        if self.phase in (AgentPhase.STOPPING, AgentPhase.SWEEPING):
            actions += self._begin_stop(now)
        return actions

    def _scheduler_was_lost(self, event: SchedulerLost, now: float) -> list[Action]:
        if event.verdict:
            return self._end(event.verdict, now)
        return self._stop_alone(self._internal(event.reason, event.code), now)

    def _signalled(self, signum: int, now: float) -> list[Action]:
        if signum in self.forwarded:
            return [ForwardSignal(tuple(sorted(self.live)), signum)] if self.live else []
        if self._interrupts:  # the user's second signal
            return self._hurry(now)
        self._interrupts.append(signum)
        if not self._was_reached and not self.register.serves:
            # No scheduler knows this node, so no other node waits for it.
            verdict = verdicts.interrupted(self.job_id, signum, generation=-1, restarts=0)
            return self._conclude(verdict, now)
        if self.phase in (AgentPhase.JOINING, AgentPhase.RUNNING):
            self._due = now + self._patience()
        return [self._send(Interrupted(signum=signum))]

    def _hurry(self, now: float) -> list[Action]:
        """Kill the workers that ignored the user's first signal, on all nodes."""
        actions: list[Action] = []
        if signal.SIGKILL not in self._interrupts:
            self._interrupts.append(signal.SIGKILL)
            actions.append(self._send(Interrupted(signum=signal.SIGKILL)))
        if self.phase in (AgentPhase.RUNNING, AgentPhase.STOPPING) and not self._tree_lost:
            actions += self._sweep(now)
        return actions

    def _end(self, verdict: Verdict, now: float) -> list[Action]:
        """Exit with `verdict`, once no worker lives here that the scheduler did not know of."""
        return self._stop_alone(verdict, now) if self.live else self._conclude(verdict, now)

    def _stop_alone(self, verdict: Verdict, now: float) -> list[Action]:
        """Stop without a scheduler and exit with `verdict`."""
        if self._own_verdict is None:
            self._own_verdict = verdict
        if self.phase is AgentPhase.RUNNING:
            return self._begin_stop(now)
        is_idle = self.phase is AgentPhase.JOINING
        return self._conclude(self._own_verdict, now) if is_idle else []

    def _check_deadline(self, now: float) -> list[Action]:
        due = self.deadline()
        if due is None or now < due:
            return []
        if self._reach_by is not None and now >= self._reach_by:
            self._reach_by = None
            away = self.lease.fence + ABSENCE_PATIENCE
            reason = f"the scheduler has been silent for {away:g}s"
            return self._stop_alone(self._internal(reason, ExitCode.NODE_LOST), now)
        if self._due is None:
            return self._not_formed(now)
        self._due = None
        match self.phase:
            case AgentPhase.STOPPING:
                return [*self._told_of_kill(), *self._sweep(now)]
            case AgentPhase.SWEEPING:
                silent = "forkserver" if self._swept else "reaper"
                self._swept = GenerationSwept(self.generation, (f"the {silent} does not answer",))
                return self._drained_if_done(now)
        return self._stop_alone(self._unanswered(), now)

    def _unanswered(self) -> Verdict:
        """Return the verdict of this node if the scheduler does not answer its user's signal.

        The user has stopped the job, whatever keeps the scheduler: a slow start of another one on a
        busy machine, or the network between the nodes.
        """
        verdict = verdicts.interrupted(
            self.job_id, self._interrupts[0], generation=self.generation, restarts=0
        )
        hint = f"the scheduler did not answer within {self._patience():g}s"
        return msgspec.structs.replace(verdict, hint=hint)

    def _not_formed(self, now: float) -> list[Action]:
        self.form_by = math.inf
        if self._pending:
            reason = "the forkserver has not finished its imports"
            hint = "something in --preload may wait for ever; --join-timeout sets the limit"
        elif self._awaited:
            reason, hint = self._awaited, ""
        elif self.register.serves:
            reason = "the scheduler has not answered"
            hint = "scheduler.log in the log directory says what it did"
        else:
            reason = f"no scheduler answered at --master-addr {self.scheduler}"
            hint = "is msrun running on that node, and the port open?"
        verdict = self._internal(f"the job did not form in time: {reason}", ExitCode.JOIN_TIMEOUT)
        return self._stop_alone(msgspec.structs.replace(verdict, hint=hint), now)

    def _internal(self, reason: str, code: int) -> Verdict:
        root = self.root()
        known = f"{reason}; before that, {root.sentence()}" if root else reason
        verdict = verdicts.internal(self.job_id, known, generation=self.generation, code=code)
        return msgspec.structs.replace(verdict, root=root)

    def root(self) -> RankExit | None:
        """Return the first failure of a worker of this node in its last generation, if any."""
        ends = [(end, at - end.age) for end, at in self._exits if not end.stopped]
        if all(end.succeeded for end, _ in ends):
            return None
        return verdicts.root_cause(ends)

    def _conclude(self, verdict: Verdict, now: float) -> list[Action]:
        """Exit with `verdict`, after a time for the servers in which they may save their state."""
        is_patient = not self._tree_lost and signal.SIGKILL not in self._interrupts
        if self.servers and is_patient and (ends := self.servers.end()):
            self.phase = AgentPhase.LEAVING
            self._own_verdict = verdict
            self._reach_by, self._due = None, now + self.grace
            # A stopped process acts on a signal only once it is continued.
            return [*ends, SignalServers(self.servers.live, signal.SIGCONT)]
        self.phase = AgentPhase.FINISHED
        self._due = None
        return [Conclude(verdict)]

    # Parameter servers.

    def _of_server(self, event: ServerStarted | ServerEnded, now: float) -> list[Action]:
        if self.servers is None:
            return []
        failure = None
        if isinstance(event, ServerStarted):
            self.servers.started(event.server, event.pid)
        else:
            failure = self.servers.ended(event.exit, now=now)
        actions: list[Action] = [self._send(self.servers.report())]
        if failure:
            self._failure = failure
            actions.append(self._send(failure))
        return actions + self.servers.restart(now=now)

    def _while_leaving(self, event: Event, now: float) -> list[Action]:
        """Wait for the servers, which have been asked to end; the verdict stands."""
        is_over = isinstance(event, Signalled | TreeLost) or (
            self._due is not None and now >= self._due
        )
        if self.servers and isinstance(event, ServerEnded):
            self.servers.ended(event.exit, now=now)
            is_over = is_over or not self.servers.live
        if not is_over or self._own_verdict is None:
            return []
        self.phase = AgentPhase.FINISHED
        self._due = None
        return [Conclude(self._own_verdict)]

    def _send(self, body: FromAgent) -> SendToScheduler:
        return SendToScheduler(self.generation, body)
