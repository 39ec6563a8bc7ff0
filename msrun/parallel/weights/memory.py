"""Notices what a script gives a sharded parameter in a way that its shard does not see.

`param.data = tensor` is one, and a write to a plain tensor of a module that was in the memory of a
parameter, as the hook of `nn.utils.spectral_norm` leaves one until the first forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.losses.call_hook import CallHook
from msrun.parallel.torch_compat import local_tensor, without_functions, write_count

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ParameterMemory:
    """The memory of a sharded parameter, which `param.data = tensor` exchanges.

    A `DTensor` has none: it is a shell around the tensor of this rank, which stays as it was.  What
    exchanges both, as `model.to(dtype)` does, is right.

    Args:
        param: The parameter.
    """

    def __init__(self, param: DTensor) -> None:
        self.param = param
        self._note()

    def is_exchanged(self) -> bool:
        """Return whether the shell alone is another; for `exchanged`."""
        pointer = Tensor.data_ptr(self.param)
        if pointer or Tensor.untyped_storage(self.param) is self._shell:
            return bool(pointer)
        is_alone = local_tensor(self.param) is self._part
        if not is_alone:
            self._note()
        return is_alone

    def _note(self) -> None:
        # torch returns the same object for the same memory as long as somebody holds it.
        self._shell, self._part = self.param.untyped_storage(), local_tensor(self.param)


def exchanged(memories: Iterable[ParameterMemory]) -> set[int]:
    """Return the ids of those parameters whose shell alone is another."""
    # Of the class: functions of a plan take the part of this rank, and attributes of a parameter
    # whose update is on its way wait for it.
    with without_functions():
        return {id(memory.param) for memory in memories if memory.is_exchanged()}


class PlainTensor(NamedTuple):
    """A tensor of a module, neither parameter nor buffer, in the memory of a parameter."""

    module: nn.Module
    name: str
    tensor: Tensor
    param: Parameter
    param_name: str


def plain_tensors(model: nn.Module) -> list[PlainTensor]:
    """Return the plain tensors of modules that are in the memory of parameters."""
    by_memory = {
        param.untyped_storage().data_ptr(): (param_name, param)
        for param_name, param in model.named_parameters()
        if type(param.data) is Tensor and not param.is_meta
    }
    return list(_plain_tensors(model, by_memory))


def _plain_tensors(
    model: nn.Module, by_memory: dict[int, tuple[str, Parameter]]
) -> Iterator[PlainTensor]:
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) is Tensor and not value.is_meta and value.numel():
                param_name, param = by_memory.get(value.untyped_storage().data_ptr(), ("", None))
                if param is not None:
                    shown = f"{prefix}.{name}" if prefix else name
                    yield PlainTensor(module, shown, value, param, param_name)


def watch_plain_tensors(found: list[PlainTensor], model: nn.Module) -> None:
    """Refuse writes to plain tensors before their modules' first forward, which are lost.

    Args:
        found: Plain tensors, before parameters were replaced.
        model: The model, after it.
    """
    kept = {id(param) for param in model.parameters()}
    for plain in found:
        if id(plain.param) not in kept:
            _watch(plain)


def _watch(plain: PlainTensor) -> None:
    """Look at the first forward of the module of `plain`, and drop it then."""
    names = plain.name, plain.param_name
    waiting = [(plain.tensor, write_count(plain.tensor))]

    def check(*_: object) -> None:
        handle.remove()
        tensor, count = waiting.pop()
        if write_count(tensor) != count:
            raise ModelError(
                f"{names[0]} was written before the first forward of its module: it was in the "
                f"memory of {names[1]}, which ranks share now, so the write is lost",
                hint=f"write {names[1]} itself",
            )

    handle = nn.Module.register_forward_hook(plain.module, CallHook(check))
