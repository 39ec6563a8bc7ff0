"""Keeps the scheduler of a job running: a child of this process that is started again.

An agent does so on the node that owns `--master-addr`, and `scheduler_host` where the cluster is
started by hand.  A scheduler that dies costs nothing: the next one inherits the listening socket
and goes on with the log, while the workers run on.  `CrashLoopGuard` ends an endless row of them.
There are never two at once: the next starts only when the last has ended.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from msrun.cluster.scheduler.crash_loop_guard import CrashLoopGuard
from msrun.cluster.verdict import Verdict
from msrun.cluster.wire.messages import Formation
from msrun.job import JobSpec
from msrun.processes import run_dir
from msrun.processes.scheduler.config import SchedulerConfig
from msrun.processes.scheduler.handle import SchedulerProcess
from msrun.transport.loop import Loop


def scheduler_config(
    job: JobSpec, formation: Formation, secret: bytes | None, directory: Path, *, alone: bool
) -> SchedulerConfig:
    """Return the configuration of the scheduler of `job`; arguments as of `SchedulerConfig`."""
    return SchedulerConfig(
        job_id=job.job_id,
        formation=formation,
        join_timeout=job.join_timeout,
        last_call=job.last_call,
        replaces=job.is_replaced,
        restarts=job.restarts,
        secret=secret,
        wal_file=str(directory / run_dir.WAL),
        log_file=str(Path(job.log_dir, "scheduler.log")),
        parent=os.getpid(),
        alone=alone,
        rank_table=job.emit_rank_table,
    )


class SchedulerSupervisor:
    """The scheduler of a job, in one process after the other.

    Args:
        config: Configuration of each scheduler; `started_before` and `term` are counted here.
        listening: The socket on which all of them listen one after the other.
        env: Their environment.
    """

    def __init__(
        self, config: SchedulerConfig, listening: socket.socket, env: Mapping[str, str]
    ) -> None:
        self._config = config
        self._listening = listening
        self._env = env
        self._crash_loop = CrashLoopGuard()
        self._process: SchedulerProcess | None = None
        self._signum = 0

    @property
    def pids(self) -> set[int]:
        """Pid of the scheduler; none before it has started."""
        return {self._process.pid} if self._process else set()

    def start(self) -> None:
        """Start a scheduler, which takes up where the last one, if any, has ended."""
        self._process = SchedulerProcess(self._config, self._listening, self._env)
        count = self._config.started_before + 1
        self._config = msgspec.structs.replace(self._config, started_before=count)
        self._crash_loop.began(Loop.now())

    def watch(
        self,
        loop: Loop,
        say: Callable[[str], None],
        when_over: Callable[[str, Verdict | None], None],
    ) -> None:
        """Start the scheduler again whenever it dies.

        Args:
            loop: This process's loop.
            say: Takes a warning that it is started again.
            when_over: Takes how the last scheduler ended, and the verdict where there is one.
        """
        if self._process:
            pidfd = self._process.pidfd
            loop.watch(pidfd, lambda: self._on_end(loop, say, when_over))

    def _on_end(
        self,
        loop: Loop,
        say: Callable[[str], None],
        when_over: Callable[[str, Verdict | None], None],
    ) -> None:
        child = self._child()
        loop.forget(child.pidfd)
        how, verdict = child.how_it_ended(), child.verdict()
        # If it died with a verdict on disk, some nodes may not know that yet.  An agent starts
        # another scheduler for them at its own end (`end`); one that is alone is started now.
        must_tell = self._config.alone and child.has_died
        may_begin_again = self._crash_loop.may_begin_again(Loop.now())
        if (verdict and not must_tell) or not may_begin_again:
            when_over(how, verdict)
            return
        child.close()
        self._note_term(child)
        self._process = None  # closed, also if no other can be started
        say(f"warning: {how}; it is started again")
        self.start()
        if self._signum:
            self._child().pass_on(self._signum)
        self.watch(loop, say, when_over)

    def kill(self) -> None:
        """Kill a scheduler that does not answer; another takes its place."""
        if self._process:
            self._process.kill()

    def pass_on(self, signum: int) -> None:
        """Tell a scheduler that is `alone` of a signal, and those after it of the first one."""
        self._signum = self._signum or signum
        self._child().pass_on(signum)

    def end(self, timeout: float, *, tells_again: bool = False) -> None:
        """Let the scheduler end, and kill it after `timeout` seconds.

        Args:
            timeout: Seconds in which it tells the nodes how the job ended.
            tells_again: If it died with a verdict on disk, another scheduler tells the nodes: it
                may have told this node and no other.
        """
        child = self._process
        if child:
            child.end(timeout)
        if child and tells_again and child.has_died and child.verdict():
            self._note_term(child)
            self.start()
            self._child().end(timeout)

    def close(self) -> None:
        """Close the listening socket: peers that cannot connect take this node for gone."""
        self._listening.close()

    def _note_term(self, ended: SchedulerProcess) -> None:
        term = max(self._config.term, ended.term)
        self._config = msgspec.structs.replace(self._config, term=term)

    def _child(self) -> SchedulerProcess:
        if self._process is None:
            raise RuntimeError("the scheduler has not been started")
        return self._process
