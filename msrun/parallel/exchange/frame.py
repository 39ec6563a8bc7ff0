"""Outputs of models as plain values: structures of tensors that one rank sends to the others.

A frame has the sequences and mappings of an output, and in place of each tensor its shape and type.
Named tuples and mappings of other classes, such as outputs of transformers, go by the name of their
class.  The receiver takes it only from a module that it has imported itself, and only if it is such
a class, so a frame cannot name code to run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from msrun.errors import ModelError
from msrun.parallel.exchange import messages

_Plain = bool | int | float | str | None


class TensorSlot(msgspec.Struct, frozen=True, tag="tensor"):
    """The place of a tensor.

    Args:
        shape: Its sizes.
        dtype: Name of its type.
    """

    shape: list[int]
    dtype: str


class PlainLeaf(msgspec.Struct, frozen=True, tag="plain"):
    """A value that is no tensor."""

    value: _Plain


class SequenceFrame(msgspec.Struct, frozen=True, tag="sequence"):
    """A tuple or list of the class `kind`, given by module and name."""

    kind: tuple[str, str]
    items: list[Frame]


class MappingFrame(msgspec.Struct, frozen=True, tag="mapping"):
    """A mapping of the class `kind`, given by module and name."""

    kind: tuple[str, str]
    items: list[tuple[_Plain, Frame]]


Frame = TensorSlot | PlainLeaf | SequenceFrame | MappingFrame


class SentOutput(msgspec.Struct, frozen=True):
    """The frame of an output, or why it has none."""

    frame: Frame
    problem: str = ""


def frame_of(output: Any) -> SentOutput:
    """Return the frame of `output`."""
    try:
        return SentOutput(_frame(output, "the output"))
    except ModelError as error:
        return SentOutput(PlainLeaf(None), error.message)


def fill(sent: SentOutput, tensor_of: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> Any:
    """Return the output of `sent`, with tensors that `tensor_of` makes, in order.

    Raises:
        ModelError: The output could not be sent.
    """
    if sent.problem:
        raise ModelError(sent.problem, hint="return tensors alone, as with use_cache=False")
    return _fill(sent.frame, tensor_of)


def _frame(value: Any, name: str) -> Frame:
    match value:
        case Tensor():
            return TensorSlot([*value.shape], messages.dtype_name(value.dtype))
        case None | bool() | int() | float() | str():
            return PlainLeaf(value)
        case tuple() | list():
            items = [_frame(item, f"{name}[{at}]") for at, item in enumerate(value)]
            return SequenceFrame(_kind(value, name), items)
        case Mapping() if all(isinstance(key, _Plain) for key in value):
            pairs = [(key, _frame(item, f"{name}[{key!r}]")) for key, item in value.items()]
            return MappingFrame(_kind(value, name), pairs)
        case _:
            raise ModelError(
                f"{name} is a {type(value).__name__}, and the last stage of a pipeline sends the "
                "others tensors and plain values"
            )


def _kind(value: Any, name: str) -> tuple[str, str]:
    kind = type(value)
    found = (kind.__module__, kind.__qualname__)
    if _class_of(found) is not kind:
        raise ModelError(f"{name} is a {kind.__name__}, a class that no module has by this name")
    return found


def _class_of(kind: tuple[str, str]) -> type | None:
    module, name = kind
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, (tuple, list, Mapping)):
        return None
    return found


def _fill(frame: Frame, tensor_of: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> Any:
    match frame:
        case TensorSlot():
            return tensor_of(tuple(frame.shape), messages.dtype_named(frame.dtype))
        case PlainLeaf():
            return frame.value
        case SequenceFrame():
            kind = _known(frame.kind)
            items = [_fill(item, tensor_of) for item in frame.items]
            return kind(*items) if hasattr(kind, "_fields") else kind(items)
        case MappingFrame():
            named: dict[Any, Any] = {key: _fill(item, tensor_of) for key, item in frame.items}
            kind = _known(frame.kind)
            # Outputs of transformers are dataclasses, whose fields are their keys.
            is_by_field = hasattr(kind, "__dataclass_fields__")
            is_mutable = issubclass(kind, MutableMapping)
            return kind(**named) if is_by_field else kind(named) if is_mutable else named


def _known(kind: tuple[str, str]) -> Any:
    found = _class_of(kind)
    if found is None:
        raise ModelError(
            f"the last stage of the pipeline returns a {'.'.join(kind)}, which this rank has not "
            "imported",
            hint="import it in the script",
        )
    return found
