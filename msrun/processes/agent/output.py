"""The output of one node's workers, on its way from their logs to the console."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from msrun import environ
from msrun.job import JobSpec
from msrun.launch import WorkerPlan
from msrun.processes.console import is_terminal, streams_differ
from msrun.supervise import logs
from msrun.supervise.logs import BOTH, STDERR, STDOUT, StreamSplit, Tail


class NodeOutput:
    """Decides how each worker writes its logs, so that the console can show what was asked for.

    Args:
        job: The job.
    """

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._is_terminal = os.isatty(1)
        self._are_apart = streams_differ() and not is_terminal()
        self._splits: dict[str, StreamSplit] = {}

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
                is_live=is_only,
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
        if not self._is_split(plan):
            return []
        opened: list[int] = []
        try:
            os.close(logs.create(samples))
            if not start:
                os.close(logs.create(plan.log_file))
            opened += (logs.reopen(plan.log_file) for _ in BOTH)
            opened.append(os.open(samples, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            # The worker meets the same problem with its log, and says so.
            for descriptor in opened:
                os.close(descriptor)
            return []
        self._split(plan).attach(opened[:2], opened[2], start)
        return opened[:2]

    def _shown(self, plan: WorkerPlan) -> frozenset[int]:
        return self._job.shown_streams(plan.rank, plan.local_rank, is_terminal=self._is_terminal)

    def _is_split(self, plan: WorkerPlan) -> bool:
        """Tell whether the console sends what is in one log to two places."""
        is_one_log = not (plan.out_file or plan.err_file)
        return is_one_log and self._are_apart and self._shown(plan) == BOTH

    def _split(self, plan: WorkerPlan) -> StreamSplit:
        return self._splits.setdefault(plan.log_file, StreamSplit())
