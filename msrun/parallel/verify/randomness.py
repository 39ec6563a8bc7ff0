"""Random numbers of a verified step: whether one process draws those of the ranks, or none can be.

Data-parallel ranks and stages draw from streams of their own, so a dropout drops other elements
than that of one process.  Such a step is compared with dropout switched off on both sides, in a run
of its own before the step.  Whatever still draws cannot be compared.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


class GeneratorStates:
    """The states of the random generators of this process.

    Args:
        device: Of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = None if device.type == "cpu" else getattr(torch, device.type)
        self._torch = torch.get_rng_state()
        self._device = self._kind.get_rng_state() if self._kind else None
        self._python = random.getstate()
        self._numpy = _numpy().get_state(legacy=False) if _numpy() else None

    def restore(self) -> None:
        """Continue the random numbers from here."""
        torch.set_rng_state(self._torch)
        if self._kind:
            self._kind.set_rng_state(self._device)
        random.setstate(self._python)
        if self._numpy is not None:
            _numpy().set_state(self._numpy)

    def is_equal(self, other: GeneratorStates) -> bool:
        """Return whether both have the same random numbers ahead."""
        is_same = torch.equal(self._torch, other._torch) and self._python == other._python
        if self._device is not None and other._device is not None:
            is_same = is_same and torch.equal(self._device, other._device)
        return is_same and str(self._numpy) == str(other._numpy)


def _numpy() -> Any:
    return sys.modules.get("numpy.random")


def rates_of_dropout(*models: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Return the rates of dropout above 0 in `models`: module, name of the attribute, and rate.

    A rate is `p` of torch's modules, and any number from 0 to 1 with `drop` in its name, as models
    have it that drop by functions.
    """
    return [
        (module, name, value)
        for model in models
        for module in model.modules()
        for name, value in vars(module).items()
        if "drop" in name.lower() or (name == "p" and isinstance(module, _DROPOUTS))
        if type(value) is float and 0.0 < value <= 1.0
    ]


@contextlib.contextmanager
def without_dropout(*models: nn.Module) -> Iterator[list[str]]:
    """Set every rate of dropout in `models` to 0 inside the block; yield what had one."""
    changed = rates_of_dropout(*models)
    for module, name, _ in changed:
        setattr(module, name, 0.0)
    try:
        yield sorted({f"{type(module).__name__}.{name}" for module, name, _ in changed})
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
