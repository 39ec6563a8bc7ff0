"""Gives a model that was built in `DeferredInit` memory, and each rank its shard of the values.

Call `find`, shard the model while it has no memory, then `fill` it.  Hooks of parameters, weak
references to them and optimizers come after that: parameters stay the same Python objects, but
their tensors are swapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.deferred.init import materialize
from msrun.parallel.deferred.log import ConstructorLog, StorageSlot, View, slot_of, tensors_of
from msrun.parallel.local import is_sharded, local_part
from msrun.parallel.uneven_rows.rows import TablePart, rows_of

_REGISTERED = frozenset(("_parameters", "_buffers", "_modules"))


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors of a model whose values are still to be replayed.

    Attributes:
        views: Log -> name -> tensor; each tensor has its first name.
        others: Those that are neither parameters nor buffers -> `id`, while modules hold them.
    """

    views: dict[ConstructorLog, dict[str, View]]
    others: dict[str, int]


def find(model: nn.Module) -> Weights | None:
    """Return the tensors of `model` that were made in `DeferredInit`; None if there are none.

    Raises:
        ModelError: A tensor is on meta for another reason, was written since, or shares memory
            with another one.
    """
    registered = {name: tensor for name, tensor in _registered(model) if not is_lazy(tensor)}
    for name, tensor in registered.items():
        if tensor.is_meta and slot_of(tensor) is None:
            raise ModelError(
                f"{name} is on the device meta, and was not made inside init_on_meta",
                hint="build the whole model in one `with rt.init_on_meta()`",
            )
    if not any(slot_of(tensor) for tensor in registered.values()):
        return None
    known = {id(tensor) for tensor in registered.values()}
    others = {name: t for name, t in _other_tensors(model).items() if id(t) not in known}
    weights = Weights(views={}, others={name: id(other) for name, other in others.items()})
    seen: dict[StorageSlot, list[tuple[str, View]]] = {}
    for name, tensor in {**registered, **others}.items():
        slot = slot_of(tensor)
        if slot is not None:
            view = slot.log.view(tensor)
            _check(name, tensor, view, seen.setdefault(slot, []))
            weights.views.setdefault(slot.log, {})[name] = view
    for name, tensor in _registered(model):
        if is_lazy(tensor):
            raise ModelError(f"{name} was made inside init_on_meta, and has no shape yet")
    return weights


def _registered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _check(name: str, tensor: Tensor, view: View, seen: list[tuple[str, View]]) -> None:
    """Refuse a tensor whose values are not those of the log, or which overlaps with `seen`."""
    log = view.slot.log
    if log.is_open:
        raise ModelError("rt.shard is called inside init_on_meta", hint="call it after the block")
    if torch_compat.write_count(tensor) > log.writes_max:
        raise ModelError(
            f"{name} was written between init_on_meta and rt.shard, where it has no memory",
            hint="do it inside the block, or after rt.shard",
        )
    for other, taken in seen:
        if view.overlaps(taken):
            raise ModelError(
                f"{name} shares memory with {other} and is another tensor",
                hint="give the model one parameter under both names, or two copies",
            )
    seen.append((name, view))


def fill(
    model: nn.Module,
    weights: Weights,
    device: torch.device,
    on_host: Collection[Parameter] = (),
) -> None:
    """Give tensors of `model` on meta memory, and `weights` their values.

    All ranks call it.  It takes the memory of the model's shard and of about one full parameter.

    Args:
        model: Sharded since `weights` were found in it, or not; names are what they were.
        weights: Of `find`.
        device: Of parameters and buffers.
        on_host: Parameters that belong on the CPU instead.

    Raises:
        ModelError: Another rank has built another model.
    """
    for log in weights.views:
        check_same_log(log, device)
    others = {
        name: torch.empty(view.size, dtype=view.dtype)
        for views in weights.views.values()
        for name, view in views.items()
        if name in weights.others
    }
    _replace_others(model, {weights.others[name]: other for name, other in others.items()})
    before = dict(model.named_buffers(remove_duplicate=False))
    _allocate(model, device, on_host)
    after = dict(model.named_buffers(remove_duplicate=False))
    _replace_others(model, {id(old): after[name] for name, old in before.items()})
    targets = {**dict(model.named_parameters(remove_duplicate=False)), **after, **others}

    def take(name: str, values: Tensor) -> None:
        target = local_part(targets[name]).detach()
        part = part_of(values, targets[name])
        if part.shape != target.shape:
            raise RuntimeError(f"{name} is {list(target.shape)} and its part {list(part.shape)}")
        target.copy_(part)

    with torch.no_grad():
        for log, views in weights.views.items():
            materialize(log, views, take)


def part_of(values: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of `values`, placed like the sharded tensor `like`."""
    if rows := rows_of(like):
        return rows.cut(values)
    if not is_sharded(like):
        return values
    coordinate = like.device_mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError("this rank is not on the mesh of its own parameter")
    for axis, placement in enumerate(like.placements):
        parts = torch_compat.parts_before(placement)
        if parts is not None:
            dim, count = placement.dim, like.device_mesh.size(axis)  # type: ignore[attr-defined]
            pieces = [_chunk(p, count, dim, coordinate[axis]) for p in values.chunk(parts, dim)]
            values = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        elif not placement.is_replicate():
            raise RuntimeError(f"a parameter is placed as {placement}")
    return values


def _chunk(values: Tensor, count: int, dim: int, index: int) -> Tensor:
    chunks = values.chunk(count, dim)
    return chunks[index] if index < len(chunks) else values.narrow(dim, 0, 0)


def move(model: nn.Module, device: torch.device) -> None:
    """Bring tensors of `model` that have memory to `device`."""
    torch_compat.replace_tensors(model, lambda t: t if t.is_meta else t.to(device))


def _allocate(model: nn.Module, device: torch.device, on_host: Collection[Parameter]) -> None:
    host = {id(param) for param in on_host}
    attributes = [(param, type(param), dict(vars(param))) for param in model.parameters()]
    made: dict[int, Tensor] = {}

    def make(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            where = "cpu" if id(tensor) in host else device
            made[id(tensor)] = torch.empty_like(tensor, device=where)
        return made[id(tensor)]

    try:
        with _swapping():
            torch_compat.replace_tensors(model, make)
    except RuntimeError as error:
        raise ModelError(
            f"a parameter can not be given memory: {error.__cause__ or error}",
            hint="weak references to it, and results computed from it, must be gone by rt.shard",
        ) from error
    for param, kind, saved in attributes:
        if rows_of(param) is None and issubclass(kind, TablePart):  # torch makes plain ones
            param.__class__ = kind
        for name, value in saved.items():
            vars(param).setdefault(name, value)


@contextlib.contextmanager
def _swapping() -> Iterator[None]:
    """Have torch swap the tensors of parameters, so that one with two names stays one object."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _other_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return tensors of blocks that are attributes of modules, not parameters or buffers."""
    others: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _REGISTERED:
                for index, tensor in enumerate(tensors_of(value)):
                    if slot_of(tensor) is not None:
                        name = f"{prefix}.{key}" if prefix else key
                        others[name if value is tensor else f"{name}[{index}]"] = tensor
    return others


def _replace_others(model: nn.Module, new: Mapping[int, Tensor]) -> None:
    for module in model.modules():
        for key, value in vars(module).items():
            if key not in _REGISTERED and tensors_of(value):
                vars(module)[key] = _replaced(value, new)


def _replaced(value: Any, new: Mapping[int, Tensor]) -> Any:
    match value:
        case Tensor():
            return new.get(id(value), value)
        case list():
            value[:] = [_replaced(item, new) for item in value]
        case dict():
            value.update({key: _replaced(item, new) for key, item in value.items()})
        case tuple() if tensors_of(value):
            return type(value)([_replaced(item, new) for item in value])
    return value


def share_random_state(device: torch.device) -> None:
    """Give the default generator of every rank the state that the first rank's has."""
    there = torch.get_rng_state().to(device)
    dist.broadcast(there, src=0)
    torch.set_rng_state(there.cpu())


def check_same_log(log: ConstructorLog, device: torch.device) -> None:
    """Refuse a log that differs from that of the first rank; all ranks call it.

    Raises:
        ModelError: Some rank has another one.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = torch.tensor(list(log.fingerprint()), dtype=torch.uint8, device=device)
    fingerprints = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(fingerprints, own)
    for rank, other in enumerate(fingerprints):
        if not torch.equal(other, fingerprints[0]):
            raise ModelError(
                f"rank {rank} did not build the model of rank 0 inside init_on_meta",
                hint="numbers of Python's and numpy's generators must be the same on all ranks: "
                "`seed` in the configuration sees to it",
            )
