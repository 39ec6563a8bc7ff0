"""Which workers make no progress: by the beats that they count, or by their CPU time.

A worker that has ever beaten hangs when it has not for several times the longest interval
seen.  CPU time is looked at only where the user asks for it: a worker may wait for long
without one of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

LEAST_SECONDS = 60.0
FACTOR = 5.0
# Between two looks; a longer time means that this process itself did not run.
LOOK_SECONDS = 1.0
_LOOK_SECONDS_MAX = 5.0
# Threads that only wait for messages use this much of a CPU.
_IDLE_SHARE = 0.01


class Sign(msgspec.Struct, frozen=True):
    """The progress of one worker at one look.

    Args:
        rank: The worker.
        beat_at: When it last beat, on this machine's monotonic clock; None for never.
        cpu: Seconds of CPU time it has used; None if it is not needed.
    """

    rank: int
    beat_at: float | None
    cpu: float | None = None


class Hang(msgspec.Struct, frozen=True):
    """A worker that makes no progress: no `sign` of it has come for `seconds`."""

    rank: int
    seconds: float
    sign: str


@dataclass(slots=True)
class _Worker:
    beat_at: float | None = None
    longest: float = 0.0
    cpu: float = 0.0
    cpu_at: float | None = None


@dataclass(slots=True, kw_only=True)
class HangWatch:
    """The workers of one node in one generation.

    Args:
        timeout: Seconds without a beat that mean a hang; None learns them, inf turns it off.
        idle: Seconds with hardly any CPU time that mean a hang; inf turns it off.
    """

    timeout: float | None = None
    idle: float = math.inf
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)
    _looked_at: float = -math.inf
    _awake_since: float = -math.inf

    @property
    def needs_cpu(self) -> bool:
        """Whether a look must find out about CPU time."""
        return self.idle != math.inf

    @property
    def is_on(self) -> bool:
        """Whether anything could come of a look."""
        return self.needs_cpu or self.timeout != math.inf

    def look(self, signs: list[Sign], *, now: float) -> list[Hang]:
        """Return the workers of `signs` that hang, each once."""
        if now - self._looked_at > _LOOK_SECONDS_MAX:
            self._awake_since = now
        self._looked_at = now
        hangs = [hang for sign in signs if (hang := self._judge(sign, now))]
        self._told |= {hang.rank for hang in hangs}
        return hangs

    def tell_again(self) -> None:
        """Return known hangs once more: a new scheduler has not heard of them."""
        self._told.clear()

    def silence(self, rank: int, *, now: float) -> float:
        """Return the seconds since a worker last beat; 0 for one that never did."""
        worker = self._workers.get(rank)
        return 0.0 if worker is None or worker.beat_at is None else now - worker.beat_at

    def limit(self, rank: int) -> float:
        """Return the seconds without a beat that mean a hang of a worker."""
        if self.timeout is not None:
            return self.timeout
        worker = self._workers.get(rank)
        return max(LEAST_SECONDS, FACTOR * worker.longest if worker else 0.0)

    def _judge(self, sign: Sign, now: float) -> Hang | None:
        worker = self._workers.setdefault(sign.rank, _Worker())
        self._note(worker, sign, now)
        if sign.rank in self._told:
            return None
        if worker.beat_at is not None:
            quiet = now - max(worker.beat_at, self._awake_since)
            if quiet >= self.limit(sign.rank):
                return Hang(sign.rank, now - worker.beat_at, "beat")
        if worker.cpu_at is not None:
            quiet = now - max(worker.cpu_at, self._awake_since)
            if quiet >= self.idle:
                return Hang(sign.rank, now - worker.cpu_at, "CPU time")
        return None

    def _note(self, worker: _Worker, sign: Sign, now: float) -> None:
        if sign.beat_at is not None and sign.beat_at != worker.beat_at:
            if worker.beat_at is not None:
                worker.longest = max(worker.longest, sign.beat_at - worker.beat_at)
            worker.beat_at = sign.beat_at
        is_busy = sign.cpu is not None and sign.cpu - worker.cpu >= _IDLE_SHARE * self.idle
        if sign.cpu is not None and (worker.cpu_at is None or is_busy):
            worker.cpu, worker.cpu_at = sign.cpu, now
