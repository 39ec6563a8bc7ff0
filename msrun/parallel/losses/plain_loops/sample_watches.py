"""Watches of what mixes samples in a plain loop, for calls of models with whichever batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from msrun.parallel.losses.batch import samples_of
from msrun.parallel.losses.sample_watch import SampleWatch


class SampleWatches(TorchFunctionMode):
    """While it is active, watches of what mixes samples see functions, and not each other.

    A watch looks up dozens of things at each function.  As modes above each other they would see
    that too, which takes a power of their number.

    Attributes:
        watches: By how many samples the batches have; calls of a model with as many share one.
    """

    is_watch = reads_graph = True

    def __init__(self) -> None:
        super().__init__()
        self.watches: dict[int, SampleWatch] = {}

    def take(self, batch: Sequence[Tensor]) -> None:
        """Look at what a model gets."""
        samples = samples_of(batch)
        if samples in self.watches:
            self.watches[samples].take([*batch])
        elif samples:
            self.watches[samples] = SampleWatch([*batch], samples, has_labels=True)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; see the class."""
        del types
        run = func
        for watch in self.watches.values():
            run = functools.partial(watch.see, func, run)
        return run(*args, **(kwargs or {}))
