"""Models of the table that are written here, as people write them, and come from no package."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(20, 8, mode="sum") for _ in range(3)])
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
