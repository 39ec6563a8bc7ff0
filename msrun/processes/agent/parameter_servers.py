"""The agent's hand on the parameter servers of its node: their orders, files and ends."""

from __future__ import annotations

from pathlib import Path

import msgspec

from msrun.backend import WorkerPlan
from msrun.cluster.agent.events import (
    CountServers,
    ServerEnded,
    ServerStarted,
    SignalServers,
    StartServer,
)
from msrun.cluster.agent.servers import NodeServers
from msrun.errors import MsrunError
from msrun.job import JobSpec
from msrun.processes.agent.node_resources import NodeResources
from msrun.processes.agent.worker_end import OomCounter, RunningWorker, describe
from msrun.supervise import node_plan, orders


class ParameterServers:
    """The parameter servers of this node.

    Args:
        job: The job.
        node: The resources of this node.
        host: Its name.
        oom: Tells which ends were for want of memory.
    """

    def __init__(self, job: JobSpec, node: NodeResources, host: str, oom: OomCounter) -> None:
        self.machine = NodeServers(
            job_id=job.job_id,
            total=job.servers,
            limits=job.restarts,
            is_elastic=job.is_elastic,
        )
        """The part of the agent's state machine that decides about them."""
        self._job = job
        self._node = node
        self._host = host
        self._oom = oom
        self._running: dict[int, RunningWorker] = {}

    @property
    def pids(self) -> set[int]:
        """Pids of the servers that live."""
        return {server.pid for server in self._running.values() if server.pid}

    def perform(
        self, action: StartServer | SignalServers | CountServers, until: float | None
    ) -> None:
        """Do what the state machine asks for.

        Args:
            action: What.
            until: After which no server may start any more; None for ever.

        Raises:
            MsrunError: The files of a server cannot be made.
        """
        if isinstance(action, StartServer):
            self._start(action, until)
            return
        if isinstance(action, CountServers):
            self._count(action.total)
            return
        order = orders.ServerSignal(servers=list(action.servers), signum=action.signum)
        self._node.tree.forkserver.send(order)

    def _count(self, total: int) -> None:
        try:
            self._node.count_servers(total)
        except OSError as error:
            msg = f"servers cannot be counted: {error.filename}: {error.strerror}"
            raise MsrunError(msg, hint="see free space") from error

    def _start(self, action: StartServer, until: float | None) -> None:
        number = action.server
        error_file = Path(node_plan.servers_directory(self._node.run_dir), f"error_{number}.json")
        log_file = node_plan.server_log_file(self._job, number)
        banner = ""
        if action.restarts:
            banner = f"[msrun] server {number} starts again, restart {action.restarts}\n"
        try:
            self._node.hand_over_servers()
            error_file.unlink(missing_ok=True)
        except OSError as error:
            msg = f"server {number} cannot be started: {error.filename}: {error.strerror}"
            raise MsrunError(msg, hint="see `ulimit -n` and free space") from error
        size = Path(log_file).stat().st_size + len(banner) if banner else 0
        self._running[number] = RunningWorker(
            plan=_plan(number, log_file),
            host=self._host,
            error_file=str(error_file),
            log_starts={log_file: size},
        )
        order = orders.SpawnServer(
            server=number,
            env=self._node.server_env(number, str(error_file)),
            log_file=log_file,
            banner=banner,
            until=until,
        )
        self._node.tree.forkserver.send(order)

    def take(
        self, report: orders.ServerSpawned | orders.ServerExited, *, now: float
    ) -> ServerStarted | ServerEnded:
        """Return what a report of the forkserver means for the state machine."""
        server = self._running[report.server]
        server.pid = report.pid
        if isinstance(report, orders.ServerSpawned):
            server.started_at = report.at
            return ServerStarted(report.server, report.pid)
        server.pid = 0
        end = orders.Exited(
            generation=-1,
            rank=report.server,
            pid=report.pid,
            status=report.status,
            at=report.at,
            reason=report.reason,
        )
        described = describe(end, server, self._oom, now=now)
        return ServerEnded(msgspec.structs.replace(described, is_server=True))


def _plan(number: int, log_file: str) -> WorkerPlan:
    """Return a server in the form in which ends of workers are described."""
    return WorkerPlan(
        rank=number,
        local_rank=number,
        node_rank=0,
        device=None,
        cpus=(),
        numa_nodes=(),
        log_file=log_file,
        env={},
    )
