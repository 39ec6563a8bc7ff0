"""A model's forward pass as plain data: values, and the steps that make them.

Pure: `trace` makes it of a module, tests make it by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec


class Value(msgspec.Struct, frozen=True):
    """A tensor.

    Args:
        shape: Its sizes, of the whole batch.
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
        """Bytes of the whole tensor."""
        return self.count * self.itemsize


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One operator.

    Args:
        name: Unique among the steps.
        target: The operator, such as `aten.linear.default`.
        inputs: Values it reads, by the name that the operator's schema gives them; members of a
            list are numbered, such as `tensors.0`.
        outputs: Values it makes.
        attrs: Its other arguments by name, defaults included.
        module: Name of the module that runs it; empty for the model itself.
    """

    name: str
    target: str
    inputs: dict[str, str]
    outputs: tuple[str, ...]
    attrs: dict[str, Any] = {}
    module: str = ""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The forward pass of a model.

    Args:
        values: Every tensor by name.
        params: Parameter values -> their names in the model.
        inputs: Values that a batch fills.
        steps: In the order of execution.
        outputs: Values that the model returns.
        frozen: Parameters that are not trained.
    """

    values: dict[str, Value]
    params: dict[str, str]
    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    frozen: frozenset[str] = frozenset()

    def constants(self) -> set[str]:
        """Return the values that no parameter has a part in."""
        made = {name for step in self.steps for name in step.outputs}
        found = set(self.values) - made - set(self.params)
        for step in self.steps:
            if found.issuperset(step.inputs.values()):
                found.update(step.outputs)
        return found

    def trained(self) -> set[str]:
        """Return the values that have a gradient."""
        found = {name for name in self.params if name not in self.frozen}
        for step in self.steps:
            if not found.isdisjoint(step.inputs.values()):
                found |= {name for name in step.outputs if self.values[name].is_float}
        return found

    def uses(self) -> Mapping[str, list[tuple[Step, str]]]:
        """Return value -> the steps that read it, each with the input's name."""
        found: dict[str, list[tuple[Step, str]]] = {name: [] for name in self.values}
        for step in self.steps:
            for slot, name in step.inputs.items():
                found[name].append((step, slot))
        return found
