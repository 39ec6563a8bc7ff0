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
    # By holder and name: a forward may bind another tensor to the name of a buffer.
    buffers = [
        (module, key, buffer, buffer.detach().clone())
        for module in model.modules()
        for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
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
            for module, key, buffer, value in buffers:
                buffer.copy_(value)
                if getattr(module, key) is not buffer:
                    setattr(module, key, buffer)
        for param, gradient in kept:
            param.grad = gradient
        for module, key, value in plain:
            vars(module)[key] = value
        state.restore()


def _cloned(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()
