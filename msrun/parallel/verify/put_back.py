"""A run that leaves a model as it was: what it computes is compared, and trains nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from msrun.parallel.verify.randomness import GeneratorStates


@contextlib.contextmanager
def put_back(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Leave buffers, gradients, random generators and plain attributes as they are now."""
    state = GeneratorStates(device)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    kept = [(param, _cloned(param.grad)) for param in model.parameters()]
    plain = [
        (module, key, value)
        for module in model.modules()
        for key, value in vars(module).items()
        if type(value) in (bool, int, float, str)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for param, gradient in kept:
            param.grad = gradient
        for module, key, value in plain:
            vars(module)[key] = value
        state.restore()


def _cloned(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()
