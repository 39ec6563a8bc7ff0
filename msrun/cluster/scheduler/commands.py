"""What somebody outside asks of a job that runs: other parameter servers, and signals to ranks."""

from __future__ import annotations

from msrun.cluster.scheduler import report
from msrun.cluster.scheduler.events import Action, JobPhase, SendToAgent
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.wire.control_messages import Denied, Done, SignalJob
from msrun.cluster.wire.messages import SignalRanks
from msrun.errors import signal_name

Answer = tuple[Denied | Done, list[Action]]


def scale(state: SchedulerState, servers: int) -> Answer:
    """Have so many parameter servers."""
    job = f"job {state.job_id}"
    if not state.formation.servers:
        return Denied(reason=f"{job} was started without parameter servers (--server-num)"), []
    if state.phase is not JobPhase.RUNNING:
        return Denied(reason=f"{job} is {state.phase.value}: try again when its workers run"), []
    if servers == state.servers:
        return Denied(reason=f"{job} has {servers} parameter server(s) already"), []
    sentence = f"{job} goes from {state.servers} to {servers} parameter server(s)"
    return Done(sentence=sentence), state.scale_servers(servers)


def send_signal(state: SchedulerState, request: SignalJob) -> Answer:
    """Send a signal to those ranks that live."""
    living = report.living(state)
    every = [rank for ranks in living.values() for rank in ranks]
    chosen = [rank for rank in every if _is_in(rank, request.ranks)]
    if not chosen:
        what = "none of those ranks" if every else "no worker of the job"
        return Denied(reason=f"{what} runs"), []
    nodes = [n for n, ranks in living.items() if any(_is_in(r, request.ranks) for r in ranks)]
    order = SignalRanks(ranks=request.ranks, signum=request.signum)
    name = signal_name(request.signum)
    sentence = f"{name} goes to {len(chosen)} rank(s) on {len(nodes)} node(s)"
    return Done(sentence=sentence), [SendToAgent(n, state.generation, order) for n in nodes]


def _is_in(rank: int, ranges: list[tuple[int, int]]) -> bool:
    return not ranges or any(first <= rank <= last for first, last in ranges)
