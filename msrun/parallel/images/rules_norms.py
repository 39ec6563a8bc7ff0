"""Rules for norms of torch, whose statistics are over the whole image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from msrun.parallel.images.image_tensor import ImageAxis, ImageCall, ImageTensor, rule
from msrun.parallel.images.rules_elements import fit
from msrun.parallel.images.rules_sums import crossed, moments, over
from msrun.parallel.norms.normalize import normalized


class _Standardize(torch.autograd.Function):
    """(x - mean) / std over some dims, of all ranks; it keeps its result for the backward pass."""

    @staticmethod
    def forward(  # noqa: PLR0917 - as of autograd
        ctx: Any, x: Tensor, dims: list[int], axes: Sequence[ImageAxis], rows: int, eps: float
    ) -> Tensor:
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, squares = moments(values, dims, axes, rows)
        scale = torch.rsqrt(squares / rows + eps)
        normal: Tensor = (values - mean).mul_(scale).to(x.dtype)
        ctx.save_for_backward(normal, scale)
        ctx.options = dims, axes, rows
        return normal

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale = ctx.saved_tensors
        dims, axes, rows = ctx.options
        gradient = gradient.to(scale.dtype)
        sums = torch.stack(
            [gradient.sum(dims, keepdim=True), (gradient * normal).sum(dims, keepdim=True)]
        )
        first, second = over(sums, axes) / rows
        result = (gradient - first - normal * second) * scale
        return result.to(normal.dtype), None, None, None, None


def standardized(
    x: Tensor, dims: list[int], axes: Sequence[ImageAxis], rows: int, eps: float
) -> Tensor:
    """Return `x` with mean 0 and variance 1 over `dims` and the ranks of `axes`."""
    result: Tensor = _Standardize.apply(x, dims, axes, rows, eps)  # type: ignore[no-untyped-call]
    return result


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
    local = x.local.unflatten(1, (groups, -1))
    rows = x.numel() // (x.shape[0] * groups)
    normal = standardized(local, list(range(2, local.dim())), axes, rows, eps).flatten(1, 2)
    shape = [1, -1] + [1] * (x.dim() - 2)
    return x.like(_affine(normal, weight, bias, shape))


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
    rows = math.prod(shape)
    normal = standardized(x.local, dims, axes, rows, call.value(4, "eps", 1e-5))
    places = tuple(p if p and p.dim >= first else None for p in x.places)
    own = [None if w is None else fit(w, x.axes, places, x.dim()) for w in (weight, bias)]
    normal = normal if own[0] is None else normal * own[0]
    return x.like(normal if own[1] is None else normal + own[1])


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
    dims, rows = list(range(2, x.dim())), math.prod(x.shape[2:])
    if uses_input:
        normal = standardized(x.local, dims, crossed(x, dims), rows, eps)
        if mean is not None and var is not None:
            _track_instances(x, (mean, var), given.get("momentum", 0.1))
    elif mean is None or var is None:
        raise call.refusal("an instance_norm without statistics")
    else:
        normal = (x.local - mean.view(shape)) * torch.rsqrt(var.view(shape) + eps)
    return x.like(_affine(normal, given.get("weight"), given.get("bias"), shape))


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
    total: Callable[[Tensor], Tensor] = lambda values: over(values, axes)  # noqa: E731
    return x.like(
        normalized(
            x.local,
            (given.get("running_mean"), given.get("running_var")),
            (given.get("weight"), given.get("bias")),
            momentum=given.get("momentum", 0.1),
            eps=given.get("eps", 1e-5),
            total=total,
        )
    )
