"""Refuses layers that take the dim of samples for that of a sequence, and explains errors.

Micro-batches cut dim 0 of a batch.  A layer of torch without `batch_first` has the sequence there:
of a batch with the sequence first, micro-batches would cut sequences.  One process would run such a
layer over all samples, if these are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel.losses.sample_watch import SampleWatch

_LAYERS = (nn.RNNBase, nn.MultiheadAttention)
_BATCHED = 3  # dims of an input with samples
_INPUTS = ("input", "query", "key", "value")


@contextlib.contextmanager
def refusing_sequences_first(model: nn.Module, watch: SampleWatch) -> Iterator[None]:
    """Refuse inside layers of `model` whose sequence is in the dim of samples.

    Args:
        model: Whose forward runs.
        watch: Follows the dim of samples; nothing is refused unless micro-batches cut it.
    """

    def check(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        count = 1 if isinstance(layer, nn.RNNBase) else 3  # the next of an RNN is its state
        given = [*args[:count], *(kwargs[name] for name in _INPUTS if name in kwargs)]
        inputs = [x for x in given if isinstance(x, Tensor) and x.dim() == _BATCHED]
        if any(watch.has_samples_first(x) for x in inputs):
            raise ModelError(
                f"{type(layer).__name__} has sequences in dim 0 of its input (batch_first=False), "
                "which micro-batches cut",
                hint="put samples first: transpose the batch, and in the forward what the layer "
                "gets, or choose batch_first=True",
            )

    layers = [each for each in model.modules() if isinstance(each, _LAYERS) and watch.parts > 1]
    # Of the class: some of our models refuse hooks of others.
    hook = nn.Module.register_forward_pre_hook
    handles = [hook(each, check, with_kwargs=True) for each in layers if not each.batch_first]
    try:
        with watch.explaining():
            yield
    finally:
        for handle in handles:
            handle.remove()
