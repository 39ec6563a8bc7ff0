"""Outputs of a model under a plan: plain tensors again, in whatever the model returns them in."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Mapping, MutableMapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch.distributed.tensor import DTensor


def plain(value: Any, *, may_be_sharded: bool) -> Any:
    """Return `value` with its sharded tensors gathered and replicated ones as plain tensors.

    Containers keep their type: named tuples, mappings such as the outputs of transformers,
    dataclasses and namespaces.  One without a sharded tensor is returned itself.

    Args:
        value: What a model returned.
        may_be_sharded: Leave sharded tensors, for a loss that is guarded.
    """
    inner = partial(plain, may_be_sharded=may_be_sharded)
    match value:
        case DTensor():
            is_replicated = all(placement.is_replicate() for placement in value.placements)
            return value if may_be_sharded and not is_replicated else value.full_tensor()
        case tuple() | list():
            return _with_members(value, [inner(item) for item in value])
        case Mapping():
            return _with_items(value, {key: inner(item) for key, item in value.items()})
        case SimpleNamespace():
            return _with_attributes(value, {key: inner(item) for key, item in vars(value).items()})
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [
                field.name for field in dataclasses.fields(value) if hasattr(value, field.name)
            ]
            return _with_attributes(value, {name: inner(getattr(value, name)) for name in fields})
        case _:
            return value


def _with_members(value: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    if all(map(operator.is_, items, value)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _with_items(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    new = {key: item for key, item in changed.items() if item is not value[key]}
    if not new:
        return value
    if type(value) is dict or not isinstance(value, MutableMapping):
        return changed
    result = copy.copy(value)
    for key, item in new.items():
        result[key] = item  # outputs of transformers set the attribute too
    return result


def _with_attributes(value: Any, changed: dict[str, Any]) -> Any:
    new = {name: item for name, item in changed.items() if item is not getattr(value, name)}
    if not new:
        return value
    result = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(result, name, item)  # a frozen one too
    return result
