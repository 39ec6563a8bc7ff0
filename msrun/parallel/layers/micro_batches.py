"""Buffers that forward writes, in a step of several micro-batches.

One process runs forward once a step on the whole batch.  With `accumulate` it runs once for each
micro-batch, so a buffer that it writes would be written several times.

Spectral norms move two buffers each time they compute their weight.  The iteration reads only
weights, which do not change within a step.  So each micro-batch begins where the step began: all of
them then compute the weight that one process computes, and the last one leaves its buffers.

Any other buffer, such as a moving average of activations, a parameter that forward itself writes,
and any number in an attribute, such as a count of calls, is refused if a second micro-batch of the
first step changes it again.  A cache that the first one fills, and others only read, passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.copies.attributes import Attributes
from msrun.parallel.data_parallel.written_parameters import WrittenParameters
from msrun.parallel.local import is_equal, numbers


def check(config: ParallelConfig, model: nn.Module) -> None:
    """Refuse spectral norms in a pipeline, whose micro-batches overlap, and beside copies.

    Raises:
        ModelError: There is one, and a step has several micro-batches.
    """
    parts = config.pipeline.microbatches if config.pipeline else 1
    name = next(iter(_spectral(model)), None)
    if config.copies > 1 and name is not None:
        raise ModelError(
            f"{ROOT}.copies: each of {config.copies} copies would move {name} of a spectral norm, "
            "which one process moves once a step",
            hint="remove the spectral norm, or leave out copies",
        )
    if parts > 1 and name is not None:
        raise ModelError(
            f"{ROOT}.pipeline.microbatches: {parts} micro-batches would each move {name} of a "
            "spectral norm, which one process moves once a step",
            hint="remove the spectral norm, or train without a pipeline",
        )


class MicroBatches:
    """The micro-batches of a step of one model.

    Args:
        config: The configuration.
        model: The model, to which no reference is kept.
    """

    def __init__(self, config: ParallelConfig, model: nn.Module) -> None:
        self._parts = config.parts
        self._key = "copies" if config.copies > 1 else "accumulate"
        self._has_spectral = any(_spectral(model))
        # With `batch_norm: local` buffers follow what a rank sees at once.
        self._is_checked = config.batch_norm == "local" or self._parts == 1
        self._after: dict[str, Tensor] | None = None
        self._numbers: dict[str, float] | None = None
        self._has_copies = config.copies > 1
        self._attributes: Attributes | None = None
        self._params = WrittenParameters()

    @contextmanager
    def before_last(self, model: nn.Module) -> Iterator[None]:
        """Run a micro-batch before the last one of a step; it does not move spectral norms.

        Raises:
            ModelError: It changes a buffer that another micro-batch changed before.
        """
        buffers = _spectral(model).values() if self._has_spectral else ()
        before = [buffer.clone() for buffer in buffers]
        self._begin(model)
        yield
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        self._check_writes(model)

    @contextmanager
    def last(self, model: nn.Module) -> Iterator[None]:
        """Run the last micro-batch of a step.

        Raises:
            ModelError: It changes a buffer that another micro-batch changed before.
        """
        self._begin(model)
        yield
        self._check_writes(model)
        self._params = WrittenParameters()
        self._is_checked, self._after, self._numbers = True, None, None
        self._attributes = None

    def _begin(self, model: nn.Module) -> None:
        if not self._is_checked:
            self._params.begin(model)

    def _check_writes(self, model: nn.Module) -> None:
        """Compare buffers with those after the micro-batch before, in the first step alone."""
        if self._is_checked:
            return
        spectral = _spectral(model)
        now = {name: b for name, b in model.named_buffers() if name not in spectral}
        again = [
            name
            for name, before in (self._after or {}).items()
            if name in now and not is_equal(before, now[name])
        ]
        counts, before = numbers(model), self._numbers or {}
        again += [name for name in before if name in counts and counts[name] != before[name]]
        again += self._params.again(model)
        if again:
            raise ModelError(
                f"{ROOT}.{self._key}: each of {self._parts} micro-batches changes {again[0]}, "
                "which one process changes once a step",
                hint="say `batch_norm: local` if that is meant",
            )
        if self._has_copies:
            attributes = Attributes(model)
            if self._attributes is not None:
                self._attributes.check_unchanged(attributes)
            self._attributes = attributes
        self._numbers = counts
        self._after = {name: buffer.detach().clone() for name, buffer in now.items()}


def _spectral(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of torch's spectral norms, as parametrizations and in the older form."""
    found = {}
    for name, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        for key in own:
            stem = key.removesuffix("_u")
            is_vector = stem != key and f"{stem}_v" in own
            iterates = hasattr(module, "n_power_iterations") or hasattr(module, f"{stem}_orig")
            if is_vector and iterates:
                for part in (key, f"{stem}_v"):
                    found[f"{name}.{part}".lstrip(".")] = own[part]
    return found
