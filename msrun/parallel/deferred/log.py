"""The record of what a model's constructor did to tensors that have no memory yet, in order.

A tensor is identified by its storage on the device meta, which refers to its `StorageSlot`.  So a
view, a `Parameter` and `.data` lead to the values by themselves, and only operators that make or
write memory are entries.  An entry names the slots that it reads and writes, so a replay can run
what one tensor depends on and nothing else.

Random numbers are drawn later, but the constructor, or code after the block, may save, restore or
seed generators meanwhile.  So each recorded draw leaves its generator seeded with a placeholder
that stands for the state it would have (`RandomStates`): saving and restoring moves placeholders,
seeding replaces them, and a draw by anyone else is noticed, since its numbers would be wrong.

Invariants: storages refer to the log and the log refers to no storage, so it lives as long as any
of its tensors.  Tensors from outside are not copied; if one is written before the replay, that is
refused.  Two ranks have the same values if their logs have the same fingerprint.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn.parameter import is_lazy

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.checkpoint.tensors import digest

_SLOT = "msrun_slot"
_STATES_AT_ONCE = 16


@dataclass(eq=False, slots=True)
class StorageSlot:
    """The future memory of a storage on the device meta.

    Attributes:
        log: The record that its values come from.
        number: Of the slots of the log, by age.
        nbytes: The most bytes that it had.
        writers: Entries that make or write it, ascending.
    """

    log: ConstructorLog
    number: int
    nbytes: int
    writers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of the block: its place in a slot."""

    slot: StorageSlot
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool

    def on(self, storage: UntypedStorage) -> Tensor:
        """Return this tensor where the slot is `storage`."""
        plain = torch.empty(0, dtype=self.dtype, device=storage.device)
        plain.set_(storage, self.offset, self.size, self.stride)
        return plain.conj() if self.is_conj else plain

    def covers_slot(self) -> bool:
        """Return whether its elements are all of the slot."""
        if self.offset or torch.Size(self.size).numel() * self.dtype.itemsize < self.slot.nbytes:
            return False
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    def overlaps(self, other: View) -> bool:
        """Return whether the two may have an element in common."""
        if self.slot is not other.slot:
            return False
        first, last = self._bounds()
        start, end = other._bounds()
        return first < end and start < last

    def _bounds(self) -> tuple[int, int]:
        reach = sum((n - 1) * stride for n, stride in zip(self.size, self.stride, strict=True))
        count = 0 if 0 in self.size else reach + 1
        itemsize = self.dtype.itemsize
        return self.offset * itemsize, (self.offset + count) * itemsize


@dataclass(frozen=True, slots=True)
class OutsideTensor:
    """A tensor with memory, from before the block.

    Attributes:
        tensor: The tensor.
        writes: How often it had been written when it was used.
    """

    tensor: Tensor
    writes: int

    def value(self) -> Tensor:
        """Return the tensor.

        Raises:
            ModelError: It has been written since.
        """
        if torch_compat.write_count(self.tensor) != self.writes:
            shape = list(self.tensor.shape)
            raise ModelError(
                f"a tensor {shape} that init_on_meta read was written before rt.shard",
                hint="give the model a copy of it",
            )
        return self.tensor


@dataclass(eq=False, slots=True)
class RandomState:
    """A state of a generator.

    Attributes:
        value: The state; None until the draws before it have been replayed.
        entry: The draw that ends in it; None for a state from before the block.
    """

    value: Tensor | None = None
    entry: int | None = None


@dataclass(frozen=True, slots=True)
class Draw:
    """The use of a generator by an entry."""

    generator: torch.Generator
    before: RandomState
    after: RandomState


@dataclass(eq=False, slots=True, kw_only=True)
class Entry:
    """An operator that made or wrote memory.

    Attributes:
        operator: The operator.
        args: Its arguments, with `View` and `OutsideTensor` for tensors.
        kwargs: Those with names.
        reads: Slots whose values it uses, but those that it only writes into.
        writes: Slot that it writes -> whether it overwrites all old values.
        created: For each tensor of the result, its view if its memory is new.
        is_fill: Whether what it writes does not depend on the old values.
        draw: None where it draws no random numbers.
        dtype: Default type when it was called.
    """

    operator: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[StorageSlot] = frozenset()
    writes: Mapping[StorageSlot, bool] = field(default_factory=dict)
    created: list[View | None] = field(default_factory=list)
    is_fill: bool = False
    draw: Draw | None = None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    @property
    def draws_alone(self) -> bool:
        """Whether its use of the generator does not depend on any values."""
        return self.draw is not None and not self.reads and (self.is_fill or not self.writes)


class RandomStates:
    """The states that generators would have, while nothing is drawn from them.

    A recorded draw seeds its generator with a placeholder for the state that it would have.  Code
    that saves and restores states, as `fork_rng` does, thereby restores the right one; seeding is
    noticed, and so is a draw, whose numbers would differ from those without the block.

    Attributes:
        generators: All that were used, some more than once.
    """

    def __init__(self) -> None:
        self._known: list[RandomState] = []
        self._placeholders: dict[int, RandomState] = {}
        self._first_seed = secrets.randbits(62)
        self._rows: Iterator[Tensor] = iter(())
        self.generators: list[torch.Generator] = []

    def at(self, generator: torch.Generator) -> RandomState:
        """Return the state that `generator` has, or has a placeholder for.

        Raises:
            ModelError: Numbers were drawn after the placeholder was set.
        """
        pending = self.pending_state(generator)
        if pending is not None:
            return pending
        if not any(generator is known for known in self.generators):
            self.generators.append(generator)
        value = generator.get_state()
        for state in self._known:
            if state.value is not None and torch.equal(state.value, value):
                return state
        self._known.append(RandomState(value))
        return self._known[-1]

    def pending_state(self, generator: torch.Generator) -> RandomState | None:
        """Return the state that `generator` has a placeholder for; None if it has none.

        Raises:
            ModelError: Numbers were drawn after the placeholder was set.
        """
        seed = generator.initial_seed()
        state = self._placeholders.get(seed)
        if state is None:
            return None
        if not torch.equal(generator.get_state(), torch.Generator().manual_seed(seed).get_state()):
            raise ModelError(
                "random numbers were drawn between init_on_meta and rt.shard, where those of the "
                "weights have not been drawn yet",
                hint="call rt.shard first, or seed the generator after the block",
            )
        return state

    def store(self, value: Tensor) -> Tensor:
        """Return a copy of the state `value` for as long as the log lives.

        Many share one block of memory: small ones between large tensors that come and go would
        keep the allocator from reusing the memory of those.
        """
        row = next(self._rows, None)
        if row is None:
            self._rows = iter(torch.empty(_STATES_AT_ONCE, len(value), dtype=value.dtype))
            row = next(self._rows)
        return row.copy_(value)

    def move(self, generator: torch.Generator, entry: int) -> RandomState:
        """Seed `generator` with a placeholder for its state after `entry`."""
        seed = self._first_seed + len(self._placeholders)
        generator.manual_seed(seed)
        self._placeholders[seed] = RandomState(entry=entry)
        return self._placeholders[seed]


class ConstructorLog:
    """The record of one block: entries in the order of the constructor.

    Attributes:
        entries: The entries.
        random: States of generators.
        writes_max: The most that any of its tensors was written in place.
        is_open: Whether its block is running.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.random = RandomStates()
        self.writes_max = 0
        self.is_open = False
        self._slots = 0

    def slot(self, tensor: Tensor) -> StorageSlot:
        """Return the slot of `tensor`, on meta, a new one if its storage has none."""
        storage = tensor.untyped_storage()
        slot = slot_of(tensor)
        if slot is None:
            slot = StorageSlot(self, self._slots, storage.nbytes())
            self._slots += 1
            vars(storage)[_SLOT] = slot
        slot.nbytes = max(slot.nbytes, storage.nbytes())
        return slot

    def view(self, tensor: Tensor) -> View:
        """Return the view that `tensor`, on meta, is.

        Raises:
            ModelError: Strides do not describe it, as of a quantized tensor.
        """
        if tensor.is_neg() or tensor.is_quantized:
            raise ModelError(
                "init_on_meta knows no quantized tensors, and none that are negated when read",
                hint="tensor.resolve_neg() negates now",
            )
        return View(
            slot=self.slot(tensor),
            dtype=tensor.dtype,
            size=tuple(tensor.size()),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            is_conj=tensor.is_conj(),
        )

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        written = {view.slot for view in entry.created if view is not None} | set(entry.writes)
        for slot in written:
            slot.writers.append(len(self.entries))
        self.entries.append(entry)

    def fingerprint(self) -> bytes:
        """Return 16 bytes that are the same on another rank if it has the same log."""
        digester = hashlib.blake2b(digest_size=16)
        roots: dict[RandomState, int] = {}
        for entry in self.entries:
            name = getattr(entry.operator, "__name__", "")
            parts = [name, *entry.args, *entry.kwargs.items(), *entry.created, entry.dtype]
            for text in _described(parts):
                digester.update(text + b"\n")
            if entry.draw is not None:
                before = entry.draw.before
                if before.entry is None and before.value is not None and before not in roots:
                    roots[before] = len(roots)
                    digester.update(digest(before.value))
                digester.update(f"{before.entry} {roots.get(before)}\n".encode())
        return digester.digest()


def slot_of(tensor: Tensor) -> StorageSlot | None:
    """Return the slot of a tensor of some block, None for any other."""
    # Its device is not read: `Functions` answers that it is the CPU.
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return None
    slot: StorageSlot | None = vars(tensor.untyped_storage()).get(_SLOT)
    return slot


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operator, in order."""
    match value:
        case Tensor():
            return [value]
        case list() | tuple():
            return [tensor for item in value for tensor in tensors_of(item)]
        case dict():
            return tensors_of(list(value.values()))
        case _:
            return []


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return `value`, an argument or result of an operator, with its items changed."""
    # No closure: one that calls itself keeps its variables alive until garbage is collected.
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, item) for item in value])
    return change(value)


def _described(value: Any) -> Iterator[bytes]:
    match value:
        case View():
            yield f"{value.slot.number} {value.dtype} {value.size} {value.stride}".encode()
            yield f"{value.offset} {value.is_conj}".encode()
        case OutsideTensor():
            yield digest(value.tensor)
        case torch.Generator():
            yield b"generator"
        case list() | tuple():
            yield str(len(value)).encode()
            for item in value:
                yield from _described(item)
        case _:
            yield repr(value).encode()
