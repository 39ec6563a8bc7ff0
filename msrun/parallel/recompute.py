"""Recomputation: modules that keep only their inputs and run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from msrun.parallel.config import Recompute
from msrun.parallel.match import matching

Context = Callable[[], AbstractContextManager[None]]

_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")


def find(settings: Recompute, modules: Sequence[str]) -> list[str]:
    """Return the outermost of `modules` that are to be recomputed.

    Raises:
        UsageError: A pattern matches none.
    """
    chosen = sorted(matching(settings.modules, modules, "recompute.modules"))
    return [
        name
        for name in chosen
        if not any(name != other and f"{name}.".startswith(f"{other}.") for other in chosen)
    ]


def apply(model: nn.Module, names: Iterable[str], save: Sequence[str], context: Context) -> None:
    """Have the modules called `names` recompute; names and hooks of the model stay as they are.

    Random numbers are drawn again as they were, so dropout is exact.

    Args:
        model: The model.
        names: Modules, none inside another.
        save: As of `config.Recompute.save`.
        context: What the modules have to run in; in the backward pass nobody else enters it.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if save:
        policy = partial(_policy, frozenset(save))
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    for name in names:
        module = model.get_submodule(name)
        inner = partial(_inside, context, module.forward)
        module.forward = partial(_forward, inner, options)


def _forward(
    forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, **options, **kwargs)


def _inside(context: Context, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with context():
        return forward(*args, **kwargs)


def _policy(
    save: frozenset[str], context: object, operator: Any, *_args: object, **_kwargs: object
) -> CheckpointPolicy:
    """Say of one operator whether its result is kept."""
    del context
    is_kept = ("comm" in save and operator.namespace in _COLLECTIVES) or (
        "matmul" in save and operator.namespace == "aten" and _name(operator) in _MATMULS
    )
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _name(operator: Any) -> str:
    return str(operator.name()).partition("::")[2].partition(".")[0]
