"""Models larger than the memory of a rank: built without memory, made of values part by part.

Inside `DeferredInit` a model's constructor makes tensors on the device meta, and what it does to
them is put off.  `materialize` does it later on the CPU, tensor by tensor: the same operators in
an order that gives the same values, with the same random numbers, as if there had been no block.

State of a generator: between the block and `materialize` nothing is to be drawn from it, and
`initial_seed` is not what it was; afterwards it is as without the block.  If it was seeded in
between, it is left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, UntypedStorage

from msrun.errors import UsageError
from msrun.parallel import torch_compat
from msrun.parallel.deferred.functions import Functions
from msrun.parallel.deferred.log import ConstructorLog, StorageSlot, View
from msrun.parallel.deferred.record import Recorder
from msrun.parallel.deferred.replay import replay


class DeferredInit:
    """Context in which tensors have no memory; it can be entered again, to go on."""

    def __init__(self) -> None:
        self.log = ConstructorLog()
        self._stack = contextlib.ExitStack()
        self._entered_in: Tensor | None = None

    def __enter__(self) -> Self:
        if self.log.is_open:
            raise UsageError("init_on_meta is already active")
        self.log.random.at(torch.default_generator)
        self._entered_in = torch.get_rng_state()
        recorder = Recorder(self.log)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch_compat.dispatching(recorder.dispatch))
            stack.enter_context(Functions(recorder))
            self._stack = stack.pop_all()
        self.log.is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.log.is_open = False
        self._stack.__exit__(kind, error, trace)
        if kind is not None and self._entered_in is not None:
            torch.set_rng_state(self._entered_in)

    def is_pending(self) -> bool:
        """Return whether the default generator waits for draws of this block."""
        return self.log.random.standing(torch.default_generator) is not None


def materialize(
    log: ConstructorLog, views: Mapping[str, View], take: Callable[[str, Tensor], None]
) -> None:
    """Give `take` each tensor of `views` by its name as soon as its values are final.

    Args:
        log: Of all of them.
        views: Name -> tensor.
        take: Copies what it wants: the memory is freed.

    Raises:
        UsageError: What the block read from outside has changed, or random numbers were drawn
            since.
    """
    names: dict[StorageSlot, list[str]] = {}
    for name, view in views.items():
        names.setdefault(view.slot, []).append(name)

    def take_all(slot: StorageSlot, storage: UntypedStorage) -> None:
        for name in names[slot]:
            take(name, views[name].on(storage))

    waiting = [(generator, log.random.standing(generator)) for generator in log.random.generators]
    states = [state for _, state in waiting if state is not None]
    replay(log, names, take_all, states)
    for generator, state in waiting:
        if state is not None and state.value is not None:
            generator.set_state(state.value.clone())  # torch crashes on a view
