"""The commands that start a fleet's agents: run, followed and ended together.

The agents report the exit code of the job.  The exit code of a command counts only if none of its
agents ever reported, because mpirun returns 0 for a lost node and ssh 255 for anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO

from msrun import environ
from msrun.errors import ExitCode, MsrunError, UsageError, signal_exit_code
from msrun.fleet import ORDER_BYTES_MAX, Report, StartCommand, parse_report
from msrun.processes import first_process
from msrun.supervise.process import descendants, die_with_parent
from msrun.transport.loop import Loop

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READ_BYTES = 1 << 16
_KEPT_BYTES = 1 << 14
# ssh and MPICH's mpirun wait for a node that lost power; nothing is asked of it any more.
_LAST_SECONDS = 5.0
# The agent's first program refused its order, Python lacks it, or the shell lacks Python.
_USAGE_CODES = (ExitCode.USAGE, 1, 126, 127)


class FleetError(MsrunError):
    """Some nodes started no agent, or their agents did not report how the job ended."""

    def __init__(self, message: str, exit_code: ExitCode, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


def run_fleet(commands: Sequence[StartCommand], secret: bytes) -> int:
    """Run all commands to their end and return the job's exit code.

    The output of the first command is shown; that of another is shown if it starts no agent.

    Args:
        commands: The commands, which run at once.
        secret: The job's secret.

    Raises:
        UsageError: A command cannot be started at all.
        FleetError: An agent cannot be started, or none of them reported how the job ended.
    """
    loop = Loop()
    run = _Run(loop)
    try:
        run.start(commands, secret.hex())
        loop.run(lambda: run.due, run.kill)
        return run.code()
    finally:
        run.kill()
        loop.close()


class _Command:
    """One command that runs.

    Args:
        plan: The command.
        secret: The job's secret as text.
    """

    def __init__(self, plan: StartCommand, secret: str) -> None:
        order = f"{secret}\n{plan.order}\n".encode() if plan.order else b""
        if len(order) > ORDER_BYTES_MAX:
            raise UsageError(f"the job's words are {len(order)} bytes (at most {ORDER_BYTES_MAX})")
        self.plan = plan
        self.nodes: set[int] = set()
        env = {**environ.current(), **plan.env}
        if plan.has_secret:
            env[environ.SECRET] = secret
        # A group of its own: a terminal's interrupt is ours to pass on.
        self.process = subprocess.Popen(
            plan.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            process_group=0,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - there is one thread
        )
        self.end = os.pidfd_open(self.process.pid)
        self._input = _given(self.process.stdin)
        if order:
            fcntl.fcntl(self._input, fcntl.F_SETPIPE_SZ, ORDER_BYTES_MAX)
            with contextlib.suppress(OSError):
                os.write(self._input.fileno(), order)
        else:
            self._input.close()

    def stop(self) -> None:
        """Ask for the end: agents that got their order here end with it."""
        if self.plan.order:
            self._input.close()
        else:
            self.process.terminate()


def _given(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise RuntimeError("a pipe that was asked for is missing")
    return stream


class _Output:
    """One of the two outputs of a command: lines for a person, and reports.

    Args:
        stream: The pipe to read.
        target: Descriptor for its lines; None keeps the last of them.
        command: The command.
        ended: Called with each report of an agent's end.
        errors: The standard error of the command, which shows the text of reports.
    """

    def __init__(
        self,
        stream: IO[bytes],
        target: int | None,
        command: _Command,
        ended: Callable[[Report], None],
        errors: _Output | None = None,
    ) -> None:
        self.source = stream.fileno()
        self.kept = b""
        self._target = target
        self._command = command
        self._ended = ended
        self._errors = errors or self
        self._rest = b""
        os.set_blocking(self.source, False)

    def read(self) -> bool:
        """Read the bytes that are there; return False if there are none, or at the end."""
        try:
            data = os.read(self.source, _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _READ_BYTES):
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._take(line + b"\n")
        return bool(data)

    def _take(self, line: bytes) -> None:
        report = parse_report(line)
        if report is None:
            self._tell(line)
        elif report.code is None:
            self._command.nodes.add(report.node)
        else:
            if report.reason:
                self._errors._tell(f"{report.reason}\n".encode())  # noqa: SLF001 - of this class
            self._ended(report)

    def _tell(self, line: bytes) -> None:
        if self._target is None:
            self.kept = (self.kept + line)[-_KEPT_BYTES:]
            return
        with contextlib.suppress(OSError):  # The reader has closed the pipe.
            os.write(self._target, line)


class _Run:
    """All commands.

    Args:
        loop: Calls us.

    Attributes:
        due: When `kill` is to be called, None while there is no reason to.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._running: dict[_Command, tuple[_Output, _Output]] = {}
        self._codes: dict[int, int] = {}
        self._last: int | None = None
        self.due: float | None = None
        self._signum = 0
        self._refusal: FleetError | None = None

    def start(self, commands: Sequence[StartCommand], secret: str) -> None:
        """Start all commands."""
        self._loop.on_signals(_SIGNALS, self._on_signal)
        first_process.reap_orphans(self._loop, lambda: {c.process.pid for c in self._running})
        for number, plan in enumerate(commands):
            try:
                command = _Command(plan, secret)
            except OSError as error:
                msg = f"{plan.argv[0]} cannot be started: {error.strerror}"
                raise UsageError(msg) from None
            self._follow(command, is_first=number == 0)

    def _follow(self, command: _Command, *, is_first: bool) -> None:
        def follow(stream: IO[bytes] | None, target: int, errors: _Output | None = None) -> _Output:
            own = target if is_first else None
            output = _Output(_given(stream), own, command, self._on_report, errors)
            self._loop.watch(output.source, lambda: self._on_output(output))
            return output

        errors = follow(command.process.stderr, sys.stderr.fileno())
        output = follow(command.process.stdout, sys.stdout.fileno(), errors)
        self._running[command] = (output, errors)
        self._loop.watch(command.end, lambda: self._on_end(command))

    def _on_output(self, output: _Output) -> None:
        if not output.read():
            self._loop.forget(output.source)

    def _on_end(self, command: _Command) -> None:
        outputs = self._running.pop(command)
        self._loop.forget(command.end)
        os.close(command.end)
        code = command.process.wait()
        for output in outputs:
            while output.read():
                pass
            self._loop.forget(output.source)
        if code and not command.nodes and not self._signum and self._refusal is None:
            self._refusal = _refusal(command, self._last or code, outputs[1].kept)
            self._stop()
        if not self._running:
            self._loop.stop()

    def _on_report(self, report: Report) -> None:
        """Take an agent's code; after the job's own, wait only a few seconds for the commands."""
        if not report.is_last:
            self._codes[report.node] = report.code or 0
        elif self._last is None:
            self._last = report.code
            self.due = self._loop.now() + _LAST_SECONDS
            if report.node < 0:
                self._stop()

    def _on_signal(self, signum: int) -> None:
        if self._signum:
            self.kill()
        self._signum = signum
        self._stop()

    def _stop(self) -> None:
        for command in self._running:
            command.stop()

    def kill(self) -> None:
        """Kill the commands that still run; their agents notice that the launcher is gone."""
        self.due = None
        for pid in descendants(os.getpid()):  # with the ssh of an mpirun
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def code(self) -> int:
        """Return the job's exit code, when all commands have ended."""
        if self._refusal:
            raise self._refusal
        first = self._codes[min(self._codes)] if self._codes else None
        code = first if self._last is None else self._last
        # Agents end by SIGTERM whatever signal we got, and mpirun may kill them before they report.
        if self._signum and code in (None, signal_exit_code(signal.SIGTERM)):
            return signal_exit_code(self._signum)
        if code is not None:
            return code
        msg = "no agent told how the job ended: its nodes are lost, or their launcher was killed"
        raise FleetError(msg, ExitCode.NODE_LOST)


def _refusal(command: _Command, code: int, errors: bytes) -> FleetError:
    """Return why a command started no agent, in its own last words."""
    name, node = command.plan.argv[0], command.plan.node
    lines = errors.decode(errors="replace").strip().splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith("error: ")), -1)
    where = f" on {node}" if node else ""
    kind = ExitCode.USAGE if code in _USAGE_CODES else ExitCode.NODE_LOST
    end = f"exit code {code}" if code > 0 else f"signal {-code}"
    message = f"{name} started no agent{where}: {end}"
    return FleetError(message, kind, hint="\n".join(lines[first:]).removeprefix("error: ") or None)
