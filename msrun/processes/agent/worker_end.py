"""Describes the end of a worker for people: exit status, exception, last lines of its log."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msrun.backend import WorkerPlan
from msrun.bounded_file import open_to_read
from msrun.cluster.verdict import TAIL_LINES, RankExit
from msrun.supervise.logs import last_lines, printable
from msrun.supervise.machine import read_oom_kills
from msrun.supervise.orders import Exited

_ERROR_CHARS_MAX = 500
_ERROR_FILE_BYTES_MAX = 256 * 1024
_MONOTONIC_MAX = 1e9


@dataclass(slots=True)
class RunningWorker:
    """A worker from its start to its end.

    Args:
        plan: The plan that it was started with.
        host: Its node.
        error_file: Where it leaves its exception.
        beat_file: Where it counts its beats.
        stack_file: Where it writes its stacks when it is asked to.
        collective_files: Where it is asked for its collectives, and where it answers.
        log_starts: Size of each of its logs when it was started.
        started_at: When, on the monotonic clock; None when it could not be.
        pid: Its pid as long as it lives, 0 when it has ended; None before.
        last_pid: Its pid when it has ended; 0 before.
    """

    plan: WorkerPlan
    host: str
    error_file: str
    beat_file: str = ""
    stack_file: str = ""
    collective_files: tuple[str, str] = ("", "")
    log_starts: Mapping[str, int] = field(default_factory=dict)
    started_at: float | None = None
    pid: int | None = None
    last_pid: int = 0

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines that it wrote, of its stderr where that has a file of its own."""
        path = self.plan.error_log
        return last_lines(path, count, start=self.log_starts.get(path, 0))


class OomCounter:
    """Tells whether the kernel killed a process for want of memory since the last question.

    Args:
        files: As of `machine.memory_cgroup_files`.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._seen = read_oom_kills(files)

    def rose(self) -> bool:
        """Return whether one more kill was counted, and take it as explained."""
        count = read_oom_kills(self._files)
        if count is None or self._seen is None or count <= self._seen:
            return False
        self._seen += 1
        return True


def describe(end: Exited, worker: RunningWorker, oom: OomCounter, *, now: float) -> RankExit:
    """Return everything that is known about the end of `worker`."""
    plan = worker.plan
    worker.last_pid = end.pid
    code: int | None = None
    signum: int | None = None
    if os.WIFSIGNALED(end.status):
        signum = os.WTERMSIG(end.status)
    else:
        code = os.WEXITSTATUS(end.status)
    failed = code != 0
    error, raised_at = _read_error(worker.error_file) if failed else ("", None)
    tail = worker.last_lines(TAIL_LINES) if failed else []
    return RankExit(
        rank=plan.rank,
        node_rank=plan.node_rank,
        host=worker.host,
        local_rank=plan.local_rank,
        pid=end.pid,
        code=code,
        signum=signum,
        core=os.WCOREDUMP(end.status),
        oom=signum == 9 and oom.rose(),  # noqa: PLR2004 - SIGKILL is the kernel's only way
        ran_for=0.0 if worker.started_at is None else end.at - worker.started_at,
        age=max(0.0, now - (end.at if raised_at is None else min(raised_at, end.at))),
        error=end.reason or error,
        tail=tail,
        log_file=printable(plan.error_log),
    )


def _read_error(path: str) -> tuple[str, float | None]:
    """Return the first line of a worker's exception and when it was raised.

    The format is torchelastic's, so a file that torch's own `record` wrote is read too;
    only ours have the monotonic time.
    """
    try:
        with open_to_read(path) as file:
            content = json.loads(file.read(_ERROR_FILE_BYTES_MAX))
        message = content["message"]
        text, extra = (
            (message, {})
            if isinstance(message, str)
            else (
                message["message"],
                message.get("extraInfo", {}),
            )
        )
        lines = [line for line in str(text).splitlines() if line.strip()]
        at = extra.get("monotonic")
        first = printable(lines[0] if lines else "")[:_ERROR_CHARS_MAX]
        # A time that no clock shows is none: numbers of JSON may be infinite, or have 400 digits.
        raised_at = float(at) if isinstance(at, int | float) and 0 <= at < _MONOTONIC_MAX else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", None
    return first, raised_at
