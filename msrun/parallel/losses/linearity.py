"""Whether a loss is a linear function of its means, so that parts of the batch make the whole."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.losses.terms import Term
from msrun.parallel.torch_compat import gradient_hooks, units_left_alone

_HINT = "return (sum, count) of the terms of the loss, or the loss of a whole batch: see rt.gather"
# What torch says of them.
_RELEASED = "out of bounds for storage of size 0"
_HANDED_ON = (
    "the model hands a number of the loss from one module that ZeRO 3 shards to the next, so what "
    "samples weigh in it is not known"
)
_HANDED_ON_HINT = (
    f"return the number from the model directly, or choose `{ROOT}: {{optimizer: {{zero: 2}}}}`"
)


def of_part(what: str, hint: str = "") -> ModelError:
    """Return the refusal of a loss that depends on a number of a part of the batch."""
    return ModelError(
        f"the loss depends on {what} of a part of the batch, which is another number for the "
        "whole batch",
        hint=hint or _HINT,
    )


def check_sums(terms: Sequence[Term]) -> None:
    """Refuse a loss of which only a part is a sum over the batch, beside means and numbers."""
    for term in terms:
        if term.is_sum and not term.is_by_hand and term.total.requires_grad:
            raise ModelError(
                f"the loss is a function of {term.name} over a part of the batch, and may mean "
                "a mean or a sum over the whole batch",
                hint="put a factor inside of its sum, as (-0.5 * x).sum() for -0.5 * x.sum(), and "
                "all is a sum over the whole batch; or return (loss, samples), of which the step "
                "takes the mean over all samples, or divide each sum by the samples of the part",
            )


def check_columns(loss: Tensor, terms: Sequence[Term]) -> None:
    """Refuse a loss that is no linear function of the means of columns, or uses their sums."""
    means = [term for term in terms if term.columns == "mean"]
    for term in terms:
        if term not in means:
            raise of_part(term.name)
    if means and loss.requires_grad:
        _check_linear(loss, [term.total for term in means], means)


def slopes_by(loss: Tensor, terms: Sequence[Term]) -> dict[Term, Tensor]:
    """Return the terms that `loss` depends on, and its derivatives by them; it must be linear.

    Others were used for something else, such as a gradient that the script took of them, and have
    no graph any more.  The gradient stops at the terms, so this does not go through the model.
    """
    try:
        return {term: slope.detach() for term, slope in _slopes(loss, terms).items()}
    except RuntimeError as error:
        if _RELEASED not in str(error):
            raise
        raise ModelError(_HANDED_ON, hint=_HANDED_ON_HINT) from None


def derivatives(loss: Tensor, terms: Sequence[Term]) -> dict[Term, Tensor]:
    """Return the same, with the graph of derivatives that are learned, as by a weight of a loss.

    A number that other units of ZeRO 3 have handed on has none: their parameters are released.
    That is a warning here.
    """
    try:
        return _slopes(loss, terms)
    except RuntimeError as error:
        if _RELEASED not in str(error):
            raise
        warnings.warn(f"msrun: {_HANDED_ON}: {_HANDED_ON_HINT}", stacklevel=2)
        return {}


def _slopes(loss: Tensor, terms: Sequence[Term]) -> dict[Term, Tensor]:
    slopes = _check_linear(loss, [term.value for term in terms], terms)
    pairs = zip(terms, slopes, strict=True)
    return {term: slope for term, slope in pairs if slope is not None}


def _check_linear(
    loss: Tensor, inputs: Sequence[Tensor], terms: Sequence[Term]
) -> Sequence[Tensor | None]:
    """Return the derivatives of `loss` by `inputs`, the values of `terms`; they must not change."""
    slopes = _gradients(loss, inputs)
    for slope in slopes:
        if slope is not None and slope.requires_grad:
            again = _gradients(slope.sum(), inputs)
            for term, curve in zip(terms, again, strict=True):
                if curve is not None:
                    raise ModelError(
                        f"the loss is no linear function of {term.name} over the batch, so losses "
                        "of parts of the batch do not make the loss of the batch",
                        hint=_HINT,
                    )
    return slopes


def _gradients(value: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the derivatives of `value`, which are differentiable; None where it has none."""
    hooks, _ = gradient_hooks(value)  # those of the script are for its own backward pass
    kept = dict(hooks)
    hooks.clear()
    try:
        with units_left_alone():
            return torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True)
    finally:
        hooks.update(kept)
