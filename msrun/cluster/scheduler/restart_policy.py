"""Decides whether and when another generation follows a failed one."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import msgspec

from msrun.cluster.scheduler.wal import GenerationStarted
from msrun.cluster.verdict import RankExit
from msrun.errors import ExitCode
from msrun.job import RestartLimits

_JITTER = 0.25
# The shell's codes for a program that cannot be executed: it cannot be next time either.
_CANNOT_START = (126, 127)


class Again(msgspec.Struct, frozen=True):
    """Start another generation after `delay` seconds."""

    delay: float


class GiveUp(msgspec.Struct, frozen=True):
    """End the job.

    Args:
        reason: Why there is no further restart; empty when none was asked for.
        code: Exit code that replaces the failure's own; None keeps it.
        hint: What to do next.
    """

    reason: str = ""
    code: int | None = None
    hint: str = ""


@dataclass(slots=True)
class RestartPolicy:
    """Budget, back-off and no-progress guard of one job.

    The first restart after a healthy generation is at once; each early failure in a
    row doubles the pause.  The pauses get up to a quarter shorter, by a number
    derived from the job id, so that jobs hit by one cause do not return in step.
    """

    job_id: str
    limits: RestartLimits
    _restarts: list[float] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list)
    _blamed: dict[str, list[float]] = field(default_factory=dict)
    _early_failures: int = 0
    _last_signature: tuple[object, ...] = ()
    _repeats: int = 0

    @property
    def used(self) -> int:
        """Restarts so far."""
        return self.failures + self.losses

    @property
    def failures(self) -> int:
        """Restarts so far after a worker had failed."""
        return len(self._restarts)

    @property
    def losses(self) -> int:
        """Restarts so far after a node was lost, which have a budget of their own."""
        return len(self._losses)

    @property
    def blamed(self) -> dict[str, int]:
        """Failures so far that began on a node."""
        return {node_id: len(times) for node_id, times in self._blamed.items()}

    def restore(self, started: GenerationStarted, *, now: float) -> None:
        """Take over the counts of an earlier scheduler, as if all of it had just happened."""
        self._restarts = [now] * started.restarts
        self._losses = [now] * started.losses
        self._blamed = {node_id: [now] * count for node_id, count in started.blamed.items()}

    def after_loss(self, *, now: float) -> Again | GiveUp:
        """Decide about a restart after the loss of a node."""
        most = self.limits.max_restarts
        if most == 0:
            return GiveUp()
        if len(self._recent(self._losses, now)) >= most:
            return GiveUp(f"the budget of {most} restart(s) after lost nodes is spent")
        self._losses.append(now)
        return Again(0.0)

    def blame(self, node_id: str, *, now: float) -> int:
        """Count a failure that began on a node; return how many if they are too many."""
        blamed = self._blamed.setdefault(node_id, [])
        blamed.append(now)
        count = len(self._recent(blamed, now))
        return count if 0 < self.limits.exclude_after <= count else 0

    def _recent(self, times: list[float], now: float) -> list[float]:
        return [at for at in times if now - at < self.limits.window]

    def after(self, failure: RankExit, *, now: float) -> Again | GiveUp:
        """Decide about a restart after `failure`, the root cause of a generation."""
        early = failure.ran_for < self.limits.early
        self._early_failures = self._early_failures + 1 if early else 1
        self._count_repeats(failure, early=early)
        if self.limits.max_restarts == 0:
            return GiveUp()
        if failure.code in _CANNOT_START:
            return GiveUp("it cannot be started, so it is not restarted")
        if len(self._recent(self._restarts, now)) >= self.limits.max_restarts:
            return GiveUp(f"the budget of {self.limits.max_restarts} restart(s) is spent")
        if 0 < self.limits.no_progress_limit <= self._repeats:
            return GiveUp(
                f"the same early failure came {self._repeats} times in a row",
                ExitCode.DO_NOT_REQUEUE,
                "correct the cause, or pass --no-progress-limit 0 to try until the budget is spent",
            )
        self._restarts.append(now)
        return Again(self._pause())

    def _count_repeats(self, failure: RankExit, *, early: bool) -> None:
        signature = (failure.rank, failure.code, failure.signum, failure.error)
        same = early and signature == self._last_signature
        self._repeats = self._repeats + 1 if same else int(early)
        self._last_signature = signature

    def _pause(self) -> float:
        if self._early_failures < 2:  # noqa: PLR2004 - the first is free
            return 0.0
        pause = self.limits.backoff_initial * 2.0 ** min(self._early_failures - 2, 30)
        seed = f"{self.job_id}/{self.used}".encode()
        jitter = 1 - _JITTER * zlib.crc32(seed) / 2**32
        return min(pause, self.limits.backoff_max) * jitter
