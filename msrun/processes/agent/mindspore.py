"""The agent's part of MindSpore's scheduler: its port, and when which node has to run it."""

from __future__ import annotations

import socket
from pathlib import Path

from msrun import environ
from msrun.cluster.agent.events import TreeLost
from msrun.cluster.wire.messages import Start
from msrun.errors import ExitCode, UsageError
from msrun.job import LOOPBACK, Framework, JobSpec
from msrun.supervise import process
from msrun.supervise.node_plan import join_seconds
from msrun.supervise.orders import Exited, SpawnMindSpore

LOG_FILE = "mindspore_scheduler.log"
_NOT_ASKED_FOR = "--framework torch leaves it without a scheduler"
_NOT_KNOWN = "on several nodes its scheduler needs --framework mindspore"


class MindSporePort:
    """The port of MindSpore's scheduler on this node, kept from other programs for the whole job.

    The socket is bound and does not listen, so that a process of the job can take the port.

    Args:
        job: The job.
    """

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._host = job.address
        self._sockets = [_bound(job.address, 0)]
        self._port: int = self._sockets[0].getsockname()[1]
        if job.address != LOOPBACK:
            # Where a worker is noticed that looks for a scheduler in vain.
            self._sockets.append(_bound(LOOPBACK, 0))
        self._here: int = self._sockets[-1].getsockname()[1]
        self.is_known = False

    @property
    def seen_by_workers(self) -> tuple[str, str]:
        """Host and port that workers have at first; on several nodes the store knows better."""
        return LOOPBACK, str(self._here)

    @property
    def asks_store(self) -> bool:
        """Whether workers must ask the store where the scheduler is."""
        return self.is_known and not self._job.is_alone

    def told_by(self, start: Start) -> str:
        """Return what the store of `start` tells workers, empty when there is nothing to tell."""
        return f"{self._host} {self._port}" if self.asks_store and start.serve_store else ""

    def order(self, generation: int, start: Start) -> SpawnMindSpore | None:
        """Return what this node has to do for a generation; None when another one does it."""
        job = self._job
        if self.is_known and not start.serve_store:
            return None
        host, port = (self._host, self._port) if self.is_known else (LOOPBACK, self._here)
        refusal = ""
        if job.framework is Framework.TORCH:
            refusal = _NOT_ASKED_FOR
        elif not job.is_alone and not self.is_known:
            refusal = _NOT_KNOWN
        return SpawnMindSpore(
            generation=generation,
            host=host,
            port=port,
            env=environ.mindspore_scheduler_env(
                host,
                port,
                workers=start.world_size,
                join_timeout=join_seconds(job),
                rank_table=job.rank_table,
            ),
            log_file=str(Path(job.log_dir, LOG_FILE)),
            append=generation > 0,
            when_called=not self.is_known,
            refusal=refusal,
        )

    def close(self) -> None:
        """Give the port free."""
        for sock in self._sockets:
            sock.close()


def loss(end: Exited, log_dir: str) -> TreeLost | None:
    """Return what the end of the scheduler means for workers that run; None if they have left it.

    Args:
        end: Its end, or the reason why there is none.
        log_dir: Directory of the job's logs.
    """
    if end.reason:
        return TreeLost(end.reason, ExitCode.USAGE)
    if not end.status:
        return None
    how = process.render_status(end.status)
    log = Path(log_dir, LOG_FILE)
    return TreeLost(f"MindSpore's scheduler {how}; log: {log}", ExitCode.NODE_LOST)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        msg = f"no port of {host} is free: {error.strerror}"
        raise UsageError(msg, hint="see `ulimit -n`, and --local-addr") from error
    return sock
