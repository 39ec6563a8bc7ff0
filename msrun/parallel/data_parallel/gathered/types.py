"""The types in which ZeRO gathers under `precision`: those in which autocast computes.

A weight that autocast casts before its product is cast before its gather, which halves the bytes
and changes no number.  All others are gathered in their own type: an embedding, a norm or the state
matrix of a recurrence computes in float32 in one process, and so does what follows it.  Which are
cast is read off the modules that have them, since nothing has run when types are chosen.

Outside of autocast one process would compute these products in float32, too, and no rank has such a
weight.  Training there is refused.  A part that is called alone in evaluation, as `generate` calls
the encoder of T5, computes as it does in the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import ROOT
from msrun.parallel.settings.steps import PRECISIONS

# Their forward computes one product with these parameters, whatever inherits from them.
_PRODUCTS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_FACTORS = ("weight", "bias")
_OF_ATTENTION = (*(f"{kind}_proj_weight" for kind in ("in", "q", "k", "v")), "in_proj_bias")


def as_autocast(model: nn.Module, precision: str | None) -> None:
    """Have units of `model`, which `fully_shard` made, gather in the types of autocast.

    Args:
        model: The model, before its first forward.
        precision: As in the configuration.
    """
    if precision is None:
        return
    dtype = getattr(torch, PRECISIONS[precision])
    cast: set[nn.Module] = set()

    def is_kept(places: list[tuple[nn.Module, str]]) -> bool:
        if not all(_is_cast(*place) for place in places):
            return True
        cast.update(module for module, name in places if getattr(module, name).dtype != dtype)
        return False

    torch_compat.keep_types(model, is_kept)
    for name, module in model.named_modules():
        if module in cast:
            check = _UnderAutocast(name, precision, dtype)
            module.register_forward_pre_hook(check, with_kwargs=True)


def _is_cast(module: nn.Module, name: str) -> bool:
    """Return whether autocast casts a parameter wherever its module computes with it."""
    if type(module) is nn.MultiheadAttention:
        return name in _OF_ATTENTION
    is_product = any(type(module).forward is kind.forward for kind in _PRODUCTS)
    return is_product and name in _FACTORS and "forward" not in vars(module)


class _UnderAutocast:
    """Checks that a module with a narrow weight runs under autocast.

    Args:
        name: Of the module.
        precision: As in the configuration.
        dtype: Of the weight.
    """

    def __init__(self, name: str, precision: str, dtype: torch.dtype) -> None:
        self._name, self._precision, self._dtype = name, precision, dtype

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return inputs of that type, outside of autocast; None leaves them alone.

        Raises:
            ModelError: The module is trained outside of autocast.
        """
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if not given or torch.is_autocast_enabled(given[0].device.type):
            return None
        if torch.is_grad_enabled():
            raise ModelError(
                f"{ROOT}.precision: {self._name} runs outside of autocast, and with optimizer.zero "
                f"its weight is gathered in {self._precision}",
                hint="leave out precision and enter torch.autocast in the script, around the "
                "forward of the model: ZeRO then gathers in float32",
            )
        narrow = {key: self._narrow(x) for key, x in kwargs.items()}
        return tuple(map(self._narrow, args)), narrow

    def _narrow(self, x: Any) -> Any:
        is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(self._dtype) if is_float else x
