"""The scheduler process: wires sockets, log and clock to `SchedulerState`."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn, TextIO, cast

import msgspec

from msrun import environ
from msrun.cluster import wal
from msrun.cluster.messages import Envelope, Register
from msrun.cluster.restart_policy import RestartPolicy
from msrun.cluster.scheduler_state import Action, Received, SchedulerState, Send, Tick, Write
from msrun.job import RestartLimits
from msrun.supervise import process, title
from msrun.supervise.channel import load
from msrun.supervise.reaper import ignore_signals
from msrun.transport.loop import Loop, new_context
from msrun.transport.sockets import SchedulerSocket

log = logging.getLogger(__name__)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent tells its scheduler on standard input, the secret included.

    Args:
        job_id: The job.
        nnodes: Nodes to wait for.
        join_timeout: Seconds in which they must register; None waits for ever.
        restarts: Restart budget and pace.
        secret: The job's secret; None without authentication.
        wal_file: Where the state is written down.
        log_file: Where to log.
        parent: Pid of the agent.
        listen_fd: Inherited listening socket.
    """

    job_id: str
    nnodes: int
    join_timeout: float | None
    restarts: RestartLimits
    secret: bytes | None
    wal_file: str
    log_file: str
    parent: int
    listen_fd: int = -1


class Scheduler:
    """The one scheduler of a job."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._loop = Loop()
        listening = socket.socket(fileno=config.listen_fd)
        self._socket = SchedulerSocket(new_context(), listening, config.secret)
        self._incarnations: dict[str, int] = {}
        self._state = SchedulerState(
            job_id=config.job_id,
            nnodes=config.nnodes,
            join_timeout=float("inf") if config.join_timeout is None else config.join_timeout,
            policy=RestartPolicy(config.job_id, config.restarts),
            started_at=self._loop.now(),
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._wal = os.open(config.wal_file, flags, 0o600)

    def run(self) -> None:
        """Serve until the agent, whose end of standard input closes, is gone."""
        self._loop.watch(0, self._loop.stop)
        self._loop.watch(self._socket.socket, self._receive)
        if gate := self._socket.gate:
            self._loop.watch(gate.socket, gate.answer)
        log.info("listening job=%s nodes=%d", self._config.job_id, self._config.nnodes)
        self._loop.run(self._state.deadline, self._tick)

    def _tick(self) -> None:
        self._perform(self._state.handle(Tick(), now=self._loop.now()))

    def _receive(self) -> None:
        for message in self._socket.receive():
            if message.job_id != self._config.job_id:
                log.warning("dropped a message of job=%s", message.job_id)
                continue
            log.info(
                "node=%s generation=%d received %s",
                message.node_id,
                message.generation,
                type(message.body).__name__,
            )
            if isinstance(message.body, Register):
                known = self._incarnations.get(message.node_id, 0)
                self._incarnations[message.node_id] = max(known, message.incarnation)
            event = Received(
                message.node_id,
                message.incarnation,
                message.generation,
                message.body,  # type: ignore[arg-type]  # a scheduler's body is no event: dropped
            )
            self._perform(self._state.handle(event, now=self._loop.now()))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Write(record=record):
                    os.write(self._wal, wal.encode(record))
                    os.fdatasync(self._wal)
                    log.info("phase=%s wrote %s", self._state.phase.value, type(record).__name__)
                case Send():
                    self._send(action)

    def _send(self, action: Send) -> None:
        envelope = Envelope(
            job_id=self._config.job_id,
            node_id=action.node_id,
            incarnation=self._incarnations.get(action.node_id, 0),
            generation=action.generation,
            body=action.body,
        )
        self._socket.send(envelope)


def main(arguments: list[str]) -> NoReturn:
    """Serve the job that standard input describes in its first line."""
    del arguments
    ignore_signals()
    title.set_name("msrun scheduler")
    line = _read_line()
    if not line:
        os._exit(1)
    config = cast("SchedulerConfig", load(line, SchedulerConfig))
    process.die_with_parent(config.parent)
    title.show_as(["msrun", "scheduler", config.job_id], environ.current())
    logging.basicConfig(
        stream=_open_log(config.log_file),
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        Scheduler(config).run()
    except Exception:
        log.exception("this is a bug of msrun")
        os._exit(70)
    sys.stderr.flush()
    os._exit(0)


def _read_line() -> bytes:
    """Read one line from standard input without reading past it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            return b""
        line += data
    return bytes(line)


def _open_log(path: str) -> TextIO:
    Path(path).touch(mode=0o600)
    return Path(path).open("a", buffering=1)
