"""Activations in the memory of the host, from the forward of their module to its backward.

Theory of operation.  Autograd keeps what a backward pass will need.  `saved_tensors_hooks` is asked
for each such tensor: the forward of a configured module runs under a pair of them, which sends the
memory of the tensor to the host and keeps where it is.  On a device the copy runs on a stream of
its own, beside the computation, and the memory is free once both have done with it.

The way back.  Each forward of a module is a call, and knows the one before it.  When the backward
pass first needs a tensor of a call, all that is left of this one and of the `prefetch` calls before
it starts on its way back, so the next module finds its tensors there.

What moves is whole storages, byte for byte, and tensors are views of them again: the queries, keys
and values of one projection are copied once, strides stay as they were, and so results are equal to
the last bit.

What stays on the device:

- Weights and buffers of the module, also gathered ones, and casts of a weight (autocast).  They do
  not go away between forward and backward, or `fully_shard` sees to it.
- Arguments without a gradient, such as masks and tables of positions, which all modules share.
- Small tensors, and kinds of tensors that have no plain storage.

Autograd does not notice that a saved tensor was written later if there are hooks, and on a device
the write may come before the copy.  So this is checked here, as without hooks: of a tensor that has
moved a witness stays, which has no memory and its count of writes.

A recomputed module saves its inputs alone, and these are what moves.

A module that a backward pass leaves out, or passes twice (`retain_graph`), costs only time: the
memory on the host lives as long as autograd holds the saved tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.host.lanes import Back, CopyStream, HostMemory, Lane
from msrun.parallel.local import is_sharded, local_part
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.match import matching
from msrun.parallel.settings.host import Offload
from msrun.parallel.torch_compat import is_fake, write_count

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_KEY = f"{ROOT}.offload.activations"


def find(config: ParallelConfig, model: nn.Module, recomputed: Collection[str]) -> list[str]:
    """Return the outermost modules whose activations go to the host.

    Args:
        config: The configuration.
        model: The model.
        recomputed: Modules that recompute.

    Raises:
        ModelError: A pattern matches what is not called, or has no activations of its own.
    """
    if not config.offload:
        return []
    modules = dict(model.named_modules())
    chosen = matching(config.offload.activations, list(modules), "offload.activations")
    names = [
        name
        for name in modules
        if name in chosen and not any(name != other and _is_inside(name, other) for other in chosen)
    ]
    for name in names:
        if not name:
            raise ModelError(
                f"{_KEY}: matches the whole model, of which no part could come back ahead of the "
                "backward pass",
                hint="name its parts, such as 'layers.*'",
            )
        if type(modules[name]).forward is nn.Module.forward:
            kind = type(modules[name]).__name__
            raise ModelError(
                f"{_KEY}: {name} is a {kind}, which has no forward", hint="name its members"
            )
        for other in recomputed:
            if name != other and _is_inside(name, other):
                raise ModelError(
                    f"{_KEY}: {name} is inside of {other}, which recomputes, so it saves nothing",
                    hint=f"name {other}, whose inputs then go to the host, or recompute less",
                )
    return names


def apply(
    config: ParallelConfig, model: nn.Module, names: Collection[str], device: torch.device
) -> Activations | None:
    """Have the modules called `names`, of those that `model` has, keep activations on the host."""
    if not config.offload:
        return None
    own = {name for name, _ in model.named_modules()}
    activations = Activations(config.offload, device)
    activations.apply(model, [name for name in names if name in own])
    return activations


def _is_inside(name: str, other: str) -> bool:
    """Return whether the module `name` is `other` or inside of it."""
    return not other or f"{name}.".startswith(f"{other}.")


@dataclass(slots=True)
class HostTraffic:
    """What went to the host and came back, since `rt.shard`.

    Args:
        tensors: Storages that went there.
        bytes: Their bytes.
        ahead: Storages whose way back began before their module needed one of them.
    """

    tensors: int = 0
    bytes: int = 0
    ahead: int = 0


class Activations:
    """The activations of some modules of one model.

    Args:
        settings: The section of the configuration.
        device: Of this rank.

    Attributes:
        moved: What went to the host so far.
    """

    def __init__(self, settings: Offload, device: torch.device) -> None:
        self.moved = HostTraffic()
        self._device = device
        self._least = int(settings.threshold)
        self._prefetch = settings.prefetch
        self._begin()

    def _begin(self) -> None:
        is_host = self._device.type == "cpu"
        self._lane: Lane = HostMemory() if is_host else CopyStream(self._device)
        self._last: weakref.ref[_OffloadedCall] | None = None

    # Of a model that the script copies or pickles.

    def __getstate__(self) -> dict[str, Any]:
        return {key: at for key, at in vars(self).items() if key not in ("_lane", "_last")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def apply(self, model: nn.Module, names: Iterable[str]) -> None:
        """Have the modules called `names` keep their activations on the host, in place."""
        for name in names:
            module = model.get_submodule(name)
            forward = module.forward
            changed = partial(self._forward, module, forward)
            # Where the signature of the forward is looked for.
            module.forward = update_wrapper(changed, forward)

    def _forward(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        /,  # names of arguments are the model's
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Without gradients nothing is saved.
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = None if self._last is None else self._last()
        call = _OffloadedCall(self._lane, self.moved, before)
        self._last = weakref.ref(call)
        known = _Known(_staying(module, tensors_in([args, kwargs])))
        with saved_tensors_hooks(partial(self._pack, call, known), self._unpack):
            return forward(*args, **kwargs)

    def _pack(self, call: _OffloadedCall, known: _Known, tensor: Tensor) -> _Saved:
        with torch.no_grad():
            if is_sharded(tensor):
                return _SavedShard(self._pack(call, known, tensor.to_local()), _Layout.of(tensor))
            if self._stays(known, tensor):
                # A result that is kept itself would keep the node that keeps it.
                own = tensor if tensor.grad_fn is None else tensor.detach()
                return _OnDevice(own, write_count(tensor))
            storage = tensor.untyped_storage()
            slot = known.slot(storage, write_count(tensor))
            if slot is None:
                slot = call.send(_bytes_of(storage))
                known.note(storage, write_count(tensor), slot)
            slot.left += 1
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            return _OnHost(call, slot, tensor.dtype, place, _witness(tensor), write_count(tensor))

    def _stays(self, known: _Known, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or is_fake(tensor):
            return True
        if tensor.device != self._device or tensor.is_conj() or tensor.is_neg():
            return True
        storage = tensor.untyped_storage()
        is_small = storage.nbytes() < max(self._least, 1)
        return is_small or storage.data_ptr() in known.staying or _is_cast_weight(tensor)

    def _unpack(self, saved: _Saved) -> Tensor:
        if isinstance(saved, _OnDevice):
            _check_unwritten(saved.tensor, saved.version, saved.tensor.shape)
            return saved.tensor
        with torch.no_grad():
            if isinstance(saved, _SavedShard):
                return saved.layout.sharded(self._unpack(saved.part))
            _check_unwritten(saved.witness, saved.version, saved.place[1])
            saved.call.begin(self._prefetch)
            memory = saved.slot.take().untyped_storage()
            empty = torch.empty(0, dtype=saved.dtype, device=self._device)
            return empty.set_(memory, *saved.place)


def _staying(module: nn.Module, given: Iterable[Tensor]) -> set[int]:
    """Return the memory of the weights and buffers of `module`, and of `given` without gradient."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    tensors += [tensor for tensor in given if not tensor.requires_grad]
    parts = map(local_part, tensors)
    plain = (part for part in parts if part.layout == torch.strided and not is_fake(part))
    return {part.untyped_storage().data_ptr() for part in plain} - {0}


def _witness(tensor: Tensor) -> Tensor:
    """Return a tensor without memory that counts the writes to `tensor`."""
    found = tensor.detach()
    found.data = tensor.new_empty(0)
    return found


def _check_unwritten(tensor: Tensor, version: int, shape: torch.Size) -> None:
    """Refuse a saved tensor of `shape` that was written since; `tensor` counts its writes.

    Raises:
        ModelError: It was.
    """
    if write_count(tensor) != version:
        raise ModelError(
            f"a tensor of shape {tuple(shape)} that the backward pass needs was written in place "
            "after the forward pass had used it",
            hint="write a copy: x = x.clone()",
        )


def _is_cast_weight(tensor: Tensor) -> bool:
    """Return whether autocast made `tensor` of a weight."""
    node = tensor.grad_fn
    if node is None or not node.name().startswith("ToCopy"):
        return False
    return all(
        of and isinstance(getattr(of, "variable", None), Parameter) for of, _ in node.next_functions
    )


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """Return the whole memory of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Known:
    """What is known of memory during one call.

    Args:
        staying: Addresses of memory that stays on the device.
    """

    def __init__(self, staying: set[int]) -> None:
        self.staying = staying
        # A weak reference keeps the key of a storage from being used again.
        self._sent: dict[int, tuple[StorageWeakRef, int, weakref.ref[_Slot]]] = {}

    def slot(self, storage: UntypedStorage, version: int) -> _Slot | None:
        """Return where `storage` went already, if nobody has written it since."""
        reference, sent, slot = self._sent.get(StorageWeakRef(storage).cdata, (None, None, None))
        return slot() if slot and reference and sent == version else None

    def note(self, storage: UntypedStorage, version: int, slot: _Slot) -> None:
        """Note where `storage` went."""
        reference = StorageWeakRef(storage)
        self._sent[reference.cdata] = reference, version, weakref.ref(slot)


class _OffloadedCall:
    """One forward of one module.

    Args:
        lane: The way to the host.
        moved: What went there so far.
        before: The forward of a module before this one.

    Attributes:
        has_begun: Whether the backward pass has come here.
    """

    def __init__(self, lane: Lane, moved: HostTraffic, before: _OffloadedCall | None) -> None:
        self._lane, self._moved = lane, moved
        self._before = None if before is None else weakref.ref(before)
        # The saved tensors have the slots.
        self._slots: list[weakref.ref[_Slot]] = []
        self.has_begun = False

    def send(self, memory: Tensor) -> _Slot:
        """Start the copy of `memory` to the host."""
        slot = _Slot(self._lane, memory)
        self._slots.append(weakref.ref(slot))
        self._moved.tensors += 1
        self._moved.bytes += memory.nbytes
        return slot

    def begin(self, prefetch: int) -> None:
        """Have everything of this call and of `prefetch` calls before it on its way back."""
        if self.has_begun:
            return
        self.has_begun = True
        self.fetch()
        call = self.before()
        for _ in range(prefetch):
            if call is None:
                return
            if not call.has_begun:
                self._moved.ahead += call.fetch()
            call = call.before()

    def before(self) -> _OffloadedCall | None:
        """Return the forward before this one, if autograd still holds what it saved."""
        return None if self._before is None else self._before()

    def fetch(self) -> int:
        """Start what is left on its way back, the last first; return how many storages it is."""
        slots = filter(None, (reference() for reference in reversed(self._slots)))
        return sum(slot.fetch() for slot in slots)


class _Slot:
    """The memory of one tensor, or of several that are views of it, on the host.

    Args:
        lane: The way there and back.
        memory: On the device.

    Attributes:
        left: Saved tensors of it that did not come back.
    """

    def __init__(self, lane: Lane, memory: Tensor) -> None:
        self._lane = lane
        self._host = lane.send(memory)
        self._back: Back | None = None
        self.left = 0

    def fetch(self) -> bool:
        """Start its way back; return whether it was due."""
        if self._back is not None or not self.left:
            return False
        self._back = self._lane.fetch(self._host)
        return True

    def take(self) -> Tensor:
        """Return its memory on the device, for one of its saved tensors."""
        back = self._back or self._lane.fetch(self._host)
        self.left -= 1
        self._back = back if self.left > 0 else None
        return back.wait()


class _OnDevice(NamedTuple):
    """A saved tensor that stayed on the device."""

    tensor: Tensor
    version: int


class _OnHost(NamedTuple):
    """A saved tensor on the host: its place there, and what counts writes to it."""

    call: _OffloadedCall
    slot: _Slot
    dtype: torch.dtype
    place: tuple[Any, torch.Size, tuple[int, ...]]
    witness: Tensor
    version: int


class _Layout(NamedTuple):
    """What a sharded tensor has beside its part."""

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> _Layout:
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def sharded(self, part: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


class _SavedShard(NamedTuple):
    """A saved tensor of which ranks have parts, and this one has its own."""

    part: Any
    layout: _Layout


_Saved = _OnDevice | _OnHost | _SavedShard
