"""Sharding rules of the operators that `torch.export` leaves in a forward graph, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.graph.rules import (
    Labels,
    ShardingRule,
    Site,
    broadcast,
    dim_labels,
    split_by_labels,
    unknown,
)

Maker = Callable[[Site], ShardingRule]
# Tensors of the size of the weights that attention saves where it drops some.
_DROPPED_WEIGHTS = 3


def rule_of(site: Site) -> ShardingRule:
    """Return how the work of the operator at `site` can be split."""
    if not site.ins or not site.outs:
        return unknown(site)
    maker = _MAKERS.get(site.packet)
    return maker(site) if maker else unknown(site)


def rules_of_steps(program: Program) -> dict[str, ShardingRule]:
    """Return step -> its rule; equal steps have one."""
    by_signature: dict[object, ShardingRule] = {}
    rules: dict[str, ShardingRule] = {}
    for step in program.steps:
        site = Site(step, program)
        key = site.signature()
        rules[step.name] = by_signature[key] = by_signature.get(key) or rule_of(site)
    return rules


def _elementwise(site: Site) -> ShardingRule:
    shape = site.out.shape
    ins = [broadcast(value.shape, shape) for value in site.ins]
    return split_by_labels(
        site, ins, [dim_labels(len(shape))] * len(site.outs), saved_inputs=_all(site)
    )


def _linear_elementwise(site: Site) -> ShardingRule:
    """Sums pass through: all inputs together for `add`, the first alone for `mul` and `to`.

    Not through what rounds, and not through one input to which a number is added.
    """
    shape = site.out.shape
    ins = [broadcast(value.shape, shape) for value in site.ins]
    is_sum = site.packet in ("add", "sub", "rsub", "add_", "sub_")
    is_rounded = bool(site.attr("rounding_mode")) or not site.out.is_float
    is_affine = is_rounded or (is_sum and len(ins) == 1)
    linear: list[list[int]] = [] if is_affine else [list(range(len(ins))) if is_sum else [0]]
    saved = () if is_sum or len(ins) == 1 else _all(site)
    return split_by_labels(site, ins, [dim_labels(len(shape))], linear=linear, saved_inputs=saved)


def _all(site: Site) -> tuple[int, ...]:
    return tuple(range(len(site.ins)))


def _linear(site: Site) -> ShardingRule:
    """`linear(x, w, b)`: x (batch..., k), w (n, k), b (n)."""
    x, weight = site.ins[:2]
    batch = dim_labels(len(x.shape) - 1, "b")
    ins: list[Labels] = [[*batch, "k"], ["n", "k"], ["n"]]
    flops = 2.0 * x.count * weight.shape[0]
    return _contraction(site, ins[: len(site.ins)], [*batch, "n"], added=(2,), flops=flops)


def _contraction(
    site: Site, ins: list[Labels], out: Labels, *, added: tuple[int, ...] = (), **options: Any
) -> ShardingRule:
    saved = tuple(index for index in _all(site) if index not in added)
    return split_by_labels(
        site, ins, [out], added=added, backward=2.0, saved_inputs=saved, **options
    )


def _matmul(site: Site) -> ShardingRule:
    """Products of matrices, in batches that may be broadcast; `addmm` has what is added first."""
    added = len(site.ins) - 2
    a, b = site.ins[added:]
    shape = site.out.shape
    rows = ["m"] if len(a.shape) > 1 else []
    columns = ["n"] if len(b.shape) > 1 else []
    batch = len(shape) - len(rows) - len(columns)
    names = dim_labels(batch, "b")
    left = _batched(a.shape[: len(a.shape) - 1 - len(rows)], shape[:batch])
    right = _batched(b.shape[: len(b.shape) - 1 - len(columns)], shape[:batch])
    out = [*names, *rows, *columns]
    ins: list[Labels] = [[*left, *rows, "k"], [*right, "k", *columns]]
    if added:
        shown = broadcast(site.ins[0].shape, shape)
        ins = [[out[int(label[1:])] if label else None for label in shown], *ins]
    flops = 2.0 * site.out.count * a.shape[-1]
    return _contraction(site, ins, out, flops=flops, added=(0,) if added else ())


def _batched(shape: tuple[int, ...], out: tuple[int, ...]) -> list[str | None]:
    return [f"b{label[1:]}" if label else None for label in broadcast(shape, out)]


def _attention(site: Site) -> ShardingRule:
    """By sample and head; queries also by position, unless it is causal."""
    query, key = site.ins[:2]
    is_causal = bool(site.attr("is_causal"))
    lead = dim_labels(len(query.shape) - 2, "b")
    at = None if is_causal else "s"
    ins: list[Labels] = [[*lead, at, None], [*lead, None, None], [*lead, None, None]]
    for mask in site.ins[3:]:
        shown = broadcast(mask.shape, (*query.shape[:-1], key.shape[-2]))
        names = [*lead, at, None]
        ins.append([names[int(label[1:])] if label else None for label in shown])
    flops = 4.0 * query.count * key.shape[-2] * (0.5 if is_causal else 1.0)
    out: Labels = [*lead, at, None]
    inside = 0
    if site.attr("dropout_p", 0.0):
        # Weights, the mask of those that are dropped, and what is left.
        weights = math.prod(query.shape[:-1]) * key.shape[-2] * query.itemsize
        inside, flops = _DROPPED_WEIGHTS * weights, flops * (2 if is_causal else 1)
    return split_by_labels(
        site,
        ins,
        [out],
        flops=flops,
        backward=2.5,
        saved_inputs=(0, 1, 2),
        saves_outputs=True,
        saved_inside=inside,
    )


def _normalization(site: Site) -> ShardingRule:
    """`layer_norm` and `rms_norm`: every dim but the last ones, which are normalized."""
    shape = site.ins[0].shape
    last = len(site.attr("normalized_shape", [0]))
    labels = [*dim_labels(len(shape) - last), *[None] * last]
    weights: list[Labels] = [[None] * len(value.shape) for value in site.ins[1:]]
    return split_by_labels(site, [labels, *weights], [labels], saved_inputs=(0,), backward=2.0)


def _group_norm(site: Site) -> ShardingRule:
    x = site.ins[0]
    labels = ["b", *[None] * (len(x.shape) - 1)]
    weights: list[Labels] = [[None] * len(value.shape) for value in site.ins[1:]]
    return split_by_labels(site, [labels, *weights], [labels], saved_inputs=(0,), backward=2.0)


def _batch_norm(site: Site) -> ShardingRule:
    """By sample and by channel; statistics of the global batch are summed, two for each channel."""
    x = site.ins[0]
    labels = ["b", "c", *[None] * (len(x.shape) - 2)]
    others: list[Labels] = [["c"] for _ in site.ins[1:]]
    is_training = bool(site.attr("training", default=True))
    summed = {"b": 8 * x.shape[1]} if is_training else {}
    return split_by_labels(
        site, [labels, *others], [labels], saved_inputs=(0,), backward=2.0, summed=summed
    )


def _gated(site: Site) -> ShardingRule:
    """`prelu`, whose weights are of channels: of the second dim."""
    shape = site.ins[0].shape
    labels = dim_labels(len(shape))
    weight = [labels[1] if len(shape) > 1 and site.ins[1].count > 1 else None]
    weights = weight * len(site.ins[1].shape)
    return split_by_labels(site, [labels, weights], [labels], saved_inputs=_all(site))


def _along(site: Site) -> ShardingRule:
    """Every dim but those that the operator runs along."""
    along = site.dims("dims") if "dims" in site.step.attrs else {site.dim()}
    shape = site.ins[0].shape
    labels = [None if dim in along else f"d{dim}" for dim in range(len(shape))]
    outs = [labels] * len(site.outs)
    others: list[Labels] = [[None] * len(value.shape) for value in site.ins[1:]]
    return split_by_labels(site, [labels, *others], outs, saves_outputs=True)


def _reduction(site: Site) -> ShardingRule:
    """The dims that stay; `sum` and `mean` by all, as a sum of parts is the sum."""
    if len(site.ins) > 1:  # `max` and `min` of two tensors
        return _elementwise(site)
    shape = site.ins[0].shape
    dims = site.dims()
    is_sum = site.packet in ("sum", "mean")
    remaining = [None if dim in dims else f"d{dim}" for dim in range(len(shape))]
    ins = dim_labels(len(shape)) if is_sum else remaining
    if site.attr("keepdim"):
        out = remaining
    else:
        out = [label for dim, label in enumerate(remaining) if dim not in dims]
    saved = () if is_sum else (0,)
    linear = [[0]] if is_sum else []
    return split_by_labels(site, [ins], [out] * len(site.outs), linear=linear, saved_inputs=saved)


def _embedding(site: Site) -> ShardingRule:
    """By token, by width, and by row: ranks look up their own rows, and results are summed."""
    tokens = dim_labels(len(site.ins[1].shape), "b")
    nbytes = 2.0 * site.out.nbytes
    # Gradients that are divided by how often a token occurs need all tokens.
    unsplit = ["v", *filter(None, tokens)] if site.attr("scale_grad_by_freq") else []
    ins: list[Labels] = [["v", "h"], tokens]
    return split_by_labels(
        site, ins, [[*tokens, "h"]], unsplit=unsplit, nbytes=nbytes, saved_inputs=(1,)
    )


def _cross_entropy(site: Site) -> ShardingRule:
    """By sample; the mean is over the sums of all shards."""
    logits, target = site.ins[:2]
    is_by_class = target.shape != logits.shape
    batch = ["b", *dim_labels(len(logits.shape) - 2)] if len(logits.shape) > 1 else []
    labels: Labels = [batch[0], None, *batch[1:]] if batch else [None]
    others: list[Labels] = [batch if is_by_class else labels]
    others += [[None] * len(value.shape) for value in site.ins[2:]]
    out: Labels = batch if site.out.shape else []
    # With weights of classes the mean is not the mean of the shards' means.
    is_weighted = "weight" in site.slots and not site.out.shape
    unsplit = [str(label) for label in batch] if is_weighted else []
    return split_by_labels(site, [labels, *others], [out], unsplit=unsplit, saved_inputs=(0,))


def _elementwise_loss(site: Site) -> ShardingRule:
    labels = dim_labels(len(site.ins[0].shape))
    ins: list[Labels] = [broadcast(value.shape, site.ins[0].shape) for value in site.ins]
    return split_by_labels(site, ins, [labels if site.out.shape else []], saved_inputs=(0, 1))


def _convolution(site: Site, *, transposed: bool = False) -> ShardingRule:
    """By sample and by channels, or by groups of them; shards of positions would need halos."""
    x, weight = site.ins[:2]
    rest = [None] * (len(weight.shape) - 2)
    groups = int(site.attr("groups", 1))
    lead = ["b"] if len(x.shape) == len(weight.shape) else []
    if groups > 1:
        ins: list[Labels] = [[*lead, "g", *rest], ["g", None, *rest], ["g"]]
        out: Labels = [*lead, "g", *rest]
    else:
        cut = ["k", "n"] if transposed else ["n", "k"]
        ins, out = [[*lead, "k", *rest], [*cut, *rest], ["n"]], [*lead, "n", *rest]
    taps = math.prod(weight.shape[2:])
    per_out = (weight.shape[0] if transposed else weight.shape[1]) * taps
    flops = 2.0 * site.out.count * per_out / (groups if transposed else 1)
    limits = {"g": groups} if groups > 1 else {}
    ins = ins[: len(site.ins)]
    return _contraction(site, ins, out, flops=flops, added=(2,), limits=limits)


def _spatial(site: Site, *, last: int) -> ShardingRule:
    """Every dim but the `last` ones, which are positions: pooling, resizing."""
    shape = site.ins[0].shape
    labels = [*dim_labels(len(shape) - last), *[None] * last]
    return split_by_labels(site, [labels], [labels] * len(site.outs), saved_inputs=(0,))


def _padding(site: Site) -> ShardingRule:
    """Every dim without padding; padding on both sides may cancel out, so sizes do not tell."""
    pads = list(site.attr("pad"))
    ndim = len(site.ins[0].shape)
    touched = {ndim - 1 - at // 2 for at, number in enumerate(pads) if number}
    labels = [None if dim in touched else f"d{dim}" for dim in range(ndim)]
    return split_by_labels(site, [labels], [labels])


def _joined(site: Site) -> ShardingRule:
    """`cat` and `stack`: every dim but the one they are joined along."""
    ndim = len(site.out.shape)
    along = int(site.attr("dim", 0)) % ndim
    out = [None if dim == along else f"d{dim}" for dim in range(ndim)]
    is_new = site.packet == "stack"
    one = [label for dim, label in enumerate(out) if not (is_new and dim == along)]
    ins: list[Labels] = [
        one if len(v.shape) == len(one) else [None] * len(v.shape) for v in site.ins
    ]
    return split_by_labels(site, ins, [out], linear=[list(_all(site))])


def _parted(site: Site) -> ShardingRule:
    """`split`, `chunk`, `unbind`, `slice` and `select`: every dim but the one they cut."""
    ndim = len(site.ins[0].shape)
    along = int(site.attr("dim", 0)) % ndim
    ins = [None if dim == along else f"d{dim}" for dim in range(ndim)]
    is_gone = len(site.out.shape) < ndim
    out = [label for dim, label in enumerate(ins) if not (is_gone and dim == along)]
    return split_by_labels(site, [ins], [out] * len(site.outs), linear=[[0]], nbytes=0.0)


def _scattered(site: Site) -> ShardingRule:
    """`slice_scatter` and `select_scatter`: every dim but the one of which a part is replaced."""
    ndim = len(site.out.shape)
    along = int(site.attr("dim", 0)) % ndim
    out = [None if dim == along else f"d{dim}" for dim in range(ndim)]
    part = [label for dim, label in enumerate(out) if dim != along]
    given = out if len(site.ins[1].shape) == ndim else part
    return split_by_labels(site, [out, given], [out], linear=[[0, 1]])


def _expanded(site: Site) -> ShardingRule:
    """`expand`, and `expand_as`, which takes the shape of a shard from a shard."""
    shape = site.out.shape
    ins = [broadcast(value.shape, shape) for value in site.ins]
    return split_by_labels(site, ins, [dim_labels(len(shape))], linear=[[0]], nbytes=0.0)


def _repeated(site: Site) -> ShardingRule:
    """`repeat`: dims that are not repeated."""
    shape, made = site.ins[0].shape, site.out.shape
    offset = len(made) - len(shape)
    ins = [f"d{offset + d}" if n == made[offset + d] else None for d, n in enumerate(shape)]
    out = [label if label in ins else None for label in dim_labels(len(made))]
    return split_by_labels(site, [ins], [out], linear=[[0]])


def _interleaved(site: Site) -> ShardingRule:
    """`repeat_interleave` by one number: shards stay contiguous."""
    if site.attr("dim") is None or len(site.ins) != 1:
        return unknown(site)
    labels = dim_labels(len(site.ins[0].shape))
    return split_by_labels(site, [labels], [labels], linear=[[0]])


def _selected(site: Site) -> ShardingRule:
    """`index_select`: every dim but the one that is looked up, and that by index."""
    along = site.dim()
    ndim = len(site.ins[0].shape)
    x = [None if dim == along else f"d{dim}" for dim in range(ndim)]
    out = ["i" if dim == along else label for dim, label in enumerate(x)]
    return split_by_labels(site, [x, ["i"] * len(site.ins[1].shape)], [out], saved_inputs=(1,))


def _gathered(site: Site) -> ShardingRule:
    """`gather`: every dim that index and input share, but the one that is looked up."""
    along = site.dim()
    pairs = zip(site.ins[0].shape, site.ins[1].shape, strict=True)
    labels = [None if d == along or n != m else f"d{d}" for d, (n, m) in enumerate(pairs)]
    return split_by_labels(site, [labels, labels], [labels], saved_inputs=(1,))


def _triangle(site: Site) -> ShardingRule:
    labels = [*dim_labels(len(site.ins[0].shape) - 2), None, None]
    return split_by_labels(site, [labels], [labels], linear=[[0]])


_TABLE: tuple[tuple[Maker, str], ...] = (
    (
        _elementwise,
        """abs acos addcdiv addcmul asin atan bitwise_and bitwise_not bitwise_or ceil celu clamp
        clamp_max clamp_min cos elu empty_like eq erf erfc exp expm1 fill floor ge gelu gt
        hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu lerp log log1p log2
        logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum mish ne
        ones_like pow reciprocal relu relu_ remainder round rsqrt selu sigmoid sign silu sin
        softplus sqrt square tan tanh threshold where zeros_like full_like floor_divide
        dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_
        feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_ bernoulli bernoulli_ normal
        normal_ normal_functional rand_like randn_like randint_like random random_ uniform uniform_
        cauchy cauchy_ exponential exponential_ geometric geometric_ log_normal log_normal_""",
    ),
    (
        _linear_elementwise,
        "add add_ sub sub_ rsub mul mul_ div div_ neg to _to_copy type_as clone detach",
    ),
    (_gated, "prelu"),
    (_linear, "linear"),
    (_matmul, "mm bmm matmul addmm baddbmm mv dot"),
    (_attention, "scaled_dot_product_attention"),
    (_normalization, "layer_norm rms_norm"),
    (_group_norm, "group_norm instance_norm"),
    (_batch_norm, "batch_norm"),
    (
        _along,
        """softmax log_softmax cumsum cumprod sort topk argsort flip roll logcumsumexp
        _safe_softmax glu""",
    ),
    (_reduction, "sum mean amax amin argmax argmin max min var std prod logsumexp any all"),
    (_embedding, "embedding"),
    (_cross_entropy, "cross_entropy_loss nll_loss nll_loss_nd"),
    (
        _elementwise_loss,
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits kl_div",
    ),
    (_convolution, "conv1d conv2d conv3d"),
    (
        partial(_convolution, transposed=True),
        "conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
    (partial(_spatial, last=1), "max_pool1d avg_pool1d adaptive_avg_pool1d upsample_linear1d"),
    (
        partial(_spatial, last=2),
        """max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d
        upsample_bilinear2d pixel_shuffle""",
    ),
    (partial(_spatial, last=3), "max_pool3d avg_pool3d adaptive_avg_pool3d"),
    (_padding, "pad constant_pad_nd"),
    (_joined, "cat concat stack"),
    (_parted, "split split_with_sizes chunk unbind slice narrow select"),
    (_scattered, "slice_scatter select_scatter"),
    (_expanded, "expand expand_as broadcast_to"),
    (_repeated, "repeat"),
    (_interleaved, "repeat_interleave"),
    (_selected, "index_select"),
    (_gathered, "gather"),
    (_triangle, "tril triu"),
)
_MAKERS: dict[str, Maker] = {name: maker for maker, names in _TABLE for name in names.split()}
