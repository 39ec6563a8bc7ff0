"""A handle on one scheduler process, for the parent that starts and outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from typing import IO, cast

import msgspec

from msrun.bounded_file import open_to_read
from msrun.cluster.scheduler import wal
from msrun.cluster.verdict import Verdict
from msrun.errors import signal_name
from msrun.processes.scheduler.config import REASON_BYTES_MAX, SchedulerConfig
from msrun.supervise import logs, process
from msrun.supervise.channel import dump
from msrun.supervise.reaper import DEAF_TO
from msrun.supervise.tree import dies_with_us, python_command
from msrun.transport.loop import wait_readable

# Seconds that a killed process may take to end.
_KILLED_SECONDS = 5.0


class SchedulerProcess:
    """The job's scheduler, a child of this process.

    Args:
        config: Its configuration; its descriptors are set here.
        listening: Its listening socket, which stays the caller's for another one.
        env: Its environment.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        listening: socket.socket,
        env: Mapping[str, str],
    ) -> None:
        again = config.started_before > 0
        self._wal_file, self._log_file = config.wal_file, config.log_file
        opener = logs.reopen if again else logs.create
        self.term = 0
        """Its term; 0 until it is closed, and if it never began."""
        self._words = b""
        self._began, began = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._began, False)
        with os.fdopen(opener(config.log_file), "ab") as log, os.fdopen(began, "wb") as theirs:
            config = msgspec.structs.replace(
                config, listen_fd=listening.fileno(), began_fd=theirs.fileno()
            )
            with process.signals_held(DEAF_TO):
                self._process = subprocess.Popen(
                    python_command("msrun.processes.scheduler.scheduler:main"),
                    bufsize=0,  # a buffer would try again what could not be written, when closed
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=[listening.fileno(), theirs.fileno()],
                    start_new_session=True,
                    env=dict(env),
                    # A `preexec_fn` is unsafe beside threads, which this process has by the second
                    # time; the scheduler also asks the kernel for this itself.
                    preexec_fn=None if again else dies_with_us(),  # noqa: PLW1509 - see there
                )
        self._lifeline = cast("IO[bytes]", self._process.stdin)
        self._tell(dump(config) + b"\n")
        self.pidfd = os.pidfd_open(self._process.pid)
        """Readable as soon as it has ended."""

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def wake(self) -> None:
        """Let it go on, should somebody have stopped it."""
        process.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it; `pidfd` says when it has ended."""
        self._process.kill()

    def pass_on(self, signum: int) -> None:
        """Pass a signal on to a scheduler that is `alone`."""
        self._tell(bytes([signum]))

    def how_it_ended(self) -> str:
        """Return the words for its end, after `pidfd` became readable."""
        with process.patiently():
            code = self._process.wait()
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        _, why = self._told()
        return f"the scheduler {how}{f': {why}' if why else ''}; log: {self._log_file}"

    @property
    def has_died(self) -> bool:
        """Whether it ended other than by leaving when it was asked to."""
        with process.patiently():
            return self._process.poll() not in (None, 0)

    def verdict(self) -> Verdict | None:
        """Return the verdict in its log, None when there is none."""
        try:
            with open_to_read(self._wal_file) as file:
                return wal.verdict(file.read())
        except OSError:
            return None

    def end(self, timeout: float) -> None:
        """Let it end and wait for that; kill it after `timeout` seconds."""
        self._lifeline.close()
        self.wake()
        if not wait_readable(self.pidfd, timeout):
            self._process.kill()
        # The kernel may keep one that waits for a disk: then it is left behind.
        with process.patiently(), contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_SECONDS)
        self.close()

    def _tell(self, data: bytes) -> None:
        # If it has ended already, its pidfd says so.
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[self._lifeline.write(data) :]

    def _told(self) -> tuple[int, str]:
        """Return its term, 0 if it never began, and why it could not go on, if it said so."""
        with contextlib.suppress(BlockingIOError):
            self._words += os.read(self._began, 2 * REASON_BYTES_MAX)
        *terms, why = self._words.decode(errors="replace").split("\n")
        return int(terms[0]) if terms else 0, why

    def close(self) -> None:
        """Close the handle, after the process has ended."""
        self.term, _ = self._told()
        self._lifeline.close()
        os.close(self._began)
        os.close(self.pidfd)
