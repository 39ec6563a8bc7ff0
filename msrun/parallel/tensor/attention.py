"""Attention on the heads of this rank.

torch has no form for sharded heads on a CPU, and gathers.  Heads do not read each other, so each
rank runs attention on its own: with a mask that is sharded alike, or the same for all heads, and
with the dropout of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from msrun.parallel.tensor.placements import Like, gradient_of, on_mesh, packed_axis, part_of
from msrun.parallel.torch_compat import parts_before, strided_shard

# Draws the dropped entries of a tensor: x, p, training, inplace -> result.
Dropout = Callable[[Any, float, bool, bool], Any]
_DIMS = 4
# Arguments of a dropout: it drops, and makes a new tensor.
_IN_TRAINING = (True, False)
_HEADS = 1
# Dims from heads on: heads, sequence, width.
_HEADS_DIMS = 3


def attend(  # noqa: PLR0917 - as of torch
    dropout: Dropout,
    query: DTensor,
    key: DTensor,
    value: DTensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - as of torch
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> DTensor | None:
    """Run attention on (batch, heads, sequence, width); None if shards alone do not do.

    On an accelerator, dropout is drawn inside of kernels, which shards cannot repeat.
    """
    placed, mesh = query.placements, query.device_mesh
    is_apart = all(p.is_replicate() or _dim(p) in (0, _HEADS) for p in placed)
    is_alike = placed == key.placements == value.placements
    # The order in which a dim packs several tensors is not that of heads.
    if not is_apart or query.dim() != _DIMS or not is_alike or packed_axis(placed) is not None:
        return None
    for tensor in (query, key, value):
        for dim in (0, _HEADS):
            on_dim = [axis for axis, p in enumerate(placed) if _dim(p) == dim]
            if tensor.shape[dim] % math.prod(map(mesh.size, on_dim)):
                return None
    if dropout_p and (query.device.type != "cpu" or query.dtype != torch.float32):
        return None
    mask = None
    if attn_mask is not None:
        mask = _local_mask(attn_mask, query)
    parts: tuple[Tensor, Tensor, Tensor] = _Parts.apply(query, key, value)  # type: ignore[no-untyped-call]
    if not dropout_p:
        output = functional.scaled_dot_product_attention(
            *parts, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return on_mesh(output, mesh, placed)

    def drop(weights: Tensor) -> Tensor:
        local: Tensor = dropout(on_mesh(weights, mesh, placed), dropout_p, *_IN_TRAINING).to_local()
        return local

    output = dropped_attention(drop, parts, mask, is_causal=is_causal, scale=scale)
    return on_mesh(output, mesh, placed)


class _Parts(Function):
    """Returns this rank's part of each tensor, in less time than one after the other."""

    @staticmethod
    def forward(ctx: Any, *tensors: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.likes = [Like.of(tensor) for tensor in tensors]
        parts = map(part_of, tensors)
        return tuple(part.view_as(part) for part in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        pairs = zip(gradients, ctx.likes, strict=True)
        return tuple(g if g is None else gradient_of(g, like.cut, like) for g, like in pairs)


def dropped_attention(
    drop: Callable[[Tensor], Tensor],
    parts: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Return attention on plain tensors, computed as torch does where it drops some weights.

    Args:
        drop: Returns what is left of weights.
        parts: Queries, keys and values, (..., heads, sequence, width).
        mask: Of the scores; None is none.
        is_causal: Whether queries see no later keys.
        scale: Of the scores; None is that of torch.
    """
    query, key, value = parts
    weights = _weights(query, key, mask, is_causal=is_causal, scale=scale)
    return drop(weights) @ _repeated(value, query)


def _local_mask(mask: DTensor, query: DTensor) -> Tensor:
    """Return the mask of the samples and heads of this rank."""
    offset = _DIMS - mask.dim()
    wanted: list[Placement] = []
    gradients: list[Placement] = []
    for placement in query.placements:
        if placement.is_replicate():
            wanted.append(Replicate())
            gradients.append(Replicate())
            continue
        dim = placement.dim - offset  # type: ignore[attr-defined]
        is_alike = dim >= 0 and mask.shape[dim] > 1
        parts = parts_before(placement) or 1
        own = strided_shard(dim, parts) if parts > 1 else Shard(dim)
        wanted.append(own if is_alike else Replicate())
        gradients.append(own if is_alike else Partial())
    placed = mask.redistribute(mask.device_mesh, wanted)
    local: Tensor = placed.to_local(grad_placements=gradients)
    return local


def _dim(placement: Placement) -> int | None:
    """Return the dim that `placement` shards; None if it shards none."""
    return None if parts_before(placement) is None else int(placement.dim)  # type: ignore[attr-defined]


def _weights(
    query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float | None
) -> Tensor:
    """Return the weights of attention, computed as torch does where it drops some of them."""
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * factor) @ (_repeated(key, query) * factor).transpose(-2, -1)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    if mask is None:
        return scores.softmax(-1)
    # A query that sees nothing has no weights.
    is_blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(is_blind, 0.0).softmax(-1).masked_fill(is_blind, 0.0)


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Return the heads of keys or values, each as often as queries share it."""
    if x.dim() < _HEADS_DIMS or x.shape[-_HEADS_DIMS] == query.shape[-_HEADS_DIMS]:
        return x
    shared = query.shape[-_HEADS_DIMS] // x.shape[-_HEADS_DIMS]
    return x.repeat_interleave(shared, -_HEADS_DIMS)
