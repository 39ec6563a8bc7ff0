"""Functions of torch on images of 4 channels, to compare those of parts with those of the whole."""

import torch
from torch import nn
from torch.nn import functional

DTYPE = torch.float64
CHANNELS = 4


def _draw(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


def _convolutions():
    shapes = [(3, 1, 1, 1), (3, 2, 1, 1), (5, 1, 2, 1), (2, 2, 0, 1), (1, 1, 0, 1), (3, 1, 2, 2)]
    shapes += [(7, 2, 3, 1), (4, 3, 1, 1), (1, 2, 0, 1), (3, 1, 0, 1), (5, 1, 4, 2)]
    for kernel, stride, padding, dilation in shapes:
        name = f"k {kernel}, s {stride}, p {padding}, d {dilation}"
        weight, bias = _draw(6, CHANNELS, kernel, kernel), _draw(6)
        back = weight.transpose(0, 1)

        def plain(x, w=weight, b=bias, options=(stride, padding, dilation)):
            return functional.conv2d(x, w, b, *options)

        def spread(x, w=back, b=bias, o=(stride, padding, dilation)):
            stride, padding, dilation = o
            more = max(0, stride - 1)
            return functional.conv_transpose2d(x, w, b, stride, padding, more, 1, dilation)

        yield f"conv {name}", plain
        yield f"transposed conv {name}", spread
    yield "conv in groups", lambda x: functional.conv2d(x, _draw(8, 2, 3, 3), None, 1, 1, 1, 2)
    for size in (3, 4):
        weight = _draw(8, CHANNELS, size, size)
        yield f"conv same {size}", lambda x, w=weight: functional.conv2d(x, w, None, 1, "same")
    for mode in ("zeros", "reflect", "replicate", "circular"):
        torch.manual_seed(0)
        module = nn.Conv2d(CHANNELS, 5, 3, padding=1, padding_mode=mode, dtype=DTYPE)
        yield f"Conv2d {mode}", module


def _pools():
    for kernel, stride, padding, ceil in [
        (2, 2, 0, False), (3, 2, 1, False), (3, 2, 1, True), (3, 1, 1, False), (2, 2, 0, True),
        (3, 3, 0, True),
    ]:  # fmt: skip
        o = (kernel, stride, padding)
        name = f"{o} {ceil}"
        yield (
            f"max pool {name}",
            lambda x, o=o, c=ceil: functional.max_pool2d(x, *o, ceil_mode=c),
        )
        for counts in (True, False):
            yield (
                f"avg pool {name} {counts}",
                lambda x, o=o, c=ceil, n=counts: functional.avg_pool2d(x, *o, c, n),
            )
    yield "avg pool by 5", lambda x: functional.avg_pool2d(x, 3, 2, 1, divisor_override=5)
    for size in (1, 2, 3, 5, (1, None), (7, 7)):
        yield f"adaptive avg {size}", lambda x, s=size: functional.adaptive_avg_pool2d(x, s)
        yield (
            f"adaptive max {size}",
            lambda x, s=size: functional.adaptive_max_pool2d(_rounded(x), s),
        )


def _rounded(x):
    """Return whole numbers, of which many are equal, with the gradient of `x`."""
    return x - x.detach() + x.detach().round()


def _sizes():
    for mode in ("reflect", "replicate", "circular", "constant"):
        yield f"pad {mode}", lambda x, m=mode: functional.pad(x, (1, 2, 2, 1), mode=m)
    yield "crop", lambda x: functional.pad(x, (-1, -1, -2, 1))
    yield "circular crop", lambda x: functional.pad(x, (2, -1, -1, 2), mode="circular")
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        for options in (
            {"scale_factor": 2}, {"size": (13, 5)}, {"scale_factor": 0.5}, {"scale_factor": 1.7}
        ):  # fmt: skip
            for aligned in (False, True) if mode in ("bilinear", "bicubic") else (None,):
                more = {**options, "mode": mode, "align_corners": aligned}
                yield f"interpolate {more}", lambda x, o=more: functional.interpolate(x, **o)
    yield "pixel shuffle", lambda x: functional.pixel_shuffle(x, 2)
    yield "pixel unshuffle", lambda x: functional.pixel_unshuffle(_even(x), 2)
    yield "space to depth", _space_to_depth
    yield (
        "areas and up",
        lambda x: functional.interpolate(functional.adaptive_avg_pool2d(x, 1), scale_factor=4),
    )


def _even(x):
    return functional.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))


def _space_to_depth(x):
    x = _even(x)
    n, c, h, w = x.shape
    return x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


def _norms():
    weight, bias = _draw(CHANNELS), _draw(CHANNELS) + 1
    yield "group norm", lambda x: functional.group_norm(x, 2, weight, bias)
    yield "instance norm", lambda x: functional.instance_norm(x, weight=weight, bias=bias)
    yield "layer norm of images", lambda x: functional.layer_norm(x, x.shape[1:])
    yield (
        "layer norm of pixels",
        lambda x: functional.layer_norm(
            x, x.shape[2:], torch.full(x.shape[2:], 2.0).to(x), torch.ones(x.shape[2:]).to(x)
        ),
    )
    yield (
        "layer norm of channels",
        lambda x: functional.layer_norm(x.permute(0, 2, 3, 1), (CHANNELS,), weight, bias),
    )
    yield "batch norm", lambda x: functional.batch_norm(x, None, None, training=True)
    yield "frozen batch norm", lambda x: functional.batch_norm(x, weight, weight**2 + 1)
    yield "normalize", functional.normalize


def _reductions():
    for name in ("sum", "mean", "amax", "amin", "std", "var", "norm", "logsumexp"):
        yield f"{name} of images", lambda x, n=name: getattr(x, n)(dim=(2, 3))
        yield f"{name} of rows", lambda x, n=name: getattr(x, n)(dim=3, keepdim=True)
        if name != "logsumexp":
            yield f"{name} of all", lambda x, n=name: getattr(x, n)()
    yield "max", lambda x: x.max()
    yield "max of columns", lambda x: x.max(2)[0]
    yield "max of channels", lambda x: x.max(1)[0]
    yield "var_mean", lambda x: torch.var_mean(x, (2, 3), correction=0, keepdim=True)[0]
    yield "softmax of channels", lambda x: x.softmax(1)
    yield "softmax of columns", lambda x: x.softmax(2)
    yield "softmax of no dim", lambda x: functional.softmax(x[0].transpose(0, 1))
    yield "numpy's names", lambda x: x.mean(axis=(2, 3), keepdims=True)
    for given in ((2, True, False), ((2, 3), False, True), (False,)):
        yield f"std by position {given}", lambda x, g=given: x.std(*g)
    for dim in (1, 2):
        yield f"max.values {dim}", lambda x, d=dim: torch.max(x, dim=d).values
        yield f"min.indices {dim}", lambda x, d=dim: x * x.min(d, keepdim=True).indices
        yield f"aminmax {dim}", lambda x, d=dim: x.aminmax(dim=d).max
        for name in ("median", "mode"):
            yield f"{name} {dim}", lambda x, d=dim, n=name: getattr(x, n)(d).values
        yield f"kthvalue {dim}", lambda x, d=dim: x.kthvalue(2, d).values
    # Where they are 0 their gradient is 0 too.
    for name in ("std", "norm"):
        yield f"{name} of equal values", lambda x, n=name: getattr(x * 0, n)(dim=(2, 3))
    yield "std_mean of equal values", lambda x: sum(torch.std_mean(x * 0, 2))
    yield "vector norm of zeros", lambda x: torch.linalg.vector_norm(x * 0, dim=(1, 2))
    # Of equal values some functions take the first, and some share the gradient among them.
    for name in ("amax", "amin"):
        yield f"{name} of equal values", lambda x, n=name: getattr(_rounded(x), n)((1, 2))
    yield "amin of bytes", lambda x: x * (x > 0).byte().amin((2, 3), keepdim=True)
    yield "max of equal values", lambda x: _rounded(x).max() - _rounded(x).min()
    yield "cosine similarity", lambda x: functional.cosine_similarity(x, x * x)
    yield "distances", lambda x: functional.pairwise_distance(x, x * x)


def _shapes():
    yield "flatten", lambda x: x.flatten(1)
    yield "flatten pixels", lambda x: x.flatten(2)
    yield "channels last", lambda x: x.permute(0, 2, 3, 1)
    yield "mT", lambda x: x.mT
    yield "groups", lambda x: x.view(len(x), 2, 2, *x.shape[2:]).transpose(1, 2).reshape(x.shape)
    yield "tokens", lambda x: x.permute(0, 2, 3, 1).reshape(len(x), -1, CHANNELS)
    yield "tokens and back", lambda x: x + x.flatten(2).softmax(-1).view(x.shape)
    for dim in (1, 2):
        yield f"cat {dim}", lambda x, d=dim: torch.cat([x, x * 2], d)
        yield f"chunk {dim}", lambda x, d=dim: x.chunk(2, d)[1]
    yield "cat of a column", lambda x: torch.cat([x, x[:, :, :, :1]], 3)
    yield "stack", lambda x: torch.stack([x, x], 2)
    yield "slices", lambda x: x[:, :, 1:-1, ::2]
    yield "a row", lambda x: x[:, :, 2]
    yield "a column", lambda x: x[..., -1]
    yield "None", lambda x: x[:, None]
    yield "split", lambda x: torch.cat(x.split([1, 3], 1)[::-1], 1)
    yield "roll", lambda x: x.roll((2, -3), (2, 3))
    yield "flip", lambda x: x.flip((2, 3))
    yield "squeeze", lambda x: x.unsqueeze(1).squeeze(1)
    yield "unfold", lambda x: functional.unfold(x, 2)
    yield "numpy's dims", lambda x: x.unsqueeze(axis=2).squeeze(axis=2).flip(2)
    yield "gather", lambda x: x.gather(1, (x[:, :1] > 0).long())
    yield "take_along_dim", lambda x: x.take_along_dim(x.detach().argsort(1), 1)
    yield "lists in a list", lambda x: x[[[1, 0], [0, 1]]]


def _copies():
    # A copy that is written leaves the image as it was.
    for name, copy in {
        "pad by 0": lambda x: functional.pad(x, (0, 0, 0, 0)),
        "roll by 0": lambda x: x.roll(0, 2),
        "interpolate to this size": lambda x: functional.interpolate(x, x.shape[2:]),
        "bilinear to this size": lambda x: functional.interpolate(x, x.shape[2:], mode="bilinear"),
        "adaptive avg of this size": lambda x: functional.adaptive_avg_pool2d(x, x.shape[2:]),
    }.items():
        yield f"copy: {name}", lambda x, c=copy: _written(x, c)
    # And what is written in place is written.
    yield "dropped channels", lambda x: _written(x, nn.Dropout2d(1.0, inplace=True))
    yield "mask of pixels", _masked_pixels


def _written(x, change):
    y = x * 1.5
    change(y).mul_(2)
    return y


def _masked_pixels(x):
    y = x.permute(0, 2, 3, 1) * 1
    y[x[:, 0] > 0] = 0.0
    return y


def _elements():
    yield "expand", lambda x: x.mean((2, 3), keepdim=True).expand(x.shape) * x
    yield "gate", lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()
    yield "gate of rows", lambda x: x * x.mean(3, keepdim=True)
    yield (
        "positions",
        lambda x: x + torch.arange(x.shape[2]).to(x)[:, None] + torch.arange(x.shape[3]).to(x),
    )
    yield "gelu", functional.gelu
    yield "in place", lambda x: (x * 1).add_(x).mul_(2)
    yield "relu in place", lambda x: functional.relu(x + 0, inplace=True)
    yield "where", lambda x: torch.where(x > 0, x, x * 0.1)
    yield "max of two", lambda x: torch.max(x, x.flip(1)) + torch.min(x, x.flip(1)) * 2
    yield "max with plain", lambda x: torch.max(x, _draw(*x.shape))
    yield "no dropout", lambda x: torch.dropout(x, 0.5, train=False)
    yield "one hot", _told_apart
    yield "clamp", lambda x: x.clamp(-1, 1)
    yield "1 - x", lambda x: 1 - x
    yield "prelu", lambda x: functional.prelu(x, torch.full((CHANNELS,), 0.1).to(x))
    yield "glu", lambda x: functional.glu(x, 1)
    yield "assignments", _assigned
    yield "linear", lambda x: functional.linear(x.permute(0, 2, 3, 1), _draw(5, CHANNELS))
    yield "linear of rows", lambda x: functional.linear(x, _draw(3, x.shape[3]))
    yield "product", lambda x: x.permute(0, 2, 3, 1) @ _draw(CHANNELS, 5)
    yield "einsum", lambda x: torch.einsum("nchw,cd->ndhw", x, _draw(CHANNELS, 5))
    yield "einsum of columns", lambda x: torch.einsum("nchw,nchv->nwv", x, x)


def _told_apart(x):
    last_first = torch.arange(x.shape[2] - 1, -1, -1)[:, None]
    return x[..., None] * functional.one_hot((x.detach() * 0).long() + last_first)


def _assigned(x):
    y = x * 1
    y[:, 0] = 3.0
    y[:, 1] = y[:, 2] * 2
    y[y > 1] = 0.0
    return y


def _losses():
    cross = functional.cross_entropy
    yield "mse", lambda x: functional.mse_loss(x, x.detach() * 0.5)
    yield "sum of l1", lambda x: functional.l1_loss(x, torch.zeros_like(x), reduction="sum")
    yield "cross entropy", lambda x: cross(x, (x[:, 0] > 0).long())
    yield (
        "weighted cross entropy",
        lambda x: cross(x, (x[:, 0] > 0).long(), _draw(CHANNELS).abs(), ignore_index=1),
    )
    yield (
        "smooth cross entropy of whole targets",
        lambda x: cross(x, torch.zeros(len(x), *x.shape[2:]).long(), label_smoothing=0.1),
    )
    yield "bce", lambda x: functional.binary_cross_entropy_with_logits(x, (x > 0).to(x))
    yield (
        "nll",
        lambda x: functional.nll_loss(x.log_softmax(1), (x[:, 0] > 0).long(), reduction="none"),
    )
    yield "dice", lambda x: 1 - 2 * (x.sigmoid() * (x > 0)).sum() / (x.sigmoid().sum() + 1)


def operators():
    """Yield names and functions of an image of shape (samples, 4, height, width)."""
    computed = (_convolutions, _pools, _norms, _reductions, _elements, _losses)
    for make in (*computed, _sizes, _shapes, _copies):
        yield from make()
