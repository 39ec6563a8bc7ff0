"""Train a small mixture of experts, in parallel as a configuration file says.

    python examples/train_moe.py                                    # one process
    msrun --nproc-per-node 4 --parallel examples/configs/moe_ep.yaml examples/train_moe.py
    msrun --nproc-per-node 4 --parallel examples/configs/moe_dp_ep.yaml examples/train_moe.py

The text is Python's own documentation, character by character.  The model contains no parallel
code: its experts are one module with the weights of all, and a forward that takes tokens, the
experts of each token, and the weights of these.  Under `style: experts` each rank has some of the
experts, and tokens travel to them.  The losses are those of one process.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import msrun

LENGTH = 32
WIDTH = 64
EXPERTS = 8
CHOICES = 2
LAYERS = 2
GLOBAL_BATCH = 16
STEPS = 60
LEARNING_RATE = 3e-3
BALANCE = 0.01


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `LENGTH` characters, each with the characters that follow.

    Args:
        samples: Windows, as far apart as the text allows.
    """

    def __init__(self, samples: int) -> None:
        text = "\n".join(pydoc_data.topics.topics.values())
        self.alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(self.alphabet)}
        self._codes = torch.tensor([index[character] for character in text])
        self._samples = samples
        self._stride = (len(text) - LENGTH - 1) // samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        window = self._codes[number * self._stride :][: LENGTH + 1]
        return window[:-1], window[1:]


class Experts(nn.Module):
    """MLPs with their weights in 3-D parameters; returns the weighted sum of those chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return (tokens, width), given the experts and their weights as (tokens, choices)."""
        order = index.flatten().argsort(stable=True)
        rows = order // index.size(1)
        sizes = index.flatten().bincount(minlength=self.num_experts).tolist()
        found = [
            functional.linear(functional.gelu(functional.linear(part, up)), down)
            for part, up, down in zip(x[rows].split(sizes), self.up, self.down, strict=True)
        ]
        weighted = torch.cat(found) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, rows, weighted)


class Mixture(nn.Module):
    """Routes each token to its best experts; all tokens also use a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the share of each expert in each token."""
        shares = self.gate(x).softmax(-1)
        weights, index = (found.flatten(0, 1) for found in shares.topk(CHOICES))
        y = self.experts(x.flatten(0, 1), index, weights)
        return self.shared(x) + y.view_as(x), shares


class Block(nn.Module):
    """Causal self-attention, then a mixture of experts, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of the layer, and the shares of its experts."""
        query, key, value = self.attention(self.norm1(x)).chunk(3, -1)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(found)
        y, shares = self.mixture(self.norm2(x))
        return x + y, shares


class Language(nn.Module):
    """A causal language model over characters."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, characters, bias=False)

    def forward(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (batch, sequence, characters), and shares (..., layers, experts)."""
        x = self.embed(codes) + self.position
        shares = []
        for layer in self.layers:
            x, of_layer = layer(x)
            shares.append(of_layer)
        return self.head(x), torch.stack(shares, 2)


def train(path: str | None) -> None:
    """Train, and write the losses to the file `path`."""
    runtime = msrun.init()
    torch.manual_seed(1)
    text = Text(GLOBAL_BATCH * STEPS)
    model = runtime.shard(Language(len(text.alphabet)))
    optimizer = runtime.optimizer(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))

    def loss_of(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        logits, shares = output
        # The balance of experts is one of the whole batch: a product of two of its means.
        whole = runtime.gather(shares).flatten(0, 1)
        chosen = functional.one_hot(whole.topk(CHOICES).indices, EXPERTS).sum(-2)
        balance = (chosen.to(whole.dtype).mean(0) * whole.mean(0)).sum() * EXPERTS / CHOICES
        entropy = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        return entropy + BALANCE * balance / LAYERS

    batch_size = GLOBAL_BATCH // runtime.layout.size("dp")
    losses = []
    start = time.perf_counter()
    for inputs, target in runtime.loader(text, batch_size, shuffle=True, seed=1):
        losses.append(runtime.step(model, optimizer, loss_of, inputs, target).item())
        if len(losses) % 10 == 0:
            runtime.print(f"step {len(losses)}/{STEPS}  loss {losses[-1]:.4f}")
    tokens = round(GLOBAL_BATCH * LENGTH * STEPS / (time.perf_counter() - start))
    runtime.print(f"{tokens:,} tokens/s on {runtime.world_size} ranks {runtime.layout.sizes}")
    if path and runtime.is_main:
        Path(path).write_text(json.dumps(losses))


def main() -> None:
    """Train, and write the losses if asked."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--losses", metavar="FILE.json")
    train(parser.parse_args().losses)


if __name__ == "__main__":
    main()
