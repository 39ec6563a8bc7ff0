"""Chains of functions drawn at random, on images of one to three dims, with uneven parts."""

import math
import random

import torch
from torch import nn
from torch.nn import functional

CHANNELS = 4
ELEMENTS_MAX = 6000  # of an activation
ROWS_MAX = 60
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
AXES = ("d", "h", "w")


class Step(nn.Module):
    """One function of a chain, with its weights.

    Args:
        text: What it is, for messages.
        function: Of an image and the weights.
        shapes: Of the weights.
    """

    def __init__(self, text, function, *shapes):
        super().__init__()
        self.text, self.function = text, function
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, dtype=torch.float64) / math.sqrt(shape.numel()))
            for shape in map(torch.Size, shapes)
        )

    def forward(self, x):
        return self.function(x, *self.weights)


def _each(rng, count, low, high):
    return [rng.randint(low, high) for _ in range(count)]


def _convolution(rng, count):
    kernel, stride = _each(rng, count, 1, 5), _each(rng, count, 1, 3)
    padding, dilation = _each(rng, count, 0, 3), _each(rng, count, 1, 3)
    groups = rng.choice([1, 2, 4])
    options = stride, rng.choice([padding] * 3 + ["valid"]), dilation, groups
    if rng.random() < 0.2:
        options = 1, "same", dilation, groups
    name = f"conv{count}d"
    return Step(
        f"{name} {kernel} {options}",
        lambda x, w, b: getattr(functional, name)(x, w, b, *options),
        [CHANNELS, CHANNELS // groups, *kernel],
        [CHANNELS],
    )


def _transposed(rng, count):
    kernel, stride = _each(rng, count, 1, 4), _each(rng, count, 1, 3)
    dilation = _each(rng, count, 1, 2)
    padding = [rng.randint(0, min(2, k)) for k in kernel]
    more = [rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
    groups = rng.choice([1, 2])
    options = stride, padding, more, groups, dilation
    name = f"conv_transpose{count}d"
    return Step(
        f"{name} {kernel} {options}",
        lambda x, w, b: getattr(functional, name)(x, w, b, *options),
        [CHANNELS, CHANNELS // groups, *kernel],
        [CHANNELS],
    )


def _pool(rng, count):
    kernel = _each(rng, count, 1, 4)
    stride = rng.choice([None, _each(rng, count, 1, 3)])
    padding = [rng.randint(0, k // 2) for k in kernel]
    ceil = rng.random() < 0.5
    if rng.random() < 0.5:
        dilation = _each(rng, count, 1, 2)
        name, options = f"max_pool{count}d", (kernel, stride, padding, dilation, ceil)
    else:
        name, options = f"avg_pool{count}d", (kernel, stride, padding, ceil, rng.random() < 0.5)
    return Step(f"{name} {options}", lambda x: getattr(functional, name)(x, *options))


def _adaptive(rng, count):
    sizes = [rng.choice([None, rng.randint(1, 9)]) for _ in range(count)]
    name = f"adaptive_{rng.choice(['avg', 'max'])}_pool{count}d"
    given = sizes if count > 1 else sizes[0] or 3
    return Step(f"{name} {given}", lambda x: getattr(functional, name)(x, given))


def _pad(rng, count):
    mode = rng.choice(["constant", "reflect", "replicate", "circular"])
    low = -1 if mode == "constant" else 0
    sides = _each(rng, 2 * count, low, 3)
    more = (0.5,) if mode == "constant" else ()
    return Step(f"pad {sides} {mode}", lambda x: functional.pad(x, sides, mode, *more))


def _resized(rng, count):
    mode = rng.choice(["nearest", "nearest-exact", LINEAR[count], "area"])
    # Where a scale leaves the number of rows, the gradient of torch's `nearest` is not that of what
    # it computed.
    scales = [0.4, 0.5, 2, 2.5] if mode == "nearest" else [0.4, 0.5, 1.3, 2, 2.5]
    how = {"scale_factor": rng.choice(scales)}
    if rng.random() < 0.5:
        how = {"size": _each(rng, count, 1, 12)}
    if mode == LINEAR[count]:
        how["align_corners"] = rng.random() < 0.5
    return Step(f"interpolate {mode} {how}", lambda x: functional.interpolate(x, mode=mode, **how))


def _norm(rng, count):
    kind = rng.choice(["group", "batch", "instance", "layer", "channels"])
    functions = {
        "group": lambda x, w, b: functional.group_norm(x, 2, w, b),
        "batch": lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
        "instance": lambda x, w, b: functional.instance_norm(x, None, None, w, b),
        "layer": lambda x, w, b: functional.layer_norm(x, x.shape[1:]) * w.sum() + b.sum(),
        "channels": lambda x, w, b: functional.layer_norm(
            x.movedim(1, -1), (CHANNELS,), w, b
        ).movedim(-1, 1),
    }
    del count
    return Step(f"{kind} norm", functions[kind], [CHANNELS], [CHANNELS])


def _slice(rng, count):
    dim, step = rng.randint(2, count + 1), rng.randint(1, 3)
    first, last = rng.randint(-9, 4), rng.choice([None, -1, -2, 7])
    taken = (slice(None),) * dim + (slice(first, last, step),)
    return Step(f"slice {first}:{last}:{step} of dim {dim}", lambda x: x[taken])


def _joined(rng, count):
    dim, rows = rng.randint(2, count + 1), rng.randint(1, 4)
    if rng.random() < 0.5:
        return Step(
            f"cat of {rows} rows {dim}", lambda x: torch.cat([x, x.narrow(dim, 0, rows)], dim)
        )
    return Step(
        f"chunks of dim {dim}", lambda x: torch.cat([*reversed(x.chunk(3, dim)), x.tanh()], dim)
    )


def _moved(rng, count):
    dim, shift = rng.randint(2, count + 1), rng.randint(-7, 7)
    other = rng.randint(2, count + 1)
    functions = {
        f"roll {shift} {dim}": lambda x: x.roll(shift, dim),
        f"flip {dim}": lambda x: x.flip(dim),
        f"transpose {dim} {other}": lambda x: x.transpose(dim, other),
        f"differences {dim}": lambda x: (
            x.narrow(dim, 1, x.shape[dim] - 1) - x.narrow(dim, 0, x.shape[dim] - 1)
        ),
        "joined": lambda x: x.flatten(2).tanh().view(x.shape),
        f"split {dim}": lambda x: x.unflatten(dim, (-1, 2)).mean(dim + 1),
        f"twice {dim}": lambda x: x.repeat_interleave(2, dim),
    }
    text = rng.choice(sorted(functions))
    return Step(text, functions[text])


def _gate(rng, count):
    dims = tuple(sorted(rng.sample(range(2, count + 2), rng.randint(1, count))))
    name = rng.choice(["mean", "amax", "std", "sum"])
    return Step(
        f"gate by {name} {dims}",
        lambda x: x * getattr(x, name)(dims, keepdim=True).sigmoid(),
    )


_KINDS = (
    [_convolution] * 4
    + [_transposed] * 2
    + [_pool] * 3
    + [_adaptive, _pad, _pad, _resized, _resized, _norm, _norm, _slice, _joined, _moved, _gate]
)


def drawn(seed, ranks):
    """Return mesh, sizes of the image and the steps of one draw; they run on the whole image."""
    for attempt in range(1000):
        rng = random.Random(f"{seed} {ranks} {attempt}")
        torch.manual_seed(rng.randrange(10**6))
        count = rng.choice([1, 2, 2, 3])
        names = ["h"] if count == 1 else list(AXES[-count:])
        mesh = _mesh(rng, names, ranks)
        size = [
            rng.randint(mesh.get(axis, 1), max(mesh.get(axis, 1), 11 if count < 3 else 7))
            for axis in names
        ]
        steps = [rng.choice(_KINDS)(rng, count) for _ in range(rng.randint(1, 5))]
        if _runs(steps, size):
            return mesh, size, steps
    raise AssertionError("no chain runs")


def _mesh(rng, names, ranks):
    """Return how many ranks each axis has."""
    mesh, left = {}, ranks
    for axis in rng.sample(names, len(names)):
        degree = rng.choice([n for n in range(1, left + 1) if left % n == 0])
        if axis == names[-1] or len(mesh) == len(names) - 1:
            degree = left
        mesh[axis] = degree
        left //= degree
    mesh = {axis: mesh[axis] for axis in names if mesh.get(axis, 1) > 1}
    return mesh if math.prod(mesh.values()) == ranks else {names[-1]: ranks}


def _runs(steps, size):
    x = torch.randn(2, CHANNELS, *size, dtype=torch.float64)
    for step in steps:
        try:
            x = step(x)
        except (RuntimeError, ValueError, IndexError):
            return False
        if not 0 < x.numel() <= ELEMENTS_MAX or x.dim() != len(size) + 2 or not x.isfinite().all():
            return False
    return x.shape[1] == CHANNELS
