"""Models of sequences for tests of style `context`, and how they are trained on parts of them."""

from types import MethodType

import torch
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

WORDS = 12
TOKENS = 8
WIDTH = 16


class Block(nn.Module):
    def __init__(self, heads, key_heads, *, is_causal):
        super().__init__()
        self.heads, self.key_heads, self.is_causal = heads, key_heads, is_causal
        size = WIDTH // heads
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (heads + 2 * key_heads) * size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def attend(self, x, mask=None):
        samples, tokens, _ = x.shape
        parts = self.qkv(x).view(samples, tokens, self.heads + 2 * self.key_heads, -1)
        q, k, v = parts.split([self.heads, self.key_heads, self.key_heads], dim=2)
        y = functional.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (q, k, v)),
            attn_mask=mask,
            is_causal=self.is_causal,
            enable_gqa=self.heads != self.key_heads,
        )
        return self.out(y.transpose(1, 2).reshape(samples, tokens, -1))

    def forward(self, x, mask=None):
        x = x + self.attend(self.norm(x), mask)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Text(nn.Module):
    """As nanoGPT: positions are a range, and learned."""

    def __init__(self, heads=4, key_heads=4, *, is_causal=True):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        blocks = [Block(heads, key_heads, is_causal=is_causal) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WORDS)

    def position(self, x):
        return self.places(torch.arange(x.shape[1], device=x.device))

    def forward(self, x, keep=None):
        x = self.words(x) + self.position(x)
        mask = None if keep is None else keep[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class Apart(Text):
    """Projects queries, keys and values apart, so that a plan may divide their heads."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            del block.qkv
            block.q, block.k, block.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            block.attend = MethodType(_attend, block)


def _attend(block, x, mask=None):
    parts = (part(x).unflatten(2, (block.heads, -1)) for part in (block.q, block.k, block.v))
    heads = (part.transpose(1, 2) for part in parts)
    y = functional.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=block.is_causal)
    return block.out(y.transpose(1, 2).flatten(2))


class Paired(Text):
    """Attends by a mask of pairs of tokens, such as of documents."""

    def forward(self, x, pairs):
        x = self.words(x) + self.position(x)
        for block in self.blocks:
            x = block(x, pairs.unsqueeze(1) if pairs.dim() == 3 else pairs)
        return self.head(x)


class Table(Text):
    """Positions are the first rows of a table."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("table", torch.randn(1, 2 * TOKENS, WIDTH))

    def position(self, x):
        return self.table[:, : x.shape[1]]


class Fixed(Text):
    """Positions are a parameter for all tokens, as in a vision transformer."""

    def __init__(self, **options):
        super().__init__(**options)
        self.all = nn.Parameter(torch.randn(1, TOKENS, WIDTH))

    def position(self, _):
        return self.all


def build(make):
    torch.manual_seed(3)
    return make().double()


def batches(samples=4, count=3):
    """Return batches whose parts have unequal numbers of labels."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(count):
        x, y = torch.randint(0, WORDS, (2, samples, TOKENS), generator=draw)
        y[:, :3] = -100
        y[1, :7] = -100
        found.append((x, y))
    return found


def loss_fn(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def trained(config, make, keep=None):
    """Return losses and weights after three steps of AdamW, of the part of this rank."""
    with msrun.init(config) as rt:
        sample = (batches()[0][0],) if keep is None else (batches()[0][0], keep)
        model = rt.shard(build(make), sample=sample if "pipeline" in config else None)
        optimizer = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        ranks, rank = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        losses = []
        for batch in batches():
            x, y = (tensor.tensor_split(ranks)[rank] for tensor in batch)
            inputs = (x,) if keep is None else (x, keep.tensor_split(ranks)[rank])
            losses.append(rt.step(model, optimizer, loss_fn, *inputs, y))
        weights = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
        return torch.stack(losses).double(), weights
