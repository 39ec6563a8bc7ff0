"""Collectives that gradients flow through, over the ranks of one group or mesh axis.

The gradient of a collective is another one.  It is right for a loss that is the sum, or the
mean, of what every rank of the group computes, which is how gradients are reduced here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over the ranks of `group`, on each of them."""
    return _Sum.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]
