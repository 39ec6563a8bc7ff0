"""Spectral norms whose power iteration moves once a step, as with the whole batch at once.

A spectral norm moves two buffers each time it computes its weight in training.  With micro-batches
that is once for each of them, from where the last one left off.  The iteration reads only weights,
which do not change within a step, so each micro-batch can begin where the step began: all of them
then compute the weight that one process computes, and the last one leaves its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel.config import ROOT, ParallelConfig


def check(config: ParallelConfig, model: nn.Module) -> None:
    """Refuse spectral norms in a pipeline, whose micro-batches overlap.

    Raises:
        ModelError: There is one, and a step has several micro-batches.
    """
    parts = config.pipeline.microbatches if config.pipeline else 1
    name = next((name for name, _ in _buffers(model)), None)
    if parts > 1 and name is not None:
        raise ModelError(
            f"{ROOT}.pipeline.microbatches: {parts} micro-batches would each move {name} of a "
            "spectral norm, which one process moves once a step",
            hint="remove the spectral norm, or train without a pipeline",
        )


def find(model: nn.Module) -> Callable[[nn.Module], AbstractContextManager[None]] | None:
    """Return the context of a micro-batch before the last; None without a spectral norm."""
    return restored if any(_buffers(model)) else None


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Run one micro-batch, of which the buffers of spectral norms show nothing afterwards."""
    buffers = [buffer for _, buffer in _buffers(model)]
    before = [buffer.clone() for buffer in buffers]
    yield
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of torch's spectral norms, as parametrizations and in the older form."""
    for name, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        for key, buffer in own.items():
            stem = key.removesuffix("_u")
            is_vector = stem != key and f"{stem}_v" in own
            if is_vector and (
                hasattr(module, "n_power_iterations") or hasattr(module, f"{stem}_orig")
            ):
                yield f"{name}.{key}".lstrip("."), buffer
                yield f"{name}.{stem}_v".lstrip("."), own[f"{stem}_v"]
