"""Lets one node leave a job for somebody outside: which node a name means, and whether it may."""

from __future__ import annotations

import signal

from msrun.cluster.scheduler.events import Action, AgentMessage
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.wire.messages import Interrupted

_CHOICES_MAX = 8


def drain(state: SchedulerState, name: str, *, now: float) -> tuple[str, list[Action]]:
    """Let the node that `name` means leave; return why it cannot, or an empty text."""
    node_id = _find_node(state, name)
    if isinstance(node_id, list):
        choices = ", ".join(node_id[:_CHOICES_MAX]) or "none has registered"
        more = f" and {len(node_id) - _CHOICES_MAX} more" * (len(node_id) > _CHOICES_MAX)
        return f"no one node of the job is {name!r} (choose {choices}{more})", []
    if problem := _why_needed(state, node_id):
        return problem, []
    # A drained node goes the way of one whose own launcher got SIGTERM: one rule, proven once.
    leaves = Interrupted(signum=signal.SIGTERM)
    incarnation = state.roster.nodes[node_id].incarnation
    event = AgentMessage(node_id, incarnation, state.generation, leaves)
    return "", state.handle(event, now=now)


def _find_node(state: SchedulerState, name: str) -> str | list[str]:
    """Return the node that `name` means, or the choices where it means none or several."""
    nodes = state.roster.nodes
    members = state.current.members
    matches = [
        node_id
        for node_id, node in nodes.items()
        if name in (node_id, node.registration.host, node.registration.store_host)
    ]
    # Hosts may have numbers for names, so a node rank is what is tried last.
    if not matches and name.isdecimal():
        matches = [n for n in nodes if n in members and members[n].node_rank == int(name)]
    if len(matches) == 1:
        return matches[0]
    return sorted(matches or [node.registration.host for node in nodes.values()])


def _why_needed(state: SchedulerState, node_id: str) -> str:
    node = state.roster.nodes[node_id]
    host = node.registration.host
    if state.is_over:
        return f"job {state.job_id} is over"
    if node.leaves_with:
        return f"node {host} is leaving already"
    if state.roster.may_leave(node_id):
        return ""
    if node.registration.serves:
        return f"node {host} has the scheduler of the job, which cannot do without it"
    if node_id in state.roster.bound:
        return f"node {host} has parameter servers of the job, which do not move"
    takes = state.formation.nnodes_min
    return (
        f"the job cannot do without node {host}: it takes {takes} node(s), no other stands by, "
        "and it was not started with --nnodes MIN:MAX"
        if not state.formation.is_elastic
        else f"the job cannot do without node {host}: it takes at least {takes} node(s)"
    )
