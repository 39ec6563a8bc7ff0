"""Models of the table that are written here, as people write them, and come from no package."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 40


class Lstm(nn.Module):
    """Two layers over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of each token."""
        output: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return output


class Dlrm(nn.Module):
    """Tables for categories, a tower for numbers, and the products of all pairs."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        tables = [nn.EmbeddingBag(20, 8, mode="sum", sparse=sparse) for _ in range(3)]
        self.tables = nn.ModuleList(tables)
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Return one number for each sample."""
        dense = self.bottom(numbers)
        found = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        stacked = torch.stack([dense, *found], dim=1)
        products = stacked @ stacked.transpose(1, 2)
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        output: Tensor = self.top(torch.cat([dense, products[:, rows, columns]], dim=1))
        return output


class Translator(nn.Module):
    """`nn.Transformer` with its embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.transformer = nn.Transformer(
            d_model=16,
            nhead=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=32,
            dropout=0.0,
            batch_first=True,
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits of each target token."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).to(torch.float64)
        hidden = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask)
        output: Tensor = self.head(hidden)
        return output


class Attention(nn.Module):
    """Causal attention with one projection for query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head = heads

    def forward(self, x: Tensor) -> Tensor:
        """Return what each token takes of those before it."""
        size, length, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (
            part.view(size, length, self.n_head, width // self.n_head).transpose(1, 2)
            for part in parts
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(size, length, width))
        return output


class FeedForward(nn.Module):
    """Widens and narrows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return one vector for each token."""
        output: Tensor = self.c_proj(functional.gelu(self.c_fc(x)))
        return output


class GptBlock(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states of the next block."""
        x = x + self.attn(self.ln_1(x))
        output: Tensor = x + self.mlp(self.ln_2(x))
        return output


class Gpt(nn.Module):
    """A GPT as tutorials write it, with a tied head and positions made in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 16), nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([GptBlock(16, 4) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of each token."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(at)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(self.norm(x))
        return output


class GraphLayer(nn.Module):
    """Messages along edges, added up where they arrive."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.own = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return the nodes after one round."""
        width = nodes.shape[-1]
        source, target = (edges[:, side].unsqueeze(-1).expand(-1, -1, width) for side in (0, 1))
        ends = torch.cat([nodes.gather(1, source), nodes.gather(1, target)], dim=-1)
        sent = functional.relu(self.message(ends))
        received = torch.zeros_like(nodes).scatter_add(1, target, sent)
        return functional.relu(self.own(nodes) + received)


class GraphNetwork(nn.Module):
    """A network over graphs of equally many nodes and edges."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 16)
        self.layers = nn.ModuleList([GraphLayer(16) for _ in range(2)])
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return logits of each graph."""
        nodes = self.inside(nodes)
        for layer in self.layers:
            nodes = layer(nodes, edges)
        output: Tensor = self.head(nodes.mean(1))
        return output
