"""Batches as scripts have them: tensors in tuples, lists, mappings and data classes of any depth.

Mappings keep their type, such as the `BatchEncoding` of a tokenizer.  A tensor whose first dim is
the number of samples is cut; numbers, strings and tensors of another first dim are for every
sample.  Whether a tensor has this size by chance shows in its use: `pairs` notices it.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel.config import ROOT

_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

# In tuples: a union of types would be made anew in each question.
_SCALARS, _SEQUENCES, _MAPPINGS = (bool, int, float, str), (tuple, list), (dict, Mapping)

_ITEMS = "num_items_in_batch"
# An attribute of tensors that were cut; others may have as many rows as a micro-batch by chance.
CUT = "msrun_cut"

# Of methods: reading a signature takes longer than the rest of a step's look at its batch.
_POSITIONAL: weakref.WeakKeyDictionary[FunctionType, tuple[str, ...]] = weakref.WeakKeyDictionary()

# Inputs of one batch, in order or by name.
Sample = Sequence[Any] | Mapping[str, Any] | None


class StepBatch(NamedTuple):
    """What a step gets of a batch.

    Args:
        inputs: Of the model, by position.
        named: Of the model, by name.
        target: Last argument of the loss function; None if the model returns its loss.
        items: What models of transformers divide the sum of their losses by; None leaves it to
            the model.
    """

    inputs: Sequence[Any]
    named: Mapping[str, Any]
    target: Any
    items: Any = None


def map_leaves(change: Callable[[Any], Any], value: Any, kind: type = Tensor) -> Any:
    """Return `value` with everything of `kind` in its structure changed.

    Structure are tuples, lists, mappings and data classes.
    """
    match value:
        case _ if isinstance(value, kind):
            return change(value)
        case tuple() | list():
            items = [
                change(item) if isinstance(item, kind) else map_leaves(change, item, kind)
                for item in value
            ]
            return like(value, items)
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            changed = {key: map_leaves(change, item, kind) for key, item in value.items()}
            return with_items(value, changed)
        case _ if is_dataclass(value) and not isinstance(value, type):
            own = {field.name: getattr(value, field.name) for field in fields(value)}
            return with_fields(value, {k: map_leaves(change, x, kind) for k, x in own.items()})
        case _:
            return value


def with_items(value: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return `items` in a mapping of the type of `value`, if it can be written."""
    if type(value) is dict or not isinstance(value, MutableMapping):
        return items
    result = copy.copy(value)
    for key, item in items.items():
        result[key] = item
    return result


def with_fields(value: Any, items: Mapping[str, Any]) -> Any:
    """Return a data class like `value` with other fields, which may be frozen."""
    if all(getattr(value, key) is item for key, item in items.items()):
        return value
    result = copy.copy(value)
    for key, item in items.items():
        object.__setattr__(result, key, item)
    return result


def like(value: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    """Return `items` in a sequence of the type of `value`, which may have named fields."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def samples_of(batch: Sequence[Tensor]) -> int:
    """Return how many samples a batch has, in the first dim of its first tensor with dims."""
    return next((len(tensor) for tensor in batch if tensor.dim()), 0)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in `value`, in order."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _collect((value,), found)
    return found


def _collect(items: Iterable[Any], found: list[Tensor]) -> None:
    """Add the tensors in `items` to `found`, in order."""
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, _SEQUENCES):
            _collect(item, found)
        elif item is None or isinstance(item, _SCALARS):
            continue  # before the slower questions, as steps ask often
        elif isinstance(item, _MAPPINGS):
            _collect(item.values(), found)
        elif is_dataclass(item) and not isinstance(item, type):
            _collect([getattr(item, field.name) for field in fields(item)], found)


def note_cut(piece: Tensor) -> Tensor:
    """Return `piece`, noting that it is one of several along dim 0."""
    setattr(piece, CUT, True)
    return piece


def tensor_names(value: Any, name: str) -> Iterator[str]:
    """Yield the names of the tensors in `value`, in the order of `tensors_in`; "" if not cut."""
    for each, tensor in _named(value, name):
        yield each if hasattr(tensor, CUT) else ""


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    match value:
        case Tensor():
            yield name, value
        case tuple() | list():
            for place, item in enumerate(value):
                yield from _named(item, f"{name}[{place}]")
        case Mapping():
            for key, item in value.items():
                yield from _named(item, f"{name}[{key!r}]")
        case _ if is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                yield from _named(getattr(value, field.name), f"{name}.{field.name}")


def input_names(model: nn.Module, batch: StepBatch) -> Iterator[str]:
    """Yield what `tensor_names` does for `batch`, by the parameters of `forward`."""
    for name, tensor in named_inputs(model, batch):
        yield name if hasattr(tensor, CUT) else ""


def named_inputs(model: nn.Module, batch: StepBatch) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in `batch` with their names, by the parameters of `forward`."""
    taken = _positional(model.forward) if batch.inputs else ()
    for place, value in enumerate(batch.inputs):
        name = taken[place] if place < len(taken) else f"input {place + 1}"
        yield from _named(value, name)
    for name, value in batch.named.items():
        yield from _named(value, name)
    yield from _named(batch.target, "target")
    yield from _named(batch.items, _ITEMS)


def _positional(forward: Callable[..., Any]) -> Sequence[str]:
    """Return the names of the parameters of a function or method that go by position."""
    function = getattr(forward, "__func__", None)  # a bound method is a new object each time
    names = _POSITIONAL.get(function) if isinstance(function, FunctionType) else None
    if names is None:
        parameters = inspect.signature(forward).parameters.values()
        names = tuple(parameter.name for parameter in parameters if parameter.kind in _KINDS)
        if isinstance(function, FunctionType):
            _POSITIONAL[function] = names
    return names


def move(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`."""
    return map_leaves(lambda tensor: tensor.to(device, non_blocking=True), batch)


def batch_size(batch: Any) -> int:
    """Return the number of samples in `batch`: the first dim of its first tensor.

    Raises:
        ModelError: There is no tensor in it.
    """
    first = batch
    while isinstance(first, _SEQUENCES) and first:
        first = first[0]
    if isinstance(first, Tensor) and first.dim():  # mostly
        return first.shape[0]
    for tensor in tensors_in(batch):
        if shape := tensor.shape:
            return shape[0]
    raise ModelError("the batch holds no tensor with a first dim of samples")


def sample_dim(batch: Any, samples: int) -> int:
    """Return the dim of `batch` that has its samples: 1 with the sequence first, else 0.

    Args:
        batch: Of this rank.
        samples: In it, as a loader says; 0 if none does.
    """
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    if not samples or any(len(tensor) == samples for tensor in tensors):
        return 0
    return int(any(tensor.dim() > 1 and tensor.shape[1] == samples for tensor in tensors))


def has_samples_first(batch: Any, samples: int) -> bool:
    """Return whether the first dim has the samples for certain.

    Args:
        batch: Of this rank.
        samples: In it, as a loader says; 0 if none does.
    """
    shapes = [tensor.shape for tensor in tensors_in(batch) if tensor.dim()]
    is_clear = all(samples not in shape[1:2] for shape in shapes)
    return bool(samples) and is_clear and any(shape[0] == samples for shape in shapes)


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Return `batch` in `parts` pieces along its first dim, whose sizes differ by at most one.

    Raises:
        ModelError: There are fewer samples than pieces.
    """
    if parts == 1:
        return [batch]
    samples = batch_size(batch)
    if samples < parts:
        said = f"{ROOT}.accumulate: {parts} micro-batches of a batch of {samples} sample(s)"
        shapes = [tuple(tensor.shape) for tensor in tensors_in(batch) if tensor.dim()]
        longer = [shape for shape in shapes if shape[0] >= parts]
        if not longer:
            raise ModelError(said)
        raise ModelError(
            f"{said}: the first tensor of the batch has shape {shapes[0]}, and another one has "
            f"{longer[0]}",
            hint="the first tensor tells how many samples there are: put one with a row for each "
            "sample first, or expand the first one to as many rows",
        )

    def piece(index: int) -> Any:
        return map_leaves(lambda tensor: _rows(tensor, samples, parts, index), batch)

    return [piece(index) for index in range(parts)]


def _rows(tensor: Tensor, samples: int, parts: int, index: int) -> Tensor:
    if not tensor.dim() or len(tensor) != samples:
        return tensor
    return note_cut(tensor.tensor_split(parts)[index])


def read_batch(model: nn.Module, batch: Sequence[Any], *, has_loss: bool) -> StepBatch:
    """Return the arguments of the model and the target in the values of a step.

    A mapping as the only input has arguments by name, unless `forward` takes a mapping.

    Args:
        model: The model.
        batch: Inputs, and with a loss function the target behind them.
        has_loss: Whether there is a loss function.

    Raises:
        ModelError: There are too few values.
    """
    if has_loss and len(batch) < 2:  # noqa: PLR2004 - an input and a target
        hint = "rt.step(model, optimizer, loss_fn, inputs, target); without loss_fn the model "
        raise ModelError(
            f"rt.step needs the inputs and the target, not {len(batch)} value(s)",
            hint=f"{hint}returns its loss: rt.step(model, optimizer, batch)",
        )
    inputs, target = (batch[:-1], batch[-1]) if has_loss else (batch, None)
    if not has_loss and len(batch) == 1 and isinstance(batch[0], tuple | list):
        inputs = list(batch[0])
    if not inputs:
        raise ModelError("rt.step needs a batch", hint="rt.step(model, optimizer, batch)")
    if len(inputs) == 1 and isinstance(inputs[0], Mapping) and _takes_names(model, inputs[0]):
        return StepBatch((), inputs[0], target)
    return StepBatch(inputs, {}, target)


def without_items(batch: StepBatch) -> StepBatch:
    """Return `batch` without the targets that count in it, which a step counts itself.

    Models of transformers return the sum of losses divided by `num_items_in_batch`, or their mean.
    The sum has no counterpart in other parts of the batch; the mean has, by its count.
    """
    if _ITEMS not in batch.named:
        return batch
    named = {name: value for name, value in batch.named.items() if name != _ITEMS}
    return batch._replace(named=named, items=batch.named[_ITEMS])


def _takes_names(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether `forward` takes the values of `batch` by name, and not `batch` itself."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return True
    names = {parameter.name for parameter in parameters if parameter.kind in _NAMED}
    required = [p for p in parameters if p.kind in _KINDS and p.default is inspect.Parameter.empty]
    return bool(names.intersection(batch)) or len(required) != 1


def check_target(batch: StepBatch, parts: int, known: int = 0) -> None:
    """Refuse a batch that `parts` micro-batches could not have their own part of.

    Args:
        batch: Of this rank.
        parts: Micro-batches.
        known: Samples in it, as a loader says; 0 if none does.

    Raises:
        ModelError: The target has rows, and not as many as the first input, so it would not be cut;
            or samples are in dim 1.
    """
    if parts > 1 and sample_dim(batch, known):
        raise ModelError(
            f"the batch has its {known} samples in dim 1, and {parts} micro-batches cut dim 0",
            hint="put samples first in inputs and target: transpose a batch with the sequence "
            "first",
        )
    samples = batch_size(batch)
    rows = [len(tensor) for tensor in tensors_in(batch.target) if tensor.dim()]
    if parts > 1 and max(rows, default=1) > 1 and samples not in rows:
        raise ModelError(
            f"the first input has {samples} rows and the target {max(rows)}, so {parts} "
            "micro-batches cannot have their own part of both",
            hint="put samples first in inputs and target: transpose a batch with the sequence "
            "first, and flatten targets in the loss function",
        )


def own_loss(output: Any, *, is_whole: bool = False) -> Any:
    """Return the loss that a model returned: itself, or its field `loss`.

    Args:
        output: Of the model.
        is_whole: Whether it is of the whole batch of all ranks.

    Raises:
        ModelError: There is none, or it has a term over the whole batch.
    """
    if isinstance(output, Tensor):
        return output
    balancing = None if is_whole else _field(output, "aux_loss")
    if balancing is not None and balancing.requires_grad:
        raise ModelError(
            "the loss of the model has a term that balances experts over a whole batch (aux_loss),"
            " and each rank and micro-batch has a part of it",
            hint="set output_router_logits=False",
        )
    loss = _field(output, "loss")
    if isinstance(output, tuple) and loss is None:
        sizes = [item.numel() if isinstance(item, Tensor) else 1 for item in output]
        if sizes == [1, 1]:  # its sum and count
            return output
        loss = output[0] if sizes[:1] == [1] else None
    if loss is None:
        raise ModelError(
            f"the model returned {type(output).__name__} without a loss",
            hint="give it its labels in the batch, or rt.step a loss function and a target",
        )
    return loss


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
