"""One call of an operator inside a block: its tensors, and whether it can be recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.deferred.log import (
    ConstructorLog,
    Entry,
    OutsideTensor,
    StorageSlot,
    mapped,
    slot_of,
    tensors_of,
)

META = torch.device("meta")

ALLOCATING = frozenset(
    (
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    )
)
# In place, and independent of the old values.
_FILLING = frozenset(
    (
        "aten::bernoulli_",
        "aten::cauchy_",
        "aten::copy_",
        "aten::exponential_",
        "aten::fill_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::normal_",
        "aten::random_",
        "aten::uniform_",
        "aten::zero_",
    )
)
# Their results have other strides than on meta.
_UNFORESEEN = frozenset(("aten::_fft_r2c", "aten::_linalg_svd", "aten::linalg_eig"))
_VALUE_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Call:
    """A call, with its tensors sorted by where they come from.

    Attributes:
        operator: What is called.
        name: Of the operator, without its overload.
        is_random: Whether it draws random numbers.
        ours: Tensors of blocks.
        bare: Other tensors on the device meta.
        outside: Tensors with memory.
        written: Those of them that it writes.
    """

    def __init__(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.name = str(operator.name()).partition(".")[0]
        self.is_random = torch.Tag.nondeterministic_seeded in operator.tags
        self.ours: list[Tensor] = []
        self.bare: list[Tensor] = []
        self.outside: list[Tensor] = []
        for tensor in tensors_of([args, kwargs]):
            is_ours = slot_of(tensor) is not None
            kind = self.ours if is_ours else self.bare if tensor.is_meta else self.outside
            kind.append(tensor)
        positions, names = torch_compat.written_arguments(operator)
        self._in_place = tensors_of([args[at] for at in positions if at < len(args)])
        self._outputs = tensors_of([kwargs.get(name) for name in names])
        self._read = tensors_of(
            [
                [value for at, value in enumerate(args) if at not in positions],
                [value for name, value in kwargs.items() if name not in names],
            ]
        )
        self.written = [*self._in_place, *self._outputs]
        self._shadows: list[Tensor] = []

    @property
    def needs_values(self) -> bool:
        """Whether the form of the result depends on values of tensors."""
        return self.name in _UNFORESEEN or not _VALUE_DEPENDENT.isdisjoint(self.operator.tags)

    @property
    def generator(self) -> torch.Generator:
        """Its generator, given or default."""
        given = [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, torch.Generator)]
        return given[0] if given else torch.default_generator

    def check(self, types: Sequence[type], log: ConstructorLog) -> None:
        """Refuse a call that cannot be recorded.

        Args:
            types: Of tensors with operators of their own.
            log: Of the block.

        Raises:
            ModelError: It can not.
        """
        device, layout = self.kwargs.get("device"), self.kwargs.get("layout")
        is_written_outside = any(slot_of(tensor) is None for tensor in self.written)
        plain = Tensor.__torch_dispatch__
        special = [kind for kind in types if getattr(kind, "__torch_dispatch__", plain) != plain]
        message, hint = "", None
        if special:
            message = f"{self.name} uses a {special[0].__name__} inside init_on_meta"
            hint = "inside init_on_meta there are plain tensors alone"
        elif device is not None and device.type not in ("cpu", "meta"):
            message = f"{self.name} makes a tensor on {device} inside init_on_meta"
            hint = "leave the device out: rt.shard moves the model to its device"
        elif any(t.layout is not torch.strided for t in (*self.outside, *self.ours)) or (
            layout not in (None, torch.strided)
        ):
            message = f"{self.name} is called for a tensor that is not dense"
            hint = "inside init_on_meta there are plain tensors alone"
        elif any(isinstance(v, UntypedStorage) and v.device != META for v in self.args):
            message = "tensors are loaded from a file inside init_on_meta"
            hint = "load them before the block, or after rt.shard with rt.load"
        elif any(slot is not None and slot.log is not log for slot in map(slot_of, self.ours)):
            message = f"{self.name} uses a tensor of an earlier init_on_meta"
            hint = "build both in one block, or the second one after rt.shard of the first"
        elif self.ours and self.bare:
            message = f"{self.name} uses a tensor on meta that init_on_meta did not make"
            hint = "leave device='meta' out"
        elif is_written_outside and (self.ours or (self.outside and self.is_random)):
            message = f"{self.name} writes a tensor from before init_on_meta"
            hint = "make that tensor inside the block"
        if message:
            raise ModelError(message, hint=hint)

    def is_no_concern(self, *, is_inside: bool) -> bool:
        """Return whether the call runs as it would outside of the block.

        Args:
            is_inside: Whether it comes from a function of a tensor of the block.
        """
        device = self.kwargs.get("device")
        if self.ours:
            return False
        if self.outside:
            return bool(self.written) or self.needs_values
        if self.bare:
            # `skip_init` makes a module on meta, and gives it memory later.
            return self.name not in ALLOCATING or device in (None, META)
        return device == META and not is_inside

    def run_on_meta(self) -> Any:
        """Return what the operator returns there."""
        kwargs = {name: mapped(self._stand_in, value) for name, value in self.kwargs.items()}
        is_made = not (self.ours or self.outside)
        if "device" in kwargs or (is_made and torch_compat.takes_device(self.operator)):
            kwargs["device"] = META
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return self.operator(*mapped(self._stand_in, list(self.args)), **kwargs)

    def _stand_in(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        self._shadows.append(without_values(value))
        return self._shadows[-1]

    def is_view_of_outside(self, results: Sequence[Tensor]) -> bool:
        """Return whether one of `results` has the memory of a tensor from outside.

        Raises:
            ModelError: A tensor of the block would have it.
        """
        shadows = {id(tensor.untyped_storage()) for tensor in self._shadows}
        is_view = any(id(tensor.untyped_storage()) in shadows for tensor in results)
        if is_view and self.ours:
            raise ModelError(
                f"{self.name} has a tensor of the model share memory from before init_on_meta",
                hint="give the model a copy",
            )
        return is_view

    def entry(self, log: ConstructorLog) -> Entry:
        """Return the call as an entry, before it has run."""
        kwargs = dict(self.kwargs)
        for name, value in (("device", torch.device("cpu")), ("pin_memory", False)):
            if name in kwargs:
                kwargs[name] = value
        reads = {slot for slot in map(slot_of, self._read) if slot is not None}
        is_filling = self.name in _FILLING
        writes: dict[StorageSlot, bool] = {}
        for index, tensor in enumerate(self.written):
            view = log.view(tensor)
            is_whole = view.covers_slot() and view.slot not in reads | writes.keys()
            writes[view.slot] = is_whole and (is_filling or index >= len(self._in_place))
        noted = partial(_noted, log)
        return Entry(
            operator=self.operator,
            args=mapped(noted, list(self.args)),
            kwargs={name: mapped(noted, value) for name, value in kwargs.items()},
            reads=frozenset(reads),
            writes={} if torch.Tag.inplace_view in self.operator.tags else writes,
            is_fill=is_filling,
        )


def without_values(value: Any) -> Any:
    """Return the tensor on meta that replaces a tensor, or `value` if it is not one."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)


def _noted(log: ConstructorLog, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if slot_of(value) is not None:
        return log.view(value)
    return OutsideTensor(value, torch_compat.write_count(value))
