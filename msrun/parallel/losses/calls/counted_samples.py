"""Numbers of a model that count the samples of its batches.

A rank calls the model with its part of a batch, so a buffer or an attribute that adds `len(x)` in
forward counts a part, and what the model computes with it is not what one process computes.  All
data-parallel ranks count alike, so no comparison of replicas shows it: the first forward does.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from msrun.parallel.local import is_sharded, numbers

_HINT = 'add up those of all ranks by all_reduce(count, "dp", "sum") of msrun.parallel.collectives'


class SampleCounts:
    """What a model counts, before a forward of it in training.

    Args:
        model: The model, to which no reference is kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = _counts(model)

    def warn(self, model: nn.Module, batch: Sequence[Tensor]) -> None:
        """Warn of numbers of `model` that have grown by that of samples in `batch`, or of tokens.

        Args:
            model: The same model, behind the forward.
            batch: What it got.
        """
        sizes = {size for x in batch if x.dim() for size in (len(x), x.numel()) if size > 1}
        for name, after in _counts(model).items():
            grown = after - self._before.get(name, _of_class(model, name, after))
            if grown in sizes:
                warnings.warn(
                    f"msrun: forward adds {grown:g} to {name}, the size of this rank's part of the "
                    f"batch, and one process adds that of the whole batch: {_HINT}",
                    stacklevel=2,
                )


@contextlib.contextmanager
def counting(model: nn.Module, batch: Sequence[Tensor]) -> Iterator[None]:
    """Warn behind a forward of `model` inside if it counts the samples of `batch`."""
    counts = SampleCounts(model)
    yield
    counts.warn(model, batch)


def _counts(model: nn.Module) -> dict[str, float]:
    buffers = {
        name: float(buffer)
        for name, buffer in model.named_buffers()
        if buffer.numel() == 1 and not (buffer.is_meta or buffer.is_complex() or is_sharded(buffer))
    }
    return numbers(model) | buffers


def _of_class(model: nn.Module, name: str, value: float) -> float:
    """Return what the class of a module has for an attribute that a forward set; else `value`."""
    path, _, key = name.rpartition(".")
    found = getattr(type(model.get_submodule(path)), key, None)
    return found if isinstance(found, int | float) else value
