"""What nobody planned: arbitrary frames, events and files.

What a frame may say is what the codec lets through; everything behind it has to cope with
that in any order, without an exception.
"""

import contextlib

import msgspec
import pytest
from anything import (
    CODES,
    FORMATIONS,
    JOB,
    NODES,
    SMALL,
    TEXT,
    body_off_the_wire,
    ends,
    envelopes,
    exits,
    from_agent,
    from_scheduler,
    verdicts,
    wire,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from msrun.cluster.agent import events as agent_events
from msrun.cluster.agent.state import AgentPhase, AgentState
from msrun.cluster.agent.uplink import Uplink
from msrun.cluster.liveness.lease import lease
from msrun.cluster.scheduler import events as scheduler_events
from msrun.cluster.scheduler import wal
from msrun.cluster.scheduler.events import JobPhase, SendToAgent, Write
from msrun.cluster.scheduler.peers import AgentLinks
from msrun.cluster.scheduler.restart_policy import RestartPolicy
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.verdict import RankExit
from msrun.cluster.wire import codec
from msrun.cluster.wire.messages import Drained, Envelope, Finish, Register, Stop, WorkerExited
from msrun.errors import ProtocolError
from msrun.job import RestartLimits

# Frames.


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_protocol_error(frame):
    with contextlib.suppress(ProtocolError):
        assert isinstance(codec.decode(frame), Envelope)


@given(envelopes, st.data())
def test_a_frame_with_several_mistakes_is_a_message_or_a_protocol_error(message, data):
    try:
        frame = bytearray(codec.encode(message))
    except ProtocolError:
        return
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame)))
        end = data.draw(st.integers(at, min(len(frame), at + 8)))
        frame[at:end] = data.draw(st.binary(max_size=8))
    with contextlib.suppress(ProtocolError):
        assert isinstance(codec.decode(bytes(frame)), Envelope)


# The scheduler.


class Scheduler(RuleBasedStateMachine):
    """A scheduler that anything can happen to, its end included."""

    @initialize(
        formation=st.sampled_from(FORMATIONS),
        restarts=st.integers(0, 3),
        exclude_after=st.integers(0, 2),
        join_timeout=st.sampled_from([5.0, float("inf")]),
        last_call=st.sampled_from([0.0, 3.0]),
    )
    def begin(self, formation, restarts, exclude_after, join_timeout, last_call):
        self.formation = formation
        self.limits = RestartLimits(max_restarts=restarts, exclude_after=exclude_after)
        self.times = {"join_timeout": join_timeout, "last_call": last_call}
        self.now = 100.0
        self.log = b""
        self.told = []
        self.members = []
        self.generation = -1
        self.state = self.new_state()

    def new_state(self):
        return SchedulerState(
            job_id=JOB,
            formation=self.formation,
            policy=RestartPolicy(JOB, self.limits),
            started_at=self.now,
            **self.times,
        )

    @rule(
        node=NODES,
        incarnation=st.integers(1, 2),
        generation=SMALL,
        is_now=st.booleans(),
        body=from_agent | from_scheduler,
    )
    def receive(self, node, incarnation, generation, is_now, body):
        if body := body_off_the_wire(body):
            generation = self.state.generation if is_now else generation
            self.handle(scheduler_events.AgentMessage(node, incarnation, generation, body))

    @rule(node=NODES, slots=st.integers(1, 3), running=st.sampled_from([-1, -1, 0]), ends=exits)
    def register(self, node, slots, running, ends):
        body = Register(
            host=node,
            slots=slots,
            store_host="10.0.0.1",
            store_port=1,
            formation=self.formation,
            running=running,
            seen=running,
            exits=[ends][: running + 1],
        )
        if body := body_off_the_wire(body):
            self.handle(scheduler_events.AgentMessage(node, 1, -1, body))

    @precondition(lambda self: self.members)
    @rule(number=st.integers(0, 2), end=exits, is_own=st.booleans())
    def worker_ends(self, number, end, is_own):
        member = self.members[number % len(self.members)]
        if is_own:
            end = msgspec.structs.replace(end, rank=member.first_rank)
        if body := body_off_the_wire(WorkerExited(exit=end, at=self.now)):
            self.from_member(member, body)

    @precondition(lambda self: self.state.phase is JobPhase.STOPPING)
    @rule()
    def all_drain(self):
        for member in self.members:
            self.from_member(member, Drained())

    def from_member(self, member, body):
        event = scheduler_events.AgentMessage(
            member.node_id, member.incarnation, self.state.generation, body
        )
        self.handle(event)

    @rule(node=NODES, incarnation=st.integers(1, 2), ago=st.floats(0, 20))
    def lose(self, node, incarnation, ago):
        self.handle(scheduler_events.Lost(node, incarnation, "silent", self.now - ago))

    @rule(node=NODES, incarnation=st.integers(1, 2))
    def cannot_reach(self, node, incarnation):
        self.handle(scheduler_events.Unreachable(node, incarnation, "refused"))

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.now += seconds
        self.tick()

    @rule(seconds=st.floats(0, 100))
    def freeze(self, seconds):
        self.now += seconds
        self.handle(scheduler_events.Woke())

    @precondition(lambda self: self.state.deadline() is not None)
    @rule()
    def wait_until_due(self):
        self.now = max(self.now, self.state.deadline())
        self.tick()

    @rule(torn=st.integers(0, 30))
    def start_again(self, torn):
        """What was written is on disk; of what was being written, a part."""
        records = wal.decode(self.log + b"0123abcd {"[:torn])
        self.state = self.new_state()
        self.state.recover(records, now=self.now)

    def tick(self):
        """As the loop does: again while something is due, which must come to an end."""
        for _ in range(4):
            self.handle(scheduler_events.Tick())
            due = self.state.deadline()
            if due is None or due > self.now:
                return
        pytest.fail(f"due at {due} and not acted on at {self.now}")

    def handle(self, event):
        for action in self.state.handle(event, now=self.now):
            match action:
                case Write(record=record):
                    self.log += wal.encode(record)
                    assert wal.decode(self.log)[-1] == record
                    self.check_record(record)
                case SendToAgent(body=Finish(verdict=verdict)):
                    assert verdict == wal.verdict(self.log)
                case SendToAgent(body=body):
                    assert body_off_the_wire(body) == body

    def check_record(self, record):
        match record:
            case wal.GenerationStarted(generation=generation, members=members):
                assert generation > self.generation
                self.generation = generation
                self.members = members
                ranks = [m.first_rank + i for m in members for i in range(m.count)]
                assert ranks == list(range(len(ranks)))
                assert ranks
                assert [m.node_rank for m in members] == list(range(len(members)))
                assert len({m.node_id for m in members}) == len(members)
                assert len(members) <= self.formation.nnodes_max
            case wal.Decided(verdict=verdict):
                assert not self.told, "a second verdict"
                self.told.append(verdict)

    @invariant()
    def the_generation_never_falls(self):
        assert self.told or self.state.generation >= self.generation

    @invariant()
    def a_verdict_stays(self):
        assert wal.verdict(self.log) == (self.told[0] if self.told else None)
        is_over = self.state.phase in (JobPhase.DONE, JobPhase.FAILED)
        assert is_over == bool(self.told)


# The agent.


class Agent(RuleBasedStateMachine):
    """An agent that anything can happen to, told by its scheduler or by its own node."""

    @initialize(
        serves=st.booleans(),
        seconds=st.sampled_from([0.0, 10.0]),
        form_by=st.sampled_from([110.0, float("inf")]),
    )
    def begin(self, serves, seconds, form_by):
        self.now = 100.0
        self.generation = -1
        self.started = []
        self.concluded = []
        register = Register(host="a", slots=1, store_host="", store_port=1, serves=serves)
        self.state = AgentState(
            job_id=JOB,
            register=register,
            grace=10.0,
            form_by=form_by,
            lease=lease(seconds),
        )
        self.carry_out(self.state.begin())

    @rule(
        generation=SMALL,
        is_next=st.booleans(),
        body=from_scheduler | from_agent,
        age=st.floats(0, 20),
    )
    def receive(self, generation, is_next, body, age):
        if body := body_off_the_wire(body):
            generation = self.generation + 1 if is_next else generation
            self.handle(agent_events.SchedulerMessage(generation, body, age))

    @rule(
        event=st.sampled_from(
            [agent_events.Reached(), agent_events.SchedulerSilent(), agent_events.Forgotten()]
        )
        | st.builds(agent_events.TreeReady, error=st.none() | TEXT)
        | st.builds(agent_events.TreeLost, reason=TEXT, code=CODES)
        | st.builds(
            agent_events.SchedulerLost, reason=TEXT, verdict=st.none() | verdicts, code=CODES
        )
        | st.builds(agent_events.Signalled, signum=st.sampled_from([1, 2, 10, 15]))
        | st.builds(
            agent_events.GenerationSwept,
            generation=SMALL,
            stuck=st.lists(TEXT, max_size=1).map(tuple),
        )
        | st.builds(agent_events.WorkerEnded, generation=SMALL, exit=ends)
    )
    def happen(self, event):
        self.handle(event)

    @precondition(lambda self: self.state.live)
    @rule(code=st.sampled_from([0, 1]))
    def worker_ends(self, code):
        rank = min(self.state.live)
        end = RankExit(
            rank=rank, node_rank=0, host="a", local_rank=0, pid=1, code=code, ran_for=1.0
        )
        self.handle(agent_events.WorkerEnded(self.state.generation, end))

    @rule()
    def swept(self):
        self.handle(agent_events.GenerationSwept(self.state.generation))

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.now += seconds
        for _ in range(4):
            self.handle(agent_events.Tick())
            due = self.state.deadline()
            if due is None or due > self.now:
                return
        pytest.fail(f"due at {due} and not acted on at {self.now}")

    def handle(self, event):
        self.carry_out(self.state.handle(event, now=self.now))

    def carry_out(self, actions):
        for action in actions:
            assert not self.concluded, "something after the end"
            match action:
                case agent_events.StartWorkers(generation=generation):
                    assert generation not in self.started
                    self.started.append(generation)
                case agent_events.Conclude(verdict=verdict):
                    self.concluded.append(verdict)
                case agent_events.Join(register=body) | agent_events.SendToScheduler(body=body):
                    assert body_off_the_wire(body) is not None

    @invariant()
    def the_generation_never_falls(self):
        assert self.state.generation >= self.generation
        self.generation = self.state.generation
        assert self.started == sorted(self.started)

    @invariant()
    def one_end(self):
        assert len(self.concluded) == (self.state.phase is AgentPhase.FINISHED)


# The lines between them.


@settings(max_examples=40)
@given(st.lists(st.tuples(envelopes, st.floats(0, 5))))
def test_the_schedulers_line_takes_any_frames(frames):
    peers = AgentLinks(job_id=JOB, lease=lease(10.0), term=1)
    now = 100.0
    for frame, seconds in frames:
        now += seconds
        if message := wire(frame):
            events, answers = peers.receive(message, now=now)
            answers += peers.send(message.node_id, 0, Stop(reason="why"), now=now)
            assert all(wire(answer) == answer for answer in answers)
            assert all(event.node_id in peers for event in events)
        peers.tick(now=now)
        assert peers.deadline() is None or peers.deadline() > now


@settings(max_examples=40)
@given(st.lists(st.tuples(envelopes, st.booleans(), st.floats(0, 5))))
def test_an_agents_line_takes_any_frames(frames):
    uplink = Uplink(job_id=JOB, node_id="a", incarnation=1, lease=lease(10.0))
    now = 100.0
    uplink.join(-1, Register(host="a", slots=1, store_host="", store_port=1), now=now)
    for frame, is_fitting, seconds in frames:
        now += seconds
        mine = {"job_id": JOB, "incarnation": 1, "session": 1} if is_fitting else {}
        if message := wire(msgspec.structs.replace(frame, **mine)):
            _, answers = uplink.receive(message, now=now)
            assert all(wire(answer) == answer for answer in answers)
        for _ in range(3):
            uplink.tick(now=now)
        assert uplink.deadline() is None or uplink.deadline() > now


PACE = settings(max_examples=40, stateful_step_count=25)
TestScheduler = Scheduler.TestCase
TestScheduler.settings = PACE
TestAgent = Agent.TestCase
TestAgent.settings = PACE
