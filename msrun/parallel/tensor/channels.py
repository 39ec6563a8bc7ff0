"""Convolutions and group norms on shards of samples or channels.

torch's own forms of a convolution on shards are wrong or missing.  A convolution is a matrix
product over channels, so it is divided as `Linear` is:

- Output channels (`colwise`): a rank has some rows of the weight and gives some channels; the
  gradient of its input is a summand.
- Input channels (`rowwise`): a rank has some columns of the weight and some channels of the input,
  and gives a summand, to which the bias is added once.
- Groups, where their number divides: a rank has the rows and the input channels of whole groups.
  So a depthwise convolution keeps the channels divided.
- Samples: a rank has the whole weight, whose gradient is a summand.

The weight of a transposed convolution has its dims the other way round: (in, out, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from msrun.parallel.tensor.labels import summed
from msrun.parallel.tensor.shard_functions import ShardFunction, is_even, is_packed

_SAMPLES, _CHANNELS = 0, 1
_WHOLE = Replicate()
_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)
# What follows the bias, of a convolution and of a transposed one.
_OPTIONS = (
    ("stride", "padding", "dilation", "groups"),
    ("stride", "padding", "output_padding", "groups", "dilation"),
)


class _OnAxis(NamedTuple):
    """How one mesh axis divides a function: placements of its tensors and of their gradients."""

    x: Placement
    weight: Placement
    bias: Placement
    out: Placement
    x_gradient: Placement
    weight_gradient: Placement
    bias_gradient: Placement
    divides_groups: bool = False


_NOT_DIVIDED = _OnAxis(_WHOLE, _WHOLE, _WHOLE, _WHOLE, _WHOLE, _WHOLE, _WHOLE)


def _of_samples() -> _OnAxis:
    part, summand = Shard(_SAMPLES), Partial()
    return _OnAxis(part, _WHOLE, _WHOLE, part, part, summand, summand)


def _of_groups(rows: Placement) -> _OnAxis:
    part = Shard(_CHANNELS)
    return _OnAxis(part, rows, Shard(0), part, part, rows, Shard(0), divides_groups=True)


def _convolution(
    x: Placement, weight: Placement, groups: int, ranks: int, *, rows: int
) -> _OnAxis | None:
    """Return how an axis divides a convolution; `rows` is the dim of the weight for its outputs."""
    if weight.is_replicate() and x.is_replicate():
        return _NOT_DIVIDED
    if weight.is_replicate() and x.is_shard(_SAMPLES):
        return _of_samples()
    columns, channels = 1 - rows, Shard(_CHANNELS)
    found = None
    if groups > 1:
        # Groups follow each other in dim 0 of either weight.
        if groups % ranks == 0 and (x.is_shard(_CHANNELS) or weight.is_shard(0)):
            found = _of_groups(Shard(0))
    elif weight.is_shard(rows):
        part = Shard(rows)
        found = _OnAxis(_WHOLE, part, Shard(0), channels, Partial(), part, Shard(0))
    elif weight.is_shard(columns):
        part = Shard(columns)
        found = _OnAxis(channels, part, _WHOLE, Partial(), channels, part, _WHOLE)
    return found


def _convolve(
    func: Callable[..., Tensor],
    is_transposed: bool,  # noqa: FBT001 - bound by `partial`
    x: Any,
    weight: Any,
    bias: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    spatial = weight.dim() - 2
    tensors = [x, weight] if bias is None else [x, weight, bias]
    if not all(isinstance(t, DTensor) for t in tensors) or any(map(is_packed, tensors)):
        return None
    if x.dim() != spatial + 2:  # without a dim of samples
        return None
    given = dict(zip(_OPTIONS[is_transposed], args, strict=False)) | options
    groups = given.get("groups", 1)
    mesh = x.device_mesh
    axes = [
        _convolution(p, w, groups, mesh.size(axis), rows=int(is_transposed))
        for axis, (p, w) in enumerate(zip(x.placements, weight.placements, strict=True))
    ]
    if any(axis is None for axis in axes):
        return None
    found = [axis for axis in axes if axis is not None]
    given["groups"] = groups // math.prod(
        mesh.size(index) for index, axis in enumerate(found) if axis.divides_groups
    )
    local = _locals(x, weight, bias, found)
    if local is None:
        return None
    placed = [axis.out for axis in found]
    has_summands = any(p.is_partial() for p in placed)
    out = summed(func(local[0], local[1], None if has_summands else local[2], **given), x, placed)
    if not has_summands or bias is None:
        return out
    whole = out.redistribute(placements=[_WHOLE if p.is_partial() else p for p in placed])
    cut = bias.redistribute(placements=[axis.bias for axis in found])
    return whole + cut.view(-1, *[1] * spatial)


def _locals(
    x: DTensor, weight: DTensor | None, bias: DTensor | None, axes: list[_OnAxis]
) -> list[Tensor | None] | None:
    """Return this rank's part of each tensor; None if parts are not equal."""
    parts: list[Tensor | None] = []
    for tensor, name in ((x, "x"), (weight, "weight"), (bias, "bias")):
        if tensor is None:
            parts.append(None)
            continue
        cut = tensor.redistribute(placements=[getattr(axis, name) for axis in axes])
        if not is_even(cut):
            return None
        gradients = [getattr(axis, f"{name}_gradient") for axis in axes]
        parts.append(cut.to_local(grad_placements=gradients))
    return parts


def _group_norm(
    x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    def run(shard: Tensor, scale: Tensor | None, shift: Tensor | None, groups: int) -> Tensor:
        return functional.group_norm(shard, groups, scale, shift, eps)

    return _normalize(run, x, weight, bias, num_groups)


def _instance_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    if running_mean is not None or running_var is not None:
        return None

    def run(shard: Tensor, scale: Tensor | None, shift: Tensor | None, groups: int) -> Tensor:
        del groups
        return functional.instance_norm(shard, None, None, scale, shift, *args, **options)

    return _normalize(run, x, weight, bias, x.shape[_CHANNELS])


def _batch_norm(  # noqa: PLR0917 - as of torch
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,  # noqa: FBT001, FBT002 - as of torch
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Run a batch norm of channels; ranks tell each other what they write to running statistics."""
    if not isinstance(x, DTensor) or (training and any(p.is_shard(_SAMPLES) for p in x.placements)):
        return None
    given = [value for value in (running_mean, running_var) if value is not None]
    wanted = [Shard(0) if p.is_shard(_CHANNELS) else _WHOLE for p in x.placements]
    # The part of a replicated tensor is a view of it, which must not be written alone.
    cut = [stat.redistribute(placements=wanted).to_local().clone() for stat in given]

    def run(shard: Tensor, scale: Tensor | None, shift: Tensor | None, groups: int) -> Tensor:
        del groups
        mean, var = cut or (None, None)
        return functional.batch_norm(shard, mean, var, scale, shift, training, momentum, eps)

    out = _normalize(run, x, weight, bias, x.shape[_CHANNELS])
    if out is not None and training:
        for stat, part in zip(given, cut, strict=True):
            written = DTensor.from_local(part, x.device_mesh, wanted, run_check=False)
            stat.to_local().copy_(written.full_tensor())
    return out


def _normalize(run: Callable[..., Tensor], x: Any, weight: Any, bias: Any, groups: int) -> Any:
    """Run a norm of each sample's groups of channels; it gets x, weight, bias and the groups."""
    tensors = [t for t in (x, weight, bias) if t is not None]
    if not isinstance(x, DTensor) or any(map(is_packed, tensors)):
        return None
    mesh, axes = x.device_mesh, []
    for axis, placement in enumerate(x.placements):
        if placement.is_replicate():
            axes.append(_NOT_DIVIDED)
        elif placement.is_shard(_SAMPLES):
            axes.append(_of_samples())
        elif placement.is_shard(_CHANNELS) and groups % mesh.size(axis) == 0:
            axes.append(_of_groups(Shard(0)))
            groups //= mesh.size(axis)
        else:
            return None
    local = _locals(x, weight, bias, axes)
    return None if local is None else summed(run(*local, groups), x, [axis.out for axis in axes])


FUNCTIONS: dict[ShardFunction, ShardFunction] = {
    **{func: partial(_convolve, func, False) for func in _CONVOLUTIONS},  # noqa: FBT003
    **{func: partial(_convolve, func, True) for func in _TRANSPOSED},  # noqa: FBT003
    functional.batch_norm: _batch_norm,
    functional.group_norm: _group_norm,
    functional.instance_norm: _instance_norm,
}
