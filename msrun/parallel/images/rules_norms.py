"""Rules for norms of torch, whose statistics are over the whole image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from msrun.parallel.autocast.casts import is_casting, wide
from msrun.parallel.images.image_tensor import ImageCall, ImageTensor, rule
from msrun.parallel.images.rules_elements import fit
from msrun.parallel.images.rules_sums import crossed, moments, over

# Returns the sum over ranks.
_Total = Callable[[Tensor], Tensor]


class _Standardize(torch.autograd.Function):
    """(x - mean) / std over some dims, of all ranks; it keeps its result for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: list[int], total: _Total, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = x.to(wide(x))
        sums = values.sum(dims, keepdim=True)
        count = values.new_tensor([values.numel() / max(sums.numel(), 1)])
        *_, count = found = total(torch.cat([sums.flatten(), count]))
        mean = found[:-1].view(sums.shape) / count
        normal = values - mean
        variance = total(normal.square().sum(dims, keepdim=True)) / count
        scale = torch.rsqrt(variance + eps)
        normal = normal.mul_(scale).to(x.dtype)
        ctx.save_for_backward(normal, scale, count)
        ctx.dims, ctx.total = dims, total
        ctx.mark_non_differentiable(mean, variance, count)
        return normal, mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normal, scale, count = ctx.saved_tensors
        dims = ctx.dims
        gradient = gradient.to(scale.dtype)
        sums = torch.stack(
            [gradient.sum(dims, keepdim=True), (gradient * normal).sum(dims, keepdim=True)]
        )
        first, second = ctx.total(sums) / count
        result = (gradient - first - normal * second) * scale
        return result.to(normal.dtype), None, None, None


def standardized(x: Tensor, dims: list[int], total: _Total, eps: float) -> Any:
    """Return `x` with mean 0 and variance 1, and what these and the count were.

    Args:
        x: A part.
        dims: What the statistics are over.
        total: Returns the sum over all ranks that have parts.
        eps: What is added to the variance.
    """
    return _Standardize.apply(x, dims, total, eps)  # type: ignore[no-untyped-call]


def batch_standardized(
    x: Tensor,
    running: tuple[Tensor | None, Tensor | None],
    affine: tuple[Tensor | None, Tensor | None],
    *,
    momentum: float,
    eps: float,
    total: _Total,
) -> Tensor:
    """Normalize parts of images as `functional.batch_norm` does; see `norms.normalize`.

    It keeps one tensor for the backward pass, where that keeps three.
    """
    dims = [dim for dim in range(x.dim()) if dim != 1]
    normal, mean, variance, count = standardized(x, dims, total, eps)
    with torch.no_grad():
        unbiased = variance * (count / (count - 1))
        for old, new in zip(running, (mean, unbiased), strict=True):
            if old is not None:
                old.lerp_(new.flatten().to(old.dtype), momentum)
    return _affine(normal, *affine, [1, -1] + [1] * (x.dim() - 2)).to(x.dtype)


def _of_result(call: ImageCall, shape: Sequence[int]) -> Tensor:
    """Return the part of the first argument in the type of the result, which autocast may choose.

    Args:
        call: Of a norm.
        shape: Of an argument without values, of which torch tells the type of its result.
    """
    local = call.x.local
    if not is_casting(local):
        return local
    with torch.no_grad():
        return local.to(call.on(local.new_empty(shape)).dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    if weight is not None:
        x = x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


@rule("group_norm")
def group_normed(call: ImageCall) -> Any:
    """Groups of channels, each with its statistics over the whole image."""
    x, groups = call.x, call.value(1, "num_groups")
    weight, bias = call.value(2, "weight"), call.value(3, "bias")
    eps = call.value(4, "eps", 1e-5)
    divided = x.divided()
    if 1 in divided:
        return call.whole()
    axes = crossed(x, divided)
    local = _of_result(call, (0, *x.shape[1:])).unflatten(1, (groups, -1))
    total = partial(over, axes=axes)
    normal = standardized(local, list(range(2, local.dim())), total, eps)[0].flatten(1, 2)
    shape = [1, -1] + [1] * (x.dim() - 2)
    return x.like(_affine(normal, weight, bias, shape).to(local.dtype))


@rule("layer_norm rms_norm")
def layer_normed(call: ImageCall) -> Any:
    """The last dims, which may have the image."""
    x, shape = call.x, call.value(1, "normalized_shape")
    weight, bias = call.value(2, "weight"), call.value(3, "bias")
    first = x.dim() - len(shape)
    dims = list(range(first, x.dim()))
    axes = crossed(x, dims)
    if not axes:
        return x.like(call.on(x.local))
    if call.name == "rms_norm":
        return call.whole()
    local, eps = _of_result(call, (0, *x.shape)), call.value(4, "eps", 1e-5)
    normal = standardized(local, dims, partial(over, axes=axes), eps)[0]
    places = tuple(p if p and p.dim >= first else None for p in x.places)
    own = [None if w is None else fit(w, x.axes, places, x.dim()) for w in (weight, bias)]
    normal = normal if own[0] is None else normal * own[0]
    return x.like((normal if own[1] is None else normal + own[1]).to(local.dtype))


@rule("instance_norm")
def instance_normed(call: ImageCall) -> Any:
    """Each channel of each sample, over the whole image."""
    x = call.x
    order = ("running_mean", "running_var", "weight", "bias")
    if call.func is not functional.instance_norm:
        order = ("weight", "bias", "running_mean", "running_var")
    given = (
        dict(zip(("input", *order, "use_input_stats", "momentum", "eps"), call.args, strict=False))
        | call.kwargs
    )
    if {0, 1} & set(x.divided()):
        return call.whole()
    uses_input = given.get("use_input_stats", True)
    mean, var = given.get("running_mean"), given.get("running_var")
    shape = [1, -1] + [1] * (x.dim() - 2)
    eps = given.get("eps", 1e-5)
    dims = list(range(2, x.dim()))
    if uses_input:
        normal = standardized(x.local, dims, partial(over, axes=crossed(x, dims)), eps)[0]
        if mean is not None and var is not None:
            _track_instances(x, (mean, var), given.get("momentum", 0.1))
    elif mean is None or var is None:
        raise call.refusal("an instance_norm without statistics")
    else:
        normal = (x.local - mean.view(shape)) * torch.rsqrt(var.view(shape) + eps)
    return x.like(_affine(normal, given.get("weight"), given.get("bias"), shape).to(x.dtype))


@torch.no_grad()
def _track_instances(x: ImageTensor, running: tuple[Tensor, Tensor], momentum: float) -> None:
    """RowMove running statistics towards those of the samples."""
    dims, rows = list(range(2, x.dim())), math.prod(x.shape[2:])
    mean, squares = moments(x.local, dims, crossed(x, dims), rows)
    for old, new in zip(running, (mean, squares / (rows - 1)), strict=True):
        old.lerp_(new.flatten(1).mean(0).to(old.dtype), momentum)


@rule("batch_norm")
def batch_normed(call: ImageCall) -> Any:
    """Each channel over all samples of this rank and the whole image; or by running statistics."""
    x = call.x
    order = ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    if call.func is not functional.batch_norm:
        order = ("weight", "bias", "running_mean", "running_var", *order[4:])
    given = dict(zip(("input", *order), call.args, strict=False)) | call.kwargs
    if not given.get("training", False):
        return x.like(call.on(x.local))
    if 1 in x.divided():
        return call.whole()
    axes = crossed(x, x.divided())
    return x.like(
        batch_standardized(
            x.local,
            (given.get("running_mean"), given.get("running_var")),
            (given.get("weight"), given.get("bias")),
            momentum=given.get("momentum", 0.1),
            eps=given.get("eps", 1e-5),
            total=partial(over, axes=axes),
        )
    )
