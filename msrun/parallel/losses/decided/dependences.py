"""How what functions of torch return depends on values of the batch.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msrun.parallel.losses.mixing import dims_of
from msrun.parallel.losses.torch_calls import DIVIDING, name_of

_COMPARISONS = frozenset(["gt", "lt", "ge", "le", "eq", "ne", "isclose", "greater", "less"])
_COMPARISONS |= {"greater_equal", "less_equal", "not_equal"}
_GUARDS = frozenset(["any", "all"])
_OF_NO_VALUE = frozenset(["isnan", "isinf", "isfinite", "isposinf", "isneginf"])
_SUMS = frozenset(["sum", "nansum", "count_nonzero", "norm", "vector_norm", "prod", "logsumexp"])
_SUMS |= {"std", "var"}
_CUTTING = frozenset(["__getitem__", "__iter__", "unbind", "select", "chunk", "split", "narrow"])


class Dependence(NamedTuple):
    """How a tensor depends on the batch.

    Args:
        is_value: Whether it depends on floating-point values, and not on tokens or masks alone.
        is_sum: Whether it is a sum over samples, which grows with them.
        is_guard: Whether it says that some element has a property, or that all have.
    """

    is_value: bool
    is_sum: bool = False
    is_guard: bool = False


def dependence_of(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dependences: Sequence[Dependence],
    result: Tensor,
) -> Dependence:
    """Return how a result depends on the batch, by what the arguments do."""
    is_value = any(dependence.is_value for dependence in dependences)
    is_sum = any(dependence.is_sum for dependence in dependences)
    is_guard = name in _GUARDS or any(dependence.is_guard for dependence in dependences)
    if result.is_floating_point():
        is_value |= result.requires_grad  # weights that tokens chose
    elif result.dtype != torch.bool:
        is_value &= name in _SUMS  # how many there are; others are places
    elif name in _OF_NO_VALUE:
        is_value = False
    if name in _SUMS and args and isinstance(args[0], Tensor):
        dims = dims_of(name, args, kwargs, args[0].dim())
        is_sum |= not dims or 0 in dims
    elif name in DIVIDING:
        is_sum = False  # a mean by hand
    elif name in _COMPARISONS and any(type(arg) in (int, float) and not arg for arg in args):
        is_guard |= is_sum  # whether there is any
        is_sum = False
    return Dependence(is_value, is_sum, is_guard and result.dtype == torch.bool)


def takes_one(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function takes some samples by their place, in the first dim."""
    if name not in _CUTTING:
        return False
    if name == "__getitem__":
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        is_part = isinstance(first, slice) and first != slice(None)
        return is_part or (isinstance(first, int) and not isinstance(first, bool))
    at = 2 if name in ("chunk", "split") else 1
    dim = kwargs.get("dim", args[at] if len(args) > at else 0)
    return bool(dim == 0)


def bare_name(func: Callable[..., Any]) -> str:
    """Return the name of a function of torch, without what says that it is an operator."""
    name = name_of(func)
    bare = name.removeprefix("__").removesuffix("__")
    return bare if bare in _COMPARISONS else name if name.endswith("__") else name.removesuffix("_")
