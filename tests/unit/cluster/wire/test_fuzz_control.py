"""What nobody planned, of the scheduler that ships: its state, its control and its lines.

Whatever those who hold a key say, only our own errors come out, and each action can be sent.
"""

import contextlib

import msgspec
from anything import (
    FORMATIONS,
    JOB,
    LONG,
    NODES,
    ODD,
    body_off_the_wire,
    frames,
    from_agent,
    from_scheduler,
    long_exits,
    of_control,
    orders,
    ranges,
    wire,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from msrun.cluster.agent.uplink import Uplink
from msrun.cluster.liveness.lease import lease
from msrun.cluster.scheduler import events as scheduler_events
from msrun.cluster.scheduler import report, wal
from msrun.cluster.scheduler.control import Control, SendReply
from msrun.cluster.scheduler.events import JobPhase, SendToAgent, Write
from msrun.cluster.scheduler.peers import AgentLinks
from msrun.cluster.scheduler.restart_policy import RestartPolicy
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.wire import control_messages
from msrun.cluster.wire.control_messages import (
    Answer,
    Denied,
    DrainNode,
    GetLog,
    GetNodes,
    GetRanks,
    GetStacks,
    GetStatus,
    Question,
    SignalJob,
    StopJob,
)
from msrun.cluster.wire.messages import (
    Drained,
    Envelope,
    Finish,
    ReadLog,
    Register,
    SignalRanks,
    Stack,
    Stalled,
    WorkerExited,
)
from msrun.errors import ProtocolError
from msrun.job import RestartLimits

TIMES = st.sampled_from([60.0, 60.0, float("nan"), float("inf")])
requests = st.one_of(
    st.builds(GetStatus),
    st.builds(GetNodes, first=ODD),
    st.builds(GetRanks, first=ODD),
    st.builds(GetLog, rank=ODD, offset=st.none() | ODD, lines=ODD),
    st.builds(GetStacks),
    st.builds(SignalJob, signum=ODD | st.integers(1, 64), ranks=ranges),
    st.builds(DrainNode, node=LONG | st.sampled_from(["a", "b", "0", "²", "-1"])),
)


def question_off_the_wire(request):
    """Return `request` as it arrives; None when it is refused."""
    try:
        frame = control_messages.encode(Question(question="", request=request))
        return control_messages.decode_question(frame).request
    except ProtocolError:
        return None


class Scheduler(RuleBasedStateMachine):
    """The scheduler that ships, which is asked, told and left alone in any order."""

    @initialize(
        formation=st.sampled_from(FORMATIONS),
        restarts=st.integers(0, 3),
        nodes=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    )
    def begin(self, formation, restarts, nodes):
        self.now = 100.0
        self.log = b""
        self.asked = set()
        limits = RestartLimits(max_restarts=restarts)
        self.state = SchedulerState(
            job_id=JOB,
            formation=formation,
            join_timeout=1e6,
            policy=RestartPolicy(JOB, limits),
            started_at=self.now,
        )
        self.peers = AgentLinks(job_id=JOB, lease=lease(formation.lease), term=1)
        self.control = Control(state=self.state, peers=self.peers)
        self.lines = {}
        self.registers = {}
        for node, slots in zip("abc", nodes, strict=True):
            line = Uplink(job_id=JOB, node_id=node, incarnation=1, lease=lease(formation.lease))
            self.lines[node] = line
            body = Register(
                host=node,
                slots=slots,
                store_host="10.0.0.1",
                store_port=1,
                formation=formation,
                warm=True,
            )
            self.registers[node] = body
            self.arrive(line.join(-1, body, now=self.now))

    # What comes.

    @rule(node=NODES, body=of_control | from_agent | from_scheduler)
    def anything(self, node, body):
        self.say(node, body)

    def say(self, node, body):
        # What the codec refuses takes no number: the line would wait for it for ever.
        if body := body_off_the_wire(body):
            self.arrive(self.lines[node].send(self.state.generation, body, now=self.now))

    @precondition(lambda self: any(report.living(self.state).values()))
    @rule(number=st.integers(0, 8), seconds=TIMES, shown=frames, problem=LONG, end=long_exits)
    def hang(self, number, seconds, shown, problem, end):
        """One rank makes no progress, and all show where they are."""
        living = self.living()
        node, rank = living[number % len(living)]
        self.say(node, Stalled(rank=rank, seconds=seconds, sign="beat"))
        inquiry = self.control._number
        for node, rank in living:
            who = msgspec.structs.replace(end, rank=rank)
            self.say(node, Stack(inquiry=inquiry, worker=who, frames=shown, problem=problem))

    @precondition(lambda self: any(report.living(self.state).values()))
    @rule(number=st.integers(0, 8), end=long_exits)
    def worker_ends(self, number, end):
        living = self.living()
        node, rank = living[number % len(living)]
        self.say(node, WorkerExited(exit=msgspec.structs.replace(end, rank=rank), at=1.0))

    def living(self):
        return [(node, rank) for node, ranks in report.living(self.state).items() for rank in ranks]

    @precondition(lambda self: self.state.phase is JobPhase.STOPPING)
    @rule()
    def all_drain(self):
        for node in self.state.current.members:
            self.arrive(self.lines[node].send(self.state.generation, Drained(), now=self.now))

    def arrive(self, envelopes):
        for envelope in envelopes:
            if (message := wire(envelope)) is None:
                continue
            events, answers = self.peers.receive(message, now=self.now)
            assert all(wire(answer) == answer for answer in answers)
            for event in events:
                self.handle(event)

    def handle(self, event):
        if self.control.is_for(event):
            self.perform(self.control.receive(event, now=self.now))
        else:
            self.perform(self.state.handle(event, now=self.now))

    @rule(node=NODES, is_running=st.booleans(), ended=st.lists(long_exits, max_size=2))
    def join(self, node, is_running, ended):
        """Register anew, as after a scheduler that was lost."""
        seen = self.state.generation
        body = msgspec.structs.replace(
            self.registers[node], seen=seen, running=seen if is_running else -1, exits=ended
        )
        if body := body_off_the_wire(body):
            self.arrive(self.lines[node].join(seen, body, now=self.now))

    @rule(request=requests, job=st.sampled_from(["", JOB, "other"]))
    def ask(self, request, job):
        if (request := question_off_the_wire(request)) is None:
            return
        route = b"%d" % len(self.asked)
        self.asked.add(route)
        self.perform(self.control.ask(job, request, route, now=self.now))

    @rule(at_once=st.booleans())
    def stop(self, at_once):
        if self.now > 200:  # else most jobs would end before anything happened to them
            self.perform(self.control.ask("", StopJob(now=at_once), b"stop", now=self.now))

    @rule(seconds=st.floats(0, 20), is_frozen=st.booleans())
    def wait(self, seconds, is_frozen):
        self.now += seconds
        for line in () if is_frozen else self.lines.values():
            self.arrive(line.ask(now=self.now))
        if is_frozen:
            self.peers.woke(now=self.now)
            self.control.woke(now=self.now)
            self.handle(scheduler_events.Woke())
        losses, sent = self.peers.tick(now=self.now)
        assert all(wire(envelope) == envelope for envelope in sent)
        for loss in losses:
            self.handle(loss)
        self.perform(self.control.tick(now=self.now))
        self.handle(scheduler_events.Tick())
        due = self.control.deadline()
        assert due is None or due > self.now

    # What follows.

    def perform(self, actions):
        self.control.note(actions)
        for action in actions:
            match action:
                case Write(record=record):
                    self.log += wal.encode(record)
                    assert wal.decode(self.log)[-1] == record
                case SendToAgent(body=body):
                    assert body_off_the_wire(body) == body
                    sent = self.peers.send(action.node_id, action.generation, body, now=self.now)
                    assert all(wire(envelope) == envelope for envelope in sent)
                    if isinstance(body, Finish):
                        assert body.verdict == wal.verdict(self.log)
                case SendReply():
                    self.answer(action)

    def answer(self, reply):
        """Only what agents sent too much of has no room in an answer, which then says so."""
        try:
            frame = control_messages.encode(Answer(answer=reply.reply))
        except ProtocolError as error:
            frame = control_messages.encode(Answer(answer=Denied(reason=error.message)))
        assert control_messages.decode_answer(frame)

    @invariant()
    def it_can_always_be_asked(self):
        for request in (GetStatus(), GetRanks(), GetNodes()):
            (reply,) = self.control.ask("", request, b"", now=self.now)
            frame = control_messages.encode(Answer(answer=reply.reply))
            assert control_messages.decode_answer(frame).answer == reply.reply


# Frames of those who ask.


@given(st.binary(max_size=300))
def test_any_bytes_are_a_question_or_a_protocol_error(frame):
    control_messages.is_question(frame)
    with contextlib.suppress(ProtocolError):
        assert isinstance(control_messages.decode_question(frame), Question)


@given(requests, st.data())
def test_a_damaged_question_is_a_question_or_a_protocol_error(request, data):
    try:
        frame = bytearray(control_messages.encode(Question(question=JOB, request=request)))
    except ProtocolError:
        return
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame)))
        end = data.draw(st.integers(at, min(len(frame), at + 8)))
        frame[at:end] = data.draw(st.binary(max_size=8))
    with contextlib.suppress(ProtocolError):
        assert isinstance(control_messages.decode_question(bytes(frame)), Question)


@given(orders)
def test_what_an_agent_is_ordered_can_be_meant(order):
    envelope = wire(Envelope(job_id=JOB, node_id="a", incarnation=1, body=order))
    if envelope is None:
        return
    match envelope.body:
        case SignalRanks(ranks=found, signum=signum):
            assert 1 <= signum <= 64
            assert all(0 <= bound < 1 << 31 for pair in found for bound in pair)
        case ReadLog(rank=rank, offset=offset, lines=lines):
            assert min(rank, lines, offset or 0) >= 0
            assert max(rank, lines) < 1 << 31


TestScheduler = Scheduler.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
