"""What elements of means and sums weigh in a loss, and on which ranks they weigh something else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from msrun.parallel.losses.terms import Term

Kind = Literal["mean", "sum", "scaled", "number"]

_TOLERANCE = 1e-5  # relative: derivatives are in the type of the loss
_DIVISIONS = ("DivBackward", "MeanBackward")


class Weight(NamedTuple):
    """What elements of a mean or sum weigh in a loss.

    Args:
        name: Of the function that computed it.
        slope: Derivative of the loss by it.
        divisor: What divides the sum, or 1.
        kind: `sum` if nothing else was done with that, and `scaled` if it was only multiplied;
            `number` for a mean without a gradient, whose value is `slope`; any other is `mean`.
        follows_data: Whether another batch may have another weight.
    """

    name: str
    slope: float
    divisor: float
    kind: Kind
    follows_data: bool = False

    @property
    def value(self) -> float:
        """The weight of an element; 0 if none counts."""
        return self.slope / self.divisor if self.divisor else 0.0


def backward_pairs(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor | None]]:
    """Return what a function is about to differentiate, each with the gradient that it is given.

    Returns:
        Nothing for a function that begins no backward pass.
    """
    if func is Tensor.backward:
        return [(args[0], kwargs.get("gradient", (*args[1:], None)[0]))]
    if func is not torch.autograd.backward:
        return []
    losses, gradients = args[0], kwargs.get("grad_tensors")  # torch passes these on by name
    given = [gradients] if isinstance(gradients, Tensor) else gradients or ()
    pairs = itertools.zip_longest(losses, given)
    return [(loss, gradient) for loss, gradient in pairs if isinstance(loss, Tensor)]


def kind_of(term: Term, weight: float, loss: Tensor) -> Kind:
    """Return what `term` is in `loss`, where its elements weigh `weight`.

    Returns:
        `sum` if nothing else was done with a sum, and `scaled` if it was only multiplied.
    """
    if not term.is_sum or term.is_by_hand:
        return "mean"
    if abs(weight) == 1.0:
        return "sum"
    return "scaled" if term.is_scaled or not _is_divided(loss, term.total) else "mean"


def weights_by(gradient: Tensor) -> list[Weight]:
    """Return what samples weigh in losses of each, differentiated with this gradient.

    Returns:
        Nothing if they weigh differently: the script knows why.
    """
    weight = float(gradient.flatten()[0])
    if not bool((gradient == weight).all()):
        return []
    is_mean = abs(abs(weight) * gradient.numel() - 1.0) < _TOLERANCE
    kind: Kind = "sum" if abs(weight) == 1.0 else "mean" if is_mean else "scaled"
    return [Weight("a loss of each sample", weight, 1.0, kind)]


def unlike_ranks(weights: Sequence[Weight]) -> tuple[int, int] | None:
    """Return the places of the least and the largest value in order; None if all are equal."""
    values = [weight.value for weight in weights]
    first, last = sorted((values.index(min(values)), values.index(max(values))))
    spread = abs(values[first] - values[last])
    is_alike = spread <= _TOLERANCE * max(abs(values[first]), abs(values[last]))
    return None if is_alike else (first, last)


def unlike_number(losses: Sequence[Sequence[Weight]], ranks: Sequence[int]) -> str | None:
    """Return a sentence on a mean without a gradient that ranks have others of; None without."""
    if len({tuple(weight.name for weight in loss) for loss in losses}) > 1:
        return None
    for weights in zip(*losses, strict=True):
        if weights[0].kind == "number" and (unlike := unlike_ranks(weights)):
            shown = " and ".join(
                f"{weights[index].slope:.6g} on rank {ranks[index]}" for index in unlike
            )
            return (
                f"the loss of this loop depends on a {weights[0].name} of a part of the batch, "
                f"{shown}, which is another number for the whole batch"
            )
    return None


def _is_divided(loss: Tensor, total: Tensor) -> bool:
    """Return whether one of the functions that lead from `total` to `loss` divides."""
    end, seen = total.grad_fn, set()
    waiting = [(loss.grad_fn, False)]
    while waiting:
        node, is_divided = waiting.pop()
        if node is end and is_divided:
            return True
        if node is None or node is end or (node, is_divided) in seen:
            continue
        seen.add((node, is_divided))
        divides = is_divided or node.name().startswith(_DIVISIONS)
        waiting += [(before, divides) for before, _ in node.next_functions]
    return False
