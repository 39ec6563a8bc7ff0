"""What an agent says on its console: one sentence for each thing that happens to its node."""

from __future__ import annotations

from collections.abc import Iterable

from msrun.cluster.agent.state import AgentPhase, AgentState
from msrun.cluster.verdict import RankExit, render_seconds
from msrun.cluster.wire.messages import Restarting
from msrun.errors import signal_name
from msrun.job import JobSpec
from msrun.processes.agent.worker_end import RunningWorker
from msrun.processes.console import NodeStatus


def begun(job: JobSpec, host: str, containment: str) -> str:
    """Return that the node takes part, with what, and where its logs are."""
    workers = f"{job.workers_per_node} worker{'s' if job.workers_per_node != 1 else ''}"
    if job.servers and job.is_alone:
        workers += f" and {job.servers} server{'s' if job.servers != 1 else ''}"
    what = f"{workers} on {host}, contained by {containment}"
    return f"msrun: {job.job_id}: {what}; logs: {job.log_dir}"


def restarting(announced: Restarting) -> str:
    """Return why the workers start again, and when."""
    when = f"in {render_seconds(announced.delay)}" if announced.delay else "now"
    log = f"; log: {announced.log_file}" if announced.log_file else ""
    if not announced.restart:
        return f"msrun: {announced.reason}: starting again {when}"
    return (
        f"warning: {announced.reason}{log}\n"
        f"msrun: restart {announced.restart} of {announced.max_restarts} {when}"
    )


def server_ended(end: RankExit, *, is_leaving: bool) -> str:
    """Return how a parameter server ended, which may be one too many."""
    if is_leaving and end.succeeded:
        return f"msrun: server {end.rank} has ended: other servers have its rows"
    return f"warning: {end.sentence()}; log: {end.log_file}"


def expired(workers: Iterable[RunningWorker], pid: int, timer: str, signum: int) -> str:
    """Return whose timer has expired, and which signal it gets for it; 0 for none."""
    ranks = (worker.plan.rank for worker in workers if worker.pid == pid)
    who = next((f"rank {rank} (pid {pid})" for rank in ranks), f"process {pid}")
    what = f"it gets {signal_name(signum)}" if signum else "it gets no signal"
    return f"warning: {who}: timer {timer!r} has expired; {what}"


def status(state: AgentState, *, workers: int, running: int, elapsed: float) -> NodeStatus:
    """Return the line that a terminal shows.

    Args:
        state: Of this node.
        workers: How many workers it has.
        running: How many of them run.
        elapsed: Seconds since the launcher began.
    """
    phase = state.phase.value
    if state.phase is AgentPhase.JOINING:
        phase = "forming"
    elif state.phase is AgentPhase.RUNNING and running < workers:
        has_ended = len(state.live) < workers
        phase = "running" if has_ended else "starting"
    return NodeStatus(
        phase=phase,
        running=running,
        workers=workers,
        generation=state.generation,
        elapsed=elapsed,
    )
