"""Describes a job to the tools that control it: its state, its nodes, its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from msrun.cluster.scheduler.events import JobPhase
from msrun.cluster.scheduler.peers import AgentLinks
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.scheduler.wal import Member
from msrun.cluster.wire.control_messages import (
    NodeRow,
    Nodes,
    RankRow,
    Ranks,
    ServerPage,
    ServerRow,
    Status,
    fitting,
)
from msrun.cluster.wire.messages import Running, ServersChanged

# Rows that are considered for one page, which may have room for fewer.
_ROWS_MAX = 512
_HOST_CHARS_MAX = 255
_CAUSE_CHARS_MAX = 500
_LIVE = (JobPhase.RUNNING, JobPhase.STOPPING)


def status(state: SchedulerState, causes: Sequence[str], *, term: int, now: float) -> Status:
    """Return the state of the job."""
    is_forming = state.phase is JobPhase.FORMING
    verdict = state.verdict
    return Status(
        job_id=state.job_id,
        phase=state.phase.value,
        generation=state.generation,
        uptime=now - state.started_at,
        formation=state.formation,
        nodes=len(state.roster.nodes),
        world_size=0 if is_forming else state.current.world_size,
        waiting_for=state.roster.attendance() if is_forming else "",
        failures=state.policy.failures,
        losses=state.policy.losses,
        max_restarts=state.policy.limits.max_restarts,
        causes=[cause[:_CAUSE_CHARS_MAX] for cause in causes],
        scheduler_restarts=term - 1,
        verdict=verdict,
    )


def nodes(state: SchedulerState, peers: AgentLinks, first: int, *, now: float) -> Nodes:
    """Return a page of the nodes: members by node rank, then the others as they came."""
    members = state.current.members if state.phase in _LIVE else {}
    others = [node_id for node_id in state.roster.nodes if node_id not in members]
    names = [*members, *others]
    window = names[max(first, 0) : max(first, 0) + _ROWS_MAX]
    rows = fitting([_node(state, peers, n, members.get(n), now) for n in window])
    return Nodes(rows=rows, following=_following(first, len(rows), len(names)))


def all_nodes(state: SchedulerState, peers: AgentLinks, *, now: float) -> Iterator[NodeRow]:
    """Yield all nodes."""
    following: int | None = 0
    while following is not None:
        page = nodes(state, peers, following, now=now)
        yield from page.rows
        following = page.following


def _node(
    state: SchedulerState, peers: AgentLinks, node_id: str, member: Member | None, now: float
) -> NodeRow:
    node = state.roster.nodes.get(node_id)
    body = node.registration if node else None
    role = "spare" if member is None else "serving"
    if node is None:
        role = "lost"
    elif node.leaves_with or node_id in state.roster.excluded:
        role = "leaving"
    elif state.phase is JobPhase.FORMING:
        role = "registered"
    host = body.host if body else member.host if member else ""
    return NodeRow(
        node_id=node_id[:_HOST_CHARS_MAX],
        host=host[:_HOST_CHARS_MAX],
        address=body.store_host if body else "",
        role=role,
        node_rank=member.node_rank if member else None,
        ranks=(member.first_rank, member.count) if member else None,
        slots=body.slots if body else 0,
        silent=peers.silence(node_id, now=now) if state.formation.lease else None,
        scheduler=bool(body and body.serves),
        devices=body.devices if body else [],
    )


def ranks(
    state: SchedulerState,
    running: Mapping[str, tuple[Running, float]],
    first: int,
    *,
    now: float,
) -> Ranks:
    """Return a page of the ranks.

    Args:
        state: The job.
        running: Node id -> the message about its running workers, and when they began.
        first: First rank of the page.
        now: The time.
    """
    if state.phase not in _LIVE and not state.current.exits:
        return Ranks(rows=[])
    first = max(first, 0)
    every = (
        (node_id, member, local_rank)
        for node_id, member in state.current.members.items()
        for local_rank in range(member.count)
    )
    window = islice(every, first, first + _ROWS_MAX)
    rows = fitting([_rank(state, running.get(n), m, local, now) for n, m, local in window])
    return Ranks(rows=rows, following=_following(first, len(rows), state.current.world_size))


def _rank(
    state: SchedulerState,
    running: tuple[Running, float] | None,
    member: Member,
    local_rank: int,
    now: float,
) -> RankRow:
    rank = member.first_rank + local_rank
    pid = None
    seconds: float | None = None
    how = "starting"
    if recorded := state.current.exits.get(rank):
        end = recorded[0]
        pid, how, seconds = end.pid, end.how(), end.ran_for
    elif running and local_rank < len(running[0].pids):
        pid, seconds = running[0].pids[local_rank], now - running[1]
        how = "stopping" if state.phase is JobPhase.STOPPING else "running"
    return RankRow(
        rank=rank,
        local_rank=local_rank,
        host=member.host[:_HOST_CHARS_MAX],
        pid=pid,
        state=how,
        seconds=seconds,
    )


def servers(
    state: SchedulerState, of_nodes: Mapping[str, ServersChanged], first: int
) -> ServerPage:
    """Return a page of the parameter servers.

    Args:
        state: The job.
        of_nodes: Node id -> what it said last about its servers.
        first: First number of the page.
    """
    first = max(first, 0)
    known = {
        server.server: ServerRow(
            server=server.server,
            host=node.registration.host[:_HOST_CHARS_MAX],
            pid=server.pid or None,
            restarts=server.restarts,
        )
        for node_id, node in state.roster.nodes.items()
        if (said := of_nodes.get(node_id))
        for server in said.servers
    }
    total = max([state.servers, *(number + 1 for number in known)])  # one too many ends soon
    window = range(first, min(first + _ROWS_MAX, total))
    # One of a node that is lost, or that has not begun, is nowhere.
    rows = [known.get(n) or ServerRow(server=n, host="", pid=None, restarts=0) for n in window]
    rows = fitting(rows)
    return ServerPage(rows=rows, following=_following(first, len(rows), total))


def living(state: SchedulerState) -> dict[str, list[int]]:
    """Return the ranks of the generation that have not ended, by node."""
    if state.phase not in _LIVE:
        return {}
    current = state.current
    return {
        node_id: [rank for rank in current.ranks(node_id) if rank not in current.exits]
        for node_id in current.members
        if node_id in current.undrained and node_id in state.roster.nodes
    }


def _following(first: int, count: int, total: int) -> int | None:
    end = max(first, 0) + count
    return end if count and end < total else None
