"""Small programs, written by hand."""

from __future__ import annotations

from msrun.parallel.search.cost.topology import NetworkLevel, Topology
from msrun.parallel.search.graph.program import Program, Step, Value

# Links so slow, and memory so small, that choices matter for small tensors too.
TINY = Topology(
    name="tiny",
    flops=1e9,
    memory_bandwidth=1e9,
    memory=1 << 20,
    per_node=4,
    inside=NetworkLevel(bandwidth=1e8, latency=1e-7),
    across=NetworkLevel(bandwidth=2e7, latency=1e-6),
    efficiency=1.0,
    launch=1e-7,
    collective=1e-6,
)


class Draft:
    """A program in the making."""

    def __init__(self):
        self.values, self.params, self.inputs, self.steps = {}, {}, [], []

    def input(self, *shape, is_float=True):
        name = f"x{len(self.inputs)}"
        self.values[name] = Value(shape, 4, is_float)
        self.inputs.append(name)
        return name

    def param(self, *shape, name=None):
        name = name or f"w{len(self.params)}"
        self.values[name] = Value(shape)
        self.params[name] = name
        return name

    def op(this, packet, shape, *shapes, attrs=None, **inputs):  # noqa: N805 - torch has a `self`
        name = f"{packet}_{len(this.steps)}"
        outputs = [name, *(f"{name}.{i + 1}" for i in range(len(shapes)))]
        for output, made in zip(outputs, (shape, *shapes), strict=True):
            this.values[output] = Value(made)
        this.steps.append(
            Step(
                name=name,
                target=f"aten.{packet}.default",
                inputs=inputs,
                outputs=tuple(outputs),
                attrs=attrs or {},
            )
        )
        return name

    def shape(self, name):
        return self.values[name].shape

    def linear(self, x, width, *, bias=True):
        shape = self.shape(x)
        inputs = {"input": x, "weight": self.param(width, shape[-1])}
        if bias:
            inputs["bias"] = self.param(width)
        return self.op("linear", (*shape[:-1], width), **inputs)

    def gelu(self, x):
        return self.op("gelu", self.shape(x), self=x)

    def add(self, a, b):
        return self.op("add", self.shape(a), self=a, other=b)

    def norm(self, x):
        width = self.shape(x)[-1]
        return self.op(
            "layer_norm",
            self.shape(x),
            input=x,
            weight=self.param(width),
            bias=self.param(width),
            attrs={"normalized_shape": [width]},
        )

    def loss(self, x):
        target = self.input(*self.shape(x))
        return self.op("mse_loss", (), self=x, target=target)

    def done(self, *outputs):
        return Program(
            values=self.values,
            params=self.params,
            inputs=tuple(self.inputs),
            steps=tuple(self.steps),
            outputs=outputs,
        )


def perceptron(layers=2, *, batch=16, width=32):
    d = Draft()
    x = d.input(batch, width)
    for _ in range(layers):
        x = d.gelu(d.linear(x, width))
    return d.done(d.loss(x))


def transformer(layers=2, *, batch=8, length=16, width=32, heads=4):
    """Blocks of attention and perceptron, each behind a norm and beside the value itself."""
    d = Draft()
    x = d.add(d.linear(d.input(batch, length, width), width), d.param(1, length, width))
    for _ in range(layers):
        h = d.norm(x)
        q, k, v = (_heads(d, d.linear(h, width), heads) for _ in range(3))
        out = d.op(
            "scaled_dot_product_attention",
            d.shape(q),
            query=q,
            key=k,
            value=v,
            attrs={"is_causal": True},
        )
        out = d.op("transpose", (batch, length, heads, width // heads), self=out, attrs=DIMS)
        out = d.op("reshape", (batch, length, width), self=out)
        x = d.add(x, d.linear(out, width))
        x = d.add(x, d.linear(d.gelu(d.linear(d.norm(x), 4 * width)), width))
    return d.done(d.loss(x))


DIMS = {"dim0": 1, "dim1": 2}


def _heads(d, x, heads):
    batch, length, width = d.shape(x)
    x = d.op("view", (batch, length, heads, width // heads), self=x)
    return d.op("transpose", (batch, heads, length, width // heads), self=x, attrs=DIMS)


def convolutions(*, batch=8, channels=8, size=8):
    """Two levels with a skip between them, as a U-Net has."""
    d = Draft()
    x = d.input(batch, channels, size, size)
    top = d.op("relu", d.shape(x), self=_conv(d, x, channels))
    half = (batch, channels, size // 2, size // 2)
    low = d.op("relu", half, self=_conv(d, d.op("max_pool2d", half, self=top), channels))
    low = d.op("relu", half, self=_conv(d, low, channels))
    up = d.op("upsample_nearest2d", d.shape(top), self=low)
    both = d.op(
        "cat",
        (batch, 2 * channels, size, size),
        attrs={"dim": 1},
        **{"tensors.0": up, "tensors.1": top},
    )
    return d.done(d.loss(_conv(d, both, channels)))


def _conv(d, x, channels):
    batch, given, *size = d.shape(x)
    weight, bias = d.param(channels, given, 3, 3), d.param(channels)
    return d.op("conv2d", (batch, channels, *size), input=x, weight=weight, bias=bias)


def drawn(rng, steps=6):
    """Return a random program of at most so many operators over tensors of one shape."""
    d = Draft()
    have = [d.input(8, 16)]
    for _ in range(steps - 1):
        x = have[int(rng.integers(max(0, len(have) - 3), len(have)))]
        match rng.integers(4):
            case 0:
                made = d.linear(x, 16, bias=bool(rng.integers(2)))
            case 1:
                made = d.gelu(x)
            case 2:
                made = d.norm(x)
            case _:
                made = d.add(x, have[int(rng.integers(len(have)))])
        have.append(made)
    return d.done(d.loss(have[-1]))
