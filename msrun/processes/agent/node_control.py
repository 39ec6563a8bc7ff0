"""Serves the scheduler's requests about this node's workers: signs of life, stacks, logs."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from msrun.bounded_file import open_to_read
from msrun.cluster.liveness import hang, stacks
from msrun.cluster.liveness.collectives import Collective
from msrun.cluster.liveness.hang import HangWatch, Sign, WorkDone
from msrun.cluster.verdict import RankExit
from msrun.cluster.wire.control_messages import LOG_BYTES_MAX
from msrun.cluster.wire.messages import (
    Collectives,
    DumpStacks,
    FromAgent,
    FromScheduler,
    Hung,
    LogPart,
    ReadLog,
    Running,
    SignalRanks,
    Stack,
    Stalled,
)
from msrun.job import JobSpec
from msrun.processes.agent.node_resources import NodeResources
from msrun.processes.agent.worker_end import RunningWorker
from msrun.processes.console import Console
from msrun.supervise import logs, process
from msrun.supervise.logs import LogGap, printable
from msrun.transport.loop import Loop
from msrun.worker.beat import LAYOUT
from msrun.worker.stacks import AGENT_SIGNAL

_OF_US = (DumpStacks, ReadLog, SignalRanks, Hung)
# A dump is written in many small pieces; it is complete once it has stopped growing.
_POLL_SECONDS = 0.1
_STACK_SECONDS = 3.0
# Of a rank that has the interpreter to itself, no other thread can tell anything.
_COLLECTIVES_SECONDS = 1.0
_COLLECTIVES_BYTES_MAX = 64 * 1024
_STACK_BYTES_MAX = 256 * 1024
_TAIL_LINES = 5
_TAIL_CHARS_MAX = 200
_STOPPED = ("T", "t")
_IN_DISK = ("D",)


@dataclass(slots=True)
class _Dump:
    """Stacks that workers are writing: rank -> size of the file when it was last looked at."""

    inquiry: int
    due: float
    told_by: float
    sizes: dict[int, int] = field(default_factory=dict)
    poll_at: float = 0.0


class NodeControl:
    """The control of this node's workers.

    Args:
        job: The job.
        node: This node's resources.
        loop: This process's loop.
        console: Takes messages to the user.
        send: Takes messages to the scheduler about the generation that runs here.
        gap_of: As of `Tail`.
    """

    def __init__(
        self,
        job: JobSpec,
        node: NodeResources,
        loop: Loop,
        console: Console,
        *,
        send: Callable[[FromAgent], None],
        gap_of: Callable[[str], LogGap | None],
    ) -> None:
        self._job = job
        self._gap_of = gap_of
        self._node = node
        self._loop = loop
        self._console = console
        self._send = send
        self._generation = -1
        self._workers: dict[int, RunningWorker] = {}
        self._watch = HangWatch()
        self._look_at: float | None = None
        self._dump: _Dump | None = None

    # The workers.

    def started(self, generation: int, workers: Iterable[RunningWorker]) -> None:
        """Take over the workers of a new generation."""
        self._generation = generation
        self._workers = {worker.plan.rank: worker for worker in workers}
        self._watch = HangWatch(timeout=self._job.hang_timeout, idle=self._job.detect_idle)
        self._look_at = self._loop.now() if self._watch.is_on else None
        self._dump = None

    def running(self) -> None:
        """Tell the scheduler the pids of the workers, once all of them run."""
        workers = self._workers.values()
        ages = [self._loop.now() - w.started_at for w in workers if w.started_at is not None]
        if ages and len(ages) == len(self._workers):
            self._send(Running(pids=[worker.pid or 0 for worker in workers], age=min(ages)))

    def rejoined(self) -> None:
        """Repeat to a new scheduler what an earlier one may have known of this node."""
        self._watch.tell_again()
        self.running()

    # Time.

    def deadline(self) -> float | None:
        """Time by which `tick` must be called; None when there is none."""
        poll_at = self._dump.poll_at if self._dump else None
        return min((at for at in (self._look_at, poll_at) if at is not None), default=None)

    def tick(self) -> None:
        """Look at the workers, and at the stacks that they write."""
        now = self._loop.now()
        if self._look_at is not None and now >= self._look_at:
            self._look(now)
        if self._dump and now >= self._dump.poll_at:
            self._poll(self._dump, now)

    def _look(self, now: float) -> None:
        living = [
            (rank, worker, worker.pid) for rank, worker in self._workers.items() if worker.pid
        ]
        self._look_at = now + hang.LOOK_SECONDS if living or not self._has_begun() else None
        signs = [
            Sign(
                rank=rank,
                beat_at=read_beat(worker.beat_file, now=now),
                cpu=process.cpu_seconds(pid) if self._watch.needs_cpu else None,
                work=_work(pid) if self._watch.needs_work(rank, now=now) else None,
            )
            for rank, worker, pid in living
        ]
        for stall in self._watch.look(signs, now=now):
            self._send(Stalled(rank=stall.rank, seconds=stall.seconds, sign=stall.sign))

    def _has_begun(self) -> bool:
        return any(worker.started_at is not None for worker in self._workers.values())

    # Requests of the scheduler.

    @staticmethod
    def is_for(body: FromScheduler) -> bool:
        """Tell whether `body` is for this object and not for the agent's state machine."""
        return isinstance(body, _OF_US)

    def serve(self, generation: int, body: FromScheduler) -> None:
        """Carry out a request of the scheduler."""
        match body:
            case ReadLog():
                self._send(self._read_log(body))
            case Hung(report=report):
                self._report(generation, report)
            case DumpStacks(inquiry=inquiry) if generation == self._generation:
                self._begin_dump(inquiry)
            case SignalRanks(ranks=ranges, signum=signum) if generation == self._generation:
                chosen = [
                    rank
                    for rank, worker in self._workers.items()
                    if worker.pid and (not ranges or any(a <= rank <= b for a, b in ranges))
                ]
                self._node.signal_workers(tuple(chosen), signum)

    def _report(self, generation: int, report: str) -> None:
        path = Path(self._job.log_dir, f"hang_{generation}.txt")
        where = f"stacks: {path}"
        try:
            with os.fdopen(logs.create(str(path)), "w", encoding="utf-8") as file:
                file.write(report + "\n")
        except OSError as error:
            where = f"{path} cannot be written: {error.strerror}"
        summary = report.partition("\n\n")[0].replace("\n", "\n  ")
        self._console.say(f"warning: {summary}\n  {where}")

    # Logs.

    def _read_log(self, asked: ReadLog) -> LogPart:
        worker = self._workers.get(asked.rank)
        if worker is None:
            return LogPart(inquiry=asked.inquiry, problem=f"rank {asked.rank} has no log here yet")
        path = worker.plan.error_log
        try:
            data, offset = read_part(path, asked.offset, asked.lines, self._gap_of(path))
        except OSError as error:
            problem = f"{path} cannot be read: {error.strerror}"
            return LogPart(inquiry=asked.inquiry, problem=logs.printable(problem))
        return LogPart(
            inquiry=asked.inquiry, log_file=logs.printable(path), data=data, offset=offset
        )

    # Stacks.

    def _begin_dump(self, inquiry: int) -> None:
        now = self._loop.now()
        self._dump = _Dump(
            inquiry,
            due=now + _STACK_SECONDS,
            told_by=now + _COLLECTIVES_SECONDS,
            poll_at=now + _POLL_SECONDS,
        )
        asked = []
        for rank, worker in self._workers.items():
            if problem := _why_silent(worker):
                self._send(self._stack(inquiry, worker, [], problem))
                continue
            with contextlib.suppress(OSError):
                os.truncate(worker.stack_file, 0)
            ask_for_collectives(*worker.collective_files)
            self._dump.sizes[rank] = 0
            asked.append(rank)
        self._node.ask_for_stacks(tuple(asked))
        if not asked:
            self._dump = None

    def _poll(self, dump: _Dump, now: float) -> None:
        dump.poll_at = now + _POLL_SECONDS
        for rank, before in list(dump.sizes.items()):
            worker = self._workers[rank]
            text = _read(worker.stack_file)
            dump.sizes[rank] = len(text)
            is_whole = text.endswith("\n") and len(text) == before
            is_whole &= now >= dump.told_by or not _is_expected(worker)
            if is_whole or not worker.pid or now >= dump.due:
                del dump.sizes[rank]
                frames = list(stacks.parse(text))
                entered = read_collectives(worker.collective_files[1])
                problem = "" if frames else "it did not show one in time"
                self._send(self._stack(dump.inquiry, worker, frames, problem, entered))
        if not dump.sizes:
            self._dump = None

    def _stack(
        self,
        inquiry: int,
        worker: RunningWorker,
        frames: list[stacks.Frame],
        problem: str,
        entered: list[Collective] | None = None,
    ) -> Stack:
        plan, now = worker.plan, self._loop.now()
        tail = worker.last_lines(_TAIL_LINES)
        who = RankExit(
            rank=plan.rank,
            node_rank=plan.node_rank,
            host=worker.host,
            local_rank=plan.local_rank,
            pid=worker.pid or 0,
            code=None,
            ran_for=0.0 if worker.started_at is None else now - worker.started_at,
            stalled=self._watch.silence(plan.rank, now=now),
            tail=[line[:_TAIL_CHARS_MAX] for line in tail],
            log_file=logs.printable(plan.error_log),
        )
        return Stack(inquiry=inquiry, worker=who, frames=frames, problem=problem, entered=entered)


def read_part(
    path: str, offset: int | None, lines: int, gap: LogGap | None = None
) -> tuple[bytes, int]:
    """Return a bounded part of a log from `offset` on, and the offset of the byte after it.

    Without an offset these are its last `lines` lines.  In place of a `gap` there is a line.

    Raises:
        OSError: It cannot be read.
    """
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - LOG_BYTES_MAX) if offset is None else max(0, min(offset, size))
        most, missed = LOG_BYTES_MAX, b""
        if gap and start < gap.start:
            most = min(most, gap.start - start)
        elif gap and start < gap.end <= size:
            start, missed = gap.end, LogGap(start, gap.end).note()
        file.seek(start)
        data = file.read(most - len(missed))
    end = start + len(data)
    data = missed + data
    if offset is None:
        kept = data.splitlines(keepends=True)[-lines:] if lines > 0 else []
        data = b"".join(kept)
    return data, end


def _why_silent(worker: RunningWorker) -> str:
    """Return why a worker could not show its stack, empty when it could."""
    if worker.pid == 0:
        return "it has ended"
    if worker.pid and process.state(worker.pid) in _STOPPED:
        return "it is stopped, by SIGSTOP or a debugger"
    if not worker.pid or not process.catches(worker.pid, AGENT_SIGNAL):
        return "it has not begun, or is no Python program"
    return ""


def ask_for_collectives(question: str, answer: str) -> None:
    """Ask a worker for its collectives, if it listens; an earlier answer is none any more."""
    with contextlib.suppress(OSError):
        Path(answer).unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(question, flags)
        try:
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, b"?")
        finally:
            os.close(descriptor)


def read_collectives(path: str) -> list[Collective] | None:
    """Return what a worker has answered; None if it has not, or its file holds something else."""
    try:
        with open_to_read(path) as file:
            found = msgspec.json.decode(
                file.read(_COLLECTIVES_BYTES_MAX), type=list[tuple[str, int, str]]
            )
        named = [Collective(printable(g), n, printable(name)) for g, n, name in found]
        return msgspec.convert(msgspec.to_builtins(named), Collectives)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


def _is_expected(worker: RunningWorker) -> bool:
    """Return whether a worker has yet to tell its collectives."""
    question, answer = worker.collective_files
    return Path(question).exists() and not Path(answer).exists()


def _work(pid: int) -> WorkDone:
    return WorkDone(
        cpu=process.tree_cpu_seconds(pid),
        wakes=process.main_thread_wakes(pid),
        goes_on=process.state(pid) in _IN_DISK or process.sleeps(pid),
        moved=process.tree_bytes(pid),
    )


def read_beat(path: str, *, now: float) -> float | None:
    """Return when a worker last beat, None when it never did or its file holds no beat."""
    try:
        with open_to_read(path) as file:
            data = file.read(LAYOUT.size + 1)
    except OSError:
        return None
    if len(data) != LAYOUT.size:
        return None
    count, nanoseconds = LAYOUT.unpack(data)
    # What a worker writes may lie in the future, and then nothing would ever be late.
    return min(nanoseconds / 1e9, now) if count else None


def _read(path: str) -> str:
    try:
        with open_to_read(path) as file:
            return file.read(_STACK_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
