"""How tensors of a block look to Python code: they are on the CPU, and have values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel.deferred.call import META
from msrun.parallel.deferred.log import mapped, slot_of, tensors_of
from msrun.parallel.deferred.record import Recorder

Function = Callable[..., Any]

_CPU = torch.device("cpu")


class Functions(TorchFunctionMode):
    """Runs functions, except those that would notice that there is no memory."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        # Code that checks for meta, as torch's own does, would skip such tensors.
        self._answers: dict[Function, Any] = {
            Tensor.device.__get__: _CPU,
            Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]  # a property
            Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
        }
        self._changed: dict[Function, Function] = {
            Tensor.__array__: self._array,
            Tensor.__getitem__: self._index,
            Tensor.__setitem__: self._index,
            Tensor.cpu: self._stay,
            Tensor.data.__set__: self._set_data,  # type: ignore[attr-defined]
            Tensor.new_tensor: self._new_tensor,
            Tensor.numpy: self._array,
            Tensor.pin_memory: self._stay,
            Tensor.to: self._move,
            Tensor.tolist: self._read,
            torch.as_tensor: self._move_or_read,
            torch.asarray: self._move_or_read,
            torch.tensor: self._read,
        }
        self._refused = {Tensor.__dlpack__, Tensor.data_ptr, Tensor.new, Tensor.share_memory_}

    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self._recorder.is_busy or not _is_ours([args, kwargs]):
            return func(*args, **kwargs)
        if func in self._answers:
            return self._answers[func]
        if func in self._refused:
            raise ModelError(
                f"Tensor.{func.__name__} needs memory, which tensors get after init_on_meta",
                hint="call it after rt.shard",
            )
        before, self._recorder.function = self._recorder.function, func
        try:
            changed = self._changed.get(func)
            return changed(func, *args, **kwargs) if changed else func(*args, **kwargs)
        finally:
            self._recorder.function = before

    def _read(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        return func(*mapped(self._recorder.real, args), **kwargs)

    def _array(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        """Return a read-only array: writes to it would not change the tensor."""
        array = func(*mapped(self._recorder.real, args), **kwargs)
        array.flags.writeable = False
        return array

    def _index(self, func: Function, tensor: Tensor, index: Any, *rest: Any) -> Any:
        # torch would make tensors of lists on meta, and lose the numbers.
        return func(tensor, _as_tensors(index), *rest)

    def _stay(self, func: Function, tensor: Tensor, *_: Any, **kwargs: Any) -> Tensor:
        del func
        return tensor.contiguous(**kwargs) if "memory_format" in kwargs else tensor

    def _move(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        """Move to the CPU by staying on meta, where torch makes no copy either."""
        options = {name: _on_meta(value) for name, value in kwargs.items()}
        return func(*args[:1], *map(_on_meta, args[1:]), **options)

    def _move_or_read(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        is_list = bool(args) and not isinstance(args[0], Tensor)
        return (self._read if is_list else self._move)(func, *args, **kwargs)

    def _new_tensor(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        data = mapped(self._recorder.real, args[1:])
        return func(args[0], *data, **{"device": _CPU, **kwargs})

    def _set_data(self, func: Function, tensor: Tensor, value: Tensor) -> None:
        func(tensor, value if slot_of(value) is not None else value.clone())


def _is_ours(values: Any) -> bool:
    return any(slot_of(tensor) is not None for tensor in tensors_of(values))


def _as_tensors(index: Any) -> Any:
    match index:
        case tuple():
            return tuple(map(_as_tensors, index))
        case list() if not tensors_of(index):
            return torch.tensor(index)
        case _:
            return index


def _on_meta(option: Any) -> Any:
    """Return an argument of `Tensor.to` with meta for the CPU."""
    match option:
        case torch.device(type="cpu") | "cpu":
            return META
        case Tensor() if slot_of(option) is None and not option.is_meta:
            return option.to(META)
        case _:
            return option
