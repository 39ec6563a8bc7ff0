"""A call of every operator that has a rule, small enough that each of its choices runs at once."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

aten = torch.ops.aten
X, V = (4, 6), (6,)
LINE, IMAGE, VOLUME = (4, 4, 8), (4, 4, 8, 8), (2, 4, 4, 4, 4)
HEADS = (2, 4, 4, 2)


class Call(nn.Module):
    """One call: shapes become parameters, tensors stay as they are.

    Args:
        function: What is called.
        given: Its inputs.
        terms: Parameters are so many, which are added up before; 0 takes each as it is.
    """

    def __init__(self, function, *given, terms=0):
        super().__init__()
        self.terms, self.function, self.names = (
            terms,
            function,
            [f"x{at}" for at in range(len(given))],
        )
        numbers = torch.Generator().manual_seed(len(given))
        for name, item in zip(self.names, given, strict=True):
            if isinstance(item, torch.Tensor):
                self.register_buffer(name, item)
            else:
                x = (
                    torch.rand(
                        (*[terms] * bool(terms), *item), generator=numbers, dtype=torch.float64
                    )
                    * 1.6
                    - 0.8
                )
                setattr(self, name, nn.Parameter(x))

    def forward(self):
        given = [getattr(self, name) for name in self.names]
        is_sum = [self.terms and isinstance(item, nn.Parameter) for item in given]
        return self.function(*[x.sum(0) if s else x for x, s in zip(given, is_sum, strict=True)])


def whole(*shape, below=4):
    """Return whole numbers, which no parameter has a part in."""
    return (torch.arange(torch.Size(shape).numel()) * 3).reshape(shape) % below


def alike(names, *given, of=torch, **options):
    """Return calls of the functions with these names, all of them with the same inputs."""
    return [(name, partial(getattr(of, name), **options), *given) for name in names.split()]


def positive(function):
    return lambda x, *others: function(x + 1, *others)


def signs(function):
    return lambda *xs: function(*[x > 0 for x in xs])


def copied(function):
    return lambda x, *others: function(x * 1, *others)


WRITES = ("normal_", "random_", "uniform_", "cauchy_", "exponential_", "log_normal_")


def wrote(name, *args):
    return lambda x: getattr(torch.empty_like(x), name)(*args)


def functional_form(name, x, *args):
    return getattr(aten, name)(x.detach(), *args)


def attend(**options):
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


MASK = torch.arange(16).reshape(4, 4) % 3 > 0
WORDS = whole(4, 8, below=10)
CALLS = [
    *alike("abs acos asin atan ceil cos erf erfc exp expm1 floor isfinite isinf isnan neg", X),
    *alike("round sigmoid sign sin square tan tanh relu clone detach zeros_like ones_like", X),
    *alike(
        "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu mish selu silu softplus", X, of=F
    ),
    ("acos", lambda x: torch.acos(x * 0.5), X),
    *((name, positive(f), *given) for name, f, *given in alike("log log1p log2 reciprocal", X)),
    *((name, positive(f), *given) for name, f, *given in alike("rsqrt sqrt", X)),
    *alike("eq ge gt le lt ne maximum minimum", X, V),
    *((n, signs(f), *given) for n, f, *given in alike("logical_and logical_or logical_xor", X, X)),
    ("logical_not", signs(torch.logical_not), X),
    ("bitwise_and", signs(torch.bitwise_and), X, X),
    ("bitwise_or", signs(torch.bitwise_or), X, X),
    ("bitwise_not", signs(torch.bitwise_not), X),
    ("addcmul", torch.addcmul, X, V, X),
    ("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c + 2), X, V, X),
    ("clamp", lambda x: torch.clamp(x, -0.3, 0.3), X),
    ("clamp", torch.clamp, X, V, V),
    ("clamp_max", lambda x: torch.clamp_max(x, 0.3), X),
    ("clamp_min", lambda x: torch.clamp_min(x, 0.3), X),
    ("fill", lambda x: aten.fill.Scalar(x, 2.0), X),
    ("full_like", lambda x: torch.full_like(x, 3.0), X),
    ("floor_divide", lambda x: torch.floor_divide(x.detach(), 0.3), X),
    ("lerp", torch.lerp, X, X, V),
    ("masked_fill", lambda x, mask: x.masked_fill(mask, 2.0), X, whole(4, 6) > 1),
    ("pow", lambda x, y: torch.pow(x + 1, y), X, V),
    ("remainder", lambda x: torch.remainder(x, 0.3), X),
    ("threshold", lambda x: F.threshold(x, 0.1, 0.2), X),
    ("where", torch.where, whole(4, 6) > 1, X, V),
    ("prelu", F.prelu, X, V),
    ("prelu", F.prelu, (4, 6, 6), V),
    ("prelu", F.prelu, (4, 6, 2), (1,)),
    ("relu_", copied(torch.relu_), X),
    # Sums pass through these.
    ("add", torch.add, X, V),
    ("add", lambda x: x + 1, X),
    ("sub", partial(torch.sub, alpha=2), X, X),
    ("rsub", torch.rsub, X, X),
    ("mul", torch.mul, X, (4, 1)),
    ("mul", torch.mul, V, X),
    ("div", lambda x, y: x / (y + 2), X, V),
    ("div", lambda x: torch.div(x, 0.3, rounding_mode="floor"), X),
    ("to", lambda x: x.to(torch.float32), X),
    ("to", lambda x: (4 * x).to(torch.int64), X),
    ("_to_copy", lambda x: aten._to_copy(x, dtype=torch.float32), X),
    ("type_as", lambda x: x.type_as(torch.zeros(1, dtype=torch.float32)), X),
    ("add_", copied(torch.Tensor.add_), X, V),
    ("sub_", copied(torch.Tensor.sub_), X, V),
    ("mul_", copied(torch.Tensor.mul_), X, V),
    ("div_", copied(lambda x, y: x.div_(y + 2)), X, V),
    # Products of matrices.
    ("linear", F.linear, (4, 2, 6), (8, 6), (8,)),
    ("linear", F.linear, V, (8, 6)),
    ("mm", torch.mm, X, (6, 8)),
    ("bmm", torch.bmm, (2, 4, 6), (2, 6, 8)),
    ("matmul", torch.matmul, (2, 4, 4, 6), (4, 6, 8)),
    ("matmul", torch.matmul, (2, 4, 6), V),
    ("matmul", torch.matmul, (4,), X),
    ("addmm", partial(torch.addmm, beta=2, alpha=3), (8,), X, (6, 8)),
    ("baddbmm", torch.baddbmm, (2, 1, 8), (2, 4, 6), (2, 6, 8)),
    ("mv", torch.mv, X, V),
    ("dot", torch.dot, V, V),
    ("scaled_dot_product_attention", attend(is_causal=True), HEADS, HEADS, HEADS),
    ("scaled_dot_product_attention", attend(), HEADS, (2, 4, 6, 2), (2, 4, 6, 2)),
    ("scaled_dot_product_attention", attend(), HEADS, HEADS, HEADS, MASK),
    ("scaled_dot_product_attention", attend(), HEADS, HEADS, HEADS, (1, 4, 4, 4)),
    ("scaled_dot_product_attention", attend(enable_gqa=True), (2, 8, 4, 2), HEADS, HEADS),
    # Norms.
    ("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), (4, 2, 6), V, V),
    ("layer_norm", lambda x: F.layer_norm(x, (2, 6)), (4, 2, 6)),
    ("rms_norm", lambda x, w: F.rms_norm(x, (6,), w), (4, 2, 6), V),
    ("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), X),
    (
        "batch_norm",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        *(IMAGE, (4,), (4,)),
    ),
    (
        "batch_norm",
        lambda x, w, mean: F.batch_norm(x, mean, mean + 2, w),
        *(LINE, (4,), torch.arange(4.0, dtype=torch.float64)),
    ),
    ("instance_norm", lambda x: F.instance_norm(x), IMAGE),  # noqa: PLW0108 - it is overloaded
    ("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), IMAGE, (4,), (4,)),
    ("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), IMAGE, (4,), (4,)),
    # Along a dim.
    *alike("softmax log_softmax cumsum cumprod logcumsumexp", (4, 6, 2), dim=1),
    *alike("sort argsort", X, dim=0),
    ("_safe_softmax", lambda x: aten._safe_softmax(x, -1), X),
    ("glu", F.glu, (4, 8)),
    ("topk", lambda x: torch.topk(x, 3, dim=0), X),
    ("flip", lambda x: torch.flip(x, [0]), (4, 6, 2)),
    ("flip", lambda x: torch.flip(x, [-1, 0]), (4, 6, 2)),
    ("roll", lambda x: torch.roll(x, 1, 0), (4, 6)),
    ("roll", lambda x: torch.roll(x, 1), (4, 6)),
    # Reductions.
    *alike("sum mean", (4, 6, 2), dim=1),
    *alike("sum mean", (4, 6, 2)),
    *alike("amax amin argmax argmin max min any all prod logsumexp var std", (4, 6, 2), dim=1),
    *alike("sum amax var", (4, 6, 2), dim=(0, 2), keepdim=True),
    *alike("max min argmax prod any var", X),
    *alike("max min", X, X),
    # Look-ups.
    ("embedding", lambda w, i: F.embedding(i, w), (10, 6), WORDS),
    ("embedding", lambda w, i: F.embedding(i, w, padding_idx=7), (10, 6), WORDS),
    ("embedding", lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), (10, 6), WORDS),
    ("index_select", lambda x, i: x.index_select(1, i), X, whole(8)),
    ("gather", lambda x, i: x.gather(1, i), X, whole(4, 8)),
    # Losses.
    ("cross_entropy_loss", F.cross_entropy, (4, 10), whole(4)),
    ("cross_entropy_loss", partial(F.cross_entropy, ignore_index=3), (8, 10), whole(8)),
    ("cross_entropy_loss", partial(F.cross_entropy, label_smoothing=0.1), (8, 10), whole(8)),
    ("cross_entropy_loss", partial(F.cross_entropy, reduction="sum"), (4, 10, 6), whole(4, 6)),
    ("cross_entropy_loss", partial(F.cross_entropy, reduction="none"), (4, 10, 6), whole(4, 6)),
    ("cross_entropy_loss", lambda x, y: F.cross_entropy(x, y.softmax(-1)), (4, 10), (4, 10)),
    (
        "cross_entropy_loss",
        partial(F.cross_entropy, label_smoothing=0.1, ignore_index=3),
        (8, 10),
        whole(8),
    ),
    ("nll_loss_nd", F.nll_loss, (4, 10), whole(4)),
    ("nll_loss", aten.nll_loss, (4, 10), whole(4)),
    *alike("mse_loss l1_loss smooth_l1_loss huber_loss", X, X, of=F),
    *alike("mse_loss", X, X, of=F, reduction="none"),
    ("kl_div", lambda x, y: F.kl_div(x, y + 1, reduction="mean"), X, X),
    ("kl_div", lambda x, y: F.kl_div(x, y + 1, reduction="batchmean"), X, X),
    (
        "binary_cross_entropy_with_logits",
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w),
        X,
        whole(4, 6, below=2).double(),
        whole(6).double(),
    ),
    # Neighbours in space.
    ("conv1d", F.conv1d, LINE, (6, 4, 3), (6,)),
    ("conv2d", F.conv2d, IMAGE, (6, 4, 3, 3), (6,)),
    ("conv2d", partial(F.conv2d, groups=2, padding=1), IMAGE, (6, 2, 3, 3), (6,)),
    ("conv2d", F.conv2d, (4, 8, 8), (6, 4, 3, 3)),
    ("conv3d", F.conv3d, VOLUME, (2, 4, 3, 3, 3)),
    ("conv_transpose1d", F.conv_transpose1d, LINE, (4, 6, 3), (6,)),
    ("conv_transpose2d", partial(F.conv_transpose2d, groups=2), IMAGE, (4, 3, 2, 2), (6,)),
    ("conv_transpose3d", F.conv_transpose3d, VOLUME, (4, 2, 2, 2, 2)),
    ("max_pool1d", lambda x: F.max_pool1d(x, 2), LINE),
    ("avg_pool1d", lambda x: F.avg_pool1d(x, 2), LINE),
    ("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 2), LINE),
    ("upsample_linear1d", lambda x: F.interpolate(x, scale_factor=2, mode="linear"), LINE),
    ("max_pool2d", lambda x: F.max_pool2d(x, 2), IMAGE),
    ("avg_pool2d", lambda x: F.avg_pool2d(x, 2), IMAGE),
    ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), IMAGE),
    ("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True), IMAGE),
    ("upsample_nearest2d", lambda x: F.interpolate(x, scale_factor=2), IMAGE),
    ("upsample_bilinear2d", lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"), IMAGE),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (2, 16, 4, 4)),
    ("max_pool3d", lambda x: F.max_pool3d(x, 2), VOLUME),
    ("avg_pool3d", lambda x: F.avg_pool3d(x, 2), VOLUME),
    ("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, 2), VOLUME),
    # Pieces.
    ("pad", lambda x: F.pad(x, (1, 2)), X),
    ("pad", lambda x: F.pad(x, (1, -1)), X),
    ("pad", lambda x: F.pad(x, (1, 1), mode="circular"), LINE),
    ("constant_pad_nd", lambda x: aten.constant_pad_nd(x, [0, 0, 1, -1]), X),
    ("cat", lambda x, y: torch.cat([x, y], 1), X, (4, 2)),
    ("concat", lambda x, y: aten.concat([x, y], 0), X, X),
    ("stack", lambda x, y: torch.stack([x, y], 1), X, X),
    ("split", lambda x: x.split(2, 1), X),
    ("split_with_sizes", lambda x: x.split_with_sizes([2, 4], 1), X),
    ("chunk", lambda x: x.chunk(2, 1), X),
    ("unbind", lambda x: x.unbind(1), (4, 2, 6)),
    ("slice", lambda x: x[1:3], X),
    ("narrow", lambda x: x.narrow(1, 1, 2), X),
    ("select", lambda x: x[:, 1], (4, 2, 6)),
    ("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 1, 1, 3), X, (4, 2)),
    ("select_scatter", lambda x, y: torch.select_scatter(x, y, 1, 1), (4, 2, 6), (4, 6)),
    ("expand", lambda x: x.expand(2, 4, 6), (4, 1)),
    ("expand_as", lambda x, y: x.expand_as(y), (4, 1), X),
    ("broadcast_to", lambda x: torch.broadcast_to(x, (2, 4, 6)), (4, 1)),
    ("repeat", lambda x: x.repeat(2, 1, 3), X),
    ("repeat_interleave", lambda x: x.repeat_interleave(2, 1), X),
    ("tril", torch.tril, (2, 4, 4)),
    ("triu", torch.triu, (2, 4, 4)),
    # Views: a dim of the view is cut by whoever reads it.
    ("view", lambda x: x.view(4, 2, 6), (8, 6)),
    ("view", lambda x: x.view(8, 6), (4, 2, 6)),
    ("reshape", lambda x: x.reshape(4, 12), (4, 2, 6)),
    ("_unsafe_view", lambda x: aten._unsafe_view(x, [4, 2, 4]), (4, 8)),
    ("flatten", lambda x: x.flatten(1), (4, 2, 6)),
    ("unflatten", lambda x: x.unflatten(1, (2, 4)), (4, 8)),
    ("squeeze", lambda x: x.squeeze(1), (4, 1, 6)),
    ("unsqueeze", lambda x: x.unsqueeze(1), X),
    ("permute", lambda x: x.permute(2, 0, 1), (4, 2, 6)),
    ("transpose", lambda x: x.transpose(0, 2), (4, 2, 6)),
    ("t", torch.t, X),
    ("swapaxes", lambda x: aten.swapaxes(x, 0, 1), X),
    ("swapdims", lambda x: aten.swapdims(x, 0, 1), X),
    ("numpy_T", lambda x: x.T, X),
    ("mT", lambda x: x.mT, (2, 4, 6)),
    ("adjoint", lambda x: x.adjoint(), (2, 4, 6)),
    ("contiguous", lambda x: x.t().contiguous(), X),
    ("alias", aten.alias, X),
    # Random numbers: of what the executor draws, each rank has its part.
    *alike("dropout alpha_dropout", X, of=F, training=True),
    *alike("feature_dropout feature_alpha_dropout", IMAGE, p=0.5, train=True),
    ("dropout_", copied(partial(F.dropout, inplace=True)), X),
    ("alpha_dropout_", copied(partial(F.alpha_dropout, training=True, inplace=True)), X),
    ("feature_dropout_", copied(partial(F.dropout2d, inplace=True)), IMAGE),
    (
        "feature_alpha_dropout_",
        copied(partial(F.feature_alpha_dropout, training=True, inplace=True)),
        IMAGE,
    ),
    ("rrelu", partial(F.rrelu, training=True), X),
    ("rrelu_", copied(partial(F.rrelu, training=True, inplace=True)), X),
    ("bernoulli", lambda x: torch.bernoulli(x.sigmoid()), X),
    ("bernoulli_", lambda x, p: x.detach().clone().bernoulli_(p.sigmoid()), X, V),
    ("normal", lambda x, y: torch.normal(x, y.exp()), X, X),
    ("normal_functional", lambda x: aten.normal_functional(x.detach()), X),
    *alike("rand_like randn_like", X),
    *alike("randint_like", X, high=5),
    ("empty_like", lambda x: torch.empty_like(x).fill_(2.0), X),
    *((name, wrote(name), X) for name in WRITES),
    ("geometric_", wrote("geometric_", 0.3), X),
    *((name[:-1], partial(functional_form, name[:-1]), X) for name in WRITES if name != "normal_"),
    ("geometric", lambda x: functional_form("geometric", x, 0.3), X),
]
