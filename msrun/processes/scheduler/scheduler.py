"""The scheduler process: wires sockets, log and clock to `AgentLinks` and `SchedulerState`."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, cast

import msgspec

from msrun import environ
from msrun.bounded_file import open_to_read
from msrun.cluster.liveness.freeze_detector import FreezeDetector
from msrun.cluster.liveness.lease import lease
from msrun.cluster.scheduler import report, wal
from msrun.cluster.scheduler.admission import Admission, Life
from msrun.cluster.scheduler.control import Action as ControlAction
from msrun.cluster.scheduler.control import Control, SendReply
from msrun.cluster.scheduler.events import (
    AgentMessage,
    Event,
    Lost,
    SendToAgent,
    Unreachable,
    Woke,
    Write,
)
from msrun.cluster.scheduler.peers import AgentLinks
from msrun.cluster.scheduler.restart_policy import RestartPolicy
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.tick import Tick
from msrun.cluster.wire import codec, control_messages
from msrun.cluster.wire.control_messages import Answer, AnyReply, Denied
from msrun.cluster.wire.link import first_resend
from msrun.cluster.wire.messages import Envelope, Refused, Register, Start
from msrun.errors import ExitCode, MsrunError, ProtocolError, UsageError, VersionError
from msrun.processes.scheduler.config import REASON_BYTES_MAX, SchedulerConfig
from msrun.processes.scheduler.contest import Contests
from msrun.processes.scheduler.dropped_messages import Dropped
from msrun.supervise import limits, process, title
from msrun.supervise.channel import load
from msrun.supervise.logs import LINE_CHARS_MAX, printable
from msrun.supervise.reaper import ignore_signals
from msrun.transport.loop import Loop, new_context
from msrun.transport.probe import Prober, describe
from msrun.transport.sockets import Asked, SchedulerSocket, io_threads

log = logging.getLogger(__name__)

# Seconds after the end of its agent, until the last node knows the verdict: without a message, as
# a node that does not know it goes on sending, and in all.
_FAREWELL_SECONDS = 5.0
_FAREWELL_SECONDS_MAX = 20.0
# Seconds without a node: an answer may still be on its way, such as that to `msrun stop`.
_LAST_WORDS_SECONDS = 0.25
# Descriptors beside those of the nodes: sockets of our own, probes, connections that come.
_FILES_RESERVED = 512
# A holder of the key can make libzmq buffer the beginnings of messages without end.  Rather than
# take the machine's memory this process ends; its parent starts it again, and the log has its
# state.
_MEMORY_BYTES = 1 << 30
# Address space that libzmq takes for a connection; it uses a third of it.
_MEMORY_BYTES_EACH = 192 << 10
_CROWD_MAX = 20_000
# From so many nodes on the loop rests between two rounds and takes many messages at once.
_CROWD_MIN = 100
_REST_SECONDS = 0.002
_OTHER_JOBS = "messages of other jobs"


class Scheduler:
    """The scheduler of a job, until this process ends."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        nnodes = config.formation.nnodes_max
        self._loop = Loop(_REST_SECONDS if nnodes >= _CROWD_MIN else 0.0)
        self._prober = Prober(self._loop)
        listening = socket.socket(fileno=config.listen_fd)
        context = new_context(io_threads(nnodes, len(os.sched_getaffinity(0))))
        self._socket = SchedulerSocket(context, listening, config.secret, nnodes)
        self._dropped = Dropped(self._socket.dropped)
        self._wal, records = _open_wal(config.wal_file)
        is_whole = wal.term(records) >= config.term
        term = max(wal.term(records), config.started_before) + 1
        self._write(wal.Began(term))
        os.write(config.began_fd, b"%d\n" % term)
        times = lease(config.formation.lease)
        self._peers = AgentLinks(
            job_id=config.job_id,
            lease=times,
            term=term,
            first_resend=first_resend(nnodes, times),
        )
        self._state = SchedulerState(
            job_id=config.job_id,
            formation=config.formation,
            join_timeout=float("inf") if config.join_timeout is None else config.join_timeout,
            last_call=config.last_call,
            replaces=config.replaces,
            policy=RestartPolicy(config.job_id, config.restarts),
            started_at=self._loop.now(),
        )
        self._control = Control(state=self._state, peers=self._peers)
        self._admission = Admission(is_open=config.formation.nnodes_max == 1)
        if not is_whole:
            log.error("the log %s was lost or damaged: the job begins again", config.wal_file)
        now = self._loop.now()
        self._freeze_detector = FreezeDetector(lease=times, look_at=now)
        self._control.recall(records)
        for member in self._state.recover(records, now=now, is_whole=is_whole):
            self._peers.expect(member.node_id, member.incarnation, now=now)
            self._admission.expect(member.node_id, member.incarnation)
        self._contests = Contests()
        self._addresses: dict[str, tuple[int, str, int]] = {}
        self._leave_by: float | None = None
        self._leave_at_last: float | None = None
        self._perform([])  # if the verdict is in the log, it leaves when all nodes know it

    def run(self) -> None:
        """Serve until the parent is gone, which closes standard input."""
        self._loop.watch(0, self._on_parent)
        self._loop.watch(self._socket.socket, self._receive)
        self._loop.watch(self._socket.monitor, self._on_broken)
        if gate := self._socket.gate:
            gate.serve(self._loop)
        process.raise_priority()  # by now there are ZeroMQ's threads
        log.info("listening job=%s phase=%s", self._config.job_id, self._state.phase.value)
        self._loop.run(self._deadline, self._tick)

    def _deadline(self) -> float | None:
        machines = (self._state, self._peers, self._prober, self._control, self._dropped)
        dues = [machine.deadline() for machine in machines]
        dues += [self._leave_by, self._freeze_detector.deadline()]
        return min((due for due in dues if due is not None), default=None)

    def _tick(self) -> None:
        now = self._loop.now()
        if self._leave_by is not None and (now >= self._leave_by or self._has_told_all):
            self._loop.stop()
            return
        if self._freeze_detector.tick(now=now):
            log.warning("frozen until now: whoever spoke meanwhile is heard first")
            self._peers.woke(now=now)
            self._control.woke(now=now)
            self._handle(Woke())
        self._prober.tick()
        self._dropped.tick(now=now)
        losses, frames = self._peers.tick(now=now)
        self._send(frames)
        for loss in losses:
            self._lose(loss)
        self._perform(self._control.tick(now=now))
        self._handle(Tick())

    def _on_parent(self) -> None:
        """Stop the job on a signal of the parent; leave when it is gone, and all know the end."""
        if signum := os.read(0, 1):
            if not self._state.is_over:
                self._perform(self._state.interrupt(signum[0]))
            return
        self._loop.forget(0)
        if not self._state.is_over or self._has_told_all:
            self._loop.stop()
        else:
            self._leave_by = self._loop.now() + _FAREWELL_SECONDS
            self._leave_at_last = self._loop.now() + _FAREWELL_SECONDS_MAX

    @property
    def _has_told_all(self) -> bool:
        is_heard = self._peers.all_delivered and not self._admission.is_busy
        return is_heard and self._state.may_leave(now=self._loop.now())

    # Messages of agents.

    def _receive(self) -> None:
        for envelope in self._socket.receive():
            if envelope.job_id != self._config.job_id:
                self._refuse_stranger(envelope)
                continue
            if self._peers.has_earlier_life(envelope):
                self._contest(envelope)
                continue
            self._take(envelope)
        for asked in self._socket.asked():
            self._answer(asked)
        if self._leave_by is not None and self._has_told_all:
            self._loop.stop()

    def _take(self, envelope: Envelope) -> None:
        events, frames = self._peers.receive(envelope, now=self._loop.now())
        self._send(frames)
        if self._leave_at_last is not None:
            self._leave_by = min(self._loop.now() + _FAREWELL_SECONDS, self._leave_at_last)
        for event in events:
            if isinstance(event, Lost):
                self._lose(event)
                continue
            log.info(
                "node=%s generation=%d received %s",
                event.node_id,
                event.generation,
                type(event.body).__name__,
            )
            self._admit(event)

    def _contest(self, envelope: Envelope) -> None:
        """Hold the registration of a node back whose earlier life may not be over."""
        node_id, now = envelope.node_id, self._loop.now()
        silence = self._peers.silence(node_id, now=now) or 0.0
        if refused := self._contests.claim(envelope, heard_at=now - silence, now=now):
            log.warning("node=%s refused: %s", node_id, refused.reason)
            term = self._peers.term
            answer = msgspec.structs.replace(envelope, seq=1, ack=1, term=term, body=refused)
            self._socket.send(answer)
        elif self._contests.must_watch(node_id, now=now):
            self._watch_end(node_id)

    def _refuse_stranger(self, envelope: Envelope) -> None:
        """Tell a node of another job that its scheduler is not here."""
        self._socket.dropped[_OTHER_JOBS] += 1
        reason = f"the scheduler here runs job {self._config.job_id}, not {envelope.job_id}"
        refused = Refused(reason=f"{reason}: choose another --master-port", code=ExitCode.USAGE)
        answer = msgspec.structs.replace(envelope, seq=1, ack=0, term=1, body=refused)
        self._socket.send(answer)

    def _admit(self, event: AgentMessage) -> None:
        """Pass `event` on once it is known that other nodes can reach its node."""
        if isinstance(event.body, Register):
            address = (event.body.store_host, event.body.store_port)
            self._addresses[event.node_id] = (event.incarnation, *address)
        heard, must_probe = self._admission.receive(event)
        if must_probe:
            incarnation, host, port = self._addresses[event.node_id]
            self._prober.probe(host, port, partial(self._on_probed, (event.node_id, incarnation)))
        for each in heard:
            self._handle(each)

    def _on_probed(self, life: Life, code: int) -> None:
        held = self._admission.probed(life, is_reachable=not code)
        register = held[0].body if held else None
        if code and isinstance(register, Register):
            address = f"{register.store_host}:{register.store_port}"
            problem = (
                f"node {register.host} gave its address as {address}, which the scheduler "
                f"cannot reach: {describe(code)}"
            )
            log.warning("node=%s %s", life[0], problem)
            self._handle(Unreachable(*life, problem))
            return
        for event in held:
            self._handle(event)

    def _on_broken(self) -> None:
        """Find out whether a node whose connection ended is still there."""
        for node_id in self._socket.broken():
            self._watch_end(node_id)

    def _watch_end(self, node_id: str) -> None:
        if node_id in self._peers and node_id in self._addresses:
            incarnation, host, port = self._addresses[node_id]
            self._prober.watch_end(host, port, partial(self._on_end, node_id, incarnation))

    def _on_end(self, node_id: str, incarnation: int) -> None:
        # The agent and all that it started held that socket, so nothing of them lives.
        reason = "it was started anew" if node_id in self._contests else "its launcher has ended"
        for loss in self._peers.lose(node_id, incarnation, reason):
            self._lose(loss)

    # Actions.

    def _lose(self, loss: Lost) -> None:
        log.warning("node=%s lost: %s", loss.node_id, loss.reason)
        self._admission.lose(loss)
        self._handle(loss)
        if envelope := self._contests.over(loss.node_id):
            self._take(envelope)

    def _handle(self, event: Event) -> None:
        now = self._loop.now()
        if isinstance(event, AgentMessage) and self._control.is_for(event):
            self._perform(self._control.receive(event, now=now))
            return
        self._perform(self._state.handle(event, now=now))

    def _answer(self, asked: Asked) -> None:
        """Answer a tool that controls the job."""
        try:
            question = control_messages.decode_question(asked.frame)
        except VersionError:
            self._socket.answer(asked.route, codec.VERSION_FRAME)
            return
        except ProtocolError as error:
            if control_messages.is_question(asked.frame):
                self._socket.answer(asked.route, _frame(Denied(reason=error.message)))
            return
        log.info("asked %s", type(question.request).__name__)
        now = self._loop.now()
        request = question.request
        self._perform(self._control.ask(question.question, request, asked.route, now=now))

    def _perform(self, actions: Sequence[ControlAction]) -> None:
        self._control.note(actions)
        if any(
            isinstance(action, SendToAgent) and isinstance(action.body, Start) for action in actions
        ):
            self._write_table()
        for action in actions:
            match action:
                case Write(record=record):
                    self._write(record)
                    log.info("phase=%s wrote %s", self._state.phase.value, type(record).__name__)
                case SendToAgent(node_id=node_id, generation=generation, body=body):
                    now = self._loop.now()
                    self._send(self._peers.send(node_id, generation, body, now=now))
                case SendReply(route=route, reply=reply):
                    self._socket.answer(route, _frame(reply))
        if self._config.alone and self._state.is_over and self._leave_by is None:
            wait = _LAST_WORDS_SECONDS if self._has_told_all else _FAREWELL_SECONDS
            self._leave_by = self._loop.now() + wait

    def _write_table(self) -> None:
        """Write the rank table of the generation that is about to start, if one is wanted."""
        if not self._config.rank_table:
            return
        from msrun.cluster.scheduler.rank_table import (
            table_of,  # Few jobs want one, and all would load them.
        )
        from msrun.rank_table.file import write_table

        now = self._loop.now()
        try:
            write_table(
                table_of(report.all_nodes(self._state, self._peers, now=now)),
                self._config.rank_table,
            )
        except UsageError as error:
            log.error("no rank table: %s", error.message)  # noqa: TRY400 - it is no bug of ours

    def _write(self, record: wal.Record) -> None:
        data = wal.encode(record)
        try:
            written = os.write(self._wal, data)
            if written < len(data):  # the rest does not fit, and the error says why
                os.write(self._wal, data[written:])
            os.fdatasync(self._wal)
        except OSError as error:
            msg = f"the scheduler's log {self._config.wal_file} cannot be written: {error.strerror}"
            raise MsrunError(msg) from error

    def _send(self, frames: list[Envelope]) -> None:
        for frame in frames:
            self._socket.send(frame)


def _frame(reply: AnyReply) -> bytes:
    try:
        return control_messages.encode(Answer(answer=reply))
    except ProtocolError as error:
        return control_messages.encode(Answer(answer=Denied(reason=error.message)))


def _open_wal(path: str) -> tuple[int, list[wal.Record]]:
    """Open the log, cut off a torn record at its end, and return the records."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
        with open_to_read(path) as file:
            data = file.read()
        os.ftruncate(descriptor, wal.whole(data))
    except OSError as error:
        msg = f"the scheduler's log {path} cannot be opened: {error.strerror}"
        raise MsrunError(msg) from error
    return descriptor, wal.decode(data)


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
    process.raise_priority()
    title.show_as(["msrun", "scheduler", config.job_id], environ.current())
    gc.freeze()  # Modules stay to the end, so no collection need walk them.
    try:
        _log_to(config.log_file)
        _set_limits(config.formation.nnodes_max)
        Scheduler(config).run()
    except MsrunError as error:
        log.error("%s", error.message)  # noqa: TRY400 - the sentence says it all
        _leave_with(config, error.message)
    except Exception as error:
        log.exception("this is a bug of msrun")
        _leave_with(config, f"this is a bug in msrun: {type(error).__name__}: {error}")
    sys.stderr.flush()
    os._exit(0)


def _leave_with(config: SchedulerConfig, why: str) -> NoReturn:
    """End with one sentence for the parent, which may have no other way to learn it."""
    with contextlib.suppress(OSError):
        os.write(config.began_fd, printable(why).encode()[:REASON_BYTES_MAX])
    os._exit(ExitCode.INTERNAL)


def _read_line() -> bytes:
    """Read one line from standard input without reading past it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            return b""
        line += data
    return bytes(line)


class _OneLine(logging.Formatter):
    """Keeps text that a message quotes from becoming lines or acting on a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line of `record`."""
        record.message = printable(record.message[:LINE_CHARS_MAX])
        return super().formatMessage(record)


def _log_to(path: str) -> None:
    Path(path).touch(mode=0o600)
    handler = logging.FileHandler(path)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _set_limits(nnodes: int) -> None:
    limits.bound_memory(_MEMORY_BYTES + min(nnodes, _CROWD_MAX) * _MEMORY_BYTES_EACH)
    files = limits.raise_open_files()
    if files < nnodes + _FILES_RESERVED:
        log.warning(
            "open files are limited to %d (ulimit -Hn), which is not enough for %d nodes: "
            "raise the limit to %d where the scheduler runs",
            files,
            nnodes,
            nnodes + _FILES_RESERVED,
        )
