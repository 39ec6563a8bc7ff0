"""Targets of a load: the tensors and values in models and optimizers that a checkpoint fills.

Everything is checked while the targets are made, before the first one is filled.  Names are those
of the unmodified model, so the layout that wrote the checkpoint does not matter here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from msrun.errors import CheckpointError
from msrun.parallel.checkpoint.schema import Index, StoredTensor
from msrun.parallel.checkpoint.state import MODEL, OPTIMIZER, TensorNames
from msrun.parallel.checkpoint.tensors import TORCH_DTYPES
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.local import has_memory, is_sharded
from msrun.parallel.uneven_rows.rows import RowRange, plain, rows_of, whole_shape

_STEP_COUNT = "step"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor to fill.

    Args:
        tensor: Tensor of this rank, plain or sharded.
        stored: Position of its values in the files.
        rows: Which rows of a table the tensor has; None of any other.
    """

    tensor: Tensor
    stored: StoredTensor
    rows: RowRange | None = None


class Targets:
    """Targets of one load: `tensors` to fill from files, and other state that `apply` sets.

    Args:
        names: Names of the models' tensors.
        optimizers: Optimizers of their parameters.
        index: Index of the checkpoint.

    Raises:
        CheckpointError: The checkpoint lacks some state, or has it in another shape.
    """

    def __init__(self, names: TensorNames, optimizers: Sequence[Optimizer], index: Index) -> None:
        self.tensors: dict[str, Target] = {}
        self._names = names
        self._index = index
        self._kept = _kept_keys(index)
        self._states: list[tuple[Optimizer, Parameter, dict[str, Any]]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._add_models()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self._add_group(optimizer, group)

    @property
    def taken(self) -> list[bool]:
        """For each model tensor in the checkpoint, in order, whether this rank has a place."""
        own = {MODEL + name for name in (*self._names.tensors, *self._names.aliases)}
        own |= set(self.tensors)
        # Earlier releases wrote names that are both a tensor and a further name of another one.
        taken = own | {self._index.aliases.get(name, name) for name in own}
        return [name in taken for name in _models_tensors(self._index)]

    def apply(self) -> None:
        """Set optimizer state, settings and extra state, once the tensors are filled."""
        for optimizer, param, kept in self._states:
            if kept:
                optimizer.state[param] = kept
            else:
                optimizer.state.pop(param, None)
        for group, settings in self._groups:
            for key, value in settings.items():
                group[key] = _like(group.get(key), value)
        for name, module in self._names.extra.items():
            filled = self.tensors.get(MODEL + name)
            value = self._index.values.get(MODEL + name) if filled is None else filled.tensor
            module.set_extra_state(value)

    def _add_models(self) -> None:
        for name, tensor in self._names.tensors.items():
            stored = self._stored(name)
            shape = list(whole_shape(tensor))
            if stored.shape != shape:
                raise CheckpointError(
                    f"{name} is {shape} in the model and {stored.shape} in the checkpoint"
                )
            if tensor.device.type == "meta":
                hint = "model.to_empty(device=rt.device) gives it memory"
                raise CheckpointError(
                    f"{name} is on the device meta, which holds no values", hint=hint
                )
            target = Target(tensor=tensor.detach(), stored=stored, rows=rows_of(tensor))
            self.tensors[MODEL + name] = target
        for name in self._names.extra:
            if MODEL + name not in self._index.values:
                stored = self._stored(name)
                empty = torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
                self.tensors[MODEL + name] = Target(tensor=empty, stored=stored)

    def _stored(self, name: str) -> StoredTensor:
        same = (alias for alias, first in self._names.aliases.items() if first == name)
        for candidate in (*_names_of(name), *same):
            stored = self._index.find(MODEL + candidate)
            if stored is not None:
                return stored
        raise CheckpointError(f"the checkpoint has no {name}")

    def _add_group(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        first = ""
        for param in group["params"]:
            name = self._names.of(param, optimizer)
            prefix = _optimizer_name(self._index, name)
            settings = self._index.values[prefix]
            if not first:
                first = name
                self._groups.append((group, settings))
            # Settings are stored for each parameter, but an optimizer has one set for each group.
            elif settings != self._groups[-1][1]:
                raise CheckpointError(
                    f"{first} and {name} are in one group of {type(optimizer).__name__}, and not "
                    "in the checkpoint"
                )
            kept = dict(self._index.values.get(f"{prefix}.", {}))
            for key in self._kept.get(prefix, ()):
                stored = self._index.tensors[f"{prefix}.{key}"]
                current = optimizer.state.get(param, {}).get(key)
                kept[key] = _tensor_for(param, group, current, stored, f"{name}.{key}")
                is_whole = list(plain(param).shape) != list(kept[key].shape)
                rows = None if is_whole else rows_of(param)
                target = Target(tensor=kept[key], stored=stored, rows=rows)
                self.tensors[f"{OPTIMIZER}{name}.{key}"] = target
            self._states.append((optimizer, param, kept))


def check_taken(taken: Sequence[bool], index: Index) -> None:
    """Refuse a checkpoint with model tensors that no rank has a place for.

    Args:
        taken: `Targets.taken` of all ranks together.
        index: Index of the checkpoint.
    """
    names = [name for name, flag in zip(_models_tensors(index), taken, strict=True) if not flag]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        first = names[0].removeprefix(MODEL)
        raise CheckpointError(f"the model has no place for {first}{more} of the checkpoint")


def _models_tensors(index: Index) -> list[str]:
    """Return the names of model tensors, without those of single data-parallel ranks.

    A job with fewer ranks has no place for the parameters that were another rank's own.
    """
    return sorted(
        name for name in index.tensors if name.startswith(MODEL) and f"@{DATA_AXIS}" not in name
    )


def _kept_keys(index: Index) -> dict[str, list[str]]:
    """Return parameter -> keys of its tensors in the optimizer state."""
    keys: dict[str, list[str]] = {}
    for name in index.tensors:
        if name.startswith(OPTIMIZER):
            prefix, _, key = name.rpartition(".")
            keys.setdefault(prefix, []).append(key)
    return keys


def _names_of(name: str) -> Iterator[str]:
    """Yield `name`, and for a rank's own parameter the name of rank 0's, which new ranks take."""
    yield name
    if f"@{DATA_AXIS}" in name:
        yield name.partition(f"@{DATA_AXIS}")[0]


def _optimizer_name(index: Index, name: str) -> str:
    """Return the name under which the checkpoint has the optimizer state of parameter `name`.

    For a tensor with two names, one process saves one state; two stages of a pipeline that each
    have one of the names save two.
    """
    for candidate in _names_of(name):
        first = index.aliases.get(MODEL + candidate, MODEL + candidate)
        same = [alias for alias, other in index.aliases.items() if other == first]
        for key in (MODEL + candidate, first, *same):
            stored = OPTIMIZER + key.removeprefix(MODEL)
            if stored in index.values:
                return stored
    if any(key.startswith(OPTIMIZER) for key in index.values):
        raise CheckpointError(f"the checkpoint has no optimizer state of {name}")
    hint = "rt.load(path, model) takes the model alone"
    raise CheckpointError("the checkpoint has no state of an optimizer", hint=hint)


def _tensor_for(
    param: Parameter, group: dict[str, Any], current: Any, stored: StoredTensor, name: str
) -> Tensor:
    """Return the tensor to fill with optimizer state, sharded like `param` if it has its shape.

    Args:
        param: Parameter that the state belongs to.
        group: Settings of the optimizer.
        current: Present state; a tensor of the stored shape is filled in place.
        stored: Position of the values in the files.
        name: Name of the state, for messages.
    """
    dtype, shape = TORCH_DTYPES[stored.dtype], stored.shape
    rows, own = rows_of(param), plain(param)
    if isinstance(current, Tensor):
        is_part = rows is not None and current.shape == own.shape
        if list(rows.shape(current) if rows and is_part else current.shape) == shape:
            return current.detach()
    if list(whole_shape(param)) == shape and not name.endswith(f".{_STEP_COUNT}"):
        if not has_memory(own):
            return torch.zeros((), dtype=dtype, device=own.device).expand(shape)
        return torch.zeros_like(own.detach(), dtype=dtype)
    if (is_sharded(param) or rows) and shape:
        raise CheckpointError(
            f"{name} {shape} has another shape than its parameter, so its sharding is not known",
            hint="let the optimizer take a step before loading",
        )
    # torch keeps step counts, which have no dims, on the host, except for these two settings.
    is_beside = bool(shape) or group.get("capturable") or group.get("fused")
    return torch.zeros(shape, dtype=dtype, device=param.device if is_beside else "cpu")


def _like(current: Any, value: Any) -> Any:
    """Return `value` in the type of `current`."""
    match current:
        case Tensor():
            return current.fill_(value)
        case tuple():
            return tuple(value) if isinstance(value, list) else value
        case _:
            return value
