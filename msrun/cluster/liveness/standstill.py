"""Whether a whole generation stands still, where no time for a hang was given.

A rank without a beat may be in an evaluation, a compilation, a save or a download, and the others
then wait for it.  So a silent rank is the reason for a warning alone.  The generation hangs when
every rank that runs has reported that it does no work, and the stacks of all are the same in two
looks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from msrun.cluster.liveness.hang import REPEAT_SECONDS
from msrun.cluster.liveness.stacks import RankStack

WARN_SECONDS = 600.0
# A rank without work says so again and again; after this time without that it works.
_VALID_SECONDS = 1.5 * REPEAT_SECONDS


@dataclass(slots=True)
class Standstill:
    """What the ranks of one generation have reported.

    Args:
        generation: The generation.
    """

    generation: int
    _idle: dict[int, tuple[float, float]] = field(default_factory=dict)
    _pictures: tuple[RankStack, ...] = ()
    _pictured_at: float = 0.0
    _warned_at: float | None = None

    def note_idle(self, rank: int, seconds: float, *, now: float) -> None:
        """Take the report of a rank that has done no work for `seconds`."""
        self._idle[rank] = (now, seconds)

    def idle(self, living: Collection[int], *, now: float) -> dict[int, float]:
        """Return rank -> seconds without a sign, if all of `living` do no work; else nothing."""
        fresh = {
            rank: seconds
            for rank, (at, seconds) in self._idle.items()
            if now - at <= _VALID_SECONDS and rank in living
        }
        return fresh if len(fresh) == len(living) else {}

    def should_warn(self, *, now: float) -> bool:
        """Return whether a warning is due, and count it."""
        is_due = self._warned_at is None or now - self._warned_at >= WARN_SECONDS
        if is_due:
            self._warned_at = now
        return is_due

    def should_look(self, *, now: float) -> bool:
        """Return whether the last look at the stacks is so old that another can tell something."""
        return not self._pictures or now - self._pictured_at >= REPEAT_SECONDS

    def is_same(self, pictures: Sequence[RankStack], *, now: float) -> bool:
        """Return whether all stacks are those of the last look, which `pictures` replace."""
        places = tuple(_place(picture) for picture in pictures)
        is_same = places == self._pictures and now - self._pictured_at >= REPEAT_SECONDS
        if not is_same or now - self._pictured_at >= REPEAT_SECONDS:
            self._pictures, self._pictured_at = places, now
        return is_same


def _place(picture: RankStack) -> RankStack:
    return RankStack(rank=picture.rank, frames=picture.frames, problem=picture.problem)
