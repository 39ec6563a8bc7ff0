"""`precision`: forward and loss under autocast, and a scaled loss for float16.

Parameters, their gradients and the optimizer's state keep their type.  Autocast is entered around
the forward of the model and around the loss, and never around a backward pass, which computes each
operator in the type of its forward.  `torch.utils.checkpoint` enters it again by itself.

Gradients of float16 are below its smallest number where those of float32 are small, so the loss is
multiplied before the backward pass and gradients are divided after it.  If one of any rank is then
no finite number, no rank takes the step: a rank that took it would part from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.local import local_gradient
from msrun.parallel.settings.steps import PRECISIONS

# As of `torch.amp.GradScaler`.
_FIRST_SCALE = 2.0**16
_GROWTH = 2.0
_STEPS_TO_GROW = 2000

_TYPES = {name: getattr(torch, dtype) for name, dtype in PRECISIONS.items()}


class Autocast:
    """A function that runs under autocast, in place of the one that it calls.

    Args:
        function: The function.
        device: Type of the device.
        dtype: Type in which matrix products are computed.
    """

    def __init__(self, function: Callable[..., Any], device: str, dtype: torch.dtype) -> None:
        self.__wrapped__ = function  # `inspect.signature` follows it
        self._device, self._dtype = device, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns."""
        with torch.autocast(self._device, dtype=self._dtype):
            return self.__wrapped__(*args, **kwargs)


def check(config: ParallelConfig, model: nn.Module) -> None:
    """Refuse a model whose parameters have the type of `precision` already.

    Raises:
        ModelError: Gradients of float16 cannot be divided by the scale of the loss.
    """
    if config.precision != "fp16":
        return
    for name, param in model.named_parameters():
        if param.dtype == torch.float16:
            raise ModelError(
                f"{ROOT}.precision: fp16 computes with parameters of float32, and {name} is "
                "float16",
                hint="call model.float() before rt.shard; it is cast where that helps",
            )


def apply(config: ParallelConfig, model: nn.Module, device: torch.device) -> None:
    """Have the forward of `model` run in the precision of `config`, in place."""
    if not config.precision:
        return
    dtype = _TYPES[config.precision]
    model.forward = Autocast(model.forward, device.type, dtype)
    if config.pipeline:
        # What stages send has the types of autocast, too.
        model.precision = partial(torch.autocast, device.type, dtype=dtype)  # type: ignore[assignment]


class LossScale:
    """The factor of the loss in float16, the same on all ranks.

    It falls to half after a step whose gradients were not finite, and doubles after 2000 others.
    """

    def __init__(self) -> None:
        self.value = _FIRST_SCALE
        self._good_steps = 0
        self._is_stepping = False

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps: `extra={"loss_scale": rt.loss_scale}`."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the factor of a checkpoint."""
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])

    @torch.no_grad()
    def unscale(self, params: Iterable[Parameter], device: torch.device) -> bool:
        """Divide gradients by the factor; return whether those of all ranks are finite.

        All ranks call it together.
        """
        worst = torch.zeros((), device=device)
        for param in params:
            gradient = local_gradient(param)
            if gradient is None or not gradient.numel():
                continue
            gradient.mul_(1.0 / self.value)
            # Infinity or no number in one element is that of the greatest.
            part = gradient.coalesce().values() if gradient.is_sparse else gradient
            greatest = torch.linalg.vector_norm(part, torch.inf).to(worst)
            worst = torch.maximum(worst, torch.where(greatest.isfinite(), 0.0, 1.0))
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        is_finite = not worst.item()
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self.value /= _GROWTH
        elif self._good_steps == _STEPS_TO_GROW:
            self.value, self._good_steps = self.value * _GROWTH, 0
        return is_finite

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer` step."""
        self._is_stepping = True
        try:
            optimizer.step()
        finally:
            self._is_stepping = False

    def refuse_plain_step(self, *_: object) -> None:
        """Refuse a step of an optimizer on gradients that nobody scaled.

        Raises:
            ModelError: The step is none of `rt.step`.
        """
        if not self._is_stepping:
            raise ModelError(
                f"{ROOT}.precision: fp16 needs a scaled loss, and this optimizer steps outside of "
                "rt.step",
                hint="train with rt.step, or choose bf16",
            )


def of_loss(
    config: ParallelConfig, function: Callable[..., Any] | None, device: torch.device
) -> Callable[..., Any] | None:
    """Return `function`, a loss, in the precision of `config`; None stays None."""
    if function is None or not config.precision:
        return function
    return Autocast(function, device.type, _TYPES[config.precision])
