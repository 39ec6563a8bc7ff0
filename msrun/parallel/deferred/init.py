"""Models larger than the memory of a rank: built without memory, filled tensor by tensor.

On the device meta a model takes no memory, but its initialisation is lost; and if each shard drew
its own random numbers, the values would depend on the number of ranks.  So inside `DeferredInit`
the constructor makes tensors on meta, and every operator on them is recorded (`log`).  After the
model has been sharded, `materialize` replays the record on the CPU, tensor by tensor, with the
generator as it was at the start of the block: the same operators in an order that gives the same
values to the bit.  Each rank copies its shard and frees the rest.  It draws the numbers of the full
model, which takes as long as one process takes.

Generators: between the block and `materialize` no number may be drawn from one that the block used,
and its `initial_seed` is another; afterwards it is in the state that it would have without the
block.  A generator that was seeded in between is left alone.

Calling `reset_parameters` of each module again was tried instead: it knows nothing of what the
constructor or `apply` did after it.  What cannot be recorded is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, UntypedStorage

from msrun.errors import ModelError
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
            raise ModelError("init_on_meta is already active")
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
        """Return whether draws of the default generator are still to be replayed."""
        return self.log.random.pending_state(torch.default_generator) is not None


def materialize(
    log: ConstructorLog, views: Mapping[str, View], take: Callable[[str, Tensor], None]
) -> None:
    """Call `take` with each tensor of `views` and its name, as soon as its values are final.

    Args:
        log: Of all of them.
        views: Name -> tensor.
        take: Copies what it needs: the memory is freed afterwards.

    Raises:
        ModelError: A tensor from outside that the block read has changed, or random numbers were
            drawn since.
    """
    names: dict[StorageSlot, list[str]] = {}
    for name, view in views.items():
        names.setdefault(view.slot, []).append(name)

    def take_all(slot: StorageSlot, storage: UntypedStorage) -> None:
        for name in names[slot]:
            take(name, views[name].on(storage))

    waiting = [
        (generator, log.random.pending_state(generator)) for generator in log.random.generators
    ]
    states = [state for _, state in waiting if state is not None]
    replay(log, names, take_all, states)
    for generator, state in waiting:
        if state is not None and state.value is not None:
            generator.set_state(state.value.clone())  # torch crashes on a view
