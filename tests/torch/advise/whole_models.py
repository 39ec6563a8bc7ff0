"""Models whose experts or sequences a search can give to ranks of their own."""

import torch
from torch import nn
from torch.nn import functional

WORDS = 32


class Experts(nn.Module):
    """The weights of all experts in two parameters; every expert computes every token."""

    def __init__(self, experts, width):
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 4 * width, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)

    def forward(self, x, index, weights):
        chosen = functional.one_hot(index, self.num_experts).to(x.dtype)
        shares = (chosen * weights[..., None]).sum(1)
        hidden = torch.relu(torch.einsum("tw,ekw->tek", x, self.up))
        return torch.einsum("tek,ewk,te->tw", hidden, self.down, shares)


class Layer(nn.Module):
    def __init__(self, experts, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)

    def forward(self, x):
        rows = self.norm(x).flatten(0, 1)
        weights, index = self.gate(rows).softmax(-1).topk(2)
        return x + self.experts(rows, index, weights).view_as(x)


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class LoopLayer(nn.Module):
    """Experts in a list, of which each computes the rows that chose it."""

    def __init__(self, experts, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x):
        rows = self.norm(x).flatten(0, 1)
        weights, index = self.gate(rows).softmax(-1).topk(2)
        found = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(index == number)
            found.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return x + found.view_as(x)


class Mixture(nn.Module):
    """Three mixtures of experts, whose forward returns the loss."""

    kind = Layer

    def __init__(self, experts=8, width=64):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(self.kind(experts, width) for _ in range(3))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words, target):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Listed(Mixture):
    kind = LoopLayer


class Block(nn.Module):
    def __init__(self, width, heads, key_heads):
        super().__init__()
        self.parts = (heads, key_heads, key_heads)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, sum(self.parts) * width // heads)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(2, (sum(self.parts), -1)).transpose(1, 2)
        query, key, value = heads.split(self.parts, 1)
        y = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=len({*self.parts}) > 1
        )
        return x + self.out(y.transpose(1, 2).flatten(2))


class Text(nn.Module):
    """Three blocks of causal attention, whose forward returns the loss."""

    def __init__(self, width=24, heads=4, key_heads=4):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, heads, key_heads) for _ in range(3))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words, target):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Smoothed(Text):
    """Mixes neighbouring tokens outside of attention, which ranks of `cp` cannot."""

    def __init__(self):
        super().__init__()
        self.smooth = nn.Conv1d(WORDS, WORDS, 3, padding=1)

    def forward(self, words, target):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        x = self.smooth(self.head(x).transpose(1, 2)).transpose(1, 2)
        return functional.cross_entropy(x.flatten(0, 1), target.flatten())


class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 16 * width), nn.Linear(16 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Both(Mixture):
    """Most of its weights are in few experts, and in linear layers as large as these."""

    def __init__(self):
        super().__init__(experts=2)
        self.wide = nn.ModuleList(Wide(64) for _ in self.layers)

    def forward(self, words, target):
        x = self.embed(words)
        for layer, wide in zip(self.layers, self.wide, strict=True):
            x = wide(layer(x))
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width) for _ in range(4)
        )

    def forward(self, x):
        query, key, value = (
            part(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


class Long(Text):
    """Its linear layers are as large as its activations."""

    def __init__(self, width=64, heads=4):
        super().__init__(width, heads, heads)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), Attention(width, heads), Wide(width))
            for _ in range(3)
        )


MODELS = {
    "both": Both,
    "listed": Listed,
    "long": Long,
    "mixture": Mixture,
    "text": lambda: Text(64, 8, 1),
    "text of 3 heads": lambda: Text(heads=3, key_heads=3),
    "smoothed": Smoothed,
}


def batch(samples, tokens, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (2, samples, tokens), generator=draw).unbind()
