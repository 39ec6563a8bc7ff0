"""Several forward passes before one backward pass: parameters stay gathered until its end.

Below ZeRO 3, parameters stay gathered from forward to backward, and the backward pass of each unit
releases those of the unit.  A script may have read them between two forward passes, such as in a
penalty on weights.  The backward pass of the later one would release them before the gradient of
the penalty reads them, from memory that is gone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from msrun.parallel import torch_compat
from msrun.parallel.losses.batch import tensors_in


class SeveralPasses:
    """Has the outermost module of `fully_shard` release all parameters at the end."""

    def __init__(self) -> None:
        self._keeps = False

    def watch(self, model: nn.Module) -> None:
        """Look at the forward passes of `model`."""
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)

    def _begin(self, model: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and torch_compat.releases_gathered(model):
            self._keeps = True
            _as_unit(model).set_reshard_after_backward(False)

    def _end(self, model: nn.Module, _: Any, output: Any) -> None:
        for tensor in tensors_in(output) if self._keeps else ():
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, model))

    def _begin_backward(self, model: nn.Module, _: Tensor) -> None:
        if self._keeps:
            torch_compat.after_backward(partial(self._release, model))

    def _release(self, model: nn.Module) -> None:
        if self._keeps:  # and no other output of the model has done so
            self._keeps = False
            _as_unit(model).set_reshard_after_backward(True)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _as_unit(model: nn.Module) -> FSDPModule:
    if not isinstance(model, FSDPModule):
        raise TypeError(type(model).__name__)
    return model
