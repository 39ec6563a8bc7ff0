"""What `.grad` of a parameter on servers is: this rank's part of a sum that servers add.

The problem.  A script, or a library, may do anything with a gradient between the backward pass and
the optimizer's step.  A rank has its own part of it alone.  What is linear may be done to the
parts: the sum follows.  A norm is that of the sum, which servers know.  Anything else would
silently be another number than in one process.

The idea.  `.grad` is a tensor without memory that looks at each operator.  Products with a number
only change `factor`, so that clipping moves no bytes.  Norms are asked for (`remote_gradients`).
Operators on lists, of which some are plain tensors, are divided.  The check of loss scalers is a
norm, too.  All else is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.torch_compat import empty_wrapper, of_subclass


class KnownNorms(Protocol):
    """Knows norms of the sums of all ranks; `remote_gradients` does."""

    def norm(self, part: GradientPart, order: float, /) -> float:
        """Return the norm of the sum of the parts of all ranks; all ranks together."""

    def cleared(self, part: GradientPart, /) -> None:
        """Forget norms: a gradient is zero from now on."""


class GradientPart:
    """This rank's part of one gradient: `factor` times `values`.

    Args:
        norms: Knows norms.
        name: Of the parameter.
        values: Dense, or sparse as of a table; None where this rank has none.
    """

    __slots__ = ("factor", "name", "norms", "values")

    def __init__(self, norms: KnownNorms, name: str, values: Tensor | None) -> None:
        self.norms, self.name, self.values = norms, name, values
        self.factor = 1.0

    def times(self, factor: float) -> GradientPart:
        """Return another one, of the same values."""
        part = GradientPart(self.norms, self.name, self.values)
        part.factor = self.factor * factor
        return part

    def norm(self, order: float) -> float:
        """Return the norm of the sum of all ranks' parts."""
        return self.norms.norm(self, order)

    def whole(self) -> Tensor | None:
        """Return the values, with the factor in them."""
        if self.values is not None and self.factor != 1.0:
            self.values, self.factor = self.values * self.factor, 1.0
        return self.values


class ServerGradient(Tensor):
    """See the module.

    Attributes:
        part: What this rank has.
    """

    part: GradientPart

    def __new__(cls, part: GradientPart, like: Tensor) -> Self:
        """Return the gradient of a parameter, of which this rank has a part."""
        plain = like if isinstance(like, cls) else like.detach()
        self: Self = empty_wrapper(cls, like.shape, plain)
        self.part = part
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return what is known of it without the other ranks."""
        return f"{type(self).__name__}({self.part.name}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Leave `func` to the operators that it calls."""
        del types
        with of_subclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares that it is disabled
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute an operator of gradients; see the module."""
        del types
        name = func.name().partition("::")[2].partition(".")[0]
        rule = _RULES.get(name)
        if rule is None:
            raise _refusal(name, (*args, *(kwargs or {}).values()))
        return rule(func, name, *args, **(kwargs or {}))


def _refusal(operator: str, args: Iterable[Any]) -> ModelError:
    listed = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
    names = [each.part.name for each in listed if isinstance(each, ServerGradient)]
    return ModelError(
        f"{ROOT}.servers: {operator.strip('_')} of the gradient of {names[0]}: a rank has its part "
        "of it alone, and servers add the parts",
        hint="its norms and products with a number are those of one process: clip by a norm, or "
        "keep the parameter out of servers",
    )


def _number(other: Any) -> float | None:
    """Return a factor; None where it is no number."""
    if isinstance(other, Tensor):
        is_number = other.numel() == 1 and not isinstance(other, ServerGradient)
        return float(other) if is_number else None
    return float(other) if isinstance(other, int | float) else None


def _factor(func: Any, name: str, own: Any, other: Any) -> float:
    factor = _number(other)
    if factor is None or not isinstance(own, ServerGradient):
        raise _refusal(func.name().partition("::")[2].partition(".")[0], (own, other))
    if "div" not in name:
        return factor
    return 1.0 / factor if factor else math.copysign(math.inf, factor)


def _same(_func: Any, _name: str, own: ServerGradient) -> ServerGradient:
    return ServerGradient(own.part, own)


def _itself(_func: Any, _name: str, own: ServerGradient) -> ServerGradient:
    return own


def _multiplied(
    func: Any, name: str, own: Any, other: Any, *, rounding_mode: str | None = None
) -> ServerGradient:
    _check_exact(name, own, rounding_mode)
    if name == "mul" and not isinstance(own, ServerGradient):
        own, other = other, own
    factor = _factor(func, name, own, other)
    return ServerGradient(own.part.times(factor), own)


def _multiply(
    func: Any, name: str, own: Any, other: Any, *, rounding_mode: str | None = None
) -> ServerGradient:
    _check_exact(name, own, rounding_mode)
    factor = _factor(func, name, own, other)
    own.part.factor *= factor
    return cast("ServerGradient", own)


def _check_exact(name: str, own: Any, rounding_mode: str | None) -> None:
    """Refuse a division that rounds: parts would be rounded before they are added."""
    if rounding_mode is not None:
        raise _refusal(name, (own,))


def _multiply_all(func: Any, _name: str, own: list[Any], other: Any) -> None:
    others = other if isinstance(other, list | tuple) else [other] * len(own)
    for each, factor in zip(own, others, strict=True):
        is_product = "mul" in func.name()
        each.mul_(factor) if is_product else each.div_(factor)


def _clear(_func: Any, _name: str, own: ServerGradient) -> ServerGradient:
    # An optimizer steps with zeros, and not with a gradient that is not there.
    if own.part.values is not None:
        own.part.values = torch.zeros_like(own.part.values)
    own.part.factor = 1.0
    own.part.norms.cleared(own.part)
    return own


def _clear_all(_func: Any, _name: str, own: list[Tensor]) -> None:
    for each in own:
        each.zero_()


def _norm(  # noqa: PLR0917 - as the operator
    func: Any,
    name: str,
    own: ServerGradient,
    order: Any = 2,
    dim: list[int] | None = None,
    keepdim: bool = False,  # noqa: FBT001, FBT002
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    is_of_all = dim is None or sorted(each % own.dim() for each in dim) == list(range(own.dim()))
    if not is_of_all or keepdim:
        raise _refusal(name, (own, func))
    order = 2.0 if order is None else float(order)
    return torch.tensor(own.part.norm(order), dtype=dtype or own.dtype, device=own.device)


def _norms_of_all(
    _func: Any,
    _name: str,
    own: list[Tensor],
    order: float = 2,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    return [torch.linalg.vector_norm(each, order, dtype=dtype) for each in own]


def _unscale(func: Any, _name: str, own: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Note gradients that are not finite on any rank, and multiply all: `torch.amp.GradScaler`."""
    plain = [each for each in own if not isinstance(each, ServerGradient)]
    if plain:
        func(plain, found, inverse)
    for each in own:
        if isinstance(each, ServerGradient):
            if not math.isfinite(each.part.norm(2.0)):
                found.fill_(1.0)
            each.part.factor *= float(inverse)


_RULES: dict[str, Callable[..., Any]] = {
    "detach": _same,
    "alias": _same,
    "detach_": _itself,
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "_foreach_norm": _norms_of_all,
    "mul": _multiplied,
    "div": _multiplied,
    "mul_": _multiply,
    "div_": _multiply,
    "_foreach_mul_": _multiply_all,
    "_foreach_div_": _multiply_all,
    "zero_": _clear,
    "_foreach_zero_": _clear_all,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
