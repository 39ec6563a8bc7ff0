"""The agent's handle on its process tree: the reaper, the forkserver, and their channels."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msrun import entry
from msrun.supervise import containment, process
from msrun.supervise.channel import Channel, ChannelClosed
from msrun.supervise.orders import Configure, ForkserverReport, ReaperReport, Swept
from msrun.supervise.reaper import DEAF_TO

_STRAYS_SECONDS = 1.0
_STRAYS_LISTS = 10


class ProcessTree:
    """Everything on this node that belongs to the job, from the agent's side.

    Args:
        configure: First order to the reaper.
        listen: Listening sockets for the stores of all generations.
        env: Environment of the reaper and, before their own variables, of all below it.
        lock: Descriptor of a locked file, which the reaper alone keeps open until it
            exits; the caller may close its own once this returns.
        stderr: Descriptor for their messages; None for this process's own.
    """

    def __init__(
        self,
        configure: Configure,
        listen: Sequence[socket.socket],
        env: Mapping[str, str],
        *,
        lock: int,
        stderr: int | None = None,
    ) -> None:
        reaper_here, reaper_there = socket.socketpair()
        forkserver_here, forkserver_there = socket.socketpair()
        descriptors = [reaper_there.fileno(), forkserver_there.fileno(), lock]
        descriptors += [sock.fileno() for sock in listen]
        self._cgroup = configure.cgroup
        with process.signals_held(DEAF_TO):
            self._process = subprocess.Popen(
                python_command("msrun.processes.node:main", *map(str, descriptors)),
                pass_fds=descriptors,
                start_new_session=True,
                env=dict(env),
                stderr=stderr,
                preexec_fn=dies_with_us(),  # noqa: PLW1509 - see there
            )
        reaper_there.close()
        forkserver_there.close()
        self.reaper: Channel[ReaperReport] = Channel(reaper_here, ReaperReport)
        self.forkserver: Channel[ForkserverReport] = Channel(forkserver_here, ForkserverReport)
        self.reaper.send(configure)

    @property
    def pid(self) -> int:
        """Pid of the reaper."""
        return self._process.pid

    def end(self, timeout: float) -> list[str]:
        """Have the reaper kill everything and exit; return the processes it could not kill.

        Args:
            timeout: Seconds to wait for the reaper.
        """
        self.forkserver.close()
        self.reaper.finish()
        stuck: list[str] = []
        try:
            with process.patiently():
                self._process.wait(timeout)
            stuck = self._last_words()
        except subprocess.TimeoutExpired:
            stuck = [f"{self.pid} {process.state(self.pid)} msrun reaper"]
            self._process.kill()
        self.reaper.close()
        return stuck

    def kill_by_force(self, job_id_variable: bytes) -> None:
        """Kill the rest of the tree after the reaper itself was killed.

        Args:
            job_id_variable: `NAME=value` that stands in the environment of every
                process of this job and of no other.
        """
        end_strays(job_id_variable, self._cgroup)

    def _last_words(self) -> list[str]:
        stuck: list[str] = []
        try:
            while True:
                for report in self.reaper.receive():
                    if isinstance(report, Swept):
                        stuck = report.stuck
        except ChannelClosed:
            return stuck


def end_strays(job_id_variable: bytes, cgroup: str | None) -> None:
    """Kill the rest of a job after its reaper has ended, and remove its cgroup.

    Args:
        job_id_variable: As of `ProcessTree.kill_by_force`.
        cgroup: The job's own, if it had one.
    """
    if cgroup:
        members = containment.members(cgroup)
        containment.kill(cgroup)
        process.kill_and_wait(members, _STRAYS_SECONDS)
    # One list is not enough: what strays fork while it is made is not in it, and neither is a
    # process in the midst of an exec, which shows no environment for that moment.
    for _ in range(_STRAYS_LISTS):
        strays = process.with_variable(job_id_variable)
        if not strays:
            break
        process.kill_and_wait(strays, _STRAYS_SECONDS)
    if cgroup:
        containment.remove(cgroup)


def dies_with_us() -> Callable[[], None]:
    """Return the first call of a new process of ours, which ends it if its parent is gone.

    Only before this process has a second thread, whose locks a fork would inherit.
    """
    return partial(process.die_with_parent, os.getpid())


def python_command(function: str, *arguments: str) -> list[str]:
    """Return the command that calls `module:function` in a Python like this one."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing does
    kept = [flag for flag in flags if flag != "-P"]
    return [sys.executable, *kept, str(Path(entry.__file__)), function, *arguments]
