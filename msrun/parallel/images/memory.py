"""Which views of a part are copies here, and whether one of them misses a write.

Rows of a divided dim are a view in one process.  Here they are a copy, as they come from other
ranks.  So a write to the one is not in the other, and what misses a write is refused where it is
used next.  Torch counts the writes of a tensor and of all views of it, also of plain ones, whose
functions nobody sees.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from msrun.parallel import torch_compat


class _Copy(NamedTuple):
    """What one process has as a view.

    Args:
        counters: Count its writes.
        writes: How many there were when it was made.
        call: The function that made it; results of one do not overlap.
        plain: Itself, if it is a plain tensor: nobody sees where it is used.
        before: How often the tensor had been written of which it is a view.
    """

    counters: list[Tensor]
    writes: int
    call: int
    plain: weakref.ref[Tensor] | None
    before: int

    def misses_write(self, writes: int) -> bool:
        """Return whether it or its tensor was written, which now has so many writes."""
        if _sum(self.counters) != self.writes:
            return True
        return self.before != writes and self.plain is not None and self.plain() is not None


class _Origin(NamedTuple):
    """Of what a copy is a view, which call made it, and how often that had been written."""

    memory: PartMemory
    call: int
    writes: int


class PartMemory:
    """The memory of a part, which true views of it share.

    Args:
        local: The part.
        origin: What it is a copy of; None of a part that is no view.

    Attributes:
        counters: Count writes to it.
    """

    def __init__(self, local: Tensor, origin: _Origin | None = None) -> None:
        self.counters = [] if local.is_inference() else [torch_compat.write_counter(local)]
        self._unseen = 0
        self._copies: list[_Copy] = []
        self._origin = origin
        self._calls = self._depth = 0

    def join(self, local: Tensor) -> None:
        """Add a tensor of this memory whose writes torch counts apart, as `x.data`."""
        if not local.is_inference():
            self.counters.append(torch_compat.write_counter(local))

    def count(self) -> None:
        """Count a write to a tensor of inference, of which torch counts none."""
        if not self.counters:
            self._unseen += 1

    @contextlib.contextmanager
    def one_call(self) -> Iterator[None]:
        """Note what is made inside as results of one function, also if it calls others."""
        self._calls += not self._depth
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def copy(self, local: Tensor, plain: Tensor | None = None) -> PartMemory:
        """Note a copy, and return its memory; `plain` is the result itself if it is a plain one."""
        made = PartMemory(local, _Origin(self, self._calls, self.writes()))
        self.note(made, self._calls, None if plain is None else weakref.ref(plain))
        return made

    def note(self, made: PartMemory, call: int, plain: weakref.ref[Tensor] | None) -> None:
        """Note a copy of rows of this memory, and of the memory that this is a view of."""
        self._copies.append(_Copy(made.counters, made.writes(), call, plain, self.writes()))
        if self._origin:
            self._origin.memory.note(made, self._origin.call, plain)

    def misses_write(self, but: int = 0) -> bool:
        """Return whether a view was written, none of the call `but`, or what this is a view of."""
        written = self.writes()
        if any(copy.call != but and copy.misses_write(written) for copy in self._copies):
            return True
        origin = self._origin
        return origin is not None and (
            origin.memory.writes() != origin.writes or origin.memory.misses_write(origin.call)
        )

    def writes(self) -> int:
        """Return how often a tensor of this memory was written."""
        return _sum(self.counters) + self._unseen


def _sum(counters: list[Tensor]) -> int:
    return sum(map(torch_compat.write_count, counters))
