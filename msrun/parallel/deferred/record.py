"""Records operators: runs them on the device meta, and adds them to the log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.deferred.call import ALLOCATING, Call, without_values
from msrun.parallel.deferred.log import (
    ConstructorLog,
    Draw,
    Entry,
    OutsideTensor,
    StorageSlot,
    mapped,
    slot_of,
    tensors_of,
)
from msrun.parallel.deferred.replay import replay

# How values from Python, numpy and buffers arrive.
_LIFTING = frozenset(("aten::lift", "aten::lift_fresh"))
# torch computes eigenvectors too while operators are dispatched, which changes the last bits.
_DECOMPOSING = frozenset(("aten::_linalg_eigh", "aten::_linalg_svd"))
_DECOMPOSITIONS = frozenset((torch.linalg.eigh, torch.linalg.svd, torch.svd, Tensor.svd))
_BEFORE = "compute it before init_on_meta, and have the constructor copy it"


class Recorder:
    """Runs the operators of a block.

    Attributes:
        log: The record.
        function: The running function on tensors of the block; tensors that torch makes on meta
            for it are of the block too.
        is_busy: Whether torch or this class runs an operator, and not the constructor.
    """

    def __init__(self, log: ConstructorLog) -> None:
        self.log = log
        self.function: Callable[..., Any] | None = None
        self.is_busy = False
        self._is_paused = False

    def dispatch(
        self,
        operator: Any,
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run `operator` on meta and record it.

        Raises:
            ModelError: It cannot be recorded.
        """
        if self._is_paused:
            return operator(*args, **kwargs)
        before, self.is_busy = self.is_busy, True
        try:
            return self._dispatch(operator, types, args, kwargs)
        finally:
            self.is_busy = before

    def _dispatch(
        self,
        operator: Any,
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        call = Call(operator, args, kwargs)
        call.check(types, self.log)
        if call.name in _DECOMPOSING and self.function not in _DECOMPOSITIONS:
            function = getattr(self.function, "__name__", call.name)
            raise ModelError(f"{function} has other last bits inside init_on_meta", hint=_BEFORE)
        counts = map(torch_compat.write_count, call.written)
        self.log.writes_max = max(self.log.writes_max, *(count + 1 for count in counts), 0)
        if call.name in _LIFTING and call.outside:
            return self._constant(call.outside[0])
        if call.is_no_concern(is_inside=self.function is not None):
            return operator(*args, **kwargs)
        return self._record(call)

    def real(self, value: Any) -> Any:
        """Return the current values of a tensor of the block, or `value` if it is not one."""
        if not isinstance(value, Tensor) or slot_of(value) is None:
            return value
        view = self.log.view(value)
        tensors: list[Tensor] = []

        def take(_: StorageSlot, storage: UntypedStorage) -> None:
            tensors.append(view.on(storage).clone())

        with self._paused():
            replay(self.log, [view.slot], take)
        return tensors[0]

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _constant(self, tensor: Tensor) -> Tensor:
        """Return a tensor on meta for one that torch has just got values for from Python."""
        constant = _copied(tensor)
        result: Tensor = without_values(constant)
        entry = Entry(
            operator=_copied, args=[OutsideTensor(constant, torch_compat.write_count(constant))]
        )
        entry.created.append(self.log.view(result))
        self.log.add(entry)
        return result

    def _record(self, call: Call) -> Any:
        log = self.log
        before = log.random.at(call.generator) if call.is_random else None
        entry = call.entry(log)
        result = self._run_on_values(call) if call.needs_values else self._run_on_meta(call)
        results = tensors_of(result)
        if any(tensor.layout is not torch.strided for tensor in results):
            raise ModelError(f"{call.name} makes a tensor that is not dense", hint=_BEFORE)
        if call.is_view_of_outside(results):
            return call.operator(*call.args, **call.kwargs)
        for tensor in call.written:
            log.slot(tensor)
        entry.created += [None if slot_of(t) else log.view(t) for t in results]
        if call.name not in ALLOCATING and (entry.writes or any(entry.created)):
            if before is not None:
                after = log.random.move(call.generator, len(log.entries))
                entry.draw = Draw(call.generator, before, after)
            log.add(entry)
        return result

    def _run_on_meta(self, call: Call) -> Any:
        try:
            return call.run_on_meta()
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error).lower():
                raise
        return self._run_on_values(call)

    def _run_on_values(self, call: Call) -> Any:
        """Return the result of `call` on real values, where meta cannot tell its form."""
        if call.is_random:
            raise ModelError(f"{call.name} can not be put off by init_on_meta", hint=_BEFORE)

        args = mapped(self.real, list(call.args))
        kwargs = {name: mapped(self.real, value) for name, value in call.kwargs.items()}
        result = call.operator(*args, **kwargs)
        if call.written:
            return call.written[0] if len(call.written) == 1 else tuple(call.written)
        return mapped(without_values, result)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy with the strides of `tensor`."""
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor)
