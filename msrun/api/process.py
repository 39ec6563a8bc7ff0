"""A job of this program as processes: its start, and the thread that reads what comes from it."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from signal import SIGCONT, SIGINT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING

from msrun.api import call_directory, reports
from msrun.api.keeper import GO
from msrun.api.reports import LaunchBegan, LaunchEnded, LaunchRefused
from msrun.api.streams import OutputStream, own_streams
from msrun.errors import ExitCode, MsrunError, UsageError, signal_exit_code
from msrun.supervise import process
from msrun.supervise.tree import python_command
from msrun.worker.call_files import CallFiles

if TYPE_CHECKING:
    from msrun.processes.control_client import ControlClient

_READ_BYTES = 1 << 16
# For the rest of the output, once the launcher has ended.
_REST_MS = 2000
# Those of this process that run; `_running_lock` is for threads that start and end some.
_running: set[JobProcess] = set()
_running_lock = threading.Lock()

Write = Callable[[CallFiles], Mapping[str, str]]
Collect = Callable[[CallFiles, LaunchEnded], None]


class JobProcess:
    """One job from its start to its end; all methods may be called from any thread.

    Args:
        write: Leaves order and function in the job's directory; returns the environment.
        collect: Takes what the workers have left there; called in the thread that reads.

    Raises:
        UsageError: It cannot be started.
    """

    def __init__(self, write: Write, collect: Collect) -> None:
        self._collect = collect
        self._has_begun = threading.Event()
        self._has_ended = threading.Event()
        self.began = LaunchBegan(pid=0)
        self.refusal: LaunchRefused | None = None
        self.result: LaunchEnded | None = None
        directory, lock = call_directory.make()
        self._files = CallFiles(directory)
        self._streams = own_streams()
        self._lock = lock
        self._socket, there = socket.socketpair()
        reader = threading.Thread(target=self._follow, name="msrun job", daemon=True)
        caller = os.pidfd_open(os.getpid())
        try:
            words = [str(there.fileno()), str(caller), str(directory)]
            self._keeper = subprocess.Popen(
                python_command("msrun.api.keeper:main", *words),
                stdin=subprocess.DEVNULL,
                stdout=self._streams[0].child,
                stderr=self._streams[1].child,
                pass_fds=(there.fileno(), caller, lock),
                start_new_session=True,
                env=dict(write(self._files)),
            )
            there.close()
            reader.start()
        except BaseException as error:
            if reader.ident is not None:
                self.stop()
                raise
            # The keeper, if there is one, has not been told to go on, and ends.
            self._close()
            if isinstance(error, OSError):
                raise UsageError(f"the launcher cannot be started: {error}") from None
            raise
        finally:
            there.close()
            os.close(caller)

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the job runs any more."""
        return self._has_ended.is_set()

    @property
    def code(self) -> int:
        """Exit code of a job that has ended without a report."""
        code = self._keeper.returncode
        return signal_exit_code(-code) if code < 0 else code or ExitCode.INTERNAL

    def wait_for_begin(self) -> None:
        """Wait until the launcher has taken the job; stop the job if that is interrupted."""
        try:
            self._has_begun.wait()
            if self.refusal:
                self._has_ended.wait()
        except BaseException:
            self.stop()
            raise

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end of the job, at most `timeout` seconds; return whether it has ended.

        An interrupt ends the job: the second one without grace, the third by force.
        """
        try:
            return self._has_ended.wait(timeout)
        except KeyboardInterrupt:
            self._interrupt()
            raise

    def stop(self, *, now: bool = False) -> None:
        """Stop the job and wait for its end, with `now` without the workers' grace."""
        if now and not self.has_ended:
            self._kill_workers()
        self._signal(SIGTERM)
        self.wait(None)

    @contextlib.contextmanager
    def connected(self) -> Iterator[ControlClient | None]:
        """Yield a connection to the scheduler; None before there is one."""
        from msrun.processes import control_file
        from msrun.processes.control_client import ControlClient

        cards = [card for card in control_file.jobs() if card.pid == self.began.pid]
        if not cards:
            yield None
            return
        client = ControlClient(cards[0])
        try:
            yield client
        finally:
            client.close()

    def _signal(self, signum: int) -> None:
        if not self.has_ended:
            self._keeper.send_signal(signum)
            self._keeper.send_signal(SIGCONT)  # should somebody have stopped it

    def _kill_workers(self) -> None:
        """Have the scheduler kill all workers, if there is one."""
        from msrun.cluster.wire.control_messages import Done, StopJob

        # One that does not answer is about to end, or will get the signal.
        with contextlib.suppress(MsrunError), self.connected() as client:
            if client:
                client.ask(StopJob(now=True), Done)

    def _interrupt(self) -> None:
        for signum in (SIGINT, SIGTERM):
            self._signal(signum)
            with contextlib.suppress(KeyboardInterrupt):
                self._has_ended.wait()
                return
        if self.began.pid and not self.has_ended:
            process.kill(self.began.pid, SIGKILL)
        self._has_ended.wait()

    def _follow(self) -> None:
        """Read everything that comes from the job until it has ended; runs in a thread."""
        with _running_lock:
            _running.add(self)
        try:
            for stream in self._streams:
                stream.started()
            # Only now: from here on the job has somebody who ends it.
            self._socket.sendall(GO)
            self._read()
            # Its launcher has ended, so nobody else would continue it.
            self._keeper.send_signal(SIGCONT)
            self._keeper.wait()
            if self.result:
                self._collect(self._files, self.result)
        finally:
            self._close()
            with _running_lock:
                _running.discard(self)
            self._has_ended.set()
            self._has_begun.set()

    def _read(self) -> None:
        """Read reports and output until both have ended."""
        poller = select.poll()
        sources: dict[int, OutputStream | None] = {self._socket.fileno(): None}
        sources |= {stream.fileno(): stream for stream in self._streams if stream.fileno() >= 0}
        for descriptor in sources:
            poller.register(descriptor, select.POLLIN)
        pending = b""
        while sources:
            is_rest = self._socket.fileno() not in sources
            ready = poller.poll(_REST_MS if is_rest else None)
            if not ready:
                return  # a process that cannot be killed has the other end
            for descriptor, _ in ready:
                stream = sources[descriptor]
                if stream is None:
                    data = self._socket.recv(_READ_BYTES)
                    pending = self._take(pending + data)
                    is_open = bool(data)
                else:
                    is_open = stream.pump()
                if not is_open:
                    poller.unregister(descriptor)
                    del sources[descriptor]

    def _take(self, data: bytes) -> bytes:
        """Take the reports in `data`; return the beginning of the next one."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            match reports.decode(line):
                case LaunchBegan() as report:
                    self.began = report
                case LaunchRefused() as report:
                    self.refusal = report
                case LaunchEnded() as report:
                    self.result = report
            self._has_begun.set()
        return rest

    def _close(self) -> None:
        call_directory.remove(self._files.directory)
        os.close(self._lock)
        self._socket.close()
        for stream in self._streams:
            stream.close()


def _stop_all() -> None:
    """Stop the jobs of this process at its end; a process that it forked has none."""
    with _running_lock:
        jobs = list(_running)
    for job in jobs:
        job.stop()


def _forget_all() -> None:
    """Forget the jobs of the process that this one was forked from."""
    global _running_lock  # noqa: PLW0603 - a thread that is not here may hold it
    _running_lock = threading.Lock()
    _running.clear()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_forget_all)
