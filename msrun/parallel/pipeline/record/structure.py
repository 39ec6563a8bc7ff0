"""Nested values of forwards: tensors in sequences, mappings and data classes of any depth."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from msrun.parallel.losses.batch import like


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of a tensor in a template.

    Args:
        index: Number of the tensor.
    """

    index: int


def map_structure(change: Callable[[Any], Any], value: Any, kind: type) -> Any:
    """Return `value` with everything of `kind` in it changed; containers keep their types."""
    result: Any
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple | list):
        return like(value, [map_structure(change, item, kind) for item in value])
    if isinstance(value, Mapping):
        changed = {key: map_structure(change, item, kind) for key, item in value.items()}
        if type(value) is dict:
            return changed
        result = copy.copy(value)
        for key, item in changed.items():
            result[key] = item
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            item = map_structure(change, getattr(value, field.name), kind)
            object.__setattr__(result, field.name, item)
        return result
    return value


def is_container(value: Any) -> bool:
    """Return whether `map_structure` looks into `value`."""
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_record or isinstance(value, tuple | list | Mapping)


def leaves(value: Any) -> list[Tensor]:
    """Return the tensors in `value`, in order."""
    return flatten(value)[0]


def flatten(value: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors in `value`, and `value` with a `Leaf` for each."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Leaf:
        found.append(tensor)
        return Leaf(len(found) - 1)

    return found, map_structure(take, value, Tensor)


class Rebuild:
    """Builds a nested value of its tensors; a step of a graph.

    Args:
        template: The value with leaves.
    """

    # As torch names the steps of a graph.
    __name__ = "rebuild"

    def __init__(self, template: Any) -> None:
        self._template = template

    def __call__(self, *tensors: Any) -> Any:
        """Return the value."""
        return map_structure(lambda leaf: tensors[leaf.index], self._template, Leaf)


class Held:
    """Yields an object that is no tensor and cannot be written as source; a step of a graph.

    Args:
        value: The object.
    """

    __name__ = "held"

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        """Return the object."""
        return self._value


def same(value: Any, *others: Any) -> Any:
    """Return `value`, after the `others` are done; a step of a graph."""
    del others
    return value
