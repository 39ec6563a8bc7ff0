"""GPT-3 with 175 billion parameters: `msrun search` finds its best parallel plan on a laptop.

msrun search examples/gpt3.py:make --world 64 --batch 256
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, LENGTH, WORDS = 96, 12288, 96, 2048, 50304


class Block(nn.Module):
    """Causal self-attention, then an MLP, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        """Return the causal self-attention of every position."""
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (
            part(x).view(heads).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(found.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, (batch, length, width) as the input."""
        x = x + self.attend(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The model; its forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy of all positions."""
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


def make() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the model and a batch of one: tokens and the next tokens."""
    words, target = (torch.zeros(1, LENGTH, dtype=torch.long) for _ in range(2))
    return GPT().to(torch.bfloat16), (words, target)
