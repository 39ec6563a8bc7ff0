"""What is composed fits into a frame, however much there is to say."""

import msgspec
import pytest

from msrun.cluster.agent import events as agent_events
from msrun.cluster.agent.state import EXITS_MAX, AgentState
from msrun.cluster.bounds import few
from msrun.cluster.liveness.lease import lease
from msrun.cluster.liveness.stacks import Frame, RankStack, group
from msrun.cluster.scheduler import events as scheduler_events
from msrun.cluster.scheduler import wal
from msrun.cluster.scheduler.control import Control, SendReply
from msrun.cluster.scheduler.events import JobPhase, SendToAgent, Write
from msrun.cluster.scheduler.generation import Generation
from msrun.cluster.scheduler.peers import AgentLinks
from msrun.cluster.scheduler.restart_policy import GiveUp, RestartPolicy
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.scheduler.verdict_builder import VerdictBuilder
from msrun.cluster.verdict import RankExit, fit, render
from msrun.cluster.wire import codec, control_messages
from msrun.cluster.wire.control_messages import Answer, GetStacks, GetStatus, Stacks, fitting
from msrun.cluster.wire.messages import (
    Drained,
    Envelope,
    Finish,
    Formation,
    NodeFailed,
    Register,
    Restarting,
    Stack,
    Start,
    Stop,
    WorkerExited,
)
from msrun.job import RestartLimits

HOST = "h" * 64
LETTERS = ["x", "训", "🙂"]
STUCK = tuple(f"{4_190_000 + n} D " + "训" * 4096 for n in range(200))


def worker_end(rank, letter="x", **changes):
    given = {
        "node_rank": rank // 8,
        "host": HOST,
        "local_rank": rank % 64,
        "pid": 4_190_000 + rank % 64,
        "code": 1,
        "ran_for": 1e5 / 3,
        "error": letter * 500,
        "tail": [letter * 400] * 20,
        "log_file": "/" + letter * 4000,
    }
    return RankExit(rank=rank, **given | changes)


def size(body):
    """Return the bytes of a frame that carries `body`, which can be read."""
    envelope = Envelope(
        job_id="j" * 64,
        node_id="n" * 255,
        incarnation=(1 << 63) - 1,
        session=1 << 31,
        seq=1 << 31,
        ack=1 << 31,
        stamp=1e6 / 3,
        term=1 << 30,
        generation=1 << 30,
        body=body,
    )
    frame = codec.encode(envelope)
    assert codec.decode(frame) == envelope
    return len(frame)


# What agents say.


def agent(count):
    """Return an agent that runs `count` workers."""
    register = Register(
        host=HOST,
        slots=count,
        store_host="f" * 39,
        store_port=29500,
        devices=[(n, "f" * 39) for n in range(min(count, 64))],
    )
    state = AgentState(job_id="train", register=register, grace=10.0, lease=lease(10.0))
    state.handle(agent_events.TreeReady(None), now=0.0)
    start = Start(
        node_rank=0,
        nnodes=1,
        first_rank=0,
        count=count,
        world_size=count,
        store_host="",
        store_port=1,
        serve_store=True,
    )
    state.handle(agent_events.SchedulerMessage(0, start, 0.0), now=0.0)
    return state


def end_of(state, end, now):
    return state.handle(agent_events.WorkerEnded(0, end), now=now)


def registered(state, now):
    """Return how `state` registers anew, and what it says after that."""
    join, *sent = state.handle(agent_events.Forgotten(), now=now)
    assert isinstance(join, agent_events.Join)
    return join.register, [send.body for send in sent]


@pytest.mark.parametrize("letter", LETTERS)
@pytest.mark.parametrize("count", [1, 8, 64, EXITS_MAX, 1000])
def test_a_node_whose_workers_have_ended_registers(count, letter):
    state = agent(count)
    for rank in range(count):
        sent = end_of(state, worker_end(rank, letter), 10.0 + rank)
        assert size(sent[0].body) <= codec.FRAME_BYTES_MAX
    body, after = registered(state, 2000.0)

    assert size(body) <= codec.FRAME_BYTES_MAX
    told = [*body.exits, *(each.exit for each in after)]
    assert sorted(end.rank for end in told) == list(range(count))
    assert all(isinstance(each, WorkerExited) for each in after)


def test_the_first_failure_is_registered_with_its_words_and_others_without():
    state = agent(3)
    first, late = worker_end(1, age=0.0), worker_end(2, age=0.0, oom=True)
    for end, now in ((worker_end(0, code=0, tail=[]), 1.0), (late, 3.0), (first, 2.0)):
        end_of(state, end, now)

    body, _ = registered(state, 10.0)

    assert body.exits == [
        msgspec.structs.replace(first, age=8.0),
        worker_end(0, code=0, age=9.0, host="", error="", tail=[], log_file=""),
        worker_end(2, oom=True, age=7.0, host="", error="", tail=[], log_file=""),
    ]


def test_the_last_lines_of_a_long_tail_are_kept():
    state = agent(1)
    lines = [f"{n:02}" + "🙂" * 398 for n in range(20)]

    (sent,) = end_of(state, worker_end(0, tail=lines), 1.0)

    assert sent.body.exit.tail == lines[-15:]


def test_what_cannot_be_killed_fits():
    state = agent(1)
    end_of(state, worker_end(0), 1.0)
    state.handle(agent_events.SchedulerMessage(0, Stop(reason="why"), 0.0), now=1.0)
    (sent,) = state.handle(agent_events.GenerationSwept(0, STUCK), now=2.0)
    body, _ = registered(state, 3.0)

    assert isinstance(sent.body, Drained)
    assert sent.body.stuck == body.stuck
    assert sent.body.stuck[-1] == "184 more processes"
    assert size(sent.body) < size(body) <= codec.FRAME_BYTES_MAX


@pytest.mark.parametrize(
    "event",
    [agent_events.TreeReady("训" * 65536), agent_events.TreeLost("训" * 65536, 70)],
)
def test_why_a_node_can_run_no_workers_fits(event):
    state = agent(1)

    (sent,) = state.handle(event, now=1.0)

    assert isinstance(sent.body, NodeFailed)
    assert size(sent.body) <= codec.FRAME_BYTES_MAX


# What the scheduler says.

SLOTS = 8


class Job:
    """A job of `nnodes` nodes of eight workers, which runs."""

    def __init__(self, nnodes, restarts=0):
        self.nodes = [f"n{n:05}" for n in range(nnodes)]
        formation = Formation(nnodes_min=nnodes, nnodes_max=nnodes, lease=10.0)
        limits = RestartLimits(max_restarts=restarts)
        self.state = SchedulerState(
            job_id="train",
            formation=formation,
            join_timeout=100.0,
            last_call=0.0,
            policy=RestartPolicy("train", limits),
            started_at=0.0,
        )
        self.control = Control(
            state=self.state, peers=AgentLinks(job_id="train", lease=lease(10.0), term=1)
        )
        for n, node in enumerate(self.nodes):
            body = Register(
                host=f"{HOST}{n:05}",
                slots=SLOTS,
                store_host="10.0.0.1",
                store_port=1,
                formation=formation,
                warm=True,
            )
            self.say(node, body, generation=-1)
        assert self.state.phase is JobPhase.RUNNING

    def say(self, node, body, *, generation=0, now=1.0):
        event = scheduler_events.AgentMessage(node, 1, generation, body)
        machine = self.control.receive if Control.is_for(event) else self.state.handle
        actions = machine(event, now=now)
        self.control.note(actions)
        return actions

    def fail(self, end_of_rank, stuck):
        """End all workers, of which that of rank 0 fails; return what follows."""
        for rank in range(len(self.nodes) * SLOTS):
            end = end_of_rank(rank)
            now = 1.0 + rank / 1e6
            self.say(self.nodes[rank // SLOTS], WorkerExited(exit=end, at=now), now=now)
        for node in self.nodes:
            actions = self.say(node, Drained(stuck=stuck), now=2.0)
        return actions


def bare(rank, **changes):
    return worker_end(rank, **{"error": "", "tail": [], "log_file": ""} | changes)


def killed(rank):
    return bare(rank, code=None, signum=15)


CROWDS = {
    "all alike": killed,
    "every other": lambda rank: bare(rank, code=rank % 2),
    "many codes": lambda rank: bare(rank, code=rank % 110 + 1),
    "many with cores": lambda rank: bare(
        rank, code=None, signum=rank % 31 + 1, core=rank % 2 == 0, oom=rank % 3 == 0
    ),
}


@pytest.fixture(scope="module")
def crowd():
    """Return a function that makes a verdict about so many nodes, whose workers end so."""
    found = {}

    def decide(nnodes, name, letter="x", stuck=()):
        def end(rank):
            return CROWDS[name](rank) if rank else worker_end(0, letter, code=3)

        key = (nnodes, name, letter, stuck)
        if key not in found:
            job = Job(nnodes)
            found[key] = (job, job.fail(end, list(stuck)))
        return found[key]

    return decide


@pytest.mark.parametrize("name", CROWDS)
@pytest.mark.parametrize("nnodes", [1, 300])
def test_a_verdict_fits(crowd, nnodes, name):
    _, actions = crowd(nnodes, name, "🙂", tuple(few(STUCK)))
    (verdict,) = [a.record.verdict for a in actions if isinstance(a, Write)]
    told = [a for a in actions if isinstance(a, SendToAgent) and isinstance(a.body, Finish)]

    assert len(told) == nnodes
    assert told[0].body.verdict == verdict
    assert size(told[0].body) <= codec.FRAME_BYTES_MAX
    counted = len(verdict.finished) + sum(len(group.ranks) for group in verdict.collateral)
    assert counted + 1 == nnodes * SLOTS
    assert verdict.stuck[-1] == f"{200 * nnodes - 16} more processes"
    assert wal.verdict(wal.encode(wal.Decided(verdict))) == verdict


@pytest.mark.parametrize("name", CROWDS)
def test_the_status_of_a_job_that_is_over_fits(crowd, name):
    job, _ = crowd(300, name, "🙂", tuple(few(STUCK)))
    reason = "训" * 10_000
    restarting = Restarting(reason=reason, log_file="", delay=0.0, restart=1, max_restarts=1)
    for generation in range(20):
        job.control.note([SendToAgent("n00000", generation, restarting)])

    (answer,) = job.control.ask("", GetStatus(), b"route", now=3.0)

    control_messages.encode(Answer(answer=answer.reply))


@pytest.mark.parametrize("name", ["all alike", "many codes"])
def test_a_verdict_of_ten_thousand_nodes_fits(name):
    root = fit(worker_end(0, "🙂"))
    generation = Generation()
    generation.exits = {rank: (CROWDS[name](rank), 2.0) for rank in range(1, 80_000)}
    generation.exits[0] = (root, 1.0)
    generation.stuck = dict.fromkeys(map(str, range(10_000)), few(STUCK))
    builder = VerdictBuilder("train", number=1, restarts=1, generation=generation)

    verdict = builder.failure(root, GiveUp(hint="h" * 500))

    assert size(Finish(verdict=verdict)) <= codec.FRAME_BYTES_MAX
    assert sum(len(group.ranks) for group in verdict.collateral) == 79_999
    assert verdict.stuck[-1] == "1999984 more processes"
    assert len(render(verdict)) < codec.FRAME_BYTES_MAX


def test_a_job_that_has_lost_many_nodes_says_so():
    job = Job(300, restarts=3)
    for node in job.nodes[:200]:
        lost = scheduler_events.Lost(node, 1, "no sign of life for 10s", 1.0)
        actions = job.state.handle(lost, now=11.0)
    for node in job.nodes[200:]:
        actions = job.say(node, Drained(), now=12.0)
    (restarting, *_) = [a.body for a in actions if isinstance(a.body, Restarting)]

    assert restarting.reason.endswith(" and 192 more")
    assert size(restarting) < 2048


# Stacks.

FRAMES = [Frame("🙂" * 120, (1 << 31) - 1, "🙂" * 60)] * 40


def test_a_stack_fits():
    end = worker_end(0, "🙂", tail=["🙂" * 200] * 5, log_file="🙂" * 4000)
    assert size(Stack(inquiry=1, worker=end, frames=FRAMES)) <= codec.FRAME_BYTES_MAX


@pytest.mark.parametrize("places", [1, 2, 97])
def test_the_stacks_of_ten_thousand_nodes_fit(places):
    groups = group(
        RankStack(rank=rank, frames=(*FRAMES[1:], Frame("/train.py", rank % places, "step")))
        for rank in range(80_000)
    )
    shown = fitting(groups)

    answer = Stacks(generation=0, groups=shown, left_out=places - len(shown))
    frame = control_messages.encode(Answer(answer=answer))
    assert control_messages.decode_answer(frame).answer == answer
    assert sum(len(found.ranks) for found in groups) == 80_000


def test_the_stacks_of_a_job_fit():
    job = Job(300)
    asked = job.control.ask("", GetStacks(), b"route", now=1.0)
    for n, node in enumerate(job.nodes):
        for rank in range(n * SLOTS, (n + 1) * SLOTS):
            body = Stack(inquiry=1, worker=killed(rank), frames=FRAMES[rank % 2 :])
            actions = job.say(node, body, now=2.0)

    (answer,) = actions
    assert (len(asked), type(answer)) == (300, SendReply)
    found = control_messages.decode_answer(control_messages.encode(Answer(answer=answer.reply)))
    assert len(found.answer.groups) + found.answer.left_out == 2
    assert len(found.answer.groups[0].ranks) == 1200
