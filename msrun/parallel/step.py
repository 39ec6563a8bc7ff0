"""One training step on a local batch: forward, backward, reduction, clipping, optimizer step.

Gradients of all micro-batches but the last accumulate on the rank, and the last backward pass
reduces them.  The loss of each micro-batch is weighted by its samples, so uneven ones count each
sample once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, ParallelConfig
from msrun.parallel.data_parallel.gradients import clip_gradients
from msrun.parallel.local import scalar_loss
from msrun.parallel.rank_context import RankContext
from msrun.parallel.sharded_model import ShardedModel

# Takes the output of the model and the target of the batch; returns the mean loss.
LossFunction = Callable[[Any, Any], Tensor]


def run_step(
    config: ParallelConfig,
    context: RankContext,
    sharded: ShardedModel,
    *,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFunction,
    batch: Sequence[Any],
    max_norm: float | None,
) -> Tensor:
    """Train on `batch`; see `Runtime.step`."""
    if len(batch) < 2:  # noqa: PLR2004 - an input and a target
        raise ModelError(f"rt.step needs the inputs and the target, not {len(batch)} value(s)")
    if max_norm is not None:
        check_clip(config, context)
    sharded.check(optimizer)
    batch = [_to(value, context.device) for value in batch]
    optimizer.zero_grad()
    train = _train_pipeline if sharded.is_pipeline else _train
    order = sharded.order
    compared = order.compared_later() if order else contextlib.nullcontext()
    with sharded.hooks.suspended(), compared:
        loss = train(context, sharded, loss_fn, batch)
    # The loss is all-reduced before the optimizer step: ranks that gathered modules in different
    # orders are refused here, while no weight has changed.
    if order:
        loss = order.sum_and_compare(loss.detach() * context.batch.value)
        loss = loss / context.layout.size(DATA_AXIS)
    else:
        loss = mean_over_data(context, loss)
    sharded.hooks.run()
    if max_norm is not None:
        clip(config, context, sharded, max_norm)
    optimizer.step()
    return loss


def mean_over_data(context: RankContext, value: Tensor) -> Tensor:
    """Return the mean of `value` over the data-parallel ranks, weighted by their samples."""
    value = value.detach() * context.batch.value
    if context.layout.size(DATA_AXIS) > 1:
        dist.all_reduce(value, group=context.group(DATA_AXIS))
    return value / context.layout.size(DATA_AXIS)


def clip(
    config: ParallelConfig, context: RankContext, sharded: ShardedModel, max_norm: float
) -> Tensor:
    """Clip the gradients of a model by their global norm, and return the norm before.

    Raises:
        ModelError: With `mode: manual` only the script knows how gradients are sharded.
    """
    check_clip(config, context)
    unreduced: dict[Parameter, dist.ProcessGroup] = {}
    counted_elsewhere: Collection[Parameter] = ()
    pipeline = None
    if context.layout.size(DATA_AXIS) > 1:
        unreduced = dict.fromkeys(sharded.excluded(), context.group(DATA_AXIS))
    if sharded.is_pipeline:
        counted_elsewhere = sharded.pipeline().borrowed()
        pipeline = context.group(PIPELINE_AXIS)
    return clip_gradients(
        sharded.parameters(),
        max_norm,
        unreduced=unreduced,
        counted_elsewhere=counted_elsewhere,
        pipeline=pipeline,
    )


def check_clip(config: ParallelConfig, context: RankContext) -> None:
    """Refuse a norm over parameters whose sharding only the script knows."""
    axes = {name: n for name, n in context.layout.axes.items() if n > 1 and name != DATA_AXIS}
    if config.mode == "manual" and axes:
        raise ModelError(
            f"{ROOT}.mode: manual does not say which gradients are sharded over {next(iter(axes))}"
            f" (size {next(iter(axes.values()))}), so there is no norm of the whole model",
            hint="clip in the script, with all_reduce of msrun.parallel.collectives",
        )


def _train(
    context: RankContext, sharded: ShardedModel, loss_fn: LossFunction, batch: Sequence[Any]
) -> Tensor:
    """Run forward and backward of all micro-batches; return their mean loss."""
    model = sharded.model()
    samples = batch_size(batch)
    if samples == 0:
        raise ModelError("the batch has no sample")
    parts = split_batch(batch, sharded.microbatches)
    total = torch.zeros((), device=context.device)
    # A rank whose loss needs no gradient may skip its backward pass: the reducer still takes part
    # in the all-reduce.  ZeRO gathers parameters in the backward pass, so there no rank may skip.
    may_skip = context.layout.size(DATA_AXIS) > 1 and sharded.order is None
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        with sharded.completed() if is_last else sharded.paused():
            weight = batch_size(part) / samples
            with sharded.computing():
                loss = scalar_loss(loss_fn(model(*part[:-1]), part[-1]))
                if sharded.order:
                    sharded.order.check_trains(loss)
                if loss.requires_grad or not may_skip:
                    (loss * (weight * context.batch.value)).backward()
        total = total + loss.detach() * weight
    if not loss.requires_grad and all(param.grad is None for param in sharded.parameters()):
        raise ModelError("the loss of no rank depends on a parameter that is trained")
    return total


def _train_pipeline(
    context: RankContext, sharded: ShardedModel, loss_fn: LossFunction, batch: Sequence[Any]
) -> Tensor:
    """Run the schedule; gradients are reduced once, after the last micro-batch."""
    pipeline = sharded.pipeline()
    if not sharded.is_described:
        sharded.is_described = True
        context.print(pipeline.describe(batch[:-1]))
    with sharded.paused(), sharded.computing():
        loss = pipeline.train_step(batch[:-1], batch[-1], loss_fn, context.batch.value)
    sharded.reduce()
    pipeline.reduce_tied()
    return loss


def batch_size(batch: Any) -> int:
    """Return the number of samples in `batch`: the first dim of its first tensor.

    Raises:
        ModelError: There is no tensor in it.
    """
    for value in _tensors(batch):
        return len(value)
    raise ModelError("the batch holds no tensor with a first dim of samples")


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Return `batch` in `parts` pieces along its first dim, whose sizes differ by at most one.

    Raises:
        ModelError: There are fewer samples than pieces.
    """
    if parts == 1:
        return [batch]
    samples = batch_size(batch)
    if samples < parts:
        raise ModelError(
            f"{ROOT}.accumulate: {parts} micro-batches of a batch of {samples} sample(s)"
        )
    return [_piece(batch, samples, parts, index) for index in range(parts)]


def _piece(value: Any, samples: int, parts: int, index: int) -> Any:
    match value:
        case Tensor() if value.dim() and len(value) == samples:
            return value.tensor_split(parts)[index]
        case tuple() | list():
            return [_piece(item, samples, parts, index) for item in value]
        case dict():
            return {key: _piece(item, samples, parts, index) for key, item in value.items()}
        case _:
            return value


def _tensors(value: Any) -> list[Tensor]:
    match value:
        case Tensor():
            return [value] if value.dim() else []
        case tuple() | list():
            return [tensor for item in value for tensor in _tensors(item)]
        case dict():
            return [tensor for item in value.values() for tensor in _tensors(item)]
        case _:
            return []


def _to(value: Any, device: torch.device) -> Any:
    match value:
        case Tensor():
            return value.to(device, non_blocking=True)
        case tuple() | list():
            return [_to(item, device) for item in value]
        case dict():
            return {key: _to(item, device) for key, item in value.items()}
        case _:
            return value
