"""Values of tensors that a forward may read, since they are the same in every run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from msrun.parallel.torch_compat import with_values

# Comparison of a number in [0, 1) with a bound: the bound from which it is True, until which False.
_LESS = {"lt": True, "le": True, "__lt__": True, "__le__": True}
_MORE = {"gt": False, "ge": False, "__gt__": False, "__ge__": False}


class _DependsError(Exception):
    """A value depends on the batch or on weights."""


def known_value(node: fx.Node) -> Tensor | None:
    """Return the value of a step that is the same in every run; None if it may differ."""
    known = _bounded(node)
    return _evaluated(node) if known is None else known


def _bounded(node: fx.Node) -> Tensor | None:
    """Return what a comparison of a number of `torch.rand` yields whatever was drawn.

    Models that drop layers at random compare so with a rate, which often is 0.
    """
    name = getattr(node.target, "__name__", str(node.target))
    if name not in _LESS | _MORE or not isinstance(node.args[0], fx.Node):
        return None
    drawn, bound = node.args[0], node.args[1]
    if drawn.target is not torch.rand or not isinstance(bound, int | float):
        return None
    if bound <= 0:
        is_less = False
    elif bound >= 1:
        is_less = True
    else:
        return None
    if bound == 0 and name in ("le", "__le__", "gt", "__gt__"):
        return None
    return torch.tensor(is_less if name in _LESS else not is_less)


def _evaluated(node: fx.Node) -> Tensor | None:
    """Return the value of what is made of plain numbers alone."""
    known: dict[fx.Node, Any] = {}

    def value(step: fx.Node) -> Any:
        if step not in known:
            if step.op not in ("call_method", "call_function"):
                raise _DependsError
            args = fx.map_arg(step.args, value)
            kwargs = fx.map_arg(step.kwargs, value)
            if step.op == "call_method":
                known[step] = getattr(args[0], str(step.target))(*args[1:], **kwargs)
            elif callable(step.target):
                known[step] = step.target(*args, **kwargs)
        return known[step]

    with with_values(), torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        try:
            result = value(node)
        except _DependsError:
            return None
        is_random = not torch.equal(before, torch.get_rng_state())
    return None if is_random or not isinstance(result, Tensor) else result
