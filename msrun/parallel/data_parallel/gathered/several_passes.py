"""Several forward passes before a backward pass, or several backward passes of one.

Below ZeRO 3, parameters stay gathered from forward to backward, and the backward pass of each unit
releases those of the unit.  A script may have read them in between, such as in a penalty on
weights.  The backward pass of a later forward pass would release them before the gradient of the
penalty reads them, from memory that is gone; so they stay gathered until its end.  One that keeps
its graph leaves them in memory for the next one.  The model has its shards again by then, with the
gradients that a script clips; the next forward pass gathers into the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from msrun.parallel import torch_compat
from msrun.parallel.losses.batch import tensors_in


class SeveralPasses:
    """Decides when the units of a model release what they gathered."""

    def __init__(self) -> None:
        self._has_several = False  # forward passes
        self._kept: list[FSDPModule] = []  # by the backward pass that runs

    def watch(self, model: nn.Module) -> None:
        """Look at the forward passes of `model`."""
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)

    def _begin(self, model: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._show_shards()  # of a backward pass that raised
        if torch_compat.releases_gathered(model):
            self._has_several = True
            _as_unit(model).set_reshard_after_backward(False)

    def _end(self, model: nn.Module, _: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, model))

    def _begin_backward(self, model: nn.Module, _: Tensor) -> None:
        if torch_compat.are_units_left_alone():
            return
        if torch_compat.keeps_graph():
            if not self._kept:  # by another output of the model
                self._kept = [unit for unit in _units(model) if torch_compat.is_gathered(unit)]
                for unit in self._kept:
                    unit.set_reshard_after_backward(False, recurse=False)
                torch_compat.after_backward(self._show_shards)
        elif self._has_several:
            torch_compat.after_backward(partial(self._release, model))

    def _show_shards(self) -> None:
        """Give the model its shards, and leave what was gathered in memory."""
        for unit in self._kept:
            unit.set_reshard_after_backward(not self._has_several, recurse=False)
            torch_compat.show_shards(unit)
        self._kept = []

    def _release(self, model: nn.Module) -> None:
        if self._has_several:  # and no other output of the model has done so
            self._has_several = False
            _as_unit(model).set_reshard_after_backward(True)
            for unit in _units(model):
                unit.reshard()


def _units(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _as_unit(model: nn.Module) -> FSDPModule:
    if not isinstance(model, FSDPModule):
        raise TypeError(type(model).__name__)
    return model
