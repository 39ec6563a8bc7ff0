"""The parameter servers of one node: which run, and when one that ended is started again.

A part of the agent's state machine, which exists only in jobs with servers.  Servers outlive the
generations of workers, so none of this is the scheduler's: a server that ends while the job runs is
started again alone, on its own node, at once or after a pause.  Its policy is that of workers, one
budget each.  When the budget is spent, the scheduler gets a `ServerFailed` and ends the job.

Where nodes come and go, the next generation may have other nodes, and servers follow from their
ranks.  So there the sweep after a generation kills its servers, too.  The ranks of the next one
begin with the tables of their checkpoint, wherever its servers are.

Four ends of a server are not its failure:

- *The node is cut off*, or the scheduler has forgotten it: its place may become another node's.  So
  its servers are killed, and `begin` starts those of its next place.
- *It is one server too many*, after `msrun scale`.  It gives away its rows, and ends with 0.
- *The sweep of a generation* of an elastic job.
- *A sweep that did not know it.*  The reaper spares the pids that it is given.  A server that was
  ordered just before has none yet, and is killed with the workers' remains.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from msrun.cluster.agent.events import Action, CountServers, SignalServers, StartServer
from msrun.cluster.scheduler.restart_policy import GiveUp, RestartPolicy
from msrun.cluster.verdict import RankExit, fit
from msrun.cluster.wire.messages import RunningServer, ServerFailed, ServersChanged
from msrun.job import RestartLimits


@dataclass(slots=True)
class _Server:
    """One server of this node.

    Args:
        policy: Decides about its restarts.
        is_live: It was ordered, and its end is not known.
        pid: Its pid; 0 as long as none is known.
        restarts: How often it was started again.
        is_exposed: Something that is no failure of its own may have killed it.
        leaves: It is one too many, and ends when others have its rows.
        due: When it is started again; None while it lives or nothing starts it.
    """

    policy: RestartPolicy
    is_live: bool = False
    pid: int = 0
    restarts: int = 0
    is_exposed: bool = False
    leaves: bool = False
    due: float | None = None


@dataclass(slots=True)
class NodeServers:
    """The servers of one node.

    Args:
        job_id: The job.
        total: Servers of all nodes: number i is on the node of rank i modulo the nodes, unless
            the scheduler says otherwise.
        limits: When a server that ended is started again.
        is_elastic: Nodes come and go, and servers end with each generation.
    """

    job_id: str
    total: int
    limits: RestartLimits
    is_elastic: bool = False
    _servers: dict[int, _Server] = field(default_factory=dict)
    # What the scheduler said last, if it did.
    _assigned: tuple[int, ...] | None = None
    # The node has no place in the job, so no server may live on it.
    _is_cut: bool = False

    @property
    def live(self) -> tuple[int, ...]:
        """The servers that may live."""
        return tuple(number for number, server in self._servers.items() if server.is_live)

    @property
    def pids(self) -> tuple[int, ...]:
        """The pids of the servers that are known to live."""
        return tuple(server.pid for server in self._servers.values() if server.pid)

    def report(self) -> ServersChanged:
        """Return the message about the servers as they are."""
        rows = [
            RunningServer(server=number, pid=server.pid, restarts=server.restarts)
            for number, server in sorted(self._servers.items())
        ]
        return ServersChanged(servers=rows)

    def begin(self, node_rank: int, nnodes: int) -> list[Action]:
        """Start the servers of a node with this place that do not live yet."""
        self._is_cut = False
        own = self._assigned
        if own is None:
            own = tuple(range(node_rank, self.total, nnodes))
        actions = self._signal([n for n in self.live if n not in own], signal.SIGKILL)
        self._servers = {n: server for n, server in self._servers.items() if n in own}
        for number in own:
            actions += self._have(number)
        return actions

    def _have(self, number: int) -> list[Action]:
        policy = RestartPolicy(f"{self.job_id}/server {number}", self.limits)
        server = self._servers.setdefault(number, _Server(policy))
        server.leaves = False
        is_idle = not server.is_live and server.due is None
        return [self._start(number, server)] if is_idle else []

    def assign(self, numbers: Sequence[int], total: int, *, is_running: bool) -> list[Action]:
        """Have these servers, at once or with the next workers.

        Others live on until their rows are elsewhere, or until the next workers.
        """
        self._assigned, self.total = tuple(numbers), total
        actions: list[Action] = [CountServers(total)]
        if not is_running or self._is_cut:
            return actions
        for number, server in self._servers.items():
            server.leaves = number not in self._assigned
        return [*actions, *(action for number in numbers for action in self._have(number))]

    def is_leaving(self, number: int) -> bool:
        """Whether a server is one too many, and may end."""
        server = self._servers.get(number)
        return server is not None and server.leaves

    def started(self, number: int, pid: int) -> None:
        """Note the pid of a server."""
        if server := self._servers.get(number):
            server.pid = pid

    def ended(self, end: RankExit, *, now: float) -> ServerFailed | None:
        """Decide about a server that has ended; return why there is no further restart, if so."""
        server = self._servers.get(end.rank)
        if server is None:  # one of another node by now
            return None
        server.is_live, server.pid = False, 0
        if self._is_cut or (server.is_exposed and end.signum == signal.SIGKILL):
            server.due = None if self._is_cut else now
            return None
        if server.leaves and end.succeeded:
            del self._servers[end.rank]
            return None
        step = server.policy.after(end, now=now)
        if isinstance(step, GiveUp):
            return ServerFailed(exit=fit(end), reason=step.reason, code=step.code, hint=step.hint)
        server.restarts += 1
        server.due = now + step.delay
        return None

    def deadline(self) -> float | None:
        """Time at which a server is to be started again; None when there is none."""
        dues = [server.due for server in self._servers.values() if server.due is not None]
        return min(dues, default=None)

    def restart(self, *, now: float) -> list[Action]:
        """Start the servers again whose time has come."""
        return [
            self._start(number, server)
            for number, server in self._servers.items()
            if server.due is not None and server.due <= now
        ]

    def swept(self) -> tuple[int, ...]:
        """Return the pids that a sweep of the workers spares; it may hit those without one."""
        if self.is_elastic and not self._is_cut:
            self._cut()
        if self._is_cut:
            return ()
        for server in self._servers.values():
            server.is_exposed = server.is_exposed or (server.is_live and not server.pid)
        return self.pids

    def kill(self) -> list[Action]:
        """Kill all servers, which start again with the node's next workers."""
        self._cut()
        return self._signal(self.live, signal.SIGKILL)

    def _cut(self) -> None:
        self._is_cut = True
        for server in self._servers.values():
            server.is_exposed, server.due = True, None

    def end(self) -> list[Action]:
        """Ask the servers to end: the job is over."""
        for server in self._servers.values():
            server.due = None
        return self._signal(self.live, signal.SIGTERM)

    def _start(self, number: int, server: _Server) -> Action:
        server.is_live, server.is_exposed, server.due = True, False, None
        return StartServer(number, server.restarts)

    @staticmethod
    def _signal(servers: Sequence[int], signum: int) -> list[Action]:
        return [SignalServers(tuple(servers), signum)] if servers else []
