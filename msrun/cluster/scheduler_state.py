"""Scheduler side of the protocol: a state machine that does no IO.

The caller feeds one event at a time with the current time and carries out the
actions it gets back, in order::

    for action in state.handle(event, now=now):
        ...

Phases: FORMING -> RUNNING -> STOPPING -> FORMING ... -> DONE | FAILED.  A
generation is announced, and a verdict told, only after a `Write` of it: the caller
must have it on disk before it goes on to the next action.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field

import msgspec

from msrun.cluster import verdict as verdicts
from msrun.cluster import wal
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
from msrun.cluster.restart_policy import Again, GiveUp, RestartPolicy
from msrun.cluster.verdict import RankExit, Verdict
from msrun.errors import ExitCode


class Phase(enum.Enum):
    """Where a job is in its life."""

    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"


class Received(msgspec.Struct, frozen=True):
    """An agent said something; of its node's life and generation as on the envelope."""

    node_id: str
    incarnation: int
    generation: int
    body: FromAgent


class Tick(msgspec.Struct, frozen=True):
    """Time passed and nothing else happened."""


Event = Received | Tick


class Write(msgspec.Struct, frozen=True):
    """Put `record` on disk before the next action."""

    record: wal.Record


class Send(msgspec.Struct, frozen=True):
    """Send `body` to a node's agent, about `generation`."""

    node_id: str
    generation: int
    body: FromScheduler


Action = Write | Send


@dataclass(slots=True)
class _Node:
    incarnation: int
    registration: Register
    node_rank: int = -1
    drained: bool = True
    stuck: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class SchedulerState:
    """One job, from its first node to its verdict.

    Args:
        job_id: The job.
        nnodes: Nodes to wait for, at least 1.
        join_timeout: Seconds from `started_at` in which all nodes must register; inf waits.
        policy: Decides about restarts.
        started_at: Time of the first event, on the caller's monotonic clock.
        generation: The generation that runs or is next; 0 for the first.
    """

    job_id: str
    nnodes: int
    join_timeout: float
    policy: RestartPolicy
    started_at: float = 0.0
    generation: int = 0
    phase: Phase = Phase.FORMING
    verdict: Verdict | None = None
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _world_size: int = 0
    _exits: dict[int, tuple[RankExit, float]] = field(default_factory=dict)
    _obstacle: Verdict | None = None
    _obstacle_came_first: bool = False
    _resume_at: float | None = None

    def handle(self, event: Event, *, now: float) -> list[Action]:
        """Apply `event` at time `now` and return what the caller must do, in order."""
        if self.phase in (Phase.DONE, Phase.FAILED):
            return self._repeat_verdict(event)
        if isinstance(event, Tick):
            return self._check_deadlines(now)
        if isinstance(event.body, Register):
            return self._register(event, event.body)
        node = self._nodes.get(event.node_id)
        if node is None or node.incarnation != event.incarnation:
            return []
        return self._received(event, node, now)

    def deadline(self) -> float | None:
        """Time by which `Tick` must be sent if nothing else is; None when there is none."""
        if self.phase is not Phase.FORMING:
            return None
        if self._resume_at is not None:
            return self._resume_at
        due = self.started_at + self.join_timeout
        return due if due != float("inf") else None

    def _received(self, event: Received, node: _Node, now: float) -> list[Action]:
        match event.body:
            case WorkerExited(exit=end):
                return self._worker_exited(event.generation, end, now)
            case Drained(stuck=stuck):
                return self._drained(event.generation, node, stuck, now)
            case Interrupted(signum=signum):
                return self._interrupted(signum)
            case NodeFailed() as failure:
                return self._node_failed(failure)
            case _:  # a key holder may send what only a scheduler says
                return []

    def _register(self, event: Received, body: Register) -> list[Action]:
        known = self._nodes.get(event.node_id)
        if known and event.incarnation <= known.incarnation:
            return []
        if self.phase is not Phase.FORMING or (not known and len(self._nodes) == self.nnodes):
            reason = f"job {self.job_id} has its {self.nnodes} node(s) already"
            return [Send(event.node_id, self.generation, Refused(reason=reason))]
        self._nodes[event.node_id] = _Node(event.incarnation, body)
        if len(self._nodes) < self.nnodes or self._resume_at is not None:
            return []
        return self._start_generation()

    def _start_generation(self) -> list[Action]:
        self.phase = Phase.RUNNING
        self._resume_at = None
        self._exits.clear()
        ordered = sorted(self._nodes.items(), key=_node_order)
        self._world_size = sum(node.registration.slots for _, node in ordered)
        master = ordered[0][1].registration
        actions: list[Action] = [Write(wal.GenerationStarted(self.generation))]
        first_rank = 0
        for node_rank, (node_id, node) in enumerate(ordered):
            node.node_rank, node.drained, node.stuck = node_rank, False, []
            start = Start(
                node_rank=node_rank,
                nnodes=len(ordered),
                first_rank=first_rank,
                count=node.registration.slots,
                world_size=self._world_size,
                store_host=master.store_host,
                store_port=master.store_port,
                serve_store=node_rank == 0,
            )
            actions.append(Send(node_id, self.generation, start))
            first_rank += node.registration.slots
        return actions

    def _worker_exited(self, generation: int, end: RankExit, now: float) -> list[Action]:
        if generation != self.generation or self.phase is Phase.FORMING:
            return []
        self._exits.setdefault(end.rank, (end, now - end.age))
        if self.phase is Phase.STOPPING:
            return []
        if not end.succeeded:
            return self._stop(end.sentence())
        if len(self._exits) == self._world_size:
            return self._decide(self._success())
        return []

    def _stop(self, reason: str, signum: int = signal.SIGTERM) -> list[Action]:
        self.phase = Phase.STOPPING
        return self._tell_all(Stop(reason=reason, signum=signum))

    def _drained(self, generation: int, node: _Node, stuck: list[str], now: float) -> list[Action]:
        if generation != self.generation or self.phase is not Phase.STOPPING:
            return []
        node.drained, node.stuck = True, stuck
        if not all(n.drained for n in self._nodes.values()):
            return []
        return self._after_generation(now)

    def _after_generation(self, now: float) -> list[Action]:
        """Decide what follows a generation of which nothing is left."""
        if self._obstacle and self._obstacle_came_first:
            return self._decide(msgspec.structs.replace(self._obstacle, stuck=self._stuck()))
        root = verdicts.root_cause(self._exits.values())
        if self._stuck():
            return self._decide(self._failure(root, GiveUp("processes could not be killed")))
        step = self.policy.after(root, now=now)
        if isinstance(step, GiveUp):
            return self._decide(self._failure(root, step))
        if self._obstacle:
            return self._decide(self._obstacle)
        self.phase = Phase.FORMING
        self.generation += 1
        self._resume_at = now + step.delay
        actions = self._tell_all(self._restarting(root, step))
        return actions if step.delay else actions + self._start_generation()

    def _interrupted(self, signum: int) -> list[Action]:
        verdict = verdicts.interrupted(
            self.job_id, signum, generation=self.generation, restarts=self.policy.used
        )
        # A script may catch Ctrl-C to save its work, as it does without a launcher.
        return self._end(verdict, signum if signum == signal.SIGINT else signal.SIGTERM)

    def _node_failed(self, failure: NodeFailed) -> list[Action]:
        return self._end(self._verdict(failure.code or ExitCode.INTERNAL, failure.reason))

    def _end(self, verdict: Verdict, signum: int = signal.SIGTERM) -> list[Action]:
        """End the job with `verdict`, unless a worker's failure came first and ends it itself."""
        if self.phase is Phase.FORMING:
            return self._decide(verdict)
        if self._obstacle is None:
            self._obstacle = verdict
            self._obstacle_came_first = self.phase is Phase.RUNNING
        return self._stop(verdict.reason, signum) if self.phase is Phase.RUNNING else []

    def _check_deadlines(self, now: float) -> list[Action]:
        due = self.deadline()
        if due is None or now < due:
            return []
        if self._resume_at is not None:
            return self._start_generation()
        return self._decide(self._join_timeout())

    def _decide(self, verdict: Verdict) -> list[Action]:
        self.verdict = verdict
        self.phase = Phase.FAILED if verdict.code else Phase.DONE
        return [Write(wal.Decided(verdict)), *self._tell_all(Finish(verdict=verdict))]

    def _repeat_verdict(self, event: Event) -> list[Action]:
        """Answer a late node with the verdict, which never changes."""
        if isinstance(event, Tick) or self.verdict is None:
            return []
        return [Send(event.node_id, self.generation, Finish(verdict=self.verdict))]

    def _tell_all(self, body: FromScheduler) -> list[Action]:
        return [Send(node_id, self.generation, body) for node_id in sorted(self._nodes)]

    def _restarting(self, root: RankExit, step: Again) -> Restarting:
        return Restarting(
            reason=root.sentence(),
            log_file=root.log_file,
            delay=step.delay,
            restart=self.policy.used,
            max_restarts=self.policy.limits.max_restarts,
        )

    def _success(self) -> Verdict:
        return self._verdict(ExitCode.OK, "")

    def _verdict(self, code: int, reason: str) -> Verdict:
        return Verdict(
            job_id=self.job_id,
            code=code,
            reason=reason,
            generation=self.generation,
            restarts=self.policy.used,
            stuck=self._stuck(),
        )

    def _failure(self, root: RankExit, step: GiveUp) -> Verdict:
        ends = [end for end, _ in self._exits.values() if end.rank != root.rank]
        before = self._exits[root.rank][1]
        finished = sorted(e.rank for e in ends if e.succeeded and self._exits[e.rank][1] < before)
        sentence = root.sentence() + (f"; {step.reason}" if step.reason else "")
        return msgspec.structs.replace(
            self._verdict(root.exit_code if step.code is None else step.code, sentence),
            hint=step.hint,
            root=root,
            collateral=verdicts.group_exits(e for e in ends if not e.succeeded),
            finished=finished,
        )

    def _join_timeout(self) -> Verdict:
        reason = (
            f"{len(self._nodes)} of {self.nnodes} node(s) registered within {self.join_timeout:g}s"
        )
        return self._verdict(ExitCode.JOIN_TIMEOUT, reason)

    def _stuck(self) -> list[str]:
        return [process for _, node in sorted(self._nodes.items()) for process in node.stuck]


def _node_order(item: tuple[str, _Node]) -> tuple[bool, int, str, str]:
    """Order nodes by the rank they were given, then by host name."""
    node_id, node = item
    given = node.registration.node_rank
    return given is None, given or 0, node.registration.host, node_id
