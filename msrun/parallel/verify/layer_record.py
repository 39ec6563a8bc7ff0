"""What layers get and return in a step, with gradients, as hooks on the sharded model see it.

The gradient of an input has summands from elsewhere, such as of a residual.  So a layer gets a view
of each input that needs a gradient, and that of the view is its own.  In the same way others get
views of its outputs: one may be what another was computed from, such as weights of attention.

Calls without gradients and recomputations in backward are not recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from msrun.parallel import torch_compat
from msrun.parallel.local import local_part
from msrun.parallel.losses.batch import map_leaves, tensors_in


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in the arguments of a call.

    Args:
        index: Of the tensor.
    """

    index: int


@dataclass(slots=True, kw_only=True)
class LayerCall:
    """One call of a layer.

    Args:
        args: Positional and named arguments, with a `Slot` for each tensor.
        inputs: Copies of the tensors.
        trained: Which of them need a gradient.
        autocast: Type of `torch.autocast` around the call; None without.
        buffers: Copies of the buffers before it.
        opaque: Class of an argument that holds more than its tensors; empty without one.
        outputs: Copies of the floating-point tensors of the output.
        of_inputs: Gradients of inputs, by index.
        of_outputs: Gradients of outputs, by index.
    """

    args: tuple[Any, Any]
    inputs: list[Tensor]
    trained: list[bool]
    autocast: torch.dtype | None
    buffers: dict[str, Tensor]
    opaque: str = ""
    outputs: list[Tensor] = field(default_factory=list)
    of_inputs: dict[int, Tensor] = field(default_factory=dict)
    of_outputs: dict[int, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of copies that this rank has, with as many again for gradients."""
        return 2 * sum(local_part(tensor).nbytes for tensor in (*self.inputs, *self.outputs))

    def note(self, kept: dict[int, Tensor], index: int, gradient: Tensor) -> None:
        """Keep a gradient; a second backward pass through a kept graph adds."""
        before = kept.get(index)
        own = gradient.detach()
        kept[index] = own.clone() if before is None else before + own


class LayerRecorder:
    """Records calls of layers inside a `with` block.

    Args:
        layers: Modules of the sharded model by name.
        device: Of this rank.
        limit: Bytes that this rank may record.
        adds: Whether gradients of several backward passes add up; in a pipeline a second pass may
            be the second half of the first.

    Attributes:
        calls: Layer -> its calls that backward may reach.
        dropped: Layers of which more than the limit would have been recorded.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], device: torch.device, limit: int, *, adds: bool
    ) -> None:
        self.calls: dict[str, list[LayerCall]] = {name: [] for name in layers}
        self.dropped: set[str] = set()
        self._layers, self._kind, self._left, self._adds = layers, device.type, limit, adds
        self._open: dict[str, list[LayerCall | None]] = {name: [] for name in layers}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for name, module in self._layers.items():
            # The first to see the inputs, and the last to see the output.
            before, after = partial(self._before, name), partial(self._after, name)
            self._handles += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside of torch.cond, say
            return None
        is_meant = torch.is_grad_enabled() and not torch_compat.is_in_backward()
        if not is_meant or name in self.dropped:
            self._open[name].append(None)
            return None
        inputs: list[Tensor] = []
        slots: dict[int, Slot] = {}

        def take(tensor: Tensor) -> Slot:
            if id(tensor) not in slots:
                slots[id(tensor)] = Slot(len(inputs))
                inputs.append(tensor)
            return slots[id(tensor)]

        opaque = [value for value in (*args, *kwargs.values()) if _is_opaque(value)]
        copies = {id(value): _snapshot(value) for value in opaque}
        kept_args = tuple(copies.get(id(value), value) for value in args)
        kept_kwargs = {key: copies.get(id(value), value) for key, value in kwargs.items()}
        is_narrow = torch.is_autocast_enabled(self._kind)
        call = LayerCall(
            args=map_leaves(take, (kept_args, kept_kwargs)),
            inputs=[tensor.detach().clone() for tensor in inputs],
            trained=[tensor.requires_grad for tensor in inputs],
            autocast=torch.get_autocast_dtype(self._kind) if is_narrow else None,
            buffers={key: b.detach().clone() for key, b in module.named_buffers()},
            opaque=type(opaque[0]).__name__ if opaque else "",
        )
        self._open[name].append(call)
        views = [self._view(call.of_inputs, call, i, tensor) for i, tensor in enumerate(inputs)]
        return map_leaves(lambda tensor: views[slots[id(tensor)].index], (tuple(args), kwargs))

    def _view(self, kept: dict[int, Tensor], call: LayerCall, index: int, tensor: Tensor) -> Tensor:
        """Return a view of a tensor; its gradient goes to `kept`."""
        if not tensor.requires_grad:
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(partial(self._reached, call, kept, index))
        return view

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        if torch.compiler.is_compiling():
            return None
        call = self._open[name].pop()
        if call is None:
            return None
        outputs = floating(output)
        if not any(each.requires_grad for each in outputs):
            return None
        call.outputs = [each.detach().clone() for each in outputs]
        self._left -= call.nbytes
        if self._left < 0:
            self.dropped.add(name)
            self._left += sum(each.nbytes for each in (*self.calls[name], call))
            self.calls[name].clear()
            return None
        self.calls[name].append(call)
        views = {
            id(each): self._view(call.of_outputs, call, index, each)
            for index, each in reversed(
                [*enumerate(outputs)]
            )  # one that is there twice counts once
        }
        return map_leaves(lambda tensor: views.get(id(tensor), tensor), output)

    def _reached(
        self, call: LayerCall, kept: dict[int, Tensor], index: int, gradient: Tensor
    ) -> None:
        if self._adds or index not in kept:
            call.note(kept, index, gradient)


def floating(output: Any) -> list[Tensor]:
    """Return the tensors of an output that may have a gradient."""
    return [each for each in tensors_in(output) if each.is_floating_point()]


def rebuilt(call: LayerCall, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    """Return the arguments of a call with other tensors."""
    args, kwargs = map_leaves(lambda slot: tensors[slot.index], call.args, Slot)
    return (
        tuple(_snapshot(value) if _is_opaque(value) else value for value in args),
        {key: _snapshot(value) if _is_opaque(value) else value for key, value in kwargs.items()},
    )


def _is_opaque(value: Any) -> bool:
    """Return whether `value` is an object that a layer may write, such as a cache of keys."""
    is_known = isinstance(value, Tensor | tuple | list | Mapping | nn.Module | type | torch.Size)
    if is_known or is_dataclass(value) or callable(value):
        return False
    return hasattr(value, "__dict__")


def _snapshot(value: Any) -> Any:
    """Return a copy of `value`, with tensors that have its values and no history."""
    try:
        with _Detached():
            return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - whatever an object of the script does when it is copied
        return value


class _Detached(TorchFunctionMode):
    """Has `copy.deepcopy` take tensors with a history too."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Copy a tensor, or run another function."""
        del types
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
