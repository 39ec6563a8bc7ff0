"""A small GPT trained as most scripts for torchrun do it: DDP, accumulation, cosine schedule."""

import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH, HEADS, LAYERS, CONTEXT, BATCH, ACCUMULATION, STEPS = 32, 2, 2, 32, 4, 2, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        logits = self.head(self.blocks(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    dist.init_process_group(backend="gloo")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    is_master = rank == 0
    torch.manual_seed(1337 + rank)
    text = "the quick brown fox jumps over the lazy dog; " * 100
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])

    def batch():
        starts = torch.randint(len(data) - CONTEXT, (BATCH,))
        return (
            torch.stack([data[s : s + CONTEXT] for s in starts]),
            torch.stack([data[s + 1 : s + 1 + CONTEXT] for s in starts]),
        )

    model = DistributedDataParallel(GPT(len(letters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for part in range(ACCUMULATION):
            with nullcontext() if part == ACCUMULATION - 1 else model.no_sync():
                loss = model(*batch()) / ACCUMULATION
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach() * ACCUMULATION
        dist.all_reduce(mean)
        losses.append(round(mean.item() / dist.get_world_size(), 4))
        if is_master:
            print(f"iter {step}: loss {losses[-1]:.4f}")
    Path(f"said-{rank}").write_text(f"{local_rank} {losses}")
    # torch 2.13 may hang where DDP's reducer is the last to hold a group of gloo: its end joins a
    # thread that waits for the interpreter's lock, under any launcher.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
