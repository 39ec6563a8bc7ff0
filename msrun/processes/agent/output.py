"""The output of one node's workers, on its way from their logs to the console."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from msrun import environ
from msrun.backend import WorkerPlan
from msrun.job import JobSpec
from msrun.processes.agent.terminal import WorkerTerminal
from msrun.processes.console import is_terminal, streams_differ
from msrun.supervise import logs
from msrun.supervise.logs import BOTH, STDERR, STDOUT, LogGap, StreamSplit, Tail
from msrun.transport.loop import Loop


class NodeOutput:
    """Decides how each worker writes its logs, so that the console can show what was asked for.

    Args:
        job: The job.
        loop: This process's loop.
        gap_of: As of `Tail`.
    """

    terminal: WorkerTerminal | None = None
    """Of the one worker that is shown at a terminal, once it has begun."""
    rank_at_terminal = -1

    def __init__(self, job: JobSpec, loop: Loop, gap_of: Callable[[str], LogGap | None]) -> None:
        self._job = job
        self._gap_of = gap_of
        self._loop = loop
        self._show: Callable[[], object] = lambda: None
        self._is_terminal = os.isatty(1)
        self._are_apart = streams_differ() and not is_terminal()
        self._splits: dict[str, StreamSplit] = {}

    def show_with(self, show: Callable[[], object]) -> None:
        """Call `show` whenever a log that is shown at a terminal has grown."""
        self._show = show

    def tails(self, workers: Iterable[tuple[WorkerPlan, Mapping[str, int]]]) -> list[Tail]:
        """Return tails of the logs that the console shows.

        Args:
            workers: Each with the sizes of its logs when it was started.
        """
        shown = [(plan, starts, self._shown(plan)) for plan, starts in workers]
        shown = [each for each in shown if each[2]]
        return [
            tail
            for plan, starts, streams in shown
            for tail in self._tails_of(plan, starts, streams, is_only=len(shown) == 1)
        ]

    def _tails_of(
        self, plan: WorkerPlan, starts: Mapping[str, int], streams: frozenset[int], *, is_only: bool
    ) -> Sequence[Tail]:
        prefix = environ.line_prefix(self._job.role, plan.rank, plan.local_rank)
        own = {STDOUT: plan.out_file, STDERR: plan.err_file}
        paths = {stream: own[stream] or plan.log_file for stream in sorted(streams)}
        split = self._split(plan) if self._is_split(plan) else None
        return [
            Tail(
                path,
                prefix,
                starts.get(path, 0),
                stream=next(stream for stream in paths if paths[stream] == path),
                split=split if path == plan.log_file else None,
                shown=frozenset(stream for stream in paths if paths[stream] == path),
                is_live=is_only or (plan.rank == 0 and os.isatty(0)),
                is_raw=self._has_terminal(plan),
                gap_of=self._gap_of,
            )
            for path in dict.fromkeys(paths.values())
        ]

    def open(self, plan: WorkerPlan, samples: str, start: int) -> list[int]:
        """Open the log of a worker once for each stream, where these are to be told apart.

        Args:
            plan: The worker.
            samples: File in which it shall note how its streams take turns.
            start: Size of the log.

        Returns:
            Descriptors for the worker, which stay ours; none if the worker opens its log itself.
        """
        if self._has_terminal(plan):
            return self._open_terminal(plan, append=start > 0)
        if not self._is_split(plan):
            return []
        opened: list[int] = []
        try:
            os.close(logs.create(samples))
            if not start:
                os.close(logs.create(plan.log_file))
            opened += (logs.reopen(plan.log_file) for _ in BOTH)
            opened.append(os.open(samples, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            # The worker meets the same problem with its log, and says so.
            for descriptor in opened:
                os.close(descriptor)
            return []
        self._split(plan).attach(opened[:2], opened[2], start)
        return opened[:2]

    def _open_terminal(self, plan: WorkerPlan, *, append: bool) -> list[int]:
        try:
            if self.terminal is None:
                terminal = WorkerTerminal()
                terminal.begin(plan.log_file, append=append)
                self.terminal = terminal
                self._loop.watch(terminal.fileno(), self.copy)
        except OSError:
            # No pseudo terminal is left, or no log: the worker meets that problem, and says so.
            return []
        self.rank_at_terminal = plan.rank
        return [self.terminal.theirs] * 2

    def copy(self) -> None:
        """Copy what the worker at the terminal has written to its log, and show it."""
        if self.terminal:
            self.terminal.copy()
            self._show()

    def _has_terminal(self, plan: WorkerPlan) -> bool:
        """Tell whether this is the one worker that a terminal shows, all of it."""
        job = self._job
        is_chosen = any(job.tee.values()) or bool(plan.out_file or plan.err_file)
        if is_chosen or job.detach or not is_terminal() or not self._shown(plan):
            return False
        if job.is_alone and job.workers_per_node == 1:
            return True
        return job.tail_local is None and (job.tail is None or len(job.tail) == 1)

    def _shown(self, plan: WorkerPlan) -> frozenset[int]:
        return self._job.shown_streams(plan.rank, plan.local_rank, is_terminal=self._is_terminal)

    def _is_split(self, plan: WorkerPlan) -> bool:
        """Tell whether the console sends what is in one log to two places."""
        is_one_log = not (plan.out_file or plan.err_file)
        return is_one_log and self._are_apart and self._shown(plan) == BOTH

    def _split(self, plan: WorkerPlan) -> StreamSplit:
        return self._splits.setdefault(plan.log_file, StreamSplit())
