"""One program for batches of any size, found from two traces."""

from __future__ import annotations

from typing import Any

import msgspec

from msrun.errors import UsageError
from msrun.parallel.search.graph.program import Program, Step, Value


class Batches:
    """A program whose numbers grow with the batch as they did between two sizes.

    Args:
        small: The program of the smaller batch.
        large: The same of a larger one.
        sizes: Of both batches.

    Attributes:
        ends: The two programs and their sizes, as they were given.

    Raises:
        UsageError: The two are not the same program.
    """

    def __init__(self, small: Program, large: Program, sizes: tuple[int, int]) -> None:
        same = [step.target for step in small.steps] == [step.target for step in large.steps]
        if not same or list(small.values) != list(large.values):
            raise UsageError(
                "search: the model runs other operators with another size of the batch"
            )
        self._small, self._large, self._sizes = small, large, sizes
        self.ends = small, large, sizes

    def at(self, batch: int) -> Program:
        """Return the program of a batch of `batch` samples."""
        values = {
            name: msgspec.structs.replace(value, shape=self._shape(value, other, batch))
            for (name, value), other in zip(
                self._small.values.items(), self._large.values.values(), strict=True
            )
        }
        steps = tuple(
            self._step(step, other, batch)
            for step, other in zip(self._small.steps, self._large.steps, strict=True)
        )
        return msgspec.structs.replace(self._small, values=values, steps=steps)

    def _shape(self, value: Value, other: Value, batch: int) -> tuple[int, ...]:
        return tuple(
            self._number(a, b, batch) for a, b in zip(value.shape, other.shape, strict=True)
        )

    def _step(self, step: Step, other: Step, batch: int) -> Step:
        if step.attrs == other.attrs:
            return step
        attrs = {key: self._attr(item, other.attrs[key], batch) for key, item in step.attrs.items()}
        return msgspec.structs.replace(step, attrs=attrs)

    def _attr(self, item: Any, other: Any, batch: int) -> Any:
        if isinstance(item, list):
            return [self._attr(a, b, batch) for a, b in zip(item, other, strict=True)]
        if isinstance(item, int) and item != other:
            return self._number(item, other, batch)
        return item

    def _number(self, a: int, b: int, batch: int) -> int:
        if a == b:
            return a
        small, large = self._sizes
        found, rest = divmod((b - a) * (batch - small), large - small)
        if rest:
            raise UsageError(f"search: the model cannot run a batch of {batch}")
        return a + found
