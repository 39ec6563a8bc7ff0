"""Functions of torch on signals and volumes: those of `image_operators` with one or three dims."""

import torch
from torch import nn
from torch.nn import functional

DTYPE = torch.float64
CHANNELS = 4


def _draw(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


def _of(name, count):
    """Return the function of torch for so many dims."""
    return getattr(functional, f"{name}{count}d")


def _convolutions(count):
    shapes = [(3, 1, 1, 1), (5, 2, 2, 1), (3, 1, 2, 2), (2, 2, 0, 1), (1, 2, 0, 1), (3, 3, 0, 1)]
    for kernel, stride, padding, dilation in shapes:
        name = f"k {kernel}, s {stride}, p {padding}, d {dilation}"
        weight, bias = _draw(6, CHANNELS, *[kernel] * count), _draw(6)
        back = weight.transpose(0, 1)

        def plain(x, w=weight, b=bias, options=(stride, padding, dilation)):
            return _of("conv", count)(x, w, b, *options)

        def spread(x, w=back, b=bias, o=(stride, padding, dilation)):
            stride, padding, dilation = o
            return _of("conv_transpose", count)(x, w, b, stride, padding, stride - 1, 1, dilation)

        yield f"conv {name}", plain
        yield f"transposed conv {name}", spread
    single = _draw(CHANNELS, 6, *[1] * count)
    yield (
        "transposed conv whose rows are nobody's",
        lambda x: _of("conv_transpose", count)(
            x[:, :, :3], single, None, 5, [2] + [0] * (count - 1)
        ),
    )
    groups = _draw(8, 2, *[3] * count)
    yield "conv in groups", lambda x: _of("conv", count)(x, groups, None, 1, 1, 1, 2)
    spread = _draw(CHANNELS, 3, *[3] * count)
    yield (
        "transposed conv in groups",
        lambda x: _of("conv_transpose", count)(x, spread, None, 2, 1, 1, 2),
    )
    for size in (2, 3):
        weight = _draw(8, CHANNELS, *[size] * count)
        yield f"conv same {size}", lambda x, w=weight: _of("conv", count)(x, w, None, 1, "same")
    for mode in ("reflect", "replicate", "circular") if count == 1 else ("replicate", "circular"):
        torch.manual_seed(0)
        kind = getattr(nn, f"Conv{count}d")
        yield f"Conv {mode}", kind(CHANNELS, 5, 3, padding=1, padding_mode=mode, dtype=DTYPE)


def _pools(count):
    for kernel, stride, padding, ceil in [
        (2, 2, 0, False), (3, 2, 1, False), (3, 2, 1, True), (3, 1, 1, False), (2, 2, 0, True),
    ]:  # fmt: skip
        o = (kernel, stride, padding)
        yield (
            f"max pool {o} {ceil}",
            lambda x, o=o, c=ceil: _of("max_pool", count)(x, *o, ceil_mode=c),
        )
        for counts in (True, False):
            yield (
                f"avg pool {o} {ceil} {counts}",
                lambda x, o=o, c=ceil, n=counts: _of("avg_pool", count)(x, *o, c, n),
            )
    yield "max pool, dilated", lambda x: _of("max_pool", count)(x, 2, 1, 0, 2)
    yield "max pool with places", lambda x: _of("max_pool", count)(x, 2, return_indices=True)[0]
    if count > 1:
        yield (
            "avg pool by 5",
            lambda x: _of("avg_pool", count)(x, 3, 2, 1, divisor_override=5),
        )
    for size in (1, 2, 3, 5):
        yield f"adaptive avg {size}", lambda x, s=size: _of("adaptive_avg_pool", count)(x, s)
        yield f"adaptive max {size}", lambda x, s=size: _of("adaptive_max_pool", count)(x, s)
    yield "lp pool", lambda x: _of("lp_pool", count)(x.abs() + 1, 2.0, 2)


def _sizes(count):
    sides = [1, 2, 2, 1, 0, 1][: 2 * count]
    for mode in ("reflect", "replicate", "circular", "constant"):
        yield f"pad {mode}", lambda x, m=mode: functional.pad(x, sides, mode=m)
    yield "crop", lambda x: functional.pad(x, [-1, -1, 2, -1, 0, 1][: 2 * count])
    linear = {1: "linear", 3: "trilinear"}[count]
    size = (13, 5, 7)[:count]
    for mode in ("nearest", "nearest-exact", linear, "area"):
        for options in (
            {"scale_factor": 2}, {"size": size}, {"scale_factor": 0.5}, {"scale_factor": 1.7}
        ):  # fmt: skip
            for aligned in (False, True) if mode == linear else (None,):
                more = {**options, "mode": mode, "align_corners": aligned}
                yield f"interpolate {more}", lambda x, o=more: functional.interpolate(x, **o)
    yield (
        "as many rows by a scale",
        lambda x: functional.interpolate(x[..., :3], scale_factor=1.3, mode="nearest-exact"),
    )
    module = nn.Upsample(scale_factor=2, mode=linear, align_corners=False)
    yield "Upsample", module


def _norms(count):
    weight, bias = _draw(CHANNELS), _draw(CHANNELS) + 1
    yield "group norm", lambda x: functional.group_norm(x, 2, weight, bias)
    yield "instance norm", lambda x: functional.instance_norm(x, weight=weight, bias=bias)
    yield "layer norm", lambda x: functional.layer_norm(x, x.shape[1:])
    yield "layer norm of rows", lambda x: functional.layer_norm(x, x.shape[2:])
    yield (
        "layer norm of channels",
        lambda x: functional.layer_norm(x.movedim(1, -1), (CHANNELS,), weight, bias).movedim(-1, 1),
    )
    yield "batch norm", lambda x: functional.batch_norm(x, None, None, training=True)
    kind = getattr(nn, f"BatchNorm{count}d")(CHANNELS, dtype=DTYPE)
    yield "BatchNorm", kind
    kind = getattr(nn, f"InstanceNorm{count}d")
    yield "InstanceNorm", kind(CHANNELS, affine=True, track_running_stats=True, dtype=DTYPE)
    yield "local response", lambda x: functional.local_response_norm(x, 2)


def _others(count):
    every = tuple(range(2, count + 2))
    yield "mean", lambda x: x.mean(every)
    yield "std", lambda x: x.std(every, keepdim=True)
    yield "max", lambda x: x.amax(2)
    yield "flatten", lambda x: x.flatten(1)
    yield "tokens", lambda x: x.flatten(2).transpose(1, 2)
    yield "channels last", lambda x: x.movedim(1, -1) @ _draw(CHANNELS, 3)
    yield "cat of channels", lambda x: torch.cat([x, x.flip(2)], 1)
    yield "cat of rows", lambda x: torch.cat([x, x[:, :, :2], x], 2)
    yield "slices", lambda x: x[:, :, 1:-1:2]
    yield "the last", lambda x: x[..., -3:]
    yield "one", lambda x: x[:, :, -1]
    yield "differences", lambda x: x[:, :, 1:] - x[:, :, :-1]
    yield "roll", lambda x: x.roll(3, 2)
    yield "gate", lambda x: x * x.mean(every, keepdim=True).sigmoid()
    yield "glu", lambda x: functional.glu(x, 1)
    yield "cumsum of channels", lambda x: x.softmax(1)
    yield "softmax of rows", lambda x: x.softmax(-1)
    yield "mse", lambda x: functional.mse_loss(x, x.detach() * 0.5)
    yield "cross entropy", lambda x: functional.cross_entropy(x, (x[:, 0] > 0).long())
    if count == 1:
        yield "squeezed", lambda x: x.mean(1, keepdim=True).squeeze(1)
        yield "frames", lambda x: x[..., : x.shape[2] // 2 * 2].unflatten(2, (-1, 2)).mean(3)
        yield "unfold of rows", lambda x: x.unfold(2, 2, 1).sum(-1)
        return
    yield "frames as samples", lambda x: x.transpose(1, 2).flatten(0, 1)
    yield (
        "planes",
        lambda x: (
            functional.conv2d(
                x.transpose(1, 2).flatten(0, 1), _draw(CHANNELS, CHANNELS, 3, 3), padding=1
            )
            .unflatten(0, (len(x), x.shape[2]))
            .transpose(1, 2)
        ),
    )
    yield "projection", lambda x: functional.max_pool2d(x.amax(2), 2)


def operators(count):
    """Yield names and functions of a signal or a volume: (samples, 4, ...) with `count` dims."""
    for make in (_convolutions, _pools, _sizes, _norms, _others):
        yield from make(count)
