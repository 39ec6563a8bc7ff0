"""An optimizer as plain data: what servers build theirs from, and what they refuse.

A server steps slices of parameters, so it offers the optimizers of torch that treat elements alone.
Of those, every slice is stepped as the whole is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import msgspec
import torch
from torch import nn

from msrun.errors import ConfigError

OPTIMIZERS = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "SparseAdam",
    "RMSprop",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
)
# How an optimizer computes, and not what; servers leave it to torch.
_EXECUTION = {"foreach", "fused", "capturable", "differentiable"}

Value = float | int | bool | str | None | tuple[float, ...]


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An optimizer without its parameters and state.

    Args:
        kind: The name of its class in `torch.optim`.
        options: Parameter -> the options of its group.
    """

    kind: str
    options: dict[str, dict[str, Value]]


def recipe_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> Recipe:
    """Return the recipe of `optimizer` for the parameters in `names`, by their names.

    Raises:
        ConfigError: Servers do not offer this optimizer.
    """
    kind = type(optimizer).__name__
    if kind not in OPTIMIZERS or type(optimizer) is not getattr(torch.optim, kind):
        text = f"servers do not offer the optimizer {kind} (choose {', '.join(OPTIMIZERS)})"
        hint = "it must treat elements alone: keep these parameters out of `servers`"
        raise ConfigError(text, hint=hint)
    options = {
        names[parameter]: {
            name: _plain(value)
            for name, value in group.items()
            if name != "params" and name not in _EXECUTION
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in names
    }
    return Recipe(kind=kind, options=options)


def _plain(value: object) -> Value:
    """Return an option without tensors, as a learning rate may be one."""
    if isinstance(value, torch.Tensor):
        return float(value)
    if isinstance(value, tuple | list):
        return tuple(float(each) for each in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    text = f"servers cannot take {value!r} as an option of an optimizer"
    raise ConfigError(text)


def build_optimizer(
    kind: str, parameter: nn.Parameter, options: Mapping[str, Value]
) -> torch.optim.Optimizer:
    """Return an optimizer of one parameter, with the options of its group."""
    if kind not in OPTIMIZERS:
        text = f"servers do not offer the optimizer {kind} (choose {', '.join(OPTIMIZERS)})"
        raise ConfigError(text)
    family = getattr(torch.optim, kind)
    # Some options make the first state, others are set by the class itself.
    known = inspect.signature(family).parameters
    given = {name: value for name, value in options.items() if name in known}
    optimizer: torch.optim.Optimizer = family([parameter], **given)
    optimizer.param_groups[0].update(options)
    return optimizer
