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
        names[parameter]: options_of(group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in names
    }
    return Recipe(kind=kind, options=options)


def options_of(group: Mapping[str, object]) -> dict[str, Value]:
    """Return the options of a group of an optimizer as plain data.

    Raises:
        ConfigError: One of them is none.
    """
    return {
        name: _plain(value)
        for name, value in group.items()
        if name not in {"params", "param_names"} and name not in _EXECUTION
    }


def try_recipe(recipe: Recipe, table: str, dtype: torch.dtype, *, is_sparse: bool) -> None:
    """Take two steps with a small table, and refuse what torch or servers cannot do.

    Raises:
        ConfigError: The optimizer does not take such gradients, or keeps a state of another kind.
    """
    parameter = nn.Parameter(torch.ones(2, 1, dtype=dtype))
    optimizer = build_optimizer(recipe.kind, parameter, recipe.options[table])
    kind = "sparse gradients" if is_sparse else "dense gradients"
    try:
        for _ in range(2):
            gradient = torch.ones(2, 1, dtype=dtype)
            parameter.grad = gradient.to_sparse(1) if is_sparse else gradient
            optimizer.step()
    except RuntimeError as error:
        text = f"{recipe.kind} does not train {table} with {kind}: {error}"
        raise ConfigError(text) from None
    for name, value in optimizer.state[parameter].items():
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            text = f"servers cannot keep {name} of {recipe.kind} for {table}, which has {kind}"
            raise ConfigError(text, hint="make the table with sparse=False, or choose Adagrad")


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
