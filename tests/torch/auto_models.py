"""Models whose forward returns their loss, small enough that any plan runs in a moment."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCAB, LENGTH, WIDTH = 32, 8, 16


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x, y):
        for layer in self.layers:
            x = functional.relu(layer(x))
        return functional.mse_loss(x, y)


class Skips(nn.Module):
    """Convolutions with a skip between two levels, groups, pooling and a linear head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(4, 8, 3, padding=1)
        self.low = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Linear(16 * 16, 12)

    def forward(self, x, y):
        top = functional.relu(self.stem(x))
        low = functional.relu(self.low(functional.max_pool2d(top, 2)))
        both = torch.cat([top, self.up(low)], dim=1)
        return functional.cross_entropy(self.head(functional.avg_pool2d(both, 4).flatten(1)), y)


class Attention(nn.Module):
    def __init__(self, heads=4, kv_heads=4, *, bias=True):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, WIDTH // heads
        self.q = nn.Linear(WIDTH, heads * self.size, bias=bias)
        self.k = nn.Linear(WIDTH, kv_heads * self.size, bias=bias)
        self.v = nn.Linear(WIDTH, kv_heads * self.size, bias=bias)
        self.o = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x, turn=None):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        if turn is not None:
            q, k = turned(q, *turn), turned(k, *turn)
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return self.o(y.transpose(1, 2).reshape(batch, length, WIDTH))


def turned(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class GPT(nn.Module):
    """Weights of embedding and output are one parameter; some targets do not count."""

    def __init__(self, layers=2, dropout=0.0, ignored=3):
        super().__init__()
        self.ignored = ignored
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.blocks = nn.ModuleList([GPTBlock(dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, target):
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(
            logits.view(-1, VOCAB), target.view(-1), ignore_index=self.ignored
        )


class GPTBlock(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class Llama(nn.Module):
    """Rotary positions, gated perceptrons, few heads of keys and values."""

    def __init__(self, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([LlamaBlock() for _ in range(layers)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        angles = torch.arange(LENGTH)[:, None] * (0.5 ** torch.arange(WIDTH // 8))[None]
        self.register_buffer("angles", torch.cat([angles, angles], dim=-1))

    def forward(self, tokens, target):
        x = self.tokens(tokens)
        turn = self.angles.cos(), self.angles.sin()
        for block in self.blocks:
            x = block(x, turn)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class LlamaBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(heads=4, kv_heads=2, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x, turn):
        x = x + self.attention(self.norm1(x), turn)
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Experts(nn.Module):
    """Every expert sees every token, weighed by its gate: routing without choices of values."""

    def __init__(self, experts=4):
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x, y):
        share = self.gate(x).softmax(-1)
        hidden = functional.gelu(torch.matmul(x, self.up))
        out = torch.matmul(hidden, self.down)
        return functional.mse_loss((out * share.t().unsqueeze(-1)).sum(0), y)


def tokens():
    return torch.randint(0, VOCAB, (8, LENGTH)), torch.randint(0, VOCAB, (8, LENGTH))


def vectors():
    return torch.randn(16, WIDTH), torch.randn(16, WIDTH)


def pictures():
    return torch.randn(8, 4, 16, 16), torch.randint(0, 12, (8,))


MODELS = {
    "perceptron": (Perceptron, vectors),
    "skips": (Skips, pictures),
    "gpt": (GPT, tokens),
    "llama": (Llama, tokens),
    "experts": (Experts, vectors),
}
