"""More blocks that scripts/fuzz_models.py draws: layers of torch, and parametrizations."""

# mypy cannot follow scripts that import each other.
# mypy: disable-error-code="import-not-found, misc, no-any-return"

from __future__ import annotations

import torch
from fuzz_quirks import Block
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


class Looks(Block):
    """Looks samples up in a table."""

    is_sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 16, sparse=self.is_sparse)

    def between(self, h: Tensor) -> Tensor:
        """Add the row of the greatest value."""
        output: Tensor = h + self.table(h.argmax(-1))
        return output


class LooksSparse(Looks):
    """The same with sparse gradients."""

    is_sparse = True


class LooksSum(Block):
    """Has a bag of embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(16, 16, sparse=True, mode="sum")

    def between(self, h: Tensor) -> Tensor:
        """Add the rows of the two greatest values."""
        output: Tensor = h + self.bag(h.topk(2, -1).indices)
        return output


class Recurrent(Block):
    """Has a recurrent layer over four steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 4, batch_first=True)

    def between(self, h: Tensor) -> Tensor:
        """Run over four steps of four values."""
        output, _ = self.cell(h.unflatten(-1, (4, 4)))
        return h + output.flatten(1)


class Attends(Block):
    """Has torch's attention over four positions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def between(self, h: Tensor) -> Tensor:
        """Attend with a causal mask."""
        x = h.unflatten(-1, (4, 4))
        mask = nn.Transformer.generate_square_subsequent_mask(4, device=h.device, dtype=h.dtype)
        output, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return h + output.flatten(1)


class EncoderLayer(Block):
    """Has torch's encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def between(self, h: Tensor) -> Tensor:
        """Encode four positions."""
        output: Tensor = self.layer(h.unflatten(-1, (4, 4)))
        return output.flatten(1)


class Convolves(Block):
    """Has a convolution and norms of groups and instances."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.norms = nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4))

    def between(self, h: Tensor) -> Tensor:
        """Convolve four channels of four pixels."""
        x = h.view(-1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
        return h + self.norms(self.conv(x)).flatten(1)


class LayerNormed(Block):
    """Has a layer norm without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, bias=False)

    def between(self, h: Tensor) -> Tensor:
        """Normalise."""
        output: Tensor = self.norm(h)
        return output


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Return a symmetric matrix."""
        return x.triu() + x.triu(1).T


class Parametrized(Block):
    """Has a parametrization of its own, which is computed once or twice."""

    is_cached = False

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(16, 16)
        parametrize.register_parametrization(self.square, "weight", _Symmetric())

    def between(self, h: Tensor) -> Tensor:
        """Multiply twice."""
        if self.is_cached:
            with parametrize.cached():
                return torch.tanh(self.square(torch.tanh(self.square(h))))
        return torch.tanh(self.square(torch.tanh(self.square(h))))


class ParametrizedCached(Parametrized):
    """The same, computed once."""

    is_cached = True


class Orthogonal(Block):
    """Has an orthogonal weight."""

    def __init__(self) -> None:
        super().__init__()
        self.square = parametrizations.orthogonal(nn.Linear(16, 16, bias=False))

    def between(self, h: Tensor) -> Tensor:
        """Turn."""
        output: Tensor = self.square(h)
        return output


class Lazy(Block):
    """Has a layer whose width its first input tells."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.LazyLinear(16)

    def between(self, h: Tensor) -> Tensor:
        """Run it."""
        output: Tensor = self.square(h)
        return output


BLOCKS: dict[str, type[nn.Module]] = {
    "embedding": Looks,
    "sparse embedding": LooksSparse,
    "sparse bag": LooksSum,
    "recurrent": Recurrent,
    "attention": Attends,
    "encoder layer": EncoderLayer,
    "convolution": Convolves,
    "layer norm": LayerNormed,
    "parametrized": Parametrized,
    "cached parametrization": ParametrizedCached,
    "orthogonal": Orthogonal,
    "lazy": Lazy,
}
