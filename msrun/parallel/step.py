"""One training step on a local batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from msrun.errors import UsageError
from msrun.parallel.config import PIPELINE_AXIS, ROOT
from msrun.parallel.gradients import clip_gradients
from msrun.parallel.local import whole

if TYPE_CHECKING:
    from msrun.parallel.pipeline.model import PipelineModel
    from msrun.parallel.runtime import Runtime

LossFunction = Callable[[Any, Any], Tensor]


def run_step(
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFunction,
    batch: Sequence[Any],
    *,
    max_norm: float | None,
) -> Tensor:
    """Train on `batch`; see `Runtime.step`."""
    if len(batch) < 2:  # noqa: PLR2004 - an input and a target
        raise UsageError(f"rt.step needs the inputs and the target, not {len(batch)} value(s)")
    batch = [_to(value, runtime.device) for value in batch]
    optimizer.zero_grad()
    train = _train_pipeline if runtime.config.pipeline else _train
    loss = train(runtime, model, loss_fn, batch)
    if max_norm is not None:
        clip(runtime, model, max_norm)
    optimizer.step()
    return runtime.mean_over_data(loss)


def clip(runtime: Runtime, model: nn.Module, max_norm: float) -> Tensor:
    """Clip the gradients of `model` by their global norm, and return it."""
    params = runtime.sharded(model).parameters()
    if not runtime.config.pipeline:
        return clip_gradients(params, max_norm)
    borrowed = model.borrowed()  # type: ignore[operator]  # it is a PipelineModel
    group = runtime.group(PIPELINE_AXIS)
    return clip_gradients(params, max_norm, borrowed=borrowed, pipeline=group)


def _train(
    runtime: Runtime, model: nn.Module, loss_fn: LossFunction, batch: Sequence[Any]
) -> Tensor:
    """Run forward and backward of all micro-batches; return their mean loss."""
    sharded = runtime.sharded(model)
    samples = batch_size(batch)
    parts = split_batch(batch, sharded.microbatches)
    total = torch.zeros((), device=runtime.device)
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        with contextlib.nullcontext() if is_last else sharded.paused():
            share = batch_size(part) / samples
            with sharded.computing():
                loss = whole(loss_fn(model(*part[:-1]), part[-1]))
                (loss * (share * runtime.batch_weight)).backward()
        total = total + loss.detach() * share
    return total


def _train_pipeline(
    runtime: Runtime, model: nn.Module, loss_fn: LossFunction, batch: Sequence[Any]
) -> Tensor:
    """Run the schedule; gradients are reduced once, after the last micro-batch."""
    pipeline: PipelineModel = model  # type: ignore[assignment]  # `shard` made it
    sharded = runtime.sharded(model)
    runtime.describe_once(pipeline, batch[:-1])
    with sharded.paused(), sharded.computing():
        loss = pipeline.train_step(batch[:-1], batch[-1], loss_fn, runtime.batch_weight)
    sharded.reduce()
    pipeline.reduce_tied()
    return loss


def batch_size(batch: Any) -> int:
    """Return the number of samples in `batch`: the first dim of its first tensor.

    Raises:
        UsageError: There is no tensor in it.
    """
    for value in _tensors(batch):
        return len(value)
    raise UsageError("the batch holds no tensor with a first dim of samples")


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Return `batch` in `parts` pieces along its first dim, as equal as they can be.

    Raises:
        UsageError: There are fewer samples than pieces.
    """
    if parts == 1:
        return [batch]
    samples = batch_size(batch)
    if samples < parts:
        raise UsageError(
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
