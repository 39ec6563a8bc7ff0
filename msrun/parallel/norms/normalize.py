"""A batch norm as sums over all samples, which may be on several ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def normalized(
    x: Tensor,
    running: tuple[Tensor | None, Tensor | None],
    affine: tuple[Tensor | None, Tensor | None],
    *,
    momentum: float,
    eps: float,
    total: Callable[[Tensor], Tensor],
) -> Tensor:
    """Normalize `x` as `functional.batch_norm` does in training, by sums over all samples.

    Args:
        x: (batch, channels, ...), with some of the samples.
        running: Mean and variance, which are updated in place.
        affine: Weight and bias.
        momentum: Of the running statistics.
        eps: What is added to the variance.
        total: Returns the sum over all that have samples, and sums gradients too.
    """
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    count = values.new_tensor([float(x.numel() // x.size(1))])
    sums = total(torch.cat([values.sum(dims), count]))
    number = sums[-1].detach()
    mean = sums[:-1] / number
    centered = values - mean.view(shape)
    variance = total(centered.square().sum(dims)) / number
    # A running variance is the unbiased one.
    _track(running, (mean, variance * number / (number - 1)), momentum)
    normal = centered * torch.rsqrt(variance + eps).view(shape)
    weight, bias = affine
    if weight is not None:
        normal = normal * weight.view(shape)
    if bias is not None:
        normal = normal + bias.view(shape)
    return normal.to(x.dtype)


@torch.no_grad()
def _track(
    running: tuple[Tensor | None, Tensor | None], batch: tuple[Tensor, Tensor], momentum: float
) -> None:
    for old, new in zip(running, batch, strict=True):
        if old is not None:
            old.lerp_(new.to(old.dtype), momentum)
