"""What functions of torch that return one number do with the elements that they get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from msrun.parallel.losses.calls.contractions import contraction
from msrun.parallel.losses.torch_calls import MEANS, OPAQUE, SUMS, tensors_of


class Reduced(NamedTuple):
    """A function that returned one number.

    Args:
        x: What it reduced; of a product the first factor.
        kind: What the number is of the elements; "opaque" if it is neither a mean nor a sum.
    """

    x: Tensor
    kind: Literal["mean", "sum", "opaque"]


def reduced_by(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_sample: Callable[[Tensor], bool],
) -> Reduced | None:
    """Return what a function reduced to one number; None for a function that is not known.

    Args:
        name: Of the function.
        args: What it got.
        kwargs: What it got by name.
        is_sample: Whether a tensor is computed from samples.
    """
    x = args[0] if args else kwargs.get("input")
    if isinstance(x, Tensor) and not x.dim() and len(tensors_of(args)) > 1:
        return None  # of numbers
    if name in MEANS | SUMS | OPAQUE:
        kind = "mean" if name in MEANS else "sum" if name in SUMS else "opaque"
        return Reduced(x, kind) if isinstance(x, Tensor) else None  # type: ignore[arg-type]
    product = contraction(name, args, kwargs)
    if product is None:
        return None
    # A sum of products of each sample with itself, and of no pairs of samples.
    firsts = {labels[:1] for x, labels in product.operands if is_sample(x)}
    return Reduced(product.operands[0][0], "sum" if len(firsts) == 1 else "opaque")


def sums_rows(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    has_rows: Callable[[Tensor], bool],
) -> bool:
    """Return whether a product of tensors adds up over samples, as `z.T @ z` does.

    Args:
        name: Of the function.
        args: What it got.
        kwargs: What it got by name.
        has_rows: Whether a tensor has samples in its first dim.
    """
    product = contraction(name, args, kwargs)
    return product is not None and any(
        labels[0] not in product.result for x, labels in product.operands if has_rows(x)
    )
