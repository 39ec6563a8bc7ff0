"""Which workers make no progress: by the beats that they count, or by the work that they do.

With a time that the user gave, a worker that has ever beaten hangs when it has not for that time.

Without one, several times the longest interval seen is the reason for a warning (`QUIET`) and no
more: a worker that evaluates, compiles, saves or downloads does not beat either.  It is also
reported, again and again, when it does no work (`IDLE`): its processes use hardly any CPU time and
read and write hardly anything, its main thread is hardly ever woken, as by data from the network,
and neither waits for a disk nor sleeps for a time.
The scheduler ends a generation in which no worker does any (`standstill`).

CPU time alone is looked at only where the user asks for it.
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
# A main thread that waits in a collective is woken less often each second.
_IDLE_WAKES = 1.0
# Threads that wait wake each other with less each second.
_IDLE_BYTES = 1024
REPEAT_SECONDS = 30.0

# Signs that did not come.  Those without a time given by the user end nothing by themselves.
BEAT = "beat"
CPU_TIME = "CPU time"
QUIET = "beat (auto)"
IDLE = "work (auto)"


class WorkDone(msgspec.Struct, frozen=True):
    """What a worker has done since it started.

    Args:
        cpu: Seconds of CPU time of it and its children.
        wakes: How often its main thread was woken.
        goes_on: Whether its main thread waits right now for what comes by itself: a disk, or the
            end of a time for which it sleeps.
        moved: Bytes that it and its children have read and written.
    """

    cpu: float
    wakes: int
    goes_on: bool = False
    moved: int = 0


class Sign(msgspec.Struct, frozen=True):
    """The progress of one worker at one look.

    Args:
        rank: The worker.
        beat_at: When it last beat, on this machine's monotonic clock; None for never.
        cpu: Seconds of CPU time it has used; None if it is not needed.
        work: What it has done; None if it is not needed.
    """

    rank: int
    beat_at: float | None
    cpu: float | None = None
    work: WorkDone | None = None


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
    work: WorkDone | None = None
    worked_at: float = -math.inf
    repeated_at: float = -math.inf


@dataclass(slots=True, kw_only=True)
class HangWatch:
    """The workers of one node in one generation.

    Args:
        timeout: Seconds without a beat that mean a hang; None learns them for a warning, inf turns
            it off.
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

    def needs_work(self, rank: int, *, now: float) -> bool:
        """Whether a look must find out about the work of a worker, which costs more."""
        if self.timeout is not None:
            return False
        worker = self._workers.get(rank)
        if worker is None or worker.beat_at is None:
            return any(other.beat_at is not None for other in self._workers.values())
        return now - worker.beat_at >= LEAST_SECONDS / 2

    def look(self, signs: list[Sign], *, now: float) -> list[Hang]:
        """Return the workers of `signs` that hang, each once."""
        if now - self._looked_at > _LOOK_SECONDS_MAX:
            self._awake_since = now
        self._looked_at = now
        hangs = [hang for sign in signs if (hang := self._judge(sign, now))]
        self._told |= {hang.rank for hang in hangs if hang.sign != IDLE}
        return hangs

    def tell_again(self) -> None:
        """Return known hangs once more: a new scheduler has not heard of them."""
        self._told.clear()
        for worker in self._workers.values():
            worker.repeated_at = -math.inf

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
        is_told = sign.rank in self._told
        if worker.beat_at is not None:
            quiet = now - max(worker.beat_at, self._awake_since)
            is_silent = quiet >= self.limit(sign.rank)
            if is_silent and not is_told:
                kind = QUIET if self.timeout is None else BEAT
                return Hang(sign.rank, now - worker.beat_at, kind)
        else:
            is_silent = True
        if worker.cpu_at is not None and not is_told:
            quiet = now - max(worker.cpu_at, self._awake_since)
            if quiet >= self.idle:
                return Hang(sign.rank, now - worker.cpu_at, CPU_TIME)
        return self._judge_work(worker, sign, now) if is_silent and sign.work else None

    def _judge_work(self, worker: _Worker, sign: Sign, now: float) -> Hang | None:
        quiet = now - max(worker.worked_at, self._awake_since)
        if quiet < LEAST_SECONDS or now - worker.repeated_at < REPEAT_SECONDS:
            return None
        worker.repeated_at = now
        since = worker.worked_at if worker.beat_at is None else worker.beat_at
        return Hang(sign.rank, now - since, IDLE)

    def _note(self, worker: _Worker, sign: Sign, now: float) -> None:
        if sign.beat_at is not None and sign.beat_at != worker.beat_at:
            if worker.beat_at is not None:
                worker.longest = max(worker.longest, sign.beat_at - worker.beat_at)
            worker.beat_at = sign.beat_at
            if self.timeout is None:
                self._told.discard(sign.rank)
        if sign.work is None:
            worker.work = None
        elif worker.work is None or _works(worker.work, sign.work):
            worker.work, worker.worked_at = sign.work, now
        is_busy = sign.cpu is not None and sign.cpu - worker.cpu >= _IDLE_SHARE * self.idle
        if sign.cpu is not None and (worker.cpu_at is None or is_busy):
            worker.cpu, worker.cpu_at = sign.cpu, now


def _works(before: WorkDone, now: WorkDone) -> bool:
    """Return whether a worker has worked between two looks, up to a minute apart."""
    cpu, wakes = now.cpu - before.cpu, now.wakes - before.wakes
    is_woken = wakes >= _IDLE_WAKES * LEAST_SECONDS
    # A child or another thread may copy or download while the main thread waits for it.
    moves = now.moved - before.moved >= _IDLE_BYTES * LEAST_SECONDS
    # Less CPU time than before: a child has ended.
    return now.goes_on or cpu < 0 or cpu >= 2 * _IDLE_SHARE * LEAST_SECONDS or is_woken or moves
