"""Hooks of models that are left out of files and compiled code."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from msrun.parallel.torch_compat import is_compiled, is_compiled_in_place, is_transforming


class CallHook:
    """A hook of a model that does nothing in copies of it in files, and is the same in others.

    Args:
        call: Gets what the hook gets.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call, unless compiled code runs."""
        if not torch.compiler.is_compiling():
            self._call(*args)

    def __deepcopy__(self, _: object) -> CallHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return CallHook, (_nothing,)


def weakly(method: Callable[[], None]) -> Callable[..., None]:
    """Return what calls a method while its object is there, and takes what hooks get."""
    reference = weakref.WeakMethod(method)

    def call(*_: object) -> None:
        if found := reference():
            found()

    return call


def trains(model: nn.Module) -> bool:
    """Return whether a call of `model` is one in training, of tensors with values."""
    return model.training and torch.is_grad_enabled() and not is_transforming()


def has_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` was called for a module in `model`."""
    return any(is_compiled(module) or is_compiled_in_place(module) for module in model.modules())


def _nothing(*_: object) -> None:
    """Do nothing with a call of a model that was read from a file."""
