"""The agent's handle on its process tree: the reaper, the forkserver, and their channels."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msrun import entry
from msrun.supervise import containment, process
from msrun.supervise.channel import Channel, ChannelClosed
from msrun.supervise.orders import Configure, ForkserverReport, ReaperReport, Swept
from msrun.supervise.reaper import DEAF_TO

_STRAYS_SECONDS = 1.0
# As the kernel's `timeval`: seconds, microseconds.
_SEND_TIMEOUT = struct.pack("ll", 15, 0)


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
        self._configure = configure
        self.is_silent = False
        """Whether the reaper did not answer, so that its processes were ended without it."""
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
        for sock in (reaper_here, forkserver_here):
            # To a process that is stopped, nothing more can be sent at some time.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self.reaper: Channel[ReaperReport] = Channel(reaper_here, ReaperReport)
        self.forkserver: Channel[ForkserverReport] = Channel(forkserver_here, ForkserverReport)
        self.reaper.send(configure)

    @property
    def pid(self) -> int:
        """Pid of the reaper."""
        return self._process.pid

    def wake(self) -> None:
        """Let the reaper go on, should somebody have stopped it."""
        if self._process.returncode is None:
            process.kill(self.pid, signal.SIGCONT)

    def end(
        self,
        timeout: float,
        job_id_variable: bytes = b"",
        adopted: Callable[[], Iterable[int]] = tuple,
    ) -> list[str]:
        """Have the reaper kill everything and exit; return the processes that stay.

        Args:
            timeout: Seconds to wait for the reaper, before its work is done without it.
            job_id_variable: As of `kill_by_force`.
            adopted: As of `kill_by_force`.
        """
        self.forkserver.close()
        self.reaper.finish()
        self.wake()
        stuck: list[str] | None = None
        try:
            with process.patiently():
                self._process.wait(timeout)
            stuck = self._last_words()
        except subprocess.TimeoutExpired:
            self.kill_silent()
        if stuck is None:  # somebody killed it before its work was done
            stuck = self.kill_by_force(job_id_variable, adopted)
            shutil.rmtree(self._configure.run_dir, ignore_errors=True)
        self.reaper.close()
        return stuck

    def kill_silent(self) -> None:
        """Kill a reaper that does not answer, and before it everything below it.

        As long as it lives, every process of the job is below it: it is their subreaper, whether
        or not it runs.
        """
        self.is_silent = True
        with process.patiently():
            process.kill_all(lambda: process.descendants(self.pid), _STRAYS_SECONDS)
            process.kill_and_wait([self.pid], _STRAYS_SECONDS)
            self._process.poll()

    def kill_by_force(
        self, job_id_variable: bytes, adopted: Callable[[], Iterable[int]] = tuple
    ) -> list[str]:
        """Kill the rest of the tree after the reaper has ended; return the processes that stay.

        Args:
            job_id_variable: `NAME=value` that stands in the environment of every
                process of this job and of no other; empty for none.
            adopted: Returns the processes that the kernel gave to this one in place of the reaper,
                and all below them.
        """
        with process.patiently():
            if self._process.returncode is None:
                # It may have closed its channel and still be on its way: what is below it comes
                # to us only when it has ended.
                process.kill_and_wait([self.pid], _STRAYS_SECONDS)
            stuck = process.kill_all(adopted, _STRAYS_SECONDS)
            stuck |= end_strays(job_id_variable, cgroup := self._configure.cgroup)
        if cgroup and Path(cgroup).exists():
            containment.note_remains(cgroup, self._configure.run_dir)
        if self._process.returncode is None and process.is_alive(self.pid):
            stuck.add(self.pid)
        return [process.describe(pid) for pid in sorted(stuck)]

    def _last_words(self) -> list[str] | None:
        """Return the processes that the reaper could not kill; None if it has not ended all."""
        stuck = None
        try:
            while True:
                for report in self.reaper.receive():
                    if isinstance(report, Swept) and report.generation < 0:
                        stuck = report.stuck
        except ChannelClosed:
            return stuck


def end_strays(job_id_variable: bytes, cgroup: str | None) -> set[int]:
    """Kill the rest of a job after its reaper has ended, and remove its cgroup.

    Args:
        job_id_variable: As of `ProcessTree.kill_by_force`.
        cgroup: The job's own, if it had one.

    Returns:
        The processes that stay.
    """
    stuck: set[int] = set()
    if cgroup:
        members = containment.members(cgroup)
        containment.kill(cgroup)
        process.kill_and_wait(members, _STRAYS_SECONDS)
        stuck = {pid for pid in members if process.is_alive(pid)}
    if job_id_variable:
        stuck |= process.kill_all(lambda: process.with_variable(job_id_variable), _STRAYS_SECONDS)
    if cgroup:
        containment.remove(cgroup)
    return stuck


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
