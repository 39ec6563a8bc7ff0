"""The scheduler's state machine: every transition of a job stands in this file.

It does no IO.  The caller feeds one event at a time with the current time and carries out the
actions it gets back, in order::

    for action in state.handle(event, now=now):
        ...

**The problem.**  Nodes fail, are cut off, come back and come late; messages are lost, doubled and
delayed; the scheduler itself may die between any two actions.  Nevertheless a rank must never run
twice at once, and every node must get the same verdict.

**The idea.**  A job is a row of *generations*: FORMING -> RUNNING -> STOPPING -> FORMING ... ->
DONE | FAILED.  Nothing is repaired inside a generation.  Every failure and every change stops all
of it and starts the next one, so there is one path to get right.  A generation stops because of a
failure (of a worker or a node), a change (nodes come or go), or an obstacle (a verdict that waits
until nothing runs, for example that of Ctrl-C).  A member is *drained* when no worker of the
generation can live on it: it reported so, its lease is over, it never started, or its launcher was
started anew.  The last drained member, and nothing before it, decides what follows, because a
report that arrives late may be of the failure that came first.

**Invariants**, which `tests/sim` checks in whole clusters under faults:

- No generation starts while `current.undrained` or `roster.stale` name a node.
- Generations are numbered upwards, above all that any node has seen.
- A `Write` precedes the messages about it: a generation is on disk before its first `Start`, the
  verdict before its first `Finish`, an exclusion before the job goes on without the node.
- The first report of a rank's end counts, and no message of another generation or of another
  incarnation of a node changes anything.
- The verdict never changes.  Nodes that come later get the same one.

**A scheduler that follows another** knows the log and the registrations of the nodes, and no more.
It takes all members of the last generation for running until each has registered again or its
lease is over.  If the log was lost, the last generation is unknown: it waits until every node that
may run one has registered or is dead, stops all, and numbers the next generation above theirs.

**Tried or rejected.**  The first report as the root cause: it names a victim when the culprit ends
slowly.  Stopping a generation for a newcomer at once: everybody waited while that one imported
torch, so it joins when it is warm.  Restarting a single rank: its peers hold a broken process
group.  `tests/sim/mutants.py` has the machine with one rule left out each.
"""

# tidy: long file, one machine is read in one place: every transition of the job stands here.

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from msrun.cluster.bounds import listed
from msrun.cluster.scheduler import rank_assignment, wal
from msrun.cluster.scheduler.events import (
    Action,
    AgentMessage,
    Event,
    JobPhase,
    Lost,
    SendToAgent,
    Unreachable,
    Woke,
    Write,
)
from msrun.cluster.scheduler.forming import Forming
from msrun.cluster.scheduler.generation import Generation, Loss, StopReason, start_generation
from msrun.cluster.scheduler.restart_policy import Again, GiveUp, RestartPolicy
from msrun.cluster.scheduler.roster import RegisteredNode, Roster
from msrun.cluster.scheduler.verdict_builder import VerdictBuilder
from msrun.cluster.tick import Tick
from msrun.cluster.verdict import RankExit, Verdict, fit
from msrun.cluster.wire.messages import (
    Drained,
    Finish,
    Formation,
    FromScheduler,
    Interrupted,
    NodeFailed,
    Refused,
    Register,
    Restarting,
    Serve,
    ServerFailed,
    Stop,
    Waiting,
    Warmed,
    WorkerExited,
)
from msrun.errors import ExitCode, signal_name

_UNKNOWN_CHANGE = "it was being stopped when its scheduler ended"


@dataclass(slots=True, kw_only=True)
class SchedulerState:
    """One job, from its first node to its verdict.

    The arguments are the wishes of its users; all other attributes change by the methods only.

    Args:
        job_id: The job.
        formation: How many nodes it takes.
        join_timeout: Seconds in which they must register, each time; inf waits.
        policy: Decides about restarts.
        last_call: Seconds for which more nodes than the fewest are waited for.
        replaces: Whoever started the nodes starts another in the place of one that leaves.
        started_at: Time of the first event, on the caller's monotonic clock.
    """

    job_id: str
    formation: Formation
    join_timeout: float
    policy: RestartPolicy
    last_call: float = 0.0
    replaces: bool = False
    started_at: float = 0.0

    phase: JobPhase = field(init=False, default=JobPhase.FORMING)
    generation: int = field(init=False, default=0)
    """Number of the generation that runs or is next."""
    current: Generation = field(init=False, default_factory=Generation)
    """The latest generation, which may have ended; empty before the first."""
    roster: Roster = field(init=False)
    """The nodes that have registered."""
    verdict: Verdict | None = field(init=False, default=None)
    servers: int = field(init=False)
    """Parameter servers that all nodes are to have together."""
    untold: set[str] = field(init=False, default_factory=set)
    """Nodes that do not know from this scheduler how the job ended, or that it goes on."""

    _forming: Forming = field(init=False)
    # Reason and signal of the last `Stop`, for members that register while they are being stopped.
    _stopped_with: tuple[str, int] = field(init=False, default=("", signal.SIGTERM))
    # The verdict that waits until nothing runs any more.
    _obstacle: Verdict | None = field(init=False, default=None)
    # When newcomers change the generation that runs; None while none has come.
    _grow_at: float | None = field(init=False, default=None)
    # Why the next generation follows the last.
    _restart_cause: str = field(init=False, default="")
    # The latest generation that any node knows: later than ours if the log lost records.
    _latest_seen: int = field(init=False, default=-1)
    _has_lost_log: bool = field(init=False, default=False)
    # The servers of a node do not follow from its rank alone.
    _is_scaled: bool = field(init=False, default=False)
    # An earlier scheduler may have had nodes that its log does not name.
    _may_miss_spares: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Count the time for the first forming from the start."""
        self.roster = Roster(self.formation, self.replaces)
        self.servers = self.formation.servers
        self._forming = Forming(
            join_timeout=self.join_timeout,
            last_call=self.last_call,
            give_up_at=self.started_at + self.join_timeout,
        )

    def recover(
        self, records: Sequence[wal.Record], *, now: float, is_whole: bool = True
    ) -> list[wal.Member]:
        """Go on where the scheduler that wrote `records` left off.

        Returns the members of its last generation.  Each of them must register again and report its
        workers, or be lost.  A log that is not whole (`is_whole`) does not
        name the last members: everything that runs is stopped, and the job begins again.
        """
        self.verdict = wal.verdict_of(records)
        self.untold = set(wal.untold(records))
        schedulers = sum(isinstance(record, wal.Began) for record in records)
        # A verdict names the spares that its scheduler knew.  Those of any further scheduler,
        # or of one that reached no verdict, are written nowhere.
        self._may_miss_spares = not is_whole or schedulers > (self.verdict is not None)
        if self.verdict:
            self.phase = JobPhase.FAILED if self.verdict.code else JobPhase.DONE
        total = wal.scaled(records)
        self.servers = self.servers if total is None else total
        self._is_scaled = total is not None
        for node_id, why in wal.excluded(records).items():
            self.roster.exclude(node_id, why)
        last = wal.last_generation(records)
        if last and not self.verdict:
            self.policy.restore(last, now=now)
        if not is_whole:
            self._has_lost_log = True
            self._note_seen(last.generation if last else -1, now)
            self._forming.again(self._all_known_at, now=now)
            return []
        if last is None or self.verdict:
            return []
        self.generation = last.generation
        self.phase = JobPhase.RUNNING
        self.current = Generation.of(last.members, (last.store_host, last.store_port))
        self.roster.expect(last.members)
        return last.members

    def handle(self, event: Event, *, now: float) -> list[Action]:
        """Apply `event` at time `now` and return the actions for the caller, in order."""
        if isinstance(event, AgentMessage):
            self.untold.discard(event.node_id)
        if self.is_over:
            return self._repeat_verdict(event)
        if isinstance(event, Tick):
            return self._check_deadlines(now)
        if isinstance(event, Woke):
            self._forming.woke(now=now)
            return []
        return self._handle_node_event(event, now)

    def _handle_node_event(
        self, event: AgentMessage | Lost | Unreachable, now: float
    ) -> list[Action]:
        if isinstance(event, Unreachable):
            return [self._send(event.node_id, Refused(reason=event.problem, code=ExitCode.USAGE))]
        if isinstance(event, AgentMessage) and isinstance(event.body, Register):
            return self._register(event, event.body, now)
        if isinstance(event, Lost):
            return self._lost(event, now)
        node = self.roster.nodes.get(event.node_id)
        if node is None or node.incarnation != event.incarnation:
            return []
        return self._handle_message(event, node, now)

    # Questions of the caller.

    @property
    def is_over(self) -> bool:
        """Whether the verdict is known."""
        return self.phase in (JobPhase.DONE, JobPhase.FAILED)

    def deadline(self) -> float | None:
        """Time by which `Tick` must be sent if nothing else is; None when there is none."""
        if self.phase is JobPhase.RUNNING:
            return self._grow_at
        if self.phase is not JobPhase.FORMING:
            return None
        if self._obstacle:
            return self._all_stopped_at
        return self._forming.deadline(is_full=self.roster.is_full())

    def may_leave(self, *, now: float) -> bool:
        """Whether every node that may live knows how the job ended.

        The log names only the members of the generation.  Other nodes that had registered with
        an earlier scheduler become known when they register again.
        """
        return not self.untold and not (self._may_miss_spares and now < self._all_known_at)

    @property
    def _all_known_at(self) -> float:
        """Time by which every node of an earlier scheduler has registered here or is dead."""
        return self.started_at + self.formation.lease

    @property
    def _all_stopped_at(self) -> float | None:
        """Time from which no worker lives that was not started here; None while some are known."""
        known_at = self._all_known_at if self._has_lost_log else self.started_at
        return None if self.roster.stale else known_at

    def _has_all_stopped(self, now: float) -> bool:
        at = self._all_stopped_at
        return at is not None and now >= at

    # Asked from outside: by the user of this node, or over a control connection.

    def interrupt(self, signum: int) -> list[Action]:
        """Stop the job for its user, who sent `signum` to the launcher of a node."""
        # A script may catch Ctrl-C to save its work, as it does without a launcher.
        is_of_terminal = signum in (signal.SIGHUP, signal.SIGQUIT)
        forwarded = signal.SIGTERM if is_of_terminal else signum
        return self._end(self._verdicts().interrupted(signum), forwarded)

    def stop(self, *, at_once: bool) -> list[Action]:
        """Stop the job for its user; `at_once` gives its workers no time."""
        verdict = self._verdicts().interrupted(signal.SIGTERM)
        verdict = msgspec.structs.replace(verdict, reason="stopped by `msrun stop`")
        was_stopping = self.phase is JobPhase.STOPPING
        actions = self._end(verdict, signal.SIGKILL if at_once else signal.SIGTERM)
        return [*actions, *self._kill_now()] if was_stopping and at_once else actions

    def give_up_on(self, worker: RankExit, *, is_sure: bool, now: float) -> list[Action]:
        """Treat a worker that hangs as one that failed when it last made progress."""
        if self.phase is not JobPhase.RUNNING:
            return []
        self.current.is_blame_sure = is_sure
        return self._count_exit(self.current.node_of(worker.rank), worker, now)

    def scale_servers(self, total: int) -> list[Action]:
        """Have so many parameter servers, in a generation that runs."""
        self.servers, self._is_scaled = total, True
        orders = [order for node_id in self.current.members for order in self._serve(node_id)]
        return [Write(wal.ServersScaled(total)), *orders]

    # Nodes that register.

    def _register(self, event: AgentMessage, body: Register, now: float) -> list[Action]:
        node_id = event.node_id
        known = self.roster.nodes.get(node_id)
        is_member = node_id in self.current.undrained
        is_known = self.current.may_live_on(node_id, event.incarnation)
        # A member that is back is never refused: its workers run, so it has to be dealt with.
        if not is_known and (problem := self.roster.misfit(node_id, body)):
            code = ExitCode.NODE_LOST if node_id in self.roster.excluded else ExitCode.USAGE
            return [self._send(node_id, Refused(reason=problem, code=code))]
        if farewell := self.roster.farewell(node_id, event.incarnation):
            return [self._send(node_id, farewell)]
        # A node may register again while it leaves, and still leaves then.
        is_same = known is not None and known.incarnation == event.incarnation
        leaves_with = known.leaves_with if known and is_same else 0
        node = RegisteredNode(event.incarnation, body, now, leaves_with, is_warm=body.warm)
        self.roster.add(node_id, node)
        self._forming.someone_came(now=now)
        self._note_seen(max(body.seen, body.running, body.spared), now)
        if is_member and self.phase is not JobPhase.FORMING:
            return self._member_is_back(node_id, event.incarnation, body, now)
        return self._admit_newcomer(node_id, body.running, now)

    def _note_seen(self, generation: int, now: float) -> None:
        """Number the next generation above one that a node has seen and the log may not name."""
        latest = self.generation - (self.phase is JobPhase.FORMING)
        if generation <= max(latest, self._latest_seen):
            return
        self._latest_seen = generation
        if self.phase is JobPhase.FORMING:
            self.generation = generation + 1
            self._forming.again(max(self._all_known_at, self._forming.resume_at or 0.0), now=now)

    def _member_is_back(
        self, node_id: str, incarnation: int, body: Register, now: float
    ) -> list[Action]:
        """Go on with a node of the generation that registers again, or without its workers."""
        if incarnation != self.current.members[node_id].incarnation:
            return self._member_gone(node_id, f"node {body.host} was started anew", now, now)
        if body.seen < self.generation:
            # It never started its workers, and a `Start` under way is of an earlier session,
            # which the node drops.
            is_stopping = self.phase is JobPhase.STOPPING
            return self._member_drained(node_id, now) if is_stopping else self._start(node_id)
        actions = [a for end in body.exits for a in self._count_exit(node_id, end, now)]
        if body.running == self.generation:
            if self.phase is JobPhase.STOPPING and not actions:
                # Whether an earlier scheduler's `Stop` reached it is unknown.
                actions = [self._send(node_id, self._stop_message())]
            return [*actions, *self._serve(node_id)]
        self.current.stuck[node_id] = body.stuck
        if body.running >= 0:  # of a later generation, whose record the log has lost
            actions += self._admit_newcomer(node_id, body.running, now)
            return actions + self._member_gone(node_id, f"node {body.host} went on", now, now)
        reason = f"node {body.host} was cut off and had to stop its workers"
        return actions + self._member_gone(node_id, reason, now, now)

    def _admit_newcomer(self, node_id: str, running: int, now: float) -> list[Action]:
        """Use a node that is no member, once nothing of another generation runs there."""
        if running >= 0:  # workers of a generation that has gone on without them
            self.roster.mark_stale(node_id, is_stale=True)
            stop = Stop(reason="the job went on without this node", servers=True)
            return [SendToAgent(node_id, running, stop)]
        self.roster.mark_stale(node_id, is_stale=False)
        if self.phase is JobPhase.FORMING:
            return self._form_if_possible(now)
        if not self._can_grow() or not self.roster.nodes[node_id].is_warm:
            return [self._send(node_id, self._standby_message(node_id))]
        return self._await_newcomers(now)

    def _await_newcomers(self, now: float) -> list[Action]:
        """Let nodes that come together change the generation once, and wait for no other."""
        at = self.roster.settled_at(self.current.members, now=now)
        self._grow_at = at if self._grow_at is None else min(self._grow_at, at)
        is_due = self.phase is JobPhase.RUNNING and now >= self._grow_at
        return self._grow() if is_due else []

    # Messages of agents.

    def _handle_message(
        self, event: AgentMessage, node: RegisteredNode, now: float
    ) -> list[Action]:
        # Reports of an earlier generation may arrive late, and those ranks are other workers now.
        is_of_now = event.generation == self.generation and event.node_id in self.current.members
        match event.body:
            case Warmed():
                return self._warmed(event.node_id, node, now)
            case WorkerExited(exit=end, at=at) if is_of_now:
                said_at = self.current.said_at(event.node_id, at, now)
                return self._count_exit(event.node_id, end, said_at)
            case Drained(stuck=stuck):
                return self._drained(event.node_id, stuck, now, is_of_now=is_of_now)
            case Interrupted(signum=signum):
                return self._interrupted(event.node_id, node, signum, now)
            case NodeFailed() | ServerFailed() as failure:
                return self._failed(event.node_id, node, failure, now)
            case _:  # of another generation, or a message for `Control`
                return []

    def _warmed(self, node_id: str, node: RegisteredNode, now: float) -> list[Action]:
        """Let a newcomer join the generation, which was not stopped before it could."""
        node.is_warm = True
        members = self.current.members
        joins = node in self.roster.newcomers(members) and self.roster.has_room(members)
        return (
            self._admit_newcomer(node_id, -1, now)
            if joins and self.phase is JobPhase.RUNNING
            else []
        )

    def _count_exit(self, node_id: str, end: RankExit, now: float) -> list[Action]:
        if self.phase is JobPhase.FORMING or end.rank not in self.current.ranks(node_id):
            return []
        # The first report counts: a node that registers again repeats the ends of its workers.
        self.current.exits.setdefault(end.rank, (fit(end), now - end.age))
        if self.phase is JobPhase.STOPPING:
            if not end.succeeded and not end.stopped:
                self._blame_failure()
            return []
        if not end.succeeded:
            return self._stop(end.sentence(), StopReason.FAILURE)
        if end.stopped:  # by an earlier scheduler, whose reason is lost
            self.current.change = _UNKNOWN_CHANGE
            is_elastic = self.formation.nnodes_min < self.formation.nnodes_max
            because = StopReason.CHANGE if is_elastic else StopReason.FAILURE
            return self._stop(_UNKNOWN_CHANGE, because)
        return self._decide(self._verdicts().success()) if self.current.all_succeeded else []

    def _blame_failure(self) -> None:
        """Take a failure for the reason for which an earlier scheduler stopped the generation."""
        if self.current.change == _UNKNOWN_CHANGE and self.current.because is StopReason.CHANGE:
            self.current.because = StopReason.FAILURE

    def _drained(
        self, node_id: str, stuck: list[str], now: float, *, is_of_now: bool
    ) -> list[Action]:
        if node_id in self.roster.stale:
            return self._admit_newcomer(node_id, -1, now)
        if not is_of_now or self.phase is JobPhase.FORMING:
            return []
        self.current.stuck[node_id] = stuck
        if self.phase is JobPhase.RUNNING:  # an earlier scheduler had asked it to stop
            host = self.current.members[node_id].host
            return self._member_gone(node_id, f"node {host} has stopped its workers", now, now)
        return self._member_drained(node_id, now)

    def _interrupted(
        self, node_id: str, node: RegisteredNode, signum: int, now: float
    ) -> list[Action]:
        if signum == signal.SIGKILL:  # the user's second signal, which is not about a leaving node
            return self._kill_now() if self._obstacle else []
        if signum != signal.SIGINT and self.roster.may_leave(node_id):
            self.roster.let_go(node_id, signum)
            host = node.registration.host
            return self._leave(node_id, f"node {host} leaves on {signal_name(signum)}", now)
        return self.interrupt(signum)

    def _failed(
        self, node_id: str, node: RegisteredNode, failure: NodeFailed | ServerFailed, now: float
    ) -> list[Action]:
        if isinstance(failure, ServerFailed):
            return self._server_failed(failure, now)
        return self._node_failed(node_id, node, failure, now)

    def _node_failed(
        self, node_id: str, node: RegisteredNode, failure: NodeFailed, now: float
    ) -> list[Action]:
        # Any other code is a mistake of the user, such as a failing import, which other nodes
        # share.
        if failure.code != ExitCode.NODE_LOST or not self.roster.can_do_without(node_id):
            code = failure.code or ExitCode.INTERNAL
            return self._end(self._verdicts().build(code, failure.reason))
        host = node.registration.host
        sentence = f"node {host} can run no more workers: {failure.reason}"
        written = self._exclude(node_id, sentence)
        if node_id in self.current.undrained:
            self.current.losses.append(Loss(sentence, now))
            if self.phase is JobPhase.RUNNING:
                return written + self._stop(sentence, StopReason.FAILURE)
        return written + self._leave(node_id, sentence, now)

    def _server_failed(self, failed: ServerFailed, now: float) -> list[Action]:
        """End the job, because a parameter server is not started again."""
        step = GiveUp(failed.reason, failed.code, failed.hint)
        verdict = self._verdicts().server_failure(fit(failed.exit), step)
        actions = self._end(verdict)
        comes_first = now - failed.exit.age < self.current.failed_at
        if self._obstacle is verdict and self.current.because is StopReason.FAILURE and comes_first:
            # The workers failed because their server had, of which its node told later.
            self.current.because = StopReason.OBSTACLE
        return actions

    def _exclude(self, node_id: str, why: str) -> list[Action]:
        """Run no more workers on a node; on disk, so that the next scheduler runs none either."""
        if node_id in self.roster.excluded:
            return []
        self.roster.exclude(node_id, why)
        return [Write(wal.Excluded(node_id, why))]

    def _leave(self, node_id: str, sentence: str, now: float) -> list[Action]:
        """Let a node go that its user or its lender wants back."""
        is_idle = self.phase is JobPhase.FORMING or node_id not in self.current.members
        if is_idle:
            return self._send_home(node_id) + self._form_if_possible(now)
        if self.phase is not JobPhase.RUNNING:
            return []
        self.current.change = sentence
        return self._stop(sentence, StopReason.CHANGE)

    # Nodes that are lost.

    def _lost(self, loss: Lost, now: float) -> list[Action]:
        node_id = loss.node_id
        self.roster.lose(node_id, loss.incarnation)
        if self.phase is JobPhase.FORMING:
            return self._form_if_possible(now)
        if not self.current.may_live_on(node_id, loss.incarnation):
            return []
        sentence = f"node {self.current.members[node_id].host} was lost: {loss.reason}"
        return self._member_gone(node_id, sentence, loss.heard_at, now)

    def _member_gone(self, node_id: str, sentence: str, at: float, now: float) -> list[Action]:
        """Go on without the workers of a member, which have all ended."""
        actions: list[Action] = []
        # A node whose workers have all reported their ends took nothing with it.
        if not self.current.has_ended(node_id) or self.current.servers_on(node_id, self.servers):
            self.current.losses.append(Loss(sentence, at))
            self._blame_failure()
            if self.phase is JobPhase.RUNNING:
                actions = self._stop(sentence, StopReason.FAILURE)
        return actions + self._member_drained(node_id, now)

    def _send_home(self, node_id: str) -> list[Action]:
        """Send a node home that leaves, or that is excluded."""
        return [self._send(node_id, self.roster.send_home(node_id))]

    # Generations.

    def _form_if_possible(self, now: float) -> list[Action]:
        """Start a generation if there are nodes enough and the time for it has come."""
        if self.phase is not JobPhase.FORMING:
            return []
        if self._obstacle:
            # Workers of an earlier generation may still run where the log was lost.
            return self._decide(self._obstacle) if self._has_all_stopped(now) else []
        is_enough, is_full = self.roster.is_enough(), self.roster.is_full()
        is_due = self._forming.is_due(is_enough=is_enough, is_full=is_full, now=now)
        return self._start_generation() if is_due else []

    def _start_generation(self) -> list[Action]:
        ready = self.roster.ready()
        before = self.current.members
        cold = self.roster.cold(before) if before else ()
        order = rank_assignment.assign_node_ranks(ready, self.formation, list(before), cold)
        workers = sum(ready[node_id].slots for node_id in order)
        # With --worker-num, nodes of other sizes may leave a rest that no node fits into.
        if self.formation.world_size not in (None, workers):
            there = listed([f"{body.host} {body.slots}" for body in ready.values()])
            reason = f"the workers of the nodes do not sum to {self.formation.world_size}, "
            reason += f"which --worker-num asks for: {there}"
            return self._decide(self._verdicts().build(ExitCode.USAGE, reason))
        self.phase = JobPhase.RUNNING
        self._grow_at = None
        self.current = start_generation({n: self.roster.nodes[n] for n in order})
        self.roster.bind(order)
        record = wal.GenerationStarted(
            self.generation,
            list(self.current.members.values()),
            *self.current.store,
            self.policy.failures,
            self.policy.losses,
            self.policy.blamed,
            self._restart_cause,
        )
        spares = [
            self._send(n, self._standby_message(n)) for n in ready if n not in self.current.members
        ]
        starts = [action for node_id in order for action in self._start(node_id)]
        return [Write(record), *starts, *spares]

    def _start(self, node_id: str) -> list[Action]:
        return [*self._serve(node_id), self._send(node_id, self.current.start(node_id))]

    def _serve(self, node_id: str) -> list[Action]:
        """Tell a node its parameter servers, where they do not follow from its rank."""
        if not self._is_scaled and not self.formation.has_server_nodes:
            return []
        if node_id not in self.roster.nodes:
            return []
        numbers = self.current.servers_on(node_id, self.servers)
        return [self._send(node_id, Serve(servers=numbers, total=self.servers))]

    def _stop(self, reason: str, because: StopReason, signum: int = signal.SIGTERM) -> list[Action]:
        self.phase = JobPhase.STOPPING
        self._grow_at = None
        self.current.because = because
        self._stopped_with = (reason, signum)
        return self._send_stop()

    def _send_stop(self) -> list[Action]:
        members = [n for n in sorted(self.current.undrained) if n in self.roster.nodes]
        return [self._send(node_id, self._stop_message()) for node_id in members]

    def _kill_now(self) -> list[Action]:
        """Give the workers that were asked to stop no more time."""
        if self.phase is not JobPhase.STOPPING:
            return []
        self._stopped_with = (self._stopped_with[0], signal.SIGKILL)
        return self._send_stop()

    def _member_drained(self, node_id: str, now: float) -> list[Action]:
        self.current.undrained.discard(node_id)
        if self.phase is not JobPhase.STOPPING or self.current.undrained:
            return []
        return self._after_generation(now)

    def _after_generation(self, now: float) -> list[Action]:
        """Decide about the time after a generation whose last worker is gone."""
        current = self.current
        if self._obstacle and current.because is StopReason.OBSTACLE:
            verdict = msgspec.structs.replace(self._obstacle, stuck=current.all_stuck())
            root = verdict.root
            return self._decide(self._verdicts().with_ends(verdict, root) if root else verdict)
        if current.all_succeeded:
            return self._decide(self._verdicts().success())
        root = current.root()
        # A stuck process may still hold a device or a port, so the next generation would fail too.
        if current.all_stuck():
            return self._decide(
                self._verdicts().failure(root, GiveUp("processes could not be killed"))
            )
        step = self._next_step(root, now)
        if isinstance(step, GiveUp):
            return self._decide(self._verdicts().failure(root, step))
        # The failure came before the obstacle and would have been restarted; the obstacle ends the
        # job.
        if self._obstacle:
            return self._decide(self._obstacle)
        return self._form_again(root, step, now)

    def _next_step(self, root: RankExit | None, now: float) -> Again | GiveUp:
        if self.current.because is StopReason.CHANGE:  # nothing failed, so it costs no restart
            return Again(0.0)
        return self.policy.after(root, now=now) if root else self.policy.after_loss(now=now)

    def _form_again(self, root: RankExit | None, step: Again, now: float) -> list[Action]:
        """Go on to the next generation, with the nodes that can take part."""
        reason = self.current.sentence(root)
        written: list[Action] = []
        if root and (blamed := self._blame(root, now)):
            reason += f"; {blamed}"
            written = self._exclude(self.current.node_of(root.rank), blamed)
        self._restart_cause = reason
        self.phase = JobPhase.FORMING
        is_behind = self._latest_seen > self.generation
        self.generation = max(self.generation, self._latest_seen) + 1
        # If the log lost a generation, nodes that this scheduler has not heard of may run it.
        at = max(now + step.delay, self._all_known_at if is_behind else 0.0)
        self._forming.again(at, now=now)
        count = self.policy.failures if root else self.policy.losses
        restarting = Restarting(
            reason=reason,
            log_file=root.log_file if root else "",
            delay=step.delay,
            restart=0 if self.current.because is StopReason.CHANGE else count,
            max_restarts=self.policy.limits.max_restarts,
        )
        goodbye = [action for n in self.roster.leaving() for action in self._send_home(n)]
        return [*written, *goodbye, *self._send_all(restarting), *self._form_if_possible(now)]

    def _blame(self, root: RankExit, now: float) -> str:
        """Return why a node is excluded, if its workers failed too often; else an empty text."""
        if not self.current.is_blame_sure:
            return ""
        node_id = self.current.node_of(root.rank)
        failures = self.policy.blame(node_id, now=now)
        node = self.roster.nodes.get(node_id)
        if not node or not failures or not self.roster.can_do_without(node_id):
            return ""
        return f"node {root.host} is excluded after {failures} failures of its workers"

    # Ends.

    def _end(self, verdict: Verdict, signum: int = signal.SIGTERM) -> list[Action]:
        """End the job with `verdict`, unless a worker's failure came first and ends it itself."""
        if self.phase is JobPhase.FORMING and not (self._has_lost_log or self.roster.stale):
            return self._decide(verdict)
        self._obstacle = self._obstacle or verdict
        if self.phase is JobPhase.RUNNING:
            return self._stop(verdict.reason, StopReason.OBSTACLE, signum)
        if self.current.because is StopReason.CHANGE:
            self.current.because = StopReason.OBSTACLE
        return []

    def _check_deadlines(self, now: float) -> list[Action]:
        due = self.deadline()
        if due is None or now < due:
            return []
        if self.phase is JobPhase.RUNNING:
            return self._grow()
        actions: list[Action] = []
        if self._forming.report_is_due(now=now) and not self.roster.is_enough():
            actions = self._send_all(Waiting(reason=self.roster.attendance()))
        if self._forming.is_over(now=now):
            attendance = self.roster.attendance()
            return self._decide(self._verdicts().join_timeout(attendance, self.join_timeout))
        return actions + self._form_if_possible(now)

    def _grow(self) -> list[Action]:
        self._grow_at = None
        if not self._can_grow():
            return []
        newcomers = self.roster.newcomers(self.current.members)
        hosts = [node.registration.host for node in newcomers if node.is_warm]
        self.current.change = f"node {listed(hosts)} joins"
        return self._stop(self.current.change, StopReason.CHANGE)

    def _can_grow(self) -> bool:
        """Whether a newcomer may change the generation, which must not be about to end."""
        return not self.current.exits and self.roster.can_grow(self.current.members)

    def _decide(self, verdict: Verdict) -> list[Action]:
        self.verdict = verdict
        self.phase = JobPhase.FAILED if verdict.code else JobPhase.DONE
        # The agent that hosts the scheduler reads the verdict in the log.
        nodes = self.roster.nodes.items()
        others = sorted(n for n, node in nodes if not node.registration.serves)
        return [Write(wal.Decided(verdict, others)), *self._send_all(Finish(verdict=verdict))]

    def _repeat_verdict(self, event: Event) -> list[Action]:
        """Answer a late node with the verdict, which never changes."""
        if self.verdict is None or not isinstance(event, AgentMessage | Unreachable):
            return []
        return [self._send(event.node_id, Finish(verdict=self.verdict))]

    # Building blocks of actions.

    def _verdicts(self) -> VerdictBuilder:
        return VerdictBuilder(self.job_id, self.generation, self.policy.used, self.current)

    def _send(self, node_id: str, body: FromScheduler) -> SendToAgent:
        return SendToAgent(node_id, self.generation, body)

    def _send_all(self, body: FromScheduler) -> list[Action]:
        return [self._send(node_id, body) for node_id in sorted(self.roster.nodes)]

    def _standby_message(self, node_id: str) -> Waiting:
        is_next, reason = self.roster.stand_by(node_id, self.current.members)
        return Waiting(reason=f"job {self.job_id} has its {reason}", spare=not is_next)

    def _stop_message(self) -> Stop:
        reason, signum = self._stopped_with
        return Stop(reason=reason, signum=signum)
