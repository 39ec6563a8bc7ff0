"""Answers the tools that control a job, and deals with ranks that hang.

A state machine of the usual shape: requests, answers of agents and the time come in; actions go
out.  Logs and stacks are on the nodes, so it asks the agents for them, and answers without the
agents that do not answer in time.  The job itself is `SchedulerState`, which this module reads and
asks to act through public methods only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from msrun.cluster.bounds import RankSet
from msrun.cluster.liveness import hang
from msrun.cluster.liveness import stacks as pictures
from msrun.cluster.liveness.stacks import RankStack
from msrun.cluster.liveness.standstill import Standstill
from msrun.cluster.scheduler import commands, report, wal
from msrun.cluster.scheduler import events as scheduler_events
from msrun.cluster.scheduler.drain import drain
from msrun.cluster.scheduler.events import AgentMessage, JobPhase, SendToAgent
from msrun.cluster.scheduler.peers import AgentLinks
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.verdict import RankExit, render_seconds
from msrun.cluster.wire.control_messages import (
    AnyReply,
    AnyRequest,
    Denied,
    Done,
    DrainNode,
    GetLog,
    GetNodes,
    GetRanks,
    GetServers,
    GetStacks,
    GetStatus,
    Log,
    ScaleServers,
    SignalJob,
    Stacks,
    StopJob,
    fitting,
)
from msrun.cluster.wire.messages import (
    DumpStacks,
    FromScheduler,
    Hung,
    LogPart,
    ReadLog,
    Restarting,
    Running,
    ServersChanged,
    Stack,
    Stalled,
    Waiting,
)

ANSWER_SECONDS = 5.0
# Seconds after the first rank has finished: ranks that still run then may wait for it for ever.
ALONE_SECONDS = 3.0
_CAUSES_MAX = 8
_INQUIRIES_MAX = 64
_MISSED_MAX = 4
_REPORT_CHARS_MAX = 12_000
_OF_US = (Running, Stalled, Stack, LogPart, ServersChanged)


class SendReply(msgspec.Struct, frozen=True):
    """Send `reply` along `route`, on which the request came."""

    route: bytes
    reply: AnyReply


Action = scheduler_events.Action | SendReply


@dataclass(slots=True)
class _LogInquiry:
    node_id: str
    host: str
    route: bytes
    due: float


@dataclass(slots=True)
class _StackInquiry:
    """Stacks that are being collected.

    Args:
        number: Number of the inquiry, which its answers carry.
        generation: The generation of the ranks.
        due: Time at which it ends, with the answers that have come.
        wanted: Ranks that have not answered, by node.
        routes: Routes to the tools that asked.
        stacks: Rank -> its stack, as the answers came.
        stalled: Rank that makes no progress -> seconds, as its node reported.
        sign: The sign of progress that did not come, such as `beat`.
        quiet: The same, of ranks for which no time for a hang was given.
    """

    number: int
    generation: int
    due: float
    wanted: dict[str, set[int]]
    routes: list[bytes] = field(default_factory=list)
    stacks: dict[int, Stack] = field(default_factory=dict)
    stalled: dict[int, float] = field(default_factory=dict)
    sign: str = ""
    quiet: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Control:
    """The control of one job.

    Args:
        state: The job.
        peers: Its agents.
    """

    state: SchedulerState
    peers: AgentLinks
    _causes: deque[str] = field(default_factory=lambda: deque(maxlen=_CAUSES_MAX))
    _running: dict[str, tuple[Running, float]] = field(default_factory=dict)
    _running_generation: int = -1
    _servers: dict[str, ServersChanged] = field(default_factory=dict)
    _logs: dict[int, _LogInquiry] = field(default_factory=dict)
    _stacks: _StackInquiry | None = None
    _number: int = 0
    _told_of: int = -1
    _standstill: Standstill = field(default_factory=lambda: Standstill(-1))

    @staticmethod
    def is_for(event: scheduler_events.Event) -> bool:
        """Tell whether `event` is for this machine and not for the job's own."""
        return isinstance(event, AgentMessage) and isinstance(event.body, _OF_US)

    def note(self, actions: Iterable[Action]) -> None:
        """Remember the failures that the state machine announced to the nodes."""
        for action in actions:
            if isinstance(action, SendToAgent) and isinstance(action.body, Restarting):
                self._note_cause(action.generation, action.body.reason)

    def recall(self, records: Iterable[wal.Record]) -> None:
        """Remember the failures in the log of an earlier scheduler."""
        for generation, reason in wal.causes(records):
            self._note_cause(generation, reason)

    def _note_cause(self, generation: int, reason: str) -> None:
        cause = f"generation {generation - 1}: {reason}"
        if cause not in self._causes:
            self._causes.append(cause)

    # Requests.

    def ask(self, job_id: str, request: AnyRequest, route: bytes, *, now: float) -> list[Action]:
        """Return the actions that answer a request."""
        if job_id not in ("", self.state.job_id):
            reason = f"the scheduler here runs job {self.state.job_id}, not {job_id}"
            return [SendReply(route, Denied(reason=reason))]
        match request:
            case GetLog():
                return self._ask_for_log(request, route, now)
            case GetStacks():
                return self._ask_for_stacks(route, now)
            case StopJob() | DrainNode() | ScaleServers() | SignalJob():
                return self._command(request, route, now)
        return [SendReply(route, self._report(request, now))]

    def _report(
        self, request: GetStatus | GetNodes | GetRanks | GetServers, now: float
    ) -> AnyReply:
        match request:
            case GetStatus():
                return report.status(self.state, self._causes, term=self.peers.term, now=now)
            case GetNodes(first=first):
                return report.nodes(self.state, self.peers, first, now=now)
            case GetRanks(first=first):
                return report.ranks(self.state, self._of_now(), first, now=now)
            case GetServers(first=first):
                return report.servers(self.state, self._servers, first)

    def _command(
        self, request: StopJob | DrainNode | ScaleServers | SignalJob, route: bytes, now: float
    ) -> list[Action]:
        state = self.state
        if state.is_over:
            return [SendReply(route, Denied(reason=f"job {state.job_id} is over"))]
        match request:
            case StopJob(now=at_once):
                done = Done(sentence=f"job {state.job_id} is being stopped")
                return [SendReply(route, done), *state.stop(at_once=at_once)]
            case DrainNode(node=name):
                problem, actions = drain(state, name, now=now)
                done = Done(sentence=f"node {name} leaves job {state.job_id}")
                return [SendReply(route, Denied(reason=problem) if problem else done), *actions]
            case ScaleServers(servers=servers):
                reply, actions = commands.scale(state, servers)
            case SignalJob():
                reply, actions = commands.send_signal(state, request)
        return [SendReply(route, reply), *actions]

    def _ask_for_log(self, request: GetLog, route: bytes, now: float) -> list[Action]:
        members = self.state.current.members
        node_id = next(
            (n for n, m in members.items() if 0 <= request.rank - m.first_rank < m.count), None
        )
        if node_id is None:
            size = self.state.current.world_size
            what = f"choose 0 to {size - 1}" if size else "no generation has started"
            return [SendReply(route, Denied(reason=f"the job has no rank {request.rank} ({what})"))]
        host = members[node_id].host
        if node_id not in self.state.roster.nodes:
            return [SendReply(route, Denied(reason=f"node {host}, which has the log, is lost"))]
        # Bounded, because each one is kept until its node answers.
        if len(self._logs) >= _INQUIRIES_MAX:
            return [SendReply(route, Denied(reason="too many ask for logs; try again"))]
        self._number += 1
        self._logs[self._number] = _LogInquiry(node_id, host, route, now + ANSWER_SECONDS)
        order = ReadLog(
            inquiry=self._number, rank=request.rank, offset=request.offset, lines=request.lines
        )
        return [self._send(node_id, order)]

    def _ask_for_stacks(self, route: bytes, now: float) -> list[Action]:
        if not any(report.living(self.state).values()):
            return [SendReply(route, Denied(reason="no worker of the job runs"))]
        actions = self._collect(now)
        if self._stacks and len(self._stacks.routes) < _INQUIRIES_MAX:
            self._stacks.routes.append(route)
        return actions

    # Answers of agents.

    def receive(self, event: AgentMessage, *, now: float) -> list[Action]:
        """Return the actions that follow from a message of an agent."""
        node = self.state.roster.nodes.get(event.node_id)
        if node is None or node.incarnation != event.incarnation:
            return []
        match event.body:
            case LogPart() as part:
                return self._log_came(event.node_id, part)
            case Stack() as stack:
                return self._stack_came(event.node_id, stack, now)
            case ServersChanged() as servers:  # which outlive generations
                self._servers[event.node_id] = servers
        is_of_now = event.generation == self.state.generation
        if not is_of_now or event.node_id not in self.state.current.members:
            return []
        match event.body:
            case Running(age=age) as running:
                self._of_now()[event.node_id] = (running, now - age)
            case Stalled() as stalled:
                return self._stalled(event.node_id, stalled, now)
        return []

    def _of_now(self) -> dict[str, tuple[Running, float]]:
        """Return the processes of this generation's workers, by node."""
        if self._running_generation != self.state.generation:
            self._running_generation = self.state.generation
            self._running = {}
        return self._running

    def _log_came(self, node_id: str, part: LogPart) -> list[Action]:
        asked = self._logs.get(part.inquiry)
        if asked is None or asked.node_id != node_id:
            return []
        del self._logs[part.inquiry]
        if part.problem:
            return [SendReply(asked.route, Denied(reason=part.problem))]
        log = Log(host=asked.host, log_file=part.log_file, data=part.data, offset=part.offset)
        return [SendReply(asked.route, log)]

    def _stalled(self, node_id: str, stalled: Stalled, now: float) -> list[Action]:
        member = self.state.current.members[node_id]
        is_living = 0 <= stalled.rank - member.first_rank < member.count
        is_living &= stalled.rank not in self.state.current.exits
        if self.state.phase is not JobPhase.RUNNING or not is_living:
            return []
        if stalled.sign in (hang.QUIET, hang.IDLE):
            return self._quiet(stalled, now)
        actions = self._collect(now)
        if self._stacks:
            self._stacks.stalled[stalled.rank] = stalled.seconds
            self._stacks.sign = stalled.sign
        return actions

    def _quiet(self, stalled: Stalled, now: float) -> list[Action]:
        """Look at the stacks, for a warning or to tell whether all ranks stand still."""
        if self._standstill.generation != self.state.generation:
            self._standstill = Standstill(self.state.generation)
        if stalled.sign == hang.IDLE:
            self._standstill.note_idle(stalled.rank, stalled.seconds, now=now)
            is_due = self._standstill.idle(self._living(), now=now)
            if not is_due or not self._standstill.should_look(now=now):
                return []
        actions = self._collect(now)
        if self._stacks:
            self._stacks.quiet[stalled.rank] = stalled.seconds
        return actions

    def _living(self) -> set[int]:
        return {rank for ranks in report.living(self.state).values() for rank in ranks}

    # Stacks.

    def _collect(self, now: float) -> list[Action]:
        """Begin to collect stacks, if that is not under way."""
        if self._stacks and self._stacks.generation == self.state.generation:
            return []
        # An inquiry about a generation that has ended goes on with the present one.
        routes = self._stacks.routes if self._stacks else []
        self._number += 1
        wanted = {
            node_id: set(ranks) for node_id, ranks in report.living(self.state).items() if ranks
        }
        self._stacks = _StackInquiry(
            self._number, self.state.generation, now + ANSWER_SECONDS, wanted, routes
        )
        return [self._send(node_id, DumpStacks(inquiry=self._number)) for node_id in wanted]

    def _stack_came(self, node_id: str, stack: Stack, now: float) -> list[Action]:
        inquiry = self._stacks
        if inquiry is None or stack.inquiry != inquiry.number:
            return []
        wanted = inquiry.wanted.get(node_id, set())
        if stack.worker.rank not in wanted:
            return []
        wanted.discard(stack.worker.rank)
        if not wanted:
            del inquiry.wanted[node_id]
        inquiry.stacks[stack.worker.rank] = stack
        return [] if inquiry.wanted else self._finish_stacks(inquiry, now)

    def _finish_stacks(self, inquiry: _StackInquiry, now: float) -> list[Action]:
        self._stacks = None
        pictured = self._pictures(inquiry)
        groups = pictures.group(pictured)
        shown = fitting(groups)
        left_out = len(groups) - len(shown)
        reply = Stacks(generation=inquiry.generation, groups=shown, left_out=left_out)
        replies: list[Action] = [SendReply(route, reply) for route in inquiry.routes]
        # A failure may have ended the generation while the stacks came: that is the better cause.
        if inquiry.generation != self.state.generation or self.state.phase is not JobPhase.RUNNING:
            return replies
        if inquiry.stalled:
            return [*replies, *self._end_hang(inquiry, pictured, now)]
        return [*replies, *self._weigh(inquiry, pictured, now)] if inquiry.quiet else replies

    def _weigh(self, inquiry: _StackInquiry, pictured: list[RankStack], now: float) -> list[Action]:
        """End the generation if all ranks stand still; else warn, but not often."""
        is_same = self._standstill.is_same(pictured, now=now)
        idle = self._standstill.idle(self._living(), now=now)
        if is_same and idle:
            inquiry.stalled, inquiry.sign = idle, "beat or work"
            return self._end_hang(inquiry, pictured, now)
        if not self._standstill.should_warn(now=now):
            return []
        head = f"generation {inquiry.generation} may hang: no beat of"
        return self._tell_stacks(head, inquiry.quiet, pictured)

    def _pictures(self, inquiry: _StackInquiry) -> list[RankStack]:
        """Return the stacks of all ranks, and a problem for ranks whose node did not answer."""
        pictured = [
            RankStack(
                rank=rank,
                frames=tuple(stack.frames),
                problem=stack.problem,
                idle=stack.worker.stalled,
                entered=None if stack.entered is None else tuple(stack.entered),
            )
            for rank, stack in inquiry.stacks.items()
        ]
        for node_id, ranks in inquiry.wanted.items():
            member = self.state.current.members.get(node_id)
            host = member.host if member else node_id
            problem = f"node {host} did not answer within {ANSWER_SECONDS:g}s"
            pictured += [RankStack(rank=rank, problem=problem) for rank in ranks]
        return sorted(pictured, key=lambda stack: stack.rank)

    def _end_hang(
        self, inquiry: _StackInquiry, pictured: list[RankStack], now: float
    ) -> list[Action]:
        """Send every node the stacks of all ranks, and end the generation."""
        suspect = pictures.suspect(pictured, inquiry.stalled)
        longest = max(inquiry.stalled.values())
        worker = self._suspect(inquiry, suspect.rank, longest)
        missed = [each for each in pictures.missed(pictured) if suspect.rank in each.missing]
        if missed:
            where = min(missed, key=lambda each: len(each.missing))
            worker = msgspec.structs.replace(worker, error=where.sentence())
        head = f"generation {inquiry.generation} hangs: no {inquiry.sign} of"
        told = self._tell_stacks(head, inquiry.stalled, pictured)
        return [*told, *self.state.give_up_on(worker, is_sure=suspect.is_sure, now=now)]

    def _tell_stacks(
        self, head: str, silent: dict[int, float], pictured: list[RankStack]
    ) -> list[Action]:
        groups = pictures.group(pictured)
        ranks = self.state.current.describe_ranks(silent.keys())
        seconds = render_seconds(max(silent.values()))
        missed = [each.sentence() for each in pictures.missed(pictured)[:_MISSED_MAX]]
        text = "\n".join([f"{head} {ranks} for {seconds}", *missed, pictures.summary(groups)])
        hung = Hung(report=f"{text}\n\n{pictures.render(groups)}"[:_REPORT_CHARS_MAX])
        return [self._send(n, hung) for n in sorted(self.state.roster.nodes)]

    def _suspect(self, inquiry: _StackInquiry, rank: int, longest: float) -> RankExit:
        stalled = inquiry.stalled.get(rank, longest)
        if stack := inquiry.stacks.get(rank):
            worker = stack.worker
        else:
            member = self.state.current.members[self.state.current.node_of(rank)]
            worker = RankExit(
                rank=rank,
                node_rank=member.node_rank,
                host=member.host,
                local_rank=rank - member.first_rank,
                pid=0,
                code=None,
                ran_for=0.0,
            )
        return msgspec.structs.replace(worker, stalled=stalled, age=stalled)

    # Time.

    def deadline(self) -> float | None:
        """Time by which `tick` must be called; None when there is none."""
        dues = [asked.due for asked in self._logs.values()]
        if self._stacks:
            dues.append(self._stacks.due)
        if (alone_at := self._alone_at()) is not None:
            dues.append(alone_at)
        return min(dues, default=None)

    def _alone_at(self) -> float | None:
        """Return when to report the ranks that still run; None before any finished, or if done."""
        if self.state.phase is not JobPhase.RUNNING or self._told_of == self.state.generation:
            return None
        # Any finished rank will do: after a failure the generation would be stopping.
        first = next(iter(self.state.current.exits.values()), None)
        return first[1] + ALONE_SECONDS if first else None

    def _tell_who_runs(self) -> list[Action]:
        """Tell all nodes once which ranks have finished and which still run."""
        self._told_of = self.state.generation
        done = RankSet.of(self.state.current.exits)
        living = report.living(self.state)
        still = self.state.current.describe_ranks(
            {rank for ranks in living.values() for rank in ranks}
        )
        have = "have" if len(done) > 1 else "has"
        reason = f"rank {done} {have} finished; still running: {still}"
        return [self._send(node_id, Waiting(reason=reason)) for node_id in living]

    def woke(self, *, now: float) -> None:
        """Restart all time-outs: answers may have come while this process was frozen."""
        for asked in self._logs.values():
            asked.due = now + ANSWER_SECONDS
        if self._stacks:
            self._stacks.due = now + ANSWER_SECONDS

    def tick(self, *, now: float) -> list[Action]:
        """Answer the requests whose time is over, with what has come."""
        actions: list[Action] = []
        for number in [n for n, asked in self._logs.items() if asked.due <= now]:
            asked = self._logs.pop(number)
            reason = f"node {asked.host} did not answer within {ANSWER_SECONDS:g}s"
            actions.append(SendReply(asked.route, Denied(reason=reason)))
        if self._stacks and self._stacks.due <= now:
            actions += self._finish_stacks(self._stacks, now)
        if (alone_at := self._alone_at()) is not None and alone_at <= now:
            actions += self._tell_who_runs()
        return actions

    def _send(self, node_id: str, body: FromScheduler) -> SendToAgent:
        return SendToAgent(node_id, self.state.generation, body)
