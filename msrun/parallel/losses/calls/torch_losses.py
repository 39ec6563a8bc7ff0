"""The losses of torch: which of them have a count, and what counts in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from msrun.parallel import torch_compat
from msrun.parallel.local import full_tensor
from msrun.parallel.losses.terms import count_type

BY_CLASS = (functional.cross_entropy, functional.nll_loss)
# Their mean is one over all elements.
BY_ELEMENT = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.huber_loss,
    functional.kl_div,
    functional.l1_loss,
    functional.mse_loss,
    functional.smooth_l1_loss,
    functional.soft_margin_loss,
)
_OTHERS = (
    functional.cosine_embedding_loss,
    functional.ctc_loss,
    functional.gaussian_nll_loss,
    functional.hinge_embedding_loss,
    functional.margin_ranking_loss,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
    functional.poisson_nll_loss,
    functional.triplet_margin_loss,
    functional.triplet_margin_with_distance_loss,
)
_NARROW = (torch.float16, torch.bfloat16)
LOSSES = frozenset(BY_CLASS + BY_ELEMENT + _OTHERS)


def reduction_of(options: dict[str, Any]) -> str:
    """Return the reduction of a loss, by its arguments or the deprecated ones."""
    averages: bool | None = options.get("size_average")
    reduces: bool | None = options.get("reduce")
    if averages is None and reduces is None:
        return str(options.get("reduction", "mean"))
    if reduces is not None and not reduces:
        return "none"
    return "sum" if averages is not None and not averages else "mean"


def count_targets(values: Tensor, target: Tensor, options: dict[str, Any]) -> Tensor:
    """Return what divides a mean loss by class: targets that count, or the sum of their weights."""
    target = full_tensor(target)
    if target.is_floating_point():  # probabilities of all classes
        rows = values.numel() // values.size(min(values.dim() - 1, 1))
        return torch.full((), rows, device=target.device)
    counts = target != options.get("ignore_index", -100)
    weight: Tensor | None = options.get("weight")
    if weight is not None:
        counts = full_tensor(weight).detach()[torch.where(counts, target, 0)] * counts
    count: Tensor = counts.sum(dtype=count_type(counts.device))
    return count


def parts_of_mean(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Return the sum, the count and the type of a mean loss of `BY_CLASS` or `BY_ELEMENT`.

    Args:
        func: The loss.
        args: What it got.
        kwargs: What it got by name.
    """
    values, target = args[0], args[1]
    kind = _type_of(func, values, target)
    if values.dtype in _NARROW:
        values = values.float()  # a sum over many would exceed their range
    options = kwargs | {"size_average": None, "reduce": None, "reduction": "sum"}
    total = func(values, *args[1:], **{option: options[option] for option in kwargs})
    if func in BY_CLASS:
        return total, count_targets(values, target, kwargs), kind
    shape = torch.broadcast_shapes(values.shape, target.shape)
    return total, torch.full((), shape.numel(), device=values.device), kind


@torch.no_grad()
def _type_of(func: Callable[..., Any], values: Tensor, target: Tensor) -> torch.dtype:
    """Return the type of a loss: autocast computes most in float32, and types may differ."""
    has_one = not target.is_floating_point() or target.dtype == values.dtype
    if values.dtype not in _NARROW and has_one:
        return values.dtype
    of_rows = partial(torch.zeros, device=values.device)
    shape = (1, 1) if target.is_floating_point() else (1,)
    with torch_compat.without_functions():
        loss = func(of_rows(1, 1, dtype=values.dtype), of_rows(*shape, dtype=target.dtype))
    kind: torch.dtype = loss.dtype
    return kind
