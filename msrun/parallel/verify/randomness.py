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
from typing import Any, NamedTuple

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
# Of torchvision, which is not imported here.
_OTHER_DROPOUTS = ("StochasticDepth",)


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


@contextlib.contextmanager
def other_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Draw the numbers of a seed inside the block."""
    state = GeneratorStates(device)
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy_random := _numpy():
        numpy_random.seed(seed)
    try:
        yield
    finally:
        state.restore()


class _Rate(NamedTuple):
    """One number that may be a rate of dropout.

    Args:
        holder: Attributes or a dict that has it.
        name: Its name there.
        value: The number.
        label: Its name for a person.
    """

    holder: dict[str, Any]
    name: str
    value: Any
    label: str


def rates_of_dropout(*models: nn.Module) -> list[_Rate]:
    """Return the rates of dropout above 0 in `models`.

    A rate is `p` of modules that drop, and any number from 0 to 1 with `drop` in its name, as
    models have it that drop by functions: in a module, in a dict of it, as adapters have it, or in
    its `config`, where transformers look for some.
    """
    modules = (module for model in models for module in model.modules())
    rates = (rate for module in modules for rate in _numbers(module))
    found = {
        (id(rate.holder), rate.name): rate
        for rate in rates
        if type(rate.value) is float and 0.0 < rate.value <= 1.0
    }
    return list(found.values())


def _numbers(module: nn.Module) -> Iterator[_Rate]:
    """Yield what has the name of a rate."""
    kind, own = type(module).__name__, vars(module)
    drops = isinstance(module, _DROPOUTS) or kind in _OTHER_DROPOUTS or "drop" in kind.lower()
    for name, value in own.items():
        if "drop" in name.lower() or (drops and name == "p"):
            label = f"{kind}.{name}"
            yield _Rate(own, name, value, label)
            if type(value) is dict:
                yield from (_Rate(value, key, rate, label) for key, rate in value.items())
    config = own.get("config")
    if isinstance(values := getattr(config, "__dict__", None), dict):
        for name, value in values.items():
            if "drop" in name.lower():
                yield _Rate(values, name, value, f"{type(config).__name__}.{name}")


@contextlib.contextmanager
def without_dropout(*models: nn.Module) -> Iterator[list[str]]:
    """Set every rate of dropout in `models` to 0 inside the block; yield what had one."""
    changed = rates_of_dropout(*models)
    for rate in changed:
        rate.holder[rate.name] = 0.0
    try:
        yield sorted({rate.label for rate in changed})
    finally:
        for rate in changed:
            rate.holder[rate.name] = rate.value
