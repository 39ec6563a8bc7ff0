"""torchelastic's events on the console, one line of JSON each: `--event-log-handler console`.

Source: `_construct_event` of torch 2.13, torch/distributed/elastic/agent/server/api.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from msrun.cluster.verdict import RankExit, Verdict
from msrun.job import JobSpec
from msrun.processes.agent.worker_end import RunningWorker

_AGENT, _WORKER = "AGENT", "WORKER"


class EventLog:
    """Says what becomes of the workers of one node.

    Args:
        job: The job.
        host: This node.
        say: Takes a line, where the user asked for them.
    """

    def __init__(self, job: JobSpec, host: str, say: Callable[[str], None]) -> None:
        self._job = job
        self._host = host
        self._say = say if job.event_log == "console" else None
        self._ends: dict[int, RankExit] = {}

    def started(self, worker: RunningWorker, generation: int) -> None:
        """A worker has started."""
        self._ends.pop(worker.plan.rank, None)
        self._record("START", worker, generation)

    def ended(self, end: RankExit) -> None:
        """A worker has ended."""
        self._ends[end.rank] = end

    def over(
        self, workers: Iterable[RunningWorker], verdict: Verdict, *, took: float, is_stopped: bool
    ) -> None:
        """The job is over: only now is it told how its last workers ended.

        Args:
            workers: Those of the last generation.
            verdict: How it ended.
            took: Seconds since the launcher began.
            is_stopped: Somebody stopped the job.
        """
        some, generation = list(workers), verdict.generation
        for worker in some:
            if worker.plan.rank in self._ends:
                end = self._ends[worker.plan.rank]
                ended = "TERMINATED" if verdict.code else "SUCCEEDED"
                state = ended if end.succeeded else "FAILED"
                self._record(state, worker, generation, end=end, took=took)
        # As there: of this launcher itself, whatever became of the workers.
        state = "FAILED" if is_stopped else "SUCCEEDED"
        self._record(state, None, generation, group=some[0] if some else None, took=took)

    def _record(
        self,
        state: str,
        worker: RunningWorker | None,
        generation: int,
        *,
        end: RankExit | None = None,
        group: RunningWorker | None = None,
        took: float = 0.0,
    ) -> None:
        if self._say is None:
            return
        member = worker or group
        env = member.plan.env if member else {}
        about: dict[str, object] = {
            "group_world_size": int(env.get("GROUP_WORLD_SIZE", 1)),
            "entry_point": Path(self._job.program.target).name,
        }
        if worker:
            code = None if end is None or end.succeeded else _exit_code(end)
            about["local_rank"] = [worker.plan.local_rank]
            about["role_rank"] = [int(env["ROLE_RANK"])]
            about["role_world_size"] = [int(env["ROLE_WORLD_SIZE"])]
            about["exit_code"] = [code]
            about["worker_pid"] = [end.pid if code is not None and end else None]
        metadata = {
            "run_id": self._job.run_id or self._job.job_id,
            "global_rank": worker.plan.rank if worker else None,
            "group_rank": int(env.get("GROUP_RANK", 0)),
            "worker_id": str(end.pid if end else worker.pid) if worker else None,
            "role": self._job.role,
            "hostname": self._host,
            "state": state,
            "total_run_time": int(took),
            "rdzv_backend": "msrun",
            "raw_error": json.dumps({"message": end.error}) if end and end.error else None,
            "metadata": json.dumps(about),
            "agent_restarts": generation,
            "duration_ms": None,
        }
        event = {
            "name": f"torchelastic.worker.status.{state}",
            "source": _WORKER if worker else _AGENT,
            "timestamp": 0,
            "metadata": metadata,
        }
        self._say(json.dumps(event))


def _exit_code(end: RankExit) -> int | None:
    """Return the exit code, as torch has it negative for a signal."""
    return end.code if end.signum is None else -end.signum
