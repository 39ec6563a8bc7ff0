"""Models of known shapes, as `msrun search` and the benches take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

GPT3_LENGTH, LLAMA_LENGTH = 2048, 4096


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return GPT-3 175B and two sequences."""
    return gpt3().to(torch.bfloat16), tokens(2, GPT3_LENGTH)


def gpt3(layers: int = 96) -> GPT:
    """Return GPT-3 175B, or fewer layers of it."""
    return GPT(layers, 12288, 96, GPT3_LENGTH, 50304)


def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the shape of LLaMA 8B and two sequences."""
    return Llama(32).to(torch.bfloat16), tokens(2, LLAMA_LENGTH)


def tokens(batch: int, length: int) -> tuple[Tensor, ...]:
    """Return inputs and targets."""
    inputs, targets = (torch.zeros(batch, length, dtype=torch.long) for _ in range(2))
    return inputs, targets


class Attention(nn.Module):
    """Attention with as many heads of keys and values as `kv_heads`, and positions by rotation."""

    def __init__(self, width: int, heads: int, kv_heads: int, *, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.v = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.o = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, turn: Any = None) -> Any:
        """Return what each position draws from those before it."""
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        if turn is not None:
            q, k = _turned(q, *turn), _turned(k, *turn)
        is_grouped = self.heads != self.kv_heads
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        return self.o(y.transpose(1, 2).reshape(batch, length, width))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class GPTBlock(nn.Module):
    """A block of GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, heads, bias=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Any:
        """Return the next block's input."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT with its loss."""

    def __init__(self, layers: int, width: int, heads: int, length: int, words: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.zeros(1, length, width))
        self.blocks = nn.ModuleList([GPTBlock(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return functional.cross_entropy(logits, target.flatten())


class LlamaBlock(nn.Module):
    """A block of LLaMA."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up, self.down = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: Tensor, turn: Any) -> Any:
        """Return the next block's input."""
        x = x + self.attention(self.norm1(x), turn)
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """LLaMA with its loss; the shape of 8B by default."""

    def __init__(self, layers: int, width: int = 4096, length: int = 4096) -> None:
        super().__init__()
        heads, words, hidden = width // 128, width * 32 - 2816, int(3.5 * width)
        self.tokens = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            [LlamaBlock(width, heads, max(1, heads // 4), hidden) for _ in range(layers)]
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        self.register_buffer("angles", torch.zeros(length, 128))
        self.angles: Tensor

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        x, turn = self.tokens(tokens), (self.angles.cos(), self.angles.sin())
        for block in self.blocks:
            x = block(x, turn)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return functional.cross_entropy(logits, target.flatten())
