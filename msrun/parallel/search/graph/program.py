"""A model's forward pass as plain data: values, and the steps that compute them.

`auto.trace` makes it from a module, tests make it by hand; nothing here knows torch.  Shapes are
those of the global batch.  A `ProgramByBatch` is one model traced with two batch sizes: every
number that differs is linear in the batch, so any other size follows without another trace.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any

import msgspec

from msrun.errors import ModelError


class Value(msgspec.Struct, frozen=True):
    """A tensor.

    Args:
        shape: Its sizes, of the global batch.
        itemsize: Bytes of one element.
        is_float: Whether it can have a gradient.
    """

    shape: tuple[int, ...]
    itemsize: int = 4
    is_float: bool = True

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return self.count * self.itemsize


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One operator.

    Args:
        name: Unique among the steps.
        target: The operator, such as `aten.linear.default`.
        inputs: Values it reads, by the name that the operator's schema gives them; members of a
            list are numbered, such as `tensors.0`.
        outputs: Values it computes.
        attrs: Its other arguments by name, defaults included.
        module: Name of the module that runs it; empty for the model itself.
        is_detached: Whether no gradient flows through it, though its inputs have some.
    """

    name: str
    target: str
    inputs: dict[str, str]
    outputs: tuple[str, ...]
    attrs: dict[str, Any] = {}
    module: str = ""
    is_detached: bool = False

    @property
    def packet(self) -> str:
        """The operator without namespace and overload, such as `linear`; torch's packet of it."""
        return self.target.split(".")[1] if "." in self.target else self.target


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The forward pass of a model.

    Args:
        values: Every tensor by name.
        params: Parameter values -> their names in the model.
        inputs: Values that a batch fills.
        steps: In the order of execution.
        outputs: Values that the model returns.
        frozen: Parameters that are not trained.
        kept: Values beside the outputs that the executor keeps: new ones of buffers.
    """

    values: dict[str, Value]
    params: dict[str, str]
    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    frozen: frozenset[str] = frozenset()
    kept: tuple[str, ...] = ()

    @property
    def of_whole_batch(self) -> str:
        """What one process would do otherwise in micro-batches or stages; empty without it.

        Batch norms take the statistics of a batch, and writes to buffers would be several.
        """
        for step in self.steps:
            if step.packet == "batch_norm" and step.attrs.get("training"):
                return f"batch norm {step.module}".strip()
        return "a forward that writes to a buffer" if self.kept else ""

    def constants(self) -> set[str]:
        """Return the values that depend on no parameter."""
        made = {name for step in self.steps for name in step.outputs}
        constants = set(self.values) - made - set(self.params)
        for step in self.steps:
            if constants.issuperset(step.inputs.values()):
                constants.update(step.outputs)
        return constants

    def trained(self) -> set[str]:
        """Return the values that have a gradient."""
        trained = {name for name in self.params if name not in self.frozen}
        for step in self.steps:
            if not step.is_detached and not trained.isdisjoint(step.inputs.values()):
                trained |= {name for name in step.outputs if self.values[name].is_float}
        return trained


def _first_difference(small: Program, large: Program, sizes: tuple[int, int]) -> str:
    """Return what the model does otherwise with batches of two sizes; empty if nothing."""
    for one, other in zip_longest(small.steps, large.steps):
        packets = [step.packet if step else "no more" for step in (one, other)]
        if packets[0] != packets[1] or one.target != other.target:
            return (
                f"the model runs other operators with {sizes[0]} samples than with {sizes[1]} "
                f"({packets[0]} and {packets[1]})"
            )
        if len(one.outputs) != len(other.outputs):
            return (
                f"the tensors that {one.packet} makes are {len(one.outputs)} with {sizes[0]} "
                f"samples and {len(other.outputs)} with {sizes[1]}"
            )
    if list(small.values) != list(large.values):
        return f"the model has other tensors with {sizes[0]} samples than with {sizes[1]}"
    return ""


class ProgramByBatch:
    """A program for batches of any size: its numbers grow as they did between two sizes.

    Args:
        small: The program of the smaller batch.
        large: The same of a larger one.
        sizes: Of both batches.

    Attributes:
        ends: The two programs and their sizes, as they were given.

    Raises:
        ModelError: The two are not the same program.
    """

    def __init__(self, small: Program, large: Program, sizes: tuple[int, int]) -> None:
        if difference := _first_difference(small, large, sizes):
            raise ModelError(
                f"search: {difference}, and one plan cannot have both",
                hint="choose a configuration without mode: auto",
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
        growth, rest = divmod((b - a) * (batch - small), large - small)
        if rest:
            raise ModelError(f"search: the model cannot run a batch of {batch}")
        return a + growth
