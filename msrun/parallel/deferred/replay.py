"""Replays entries of a log on the CPU, as the constructor would have run them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from msrun.errors import ModelError
from msrun.parallel.deferred.log import (
    ConstructorLog,
    Draw,
    Entry,
    OutsideTensor,
    RandomState,
    StorageSlot,
    View,
    mapped,
    tensors_of,
)
from msrun.parallel.deferred.plan import ReplayPlan, make_plan

_LARGE_BYTES = 2**20

Take = Callable[[StorageSlot, UntypedStorage], None]


def replay(
    log: ConstructorLog,
    wanted: Collection[StorageSlot],
    take: Take,
    states: Collection[RandomState] = (),
) -> None:
    """Call `take` with the memory of each of `wanted`, as soon as its values are final.

    Generators are in the same states afterwards.

    Args:
        log: Of all slots.
        wanted: Slots.
        take: Must not keep the memory, which is used again or freed.
        states: Further states of generators that are known afterwards.

    Raises:
        ModelError: A tensor from outside that the log read has changed.
    """
    plan = make_plan(log.entries, wanted, states)
    default_dtype = torch.get_default_dtype()
    try:
        off = torch.autocast("cpu", enabled=False)
        with torch.no_grad(), off, _restored(log.random.generators):
            _Replay(log, plan, take).run()
    finally:
        torch.set_default_dtype(default_dtype)


@contextmanager
def _restored(generators: Iterable[torch.Generator]) -> Iterator[None]:
    before = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


class _Replay:
    def __init__(self, log: ConstructorLog, plan: ReplayPlan, take: Take) -> None:
        self._entries = log.entries
        self._keep = log.random.store
        self._plan = plan
        self._take = take
        self._memory: dict[StorageSlot, UntypedStorage] = {}

    def run(self) -> None:
        """Run the plan."""
        for slot in self._plan.finished.get(None, ()):
            self._take(slot, _memory(slot.nbytes))
        for number in self._plan.order:
            entry = self._entries[number]
            if torch.get_default_dtype() != entry.dtype:
                torch.set_default_dtype(entry.dtype)
            is_drawn_only = number in self._plan.drawn_only
            if entry.draw is None:
                self._run(entry)
            else:
                self._draw(entry, entry.draw, is_drawn_only=is_drawn_only)
            for slot in () if is_drawn_only else self._plan.finished.get(number, ()):
                self._take(slot, self._memory[slot])
            for slot in self._plan.freed.get(number, ()):
                self._memory.pop(slot, None)

    def _draw(self, entry: Entry, draw: Draw, *, is_drawn_only: bool) -> None:
        if draw.before.value is None:
            raise RuntimeError("the plan has left a draw out")
        draw.generator.set_state(draw.before.value.clone())  # torch crashes on a view
        self._run(entry, is_drawn_only=is_drawn_only)
        if draw.after.value is None:
            draw.after.value = self._keep(draw.generator.get_state())

    def _run(self, entry: Entry, *, is_drawn_only: bool = False) -> None:
        real = _scratch if is_drawn_only else self._real
        args = [mapped(real, value) for value in entry.args]
        kwargs = {name: mapped(real, value) for name, value in entry.kwargs.items()}
        result = entry.operator(*args, **kwargs)
        if not is_drawn_only:
            for view, tensor in zip(entry.created, tensors_of(result), strict=True):
                if view is not None:
                    self._memory[view.slot] = _in_recorded_layout(entry, view, tensor)

    def _real(self, value: Any) -> Any:
        match value:
            case View():
                return value.on(self._storage(value))
            case OutsideTensor():
                return value.value()
            case _:
                return value

    def _storage(self, view: View) -> UntypedStorage:
        """Return the memory of a slot; unwritten elements are zero, so that all ranks agree."""
        if view.slot not in self._memory:
            self._memory[view.slot] = _memory(view.slot.nbytes)
        return self._memory[view.slot]


def _memory(nbytes: int) -> UntypedStorage:
    """Return memory full of zeros; if it is large it goes back to the system once it is freed.

    The allocator of the process could not reuse it where something small and lasting follows each
    tensor.
    """
    if nbytes < _LARGE_BYTES:
        return torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).untyped_storage()


def _scratch(value: Any) -> Any:
    return value.on(_memory(value.slot.nbytes)) if isinstance(value, View) else value


def _in_recorded_layout(entry: Entry, view: View, tensor: Tensor) -> UntypedStorage:
    """Return the memory of a result, in the layout that its tensor on meta has.

    Raises:
        ModelError: Its layout differs, so that what was recorded after it would not be the same.
    """
    if not _has_form(tensor, view):
        name = getattr(entry.operator, "__name__", "an operator")
        raise ModelError(
            f"{name} has another result than torch foresees, so it can not be put off",
            hint="compute it before init_on_meta, and have the constructor copy it",
        )
    if tensor.storage_offset() == view.offset:
        return tensor.untyped_storage()
    storage = _memory(view.slot.nbytes)
    view.on(storage).copy_(tensor)
    return storage


def _has_form(tensor: Tensor, view: View) -> bool:
    if tensor.layout is not torch.strided or tensor.dtype != view.dtype:
        return False
    if tuple(tensor.size()) != view.size or not tensor.numel():
        return tuple(tensor.size()) == view.size
    strides = zip(view.size, tensor.stride(), view.stride, strict=True)
    return all(stride == expected for size, stride, expected in strides if size > 1)
