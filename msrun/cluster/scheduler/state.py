"""Scheduler side of the protocol: a state machine that does no IO.

The caller feeds one event at a time with the current time and carries out the
actions it gets back, in order::

    for action in state.handle(event, now=now):
        ...

Phases: FORMING -> RUNNING -> STOPPING -> FORMING ... -> DONE | FAILED.  A
generation is announced, and a verdict told, only after a `Write` of it: the caller
must have it on disk before it goes on to the next action.
"""

# tidy: long file, one machine is read in one place: every transition of the job stands here.

from __future__ import annotations

import signal
from collections.abc import Sequence

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
    Tick,
    Unreachable,
    Woke,
    Write,
)
from msrun.cluster.scheduler.generation import Generation, Loss, StopReason, start_generation
from msrun.cluster.scheduler.job_state import JobState
from msrun.cluster.scheduler.restart_policy import Again, GiveUp
from msrun.cluster.scheduler.roster import RegisteredNode
from msrun.cluster.verdict import RankExit, Verdict, fit
from msrun.cluster.wire.messages import (
    Drained,
    Finish,
    Interrupted,
    NodeFailed,
    Refused,
    Register,
    Restarting,
    Stop,
    Waiting,
    Warmed,
    WorkerExited,
)
from msrun.errors import ExitCode, signal_exit_code, signal_name

_UNKNOWN_CHANGE = "it was being stopped when its scheduler ended"


class SchedulerState(JobState):
    """One job, from its first node to its verdict; arguments as there."""

    __slots__ = ()

    def recover(
        self, records: Sequence[wal.Record], *, now: float, is_whole: bool = True
    ) -> list[wal.Member]:
        """Go on where the scheduler that wrote `records` left off.

        Returns the members of its last generation.  Each must be seen to register again,
        and to say what runs there, or to be lost.  Of a log that is not whole nobody knows
        the last members: whatever runs is stopped, and all begin again.
        """
        self.verdict = wal.verdict_of(records)
        self.untold = set(wal.untold(records))
        lives = sum(isinstance(record, wal.Began) for record in records)
        self._may_miss_spares = not is_whole or lives > (self.verdict is not None)
        if self.verdict:
            self.phase = JobPhase.FAILED if self.verdict.code else JobPhase.DONE
        for node_id, why in wal.excluded(records).items():
            self._roster.exclude(node_id, why)
        last = wal.last_generation(records)
        if last and not self.verdict:
            self.policy.restore(last, now=now)
        if not is_whole:
            self._has_lost_log = True
            self._has_seen(last.generation if last else -1, now)
            self._forming.again(self._all_known_at, now=now)
            return []
        if last is None or self.verdict:
            return []
        self.generation = last.generation
        self.phase = JobPhase.RUNNING
        self._current = Generation.of(last.members, (last.store_host, last.store_port))
        self._roster.expect(last.members)
        return last.members

    def handle(self, event: Event, *, now: float) -> list[Action]:
        """Apply `event` at time `now` and return what the caller must do, in order."""
        if isinstance(event, AgentMessage):
            self.untold.discard(event.node_id)
        if self.phase in (JobPhase.DONE, JobPhase.FAILED):
            return self._repeat_verdict(event)
        if isinstance(event, Tick):
            return self._check_deadlines(now)
        if isinstance(event, Woke):
            self._forming.woke(now=now)
            return []
        return self._of_node(event, now)

    def _of_node(self, event: AgentMessage | Lost | Unreachable, now: float) -> list[Action]:
        if isinstance(event, Unreachable):
            return [self._send(event.node_id, Refused(reason=event.problem, code=ExitCode.USAGE))]
        if isinstance(event, AgentMessage) and isinstance(event.body, Register):
            return self._register(event, event.body, now)
        if isinstance(event, Lost):
            return self._lost(event, now)
        node = self._roster.nodes.get(event.node_id)
        if node is None or node.incarnation != event.incarnation:
            return []
        return self._received(event, node, now)

    def deadline(self) -> float | None:
        """Time by which `Tick` must be sent if nothing else is; None when there is none."""
        if self.phase is JobPhase.FORMING:
            return self._forming_deadline()
        return self._grow_at if self.phase is JobPhase.RUNNING else None

    # Nodes that come.

    def _register(self, event: AgentMessage, body: Register, now: float) -> list[Action]:
        node_id = event.node_id
        known = self._roster.nodes.get(node_id)
        is_member = node_id in self._current.undrained
        is_known = self._current.lives(node_id, event.incarnation)
        if not is_known and (problem := self._roster.misfit(node_id, body)):
            code = ExitCode.NODE_LOST if node_id in self._roster.excluded else ExitCode.USAGE
            return [self._send(node_id, Refused(reason=problem, code=code))]
        if farewell := self._roster.farewell(node_id, event.incarnation):
            return [self._send(node_id, farewell)]
        is_same_life = known is not None and known.incarnation == event.incarnation
        leaves_with = known.leaves_with if known and is_same_life else 0
        node = RegisteredNode(event.incarnation, body, now, leaves_with, is_warm=body.warm)
        self._roster.add(node_id, node)
        self._forming.someone_came(now=now)
        self._has_seen(max(body.seen, body.running), now)
        if is_member and self.phase is not JobPhase.FORMING:
            return self._member_is_back(node_id, event.incarnation, body, now)
        return self._newcomer(node_id, body.running, now)

    def _has_seen(self, generation: int, now: float) -> None:
        """Number what follows after a generation of which the log may know nothing."""
        latest = self.generation - (self.phase is JobPhase.FORMING)
        if generation <= max(latest, self._seen):
            return
        self._seen = generation
        if self.phase is JobPhase.FORMING:
            self.generation = generation + 1
            self._forming.again(max(self._all_known_at, self._forming.resume_at or 0.0), now=now)

    def _member_is_back(
        self, node_id: str, incarnation: int, body: Register, now: float
    ) -> list[Action]:
        """Go on with a node of the generation that registers again, or without its workers."""
        if incarnation != self._current.members[node_id].incarnation:
            return self._gone(node_id, f"node {body.host} was started anew", now, now)
        if body.seen < self.generation:  # and nothing that is under way to it starts it
            is_stopping = self.phase is JobPhase.STOPPING
            return self._is_drained(node_id, now) if is_stopping else [self._start(node_id)]
        actions = [a for end in body.exits for a in self._count_exit(node_id, end, now)]
        if body.running == self.generation:
            if self.phase is JobPhase.STOPPING and not actions:
                # It may have been told by an earlier scheduler, or not at all.
                actions = [self._send(node_id, self._stop_message())]
            return actions
        self._current.stuck[node_id] = body.stuck
        if body.running >= 0:  # of a later generation, of which the log knows nothing
            actions += self._newcomer(node_id, body.running, now)
            return actions + self._gone(node_id, f"node {body.host} went on", now, now)
        reason = f"node {body.host} was cut off and had to stop its workers"
        return actions + self._gone(node_id, reason, now, now)

    def _newcomer(self, node_id: str, running: int, now: float) -> list[Action]:
        if running >= 0:  # workers of a generation that has gone on without them
            self._roster.mark_stale(node_id, is_stale=True)
            stop = Stop(reason="the job went on without this node")
            return [SendToAgent(node_id, running, stop)]
        self._roster.mark_stale(node_id, is_stale=False)
        if self.phase is JobPhase.FORMING:
            return self._form_if_possible(now)
        if not self._can_grow() or not self._roster.nodes[node_id].is_warm:
            return [self._send(node_id, self._stand_by(node_id))]
        return self._await_newcomers(now)

    def _await_newcomers(self, now: float) -> list[Action]:
        """Let those that come together change the generation once, and wait for no other."""
        at = self._roster.settled_at(self._current.members, now=now)
        self._grow_at = at if self._grow_at is None else min(self._grow_at, at)
        is_due = self.phase is JobPhase.RUNNING and now >= self._grow_at
        return self._grow() if is_due else []

    # What agents say.

    def _received(self, event: AgentMessage, node: RegisteredNode, now: float) -> list[Action]:
        is_of_now = event.generation == self.generation and event.node_id in self._current.members
        match event.body:
            case Warmed():
                return self._warmed(event.node_id, node, now)
            case WorkerExited(exit=end, at=at) if is_of_now:
                said_at = self._current.said_at(event.node_id, at, now)
                return self._count_exit(event.node_id, end, said_at)
            case Drained(stuck=stuck):
                return self._drained(event.node_id, stuck, now, is_of_now=is_of_now)
            case Interrupted(signum=signum):
                return self._interrupted(event.node_id, node, signum, now)
            case NodeFailed() as failure:
                return self._node_failed(event.node_id, node, failure, now)
            case _:  # of another generation, or what only a scheduler says
                return []

    def _warmed(self, node_id: str, node: RegisteredNode, now: float) -> list[Action]:
        """Let a newcomer join the generation, which was not stopped before it could."""
        node.is_warm = True
        members = self._current.members
        joins = node in self._roster.newcomers(members) and self._roster.has_room(members)
        return self._newcomer(node_id, -1, now) if joins and self.phase is JobPhase.RUNNING else []

    def _count_exit(self, node_id: str, end: RankExit, now: float) -> list[Action]:
        if self.phase is JobPhase.FORMING or end.rank not in self._current.ranks(node_id):
            return []
        self._current.exits.setdefault(end.rank, (fit(end), now - end.age))
        if self.phase is JobPhase.STOPPING:
            if not end.succeeded and not end.stopped:
                self._find_failure()
            return []
        if not end.succeeded:
            return self._stop(end.sentence(), StopReason.FAILURE)
        if end.stopped:  # by an earlier scheduler, of which nobody knows why
            self._current.change = _UNKNOWN_CHANGE
            is_elastic = self.formation.nnodes_min < self.formation.nnodes_max
            because = StopReason.CHANGE if is_elastic else StopReason.FAILURE
            return self._stop(_UNKNOWN_CHANGE, because)
        return self._decide(self._verdict(ExitCode.OK, "")) if self._current.all_succeeded else []

    def _find_failure(self) -> None:
        """Take a failure for why an earlier scheduler stopped the generation."""
        if self._current.change == _UNKNOWN_CHANGE and self._current.because is StopReason.CHANGE:
            self._current.because = StopReason.FAILURE

    def _drained(
        self, node_id: str, stuck: list[str], now: float, *, is_of_now: bool
    ) -> list[Action]:
        if node_id in self._roster.stale:
            return self._newcomer(node_id, -1, now)
        if not is_of_now or self.phase is JobPhase.FORMING:
            return []
        self._current.stuck[node_id] = stuck
        if self.phase is JobPhase.RUNNING:  # which an earlier scheduler had ended
            host = self._current.members[node_id].host
            return self._gone(node_id, f"node {host} has stopped its workers", now, now)
        return self._is_drained(node_id, now)

    def _interrupted(
        self, node_id: str, node: RegisteredNode, signum: int, now: float
    ) -> list[Action]:
        if signum == signal.SIGKILL:  # asked for a second time, and not for a node that leaves
            return self._hurry() if self._obstacle else []
        if signum != signal.SIGINT and self._roster.can_do_without(node_id):
            self._roster.let_go(node_id, signum)
            host = node.registration.host
            return self._leave(node_id, f"node {host} leaves on {signal_name(signum)}", now)
        verdict = self._verdict(signal_exit_code(signum), f"stopped by {signal_name(signum)}")
        # A script may catch Ctrl-C to save its work, as it does without a launcher.
        return self._end(verdict, signum if signum == signal.SIGINT else signal.SIGTERM)

    def _node_failed(
        self, node_id: str, node: RegisteredNode, failure: NodeFailed, now: float
    ) -> list[Action]:
        if failure.code != ExitCode.NODE_LOST or not self._roster.can_do_without(node_id):
            return self._end(self._verdict(failure.code or ExitCode.INTERNAL, failure.reason))
        host = node.registration.host
        sentence = f"node {host} can run no more workers: {failure.reason}"
        written = self._exclude(node_id, sentence)
        if node_id in self._current.undrained:
            self._current.losses.append(Loss(sentence, now))
            if self.phase is JobPhase.RUNNING:
                return written + self._stop(sentence, StopReason.FAILURE)
        return written + self._leave(node_id, sentence, now)

    def _exclude(self, node_id: str, why: str) -> list[Action]:
        """Run no more workers on a node, whoever is the scheduler."""
        if node_id in self._roster.excluded:
            return []
        self._roster.exclude(node_id, why)
        return [Write(wal.Excluded(node_id, why))]

    def _leave(self, node_id: str, sentence: str, now: float) -> list[Action]:
        """Let a node go that its user, or whoever lent it, wants back."""
        is_idle = self.phase is JobPhase.FORMING or node_id not in self._current.members
        if is_idle:
            return self._dismiss(node_id) + self._form_if_possible(now)
        if self.phase is not JobPhase.RUNNING:
            return []
        self._current.change = sentence
        return self._stop(sentence, StopReason.CHANGE)

    # Nodes that go.

    def _lost(self, loss: Lost, now: float) -> list[Action]:
        node_id = loss.node_id
        self._roster.lose(node_id, loss.incarnation)
        if self.phase is JobPhase.FORMING:
            return self._form_if_possible(now)
        if not self._current.lives(node_id, loss.incarnation):
            return []
        sentence = f"node {self._current.members[node_id].host} was lost: {loss.reason}"
        return self._gone(node_id, sentence, loss.heard_at, now)

    def _gone(self, node_id: str, sentence: str, at: float, now: float) -> list[Action]:
        """Go on without the workers of a member, none of which lives any more."""
        actions: list[Action] = []
        if not self._current.has_ended(node_id):
            self._current.losses.append(Loss(sentence, at))
            self._find_failure()
            if self.phase is JobPhase.RUNNING:
                actions = self._stop(sentence, StopReason.FAILURE)
        return actions + self._is_drained(node_id, now)

    def _dismiss(self, node_id: str) -> list[Action]:
        """Send a node home that leaves, or that is excluded."""
        return [self._send(node_id, self._roster.send_home(node_id))]

    # Generations.

    def _form_if_possible(self, now: float) -> list[Action]:
        """Start a generation if there are nodes enough and the time for it has come."""
        if self.phase is not JobPhase.FORMING:
            return []
        if self._obstacle:
            return self._decide(self._obstacle) if self._has_all_stopped(now) else []
        is_enough, is_full = self._roster.is_enough(), self._roster.is_full()
        is_due = self._forming.is_due(is_enough=is_enough, is_full=is_full, now=now)
        return self._start_generation() if is_due else []

    def _start_generation(self) -> list[Action]:
        ready = self._roster.ready()
        before = self._current.members
        cold = self._roster.cold(before) if before else ()
        order = rank_assignment.assign_node_ranks(ready, self.formation, list(before), cold)
        workers = sum(ready[node_id].slots for node_id in order)
        if self.formation.world_size not in (None, workers):
            there = listed([f"{body.host} {body.slots}" for body in ready.values()])
            reason = f"the workers of the nodes do not sum to {self.formation.world_size}, "
            reason += f"which --worker-num asks for: {there}"
            return self._decide(self._verdict(ExitCode.USAGE, reason))
        self.phase = JobPhase.RUNNING
        self._grow_at = None
        self._current = start_generation({n: self._roster.nodes[n] for n in order})
        record = wal.GenerationStarted(
            self.generation,
            list(self._current.members.values()),
            *self._current.store,
            self.policy.failures,
            self.policy.losses,
            self.policy.blamed,
            self._cause,
        )
        spares = [self._send(n, self._stand_by(n)) for n in ready if n not in self._current.members]
        return [Write(record), *map(self._start, order), *spares]

    def _start(self, node_id: str) -> SendToAgent:
        return self._send(node_id, self._current.start(node_id))

    def _stop(self, reason: str, because: StopReason, signum: int = signal.SIGTERM) -> list[Action]:
        self.phase = JobPhase.STOPPING
        self._grow_at = None
        self._current.because = because
        self._stopped_with = (reason, signum)
        return self._tell_to_stop()

    def _tell_to_stop(self) -> list[Action]:
        members = [n for n in sorted(self._current.undrained) if n in self._roster.nodes]
        return [self._send(node_id, self._stop_message()) for node_id in members]

    def _hurry(self) -> list[Action]:
        """Give the workers that were asked to stop no more time."""
        if self.phase is not JobPhase.STOPPING:
            return []
        self._stopped_with = (self._stopped_with[0], signal.SIGKILL)
        return self._tell_to_stop()

    def _is_drained(self, node_id: str, now: float) -> list[Action]:
        self._current.undrained.discard(node_id)
        if self.phase is not JobPhase.STOPPING or self._current.undrained:
            return []
        return self._after_generation(now)

    def _after_generation(self, now: float) -> list[Action]:
        """Decide what follows a generation of which nothing is left."""
        current = self._current
        if self._obstacle and current.because is StopReason.OBSTACLE:
            return self._decide(msgspec.structs.replace(self._obstacle, stuck=current.all_stuck()))
        if current.all_succeeded:
            return self._decide(self._verdict(ExitCode.OK, ""))
        root = current.root()
        if current.all_stuck():
            return self._decide(self._failure(root, GiveUp("processes could not be killed")))
        step = self._next_step(root, now)
        if isinstance(step, GiveUp):
            return self._decide(self._failure(root, step))
        if self._obstacle:
            return self._decide(self._obstacle)
        return self._form_again(root, step, now)

    def _next_step(self, root: RankExit | None, now: float) -> Again | GiveUp:
        if self._current.because is StopReason.CHANGE:
            return Again(0.0)
        return self.policy.after(root, now=now) if root else self.policy.after_loss(now=now)

    def _form_again(self, root: RankExit | None, step: Again, now: float) -> list[Action]:
        """Go on to the next generation, with the nodes that can take part."""
        reason = self._current.sentence(root)
        written: list[Action] = []
        if root and (blamed := self._blame(root, now)):
            reason += f"; {blamed}"
            written = self._exclude(self._current.node_of(root.rank), blamed)
        self._cause = reason
        self.phase = JobPhase.FORMING
        is_behind = self._seen > self.generation
        self.generation = max(self.generation, self._seen) + 1
        at = max(now + step.delay, self._all_known_at if is_behind else 0.0)
        self._forming.again(at, now=now)
        count = self.policy.failures if root else self.policy.losses
        restarting = Restarting(
            reason=reason,
            log_file=root.log_file if root else "",
            delay=step.delay,
            restart=0 if self._current.because is StopReason.CHANGE else count,
            max_restarts=self.policy.limits.max_restarts,
        )
        goodbye = [action for n in self._roster.leaving() for action in self._dismiss(n)]
        return [*written, *goodbye, *self._tell_all(restarting), *self._form_if_possible(now)]

    def _blame(self, root: RankExit, now: float) -> str:
        """Return why a node is kept out whose workers fail again and again; empty where not."""
        node_id = self._current.node_of(root.rank)
        failures = self.policy.blame(node_id, now=now)
        node = self._roster.nodes.get(node_id)
        if not node or not failures or not self._roster.can_do_without(node_id):
            return ""
        return f"node {root.host} is excluded after {failures} failures of its workers"

    # Ends.

    def _end(self, verdict: Verdict, signum: int = signal.SIGTERM) -> list[Action]:
        """End the job with `verdict`, unless a worker's failure came first and ends it itself."""
        if self.phase is JobPhase.FORMING and not (self._has_lost_log or self._roster.stale):
            return self._decide(verdict)
        self._obstacle = self._obstacle or verdict
        if self.phase is JobPhase.RUNNING:
            return self._stop(verdict.reason, StopReason.OBSTACLE, signum)
        if self._current.because is StopReason.CHANGE:
            self._current.because = StopReason.OBSTACLE
        return []

    def _check_deadlines(self, now: float) -> list[Action]:
        due = self.deadline()
        if due is None or now < due:
            return []
        if self.phase is JobPhase.RUNNING:
            return self._grow()
        actions: list[Action] = []
        if self._forming.report_is_due(now=now) and not self._roster.is_enough():
            actions = self._tell_all(Waiting(reason=self._roster.attendance()))
        if self._forming.is_over(now=now):
            return self._decide(self._join_timeout())
        return actions + self._form_if_possible(now)

    def _grow(self) -> list[Action]:
        self._grow_at = None
        if not self._can_grow():
            return []
        newcomers = self._roster.newcomers(self._current.members)
        hosts = [node.registration.host for node in newcomers if node.is_warm]
        self._current.change = f"node {listed(hosts)} joins"
        return self._stop(self._current.change, StopReason.CHANGE)

    def _can_grow(self) -> bool:
        """Whether a newcomer may change the generation, which must not be about to end."""
        return not self._current.exits and self._roster.can_grow(self._current.members)

    def _decide(self, verdict: Verdict) -> list[Action]:
        self.verdict = verdict
        self.phase = JobPhase.FAILED if verdict.code else JobPhase.DONE
        # The agent that keeps the scheduler reads it in the log.
        nodes = self._roster.nodes.items()
        others = sorted(n for n, node in nodes if not node.registration.serves)
        return [Write(wal.Decided(verdict, others)), *self._tell_all(Finish(verdict=verdict))]

    def _repeat_verdict(self, event: Event) -> list[Action]:
        """Answer a late node with the verdict, which never changes."""
        if self.verdict is None or not isinstance(event, AgentMessage | Unreachable):
            return []
        return [self._send(event.node_id, Finish(verdict=self.verdict))]
