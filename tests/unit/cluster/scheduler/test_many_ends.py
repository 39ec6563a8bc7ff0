"""More workers of a node have ended than its registration has room for, and nobody knows yet."""

import pytest

from msrun.cluster.agent import events as agent_events
from msrun.cluster.agent.state import EXITS_MAX, AgentPhase, AgentState
from msrun.cluster.liveness.lease import lease
from msrun.cluster.scheduler import wal
from msrun.cluster.scheduler.events import AgentMessage, SendToAgent, Write
from msrun.cluster.scheduler.restart_policy import RestartPolicy
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.scheduler.wal import GenerationStarted, Member
from msrun.cluster.verdict import RankExit
from msrun.cluster.wire.messages import Formation, Register, Restarting, Start, Stop
from msrun.job import RestartLimits

FORMATION = Formation(nnodes_min=1, nnodes_max=2, lease=10.0)
COUNTS = [EXITS_MAX - 1, EXITS_MAX, EXITS_MAX + 1, 1000]


def drained(first_rank, ends):
    """Return an agent whose workers have ended so, each a code and a signal, and are swept."""
    register = Register(
        host="h", slots=len(ends), store_host="10.0.0.1", store_port=1, formation=FORMATION
    )
    state = AgentState(job_id="train", register=register, grace=10.0, lease=lease(10.0))
    state.handle(agent_events.TreeReady(None), now=0.0)
    start = Start(
        node_rank=0,
        nnodes=2,
        first_rank=first_rank,
        count=len(ends),
        world_size=1001,
        store_host="10.0.0.1",
        store_port=1,
        serve_store=True,
    )
    state.handle(agent_events.SchedulerMessage(0, start, 0.0), now=0.0)
    for number, (code, signum, at) in enumerate(ends):
        if at == ASKED and state.phase is AgentPhase.RUNNING:
            state.handle(agent_events.SchedulerMessage(0, Stop(reason="why"), 0.0), now=ASKED)
        end = RankExit(
            rank=first_rank + number,
            node_rank=0,
            host="h",
            local_rank=number,
            pid=number + 1,
            code=code,
            signum=signum,
            ran_for=1.0,
        )
        state.handle(agent_events.WorkerEnded(0, end), now=at)
    if state.phase is AgentPhase.RUNNING:
        state.handle(agent_events.SchedulerMessage(0, Stop(reason="why"), 0.0), now=ASKED)
    state.handle(agent_events.GenerationSwept(0), now=ASKED)
    assert state.phase is AgentPhase.JOINING
    return state


ASKED = 20.0
FINISHED = (0, None, 5.0)
OBEYED = (0, None, ASKED)
ENDED_BY_US = (None, 15, ASKED)
FAILED = (3, None, 10.0)


def register_again(agents):
    """Let the agents register with a scheduler that has only its log; return what it does."""
    ranks = 0
    members = []
    for number, (name, agent) in enumerate(agents.items()):
        count = agent.register.slots
        member = Member(
            node_id=name,
            host="h",
            incarnation=1,
            node_rank=number,
            first_rank=ranks,
            count=count,
        )
        members.append(member)
        ranks += count
    policy = RestartPolicy("train", RestartLimits(max_restarts=3))
    scheduler = SchedulerState(
        job_id="train",
        formation=FORMATION,
        join_timeout=100.0,
        last_call=0.0,
        policy=policy,
        started_at=30.0,
    )
    scheduler.recover([wal.Began(1), GenerationStarted(0, members)], now=30.0)
    actions = []
    for name, agent in agents.items():
        join, *sent = agent.handle(agent_events.Forgotten(), now=30.0)
        for body in [join.register, *(send.body for send in sent)]:
            actions += scheduler.handle(AgentMessage(name, 1, 0, body), now=30.0)
    return actions


def restarting(actions):
    """Return what the nodes are told of the next generation."""
    told = [
        a.body for a in actions if isinstance(a, SendToAgent) and isinstance(a.body, Restarting)
    ]
    (started,) = [a.record for a in actions if isinstance(a, Write)]
    assert len(told) == 2
    assert started.generation == 1
    return told[0], started


@pytest.mark.parametrize("count", COUNTS)
def test_workers_that_obeyed_cost_no_restart(count):
    agents = {"a": drained(0, [OBEYED] * count), "b": drained(count, [OBEYED])}

    told, started = restarting(register_again(agents))

    assert told.restart == 0
    assert (started.restarts, started.losses) == (0, 0)


@pytest.mark.parametrize("count", COUNTS)
def test_a_failure_among_them_is_the_cause(count):
    ends = [FAILED if n == count // 2 else ENDED_BY_US for n in range(count)]
    agents = {"a": drained(0, ends), "b": drained(count, [ENDED_BY_US])}

    told, started = restarting(register_again(agents))

    assert told.reason.startswith(f"rank {count // 2} (node h, ")
    assert (started.restarts, started.losses) == (1, 0)


@pytest.mark.parametrize("count", COUNTS)
def test_workers_that_had_finished_are_not_to_blame(count):
    agents = {"a": drained(0, [FINISHED] * count), "b": drained(count, [FAILED])}

    told, started = restarting(register_again(agents))

    assert told.reason.startswith(f"rank {count} (node h, ")
    assert (started.restarts, started.losses) == (1, 0)
