"""Models that scripts/fuzz_techniques.py draws: with the blocks that a technique divides."""

# mypy cannot follow scripts that import each other.
# mypy: disable-error-code="import-not-found, misc, no-any-return"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Sizes = dict[str, Any]
CLASSES = 5


class Attention(nn.Module):
    """Attention of (samples, tokens, width), with grouped heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, heads, groups = sizes["width"], sizes["heads"], sizes["groups"]
        self.heads, self.groups, self.is_causal = heads, groups, sizes["is_causal"]
        size = width // heads
        self.q = nn.Linear(width, width, bias=sizes["bias"])
        self.k = nn.Linear(width, size * groups, bias=sizes["bias"])
        self.v = nn.Linear(width, size * groups, bias=sizes["bias"])
        self.o = nn.Linear(width, width, bias=sizes["bias"])

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.is_causal, enable_gqa=self.heads != self.groups
        )
        return self.o(y.transpose(1, 2).flatten(2))


def _norm(sizes: Sizes) -> nn.Module:
    width = sizes["width"]
    return nn.RMSNorm(width) if sizes["norm"] == "rms" else nn.LayerNorm(width)


class Block(nn.Module):
    """A block of a transformer; without heads a feed-forward alone."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.first = _norm(sizes)
        self.attention = Attention(sizes) if sizes["heads"] else None
        self.second = _norm(sizes)
        self.up = nn.Linear(sizes["width"], sizes["hidden"], bias=sizes["bias"])
        self.down = nn.Linear(sizes["hidden"], sizes["width"], bias=sizes["bias"])

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        if self.attention is not None:
            x = x + self.attention(self.first(x))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Vectors(nn.Module):
    """Blocks over vectors of tokens; a class for each token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes["blocks"]))
        self.head = nn.Linear(sizes["width"], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return classes last."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Text(nn.Module):
    """The same over ids."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes["words"], sizes["width"])
        self.places = nn.Embedding(sizes["tokens"], sizes["width"])
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes["blocks"]))
        self.head = nn.Linear(sizes["width"], CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """Return classes last."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Experts(nn.Module):
    """Experts with their weights in dim 0."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        count, width, hidden = sizes["experts"], sizes["width"], sizes["hidden"]
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, hidden, width) / 4)
        self.down = nn.Parameter(torch.randn(count, width, hidden) / 4)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts of each token."""
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            rows, place = torch.where(index == expert)
            hidden = torch.tanh(functional.linear(x[rows], self.up[expert]))
            found = functional.linear(hidden, self.down[expert])
            y.index_add_(0, rows, found * weights[rows, place, None])
        return y


class Mixture(nn.Module):
    """A router with experts, as one module or in a list, with a capacity or a shared expert."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, count = sizes["width"], sizes["experts"]
        self.top, self.count, self.capacity = sizes["top"], count, sizes["capacity"]
        self.is_list = sizes["is_list"]
        self.gate = nn.Linear(width, count)
        made = [nn.Linear(width, width) for _ in range(count)] if self.is_list else []
        self.experts: Any = nn.ModuleList(made) if self.is_list else Experts(sizes)
        self.shared = nn.Linear(width, width) if sizes["is_shared"] else None

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights, index = self.gate(x).softmax(-1).topk(self.top)
        if self.is_list:
            y = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows, place = torch.where(index == number)
                if len(rows):
                    y.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        else:
            if self.capacity:
                # The last choice counts if it is a strong one: of each token by itself.
                index = index.masked_fill(weights < 1 / (2 * self.count), self.count)
            y = self.experts(x, index, weights)
        if self.shared is not None:
            y = y + self.shared(x)
        return y.reshape(shape)


class Mixtures(nn.Module):
    """Mixtures behind each other, with a class for each sample or token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture(sizes) for _ in range(sizes["blocks"]))
        self.head = nn.Linear(sizes["width"], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return classes last."""
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Clicks(nn.Module):
    """Fields of ids in one table, and a tower."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        fields, width = sizes["fields"], sizes["width"]
        self.table = nn.Embedding(sum(sizes["rows"]), width, sparse=sizes["is_sparse"])
        self.tower = nn.Sequential(
            nn.Linear(fields * width, sizes["hidden"]),
            nn.Tanh(),
            nn.Linear(sizes["hidden"], CLASSES),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return classes last."""
        return self.tower(self.table(ids).flatten(1))


class Stage(nn.Module):
    """A convolution, a norm, and something that changes the number of rows."""

    def __init__(self, channels: int, spec: Sizes) -> None:
        super().__init__()
        self.kind = spec["then"]
        self.convolution = nn.Conv2d(
            channels,
            channels,
            spec["kernel"],
            stride=spec["stride"],
            padding=spec["padding"],
            dilation=spec["dilation"],
            groups=spec["convolution_groups"],
            padding_mode=spec["mode"],
        )
        norms: dict[str, nn.Module] = {
            "batch": nn.BatchNorm2d(channels),
            "group": nn.GroupNorm(2, channels),
            "instance": nn.InstanceNorm2d(channels, affine=True),
            "none": nn.Identity(),
        }
        self.norm = norms[spec["image_norm"]]

    def forward(self, x: Tensor) -> Tensor:
        """Return an image."""
        x = torch.tanh(self.norm(self.convolution(x)))
        if self.kind == "max":
            return functional.max_pool2d(x, 2, ceil_mode=True)
        if self.kind == "average":
            return functional.avg_pool2d(x, 3, stride=2, padding=1)
        if self.kind == "wide":
            return functional.interpolate(x, scale_factor=2, mode="nearest")
        return x


class Images(nn.Module):
    """Stages, perhaps an MLP of channels, and a class for each image."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        channels = sizes["channels"]
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.stages = nn.ModuleList(Stage(channels, spec) for spec in sizes["stages"])
        self.has_mlp = "hidden" in sizes
        if self.has_mlp:
            self.up = nn.Linear(channels, sizes["hidden"])
            self.down = nn.Linear(sizes["hidden"], channels)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Return classes last."""
        x = self.first(image)
        for stage in self.stages:
            x = stage(x)
        if self.has_mlp:
            x = x + self.down(functional.gelu(self.up(x.movedim(1, -1)))).movedim(-1, 1)
        return self.head(x.mean((2, 3)))


MODELS = {
    "vectors": Vectors,
    "text": Text,
    "mixtures": Mixtures,
    "clicks": Clicks,
    "images": Images,
}


def inputs(model: str, sizes: Sizes) -> Tensor:
    """Return the input of a batch of all ranks."""
    samples = sizes["samples"]
    if model == "text":
        return torch.randint(0, sizes["words"], (samples, sizes["tokens"]))
    if model == "clicks":
        rows, starts = sizes["rows"], [sum(sizes["rows"][:at]) for at in range(len(sizes["rows"]))]
        each = sizes["fields"] // len(rows)
        columns = [
            torch.randint(start, start + count, (samples, each))
            for start, count in zip(starts, rows, strict=True)
        ]
        return torch.cat(columns, 1)
    if model == "images":
        return torch.randn(samples, 3, sizes["height"], sizes["across"], dtype=torch.float64)
    tokens = (sizes["tokens"],) if sizes["tokens"] else ()
    return torch.randn(samples, *tokens, sizes["width"], dtype=torch.float64)


def targets(model: str, sizes: Sizes) -> Tensor:
    """Return classes, of which some do not count."""
    per_token = (sizes["tokens"],) if sizes.get("tokens") and model != "images" else ()
    y = torch.randint(0, CLASSES, (sizes["samples"], *per_token))
    y[: sizes["samples"] // 2 : 2] = -100
    y[-1] = 1
    return y


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of what counts."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=-100)
