"""Cross entropy of logits whose samples or positions ranks share: each computes those it has.

torch gathers the logits.  A sum over samples is the sum of the ranks' sums, and a mean is that over
the number of targets that count, or the weight of their classes: two all-reduces of one number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from msrun.errors import ModelError
from msrun.parallel.tensor.labels import summed
from msrun.parallel.tensor.placements import on_mesh
from msrun.parallel.tensor.shard_functions import is_even

_CLASSES = 1


@contextlib.contextmanager
def by_class() -> Iterator[None]:
    """Compute the loss of logits that ranks share by class without gathering them inside.

    torch's context alone stays on for good where something raises inside.
    """
    context = loss_parallel()
    context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)


class _Once(torch.autograd.Function):
    """Hands logits on; torch's loss by class has a wrong second derivative."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        del ctx
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        if torch.is_grad_enabled():
            raise ModelError(
                "the gradient of a cross entropy of logits that ranks share by class cannot be "
                "differentiated again, as a penalty on gradients does",
                hint="leave the layer that computes the logits out of the plan",
            )
        return gradient


def once(logits: DTensor) -> DTensor:
    """Return `logits`, of whose loss there is one derivative."""
    found: DTensor = _Once.apply(logits)  # type: ignore[no-untyped-call]  # as torch has it
    return found


def cross_entropy(
    logits: DTensor,
    target: DTensor,
    weight: DTensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **old: Any,
) -> DTensor | None:
    """Return the cross entropy of `logits`; None unless ranks share dims beside the classes.

    torch gives every option by name; `old` are those that `reduction` replaced.
    """
    dims = {p.dim for p in logits.placements if isinstance(p, Shard)}
    is_shared = dims and all(p.is_replicate() or isinstance(p, Shard) for p in logits.placements)
    if logits.dim() == 1 or not is_shared or _CLASSES in dims or not is_even(logits):
        return None
    is_old = any(value is not None for value in old.values())
    if is_old or (weight is not None and weight.requires_grad):
        return None
    has_classes = target.shape == logits.shape  # probabilities, or one index a sample
    placed = [_of_target(p, has_classes=has_classes) for p in logits.placements]
    own = target.redistribute(placements=placed).to_local()
    sums = [Partial() if p.is_shard() else p for p in logits.placements]
    whole = [Replicate()] * len(sums)
    weights = None if weight is None else weight.full_tensor()
    local = functional.cross_entropy(
        logits.to_local(),
        own,
        weights,
        ignore_index=ignore_index,
        reduction="sum" if reduction == "mean" else reduction,
        label_smoothing=label_smoothing,
    )
    if reduction == "none":
        of_losses = [_of_target(p, has_classes=False) for p in logits.placements]
        return on_mesh(local, logits.device_mesh, of_losses)
    total = summed(local, logits, sums)
    if reduction == "sum":
        return total
    count = _counted(own, weights, local, ignore_index, has_classes=has_classes)
    # Each once: backward reads the count, too.
    numbers = (each.redistribute(placements=whole) for each in (total, summed(count, logits, sums)))
    mean: DTensor = next(numbers) / next(numbers)  # type: ignore[assignment]
    return mean


def _of_target(placement: Placement, *, has_classes: bool) -> Placement:
    """Return the placement of targets where logits have `placement`."""
    if not isinstance(placement, Shard) or has_classes or placement.dim < _CLASSES:
        return placement
    return Shard(placement.dim - 1)


def _counted(
    target: Tensor,
    weights: Tensor | None,
    like: Tensor,
    ignored: int,
    *,
    has_classes: bool,
) -> Tensor:
    """Return by what this rank's sum of losses would be divided for a mean."""
    if has_classes:
        return torch.full_like(like, target.numel() / target.shape[_CLASSES])
    counts = target != ignored
    if weights is None:
        return counts.sum().to(like)
    return weights[target.where(counts, 0)].where(counts, 0).sum()
