"""States of torch's, Python's and numpy's global random generators as tensors, and back."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PYTHON_VERSION = 3
_MT_WORDS = 624


def torch_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators of the host and of `device`, if that is another."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        states.append(module.get_rng_state(device))
    return states


def set_torch_states(states: Sequence[Tensor], device: torch.device) -> None:
    """Set torch's generators to states of `torch_states`, where they have others."""
    now = torch_states(device)
    if not torch.equal(now[0], states[0]):
        torch.set_rng_state(states[0])
    if len(now) > 1 and not torch.equal(now[1], states[1]):
        module: Any = torch.get_device_module(device)
        module.set_rng_state(states[1], device)


def python_state() -> Tensor:
    """Return the state of Python's generator."""
    version, words, gauss = random.getstate()
    return torch.tensor([version, *words, *_of_float(gauss)], dtype=torch.int64)


def set_python_state(state: Tensor) -> None:
    """Set Python's generator to a state of `python_state`."""
    numbers = state.tolist()
    version, *words = numbers[:-2]
    if version == _PYTHON_VERSION:
        random.setstate((version, tuple(words), _to_float(numbers[-2:])))


def numpy_state() -> Tensor | None:
    """Return the state of numpy's global generator; None if not loaded or not an MT19937."""
    module: Any = sys.modules.get("numpy.random")
    state = module.get_state() if module else None
    if not isinstance(state, tuple) or state[0] != "MT19937":
        return None
    _, words, position, has_gauss, gauss = state
    numbers = [*words.tolist(), position, *_of_float(gauss if has_gauss else None)]
    return torch.tensor(numbers, dtype=torch.int64)


def set_numpy_state(state: Tensor) -> None:
    """Set numpy's global generator to a state of `numpy_state`, if numpy is loaded."""
    numbers = state.tolist()
    module: Any = sys.modules.get("numpy.random")
    if module:
        gauss = _to_float(numbers[-2:])
        words, position = numbers[:_MT_WORDS], numbers[_MT_WORDS]
        module.set_state(("MT19937", words, position, int(gauss is not None), gauss or 0.0))


def _of_float(value: float | None) -> tuple[int, int]:
    """Return 1 and the bits of `value`, or 0 and 0 for None."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value or 0.0))
    return int(value is not None), bits


def _to_float(pair: list[int]) -> float | None:
    (value,) = struct.unpack("<d", struct.pack("<q", pair[1]))
    return float(value) if pair[0] else None
