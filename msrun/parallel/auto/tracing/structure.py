"""Nested arguments and results: containers with tensors, plain values and objects in them.

A trace and an executor pass tensors alone.  What is around them, such as a dict, a dataclass or an
output class of a library, is taken apart on one side and put together again on the other.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from msrun.errors import ModelError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_COMPUTED = (torch.SymInt, torch.SymFloat, torch.SymBool)


def mapped(item: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return `item` with `leaf` of everything in it that is no container, in order."""
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(mapped(part, leaf) for part in item))
    if isinstance(item, list | tuple):
        return type(item)([mapped(part, leaf) for part in item])
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return _mapped_fields(item, leaf)
    if isinstance(item, MutableMapping):
        made = copy.copy(item)
        for key, part in item.items():
            made[key] = mapped(part, leaf)
        return made
    return leaf(item)


def _mapped_fields(item: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(item, Mapping):  # an output class of transformers
        return type(item)(**{key: mapped(part, leaf) for key, part in item.items()})
    made = copy.copy(item)
    for field in dataclasses.fields(item):
        object.__setattr__(made, field.name, mapped(getattr(item, field.name), leaf))
    return made


def leaves_of(item: Any) -> list[Any]:
    """Return everything in `item` that is no container."""
    found: list[Any] = []

    def noted(leaf: Any) -> Any:
        found.append(leaf)
        return leaf  # a torch.Size takes nothing but numbers

    mapped(item, noted)
    return found


def leaf_tensors(item: Any) -> list[Tensor]:
    """Return the tensors in `item`."""
    return [leaf for leaf in leaves_of(item) if isinstance(leaf, Tensor)]


def with_tensors(item: Any, tensors: Iterable[Tensor]) -> Any:
    """Return `item` with its tensors replaced, in order."""
    given = iter(tensors)
    return mapped(item, lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf)


class OutputForm:
    """What a model returns, without its tensors.

    Args:
        output: What it returned in a trace.

    Raises:
        ModelError: It holds a number that is computed from tensors.
    """

    def __init__(self, output: Any) -> None:
        self._form = mapped(output, _emptied)

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """Return the output with these tensors."""
        given = iter(tensors)
        return mapped(self._form, lambda leaf: next(given) if leaf is _TENSOR else leaf)


def _emptied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _TENSOR
    if isinstance(leaf, _COMPUTED):
        raise ModelError(
            "search: the model returns a number that it computes from tensors",
            hint="return the tensor, without .item()",
        )
    return leaf if isinstance(leaf, _PLAIN) else Uncomputed(type(leaf).__name__)


class _TensorPlace:
    """The place of a tensor in an output."""


_TENSOR = _TensorPlace()


class Uncomputed:
    """Replaces an object in an output that a plan does not compute, such as a cache of keys.

    Every use of it raises `ModelError`.

    Args:
        kind: Class of the object.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def _refuse(self, *_: Any) -> NoReturn:
        raise ModelError(
            f"parallel.mode: auto does not compute the {self._kind} that the model returns",
            hint="read only tensors of the output, or have the model return none (use_cache=False)",
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse the attribute; what Python looks for itself is not there."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        """Return what it replaces."""
        return f"<{self._kind}, not computed by parallel.mode: auto>"

    __getitem__ = __iter__ = __len__ = __bool__ = __call__ = __contains__ = _refuse
