"""Batch norms with the statistics of the global batch, whose samples are spread over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from msrun.errors import ModelError
from msrun.parallel.collectives import all_reduce
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.local import full_tensor, is_sharded

# Not torch's `SyncBatchNorm`: it runs only on accelerators.
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def check(config: ParallelConfig, model: nn.Module) -> None:
    """Refuse batch norms that would see one micro-batch at a time.

    Raises:
        ModelError: The model has one, a step has several micro-batches, and the configuration
            does not say `batch_norm: local`.
    """
    parts = config.pipeline.microbatches if config.pipeline else config.accumulate
    key = "pipeline.microbatches" if config.pipeline else "accumulate"
    if parts == 1 or config.batch_norm == "local":
        return
    for name, _ in _batch_norms(model):
        raise ModelError(
            f"{ROOT}.{key}: with {parts} micro-batches {name} sees one of them at a time",
            hint="say `batch_norm: local` if that is meant",
        )


def synchronize(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Have the batch norms of `model` use the statistics of all samples of `group`."""
    warned: set[str] = set()
    for _, module in _batch_norms(model):
        module.forward = partial(_forward, module, group, warned)  # type: ignore[method-assign]


def _batch_norms(model: nn.Module) -> Iterator[tuple[str, BatchNorm]]:
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm):
            yield name or type(module).__name__, module


def _forward(module: BatchNorm, group: dist.ProcessGroup, warned: set[str], x: Tensor) -> Tensor:
    """Normalize `x`, (batch, channels, ...), as `nn.BatchNorm` does.

    Two all-reduces over the group: sums of values and counts, then of squared distances from the
    mean.  One all-reduce with sums of squares would lose precision where the mean is large.
    Channels that a plan sharded are gathered, with a warning for the first.
    """
    if is_sharded(x) and any(p.is_shard() for p in x.placements) and not warned:
        warned.add("batch_norm")
        warnings.warn("msrun: batch_norm is computed whole on every rank", stacklevel=2)
    x = full_tensor(x)
    uses_batch = module.training or not module.track_running_stats
    if not uses_batch:
        return functional.batch_norm(
            x, module.running_mean, module.running_var, module.weight, module.bias, eps=module.eps
        )
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    # Counts travel with the sums: ranks may have different numbers of samples.
    count = values.new_tensor([float(x.numel() // x.size(1))])
    sums = all_reduce(torch.cat([values.sum(dims), count]), group)
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centered = values - mean.view(shape)
    variance = all_reduce(centered.square().sum(dims), group) / total
    if module.training and module.track_running_stats:
        _track(module, mean.detach(), (variance * total / (total - 1)).detach())
    normal = centered * torch.rsqrt(variance + module.eps).view(shape)
    if module.weight is not None:
        normal = normal * module.weight.view(shape)
    if module.bias is not None:
        normal = normal + module.bias.view(shape)
    return normal.to(x.dtype)


@torch.no_grad()
def _track(module: BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics as `nn.BatchNorm` does; `variance` is the unbiased one."""
    if module.running_mean is None or module.running_var is None:
        return
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    factor = module.momentum
    if factor is None:
        factor = 1.0 / float(module.num_batches_tracked or 1)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
    module.running_var.lerp_(variance.to(module.running_var.dtype), factor)
