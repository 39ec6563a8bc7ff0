"""What people write into models: blocks that scripts/fuzz_models.py draws.

All compute in float64 on a batch of `SAMPLES` rows, and one process and many ranks must learn the
same from it.  `fuzz_blocks` has more of them, `fuzz_scripts` what scripts do with a model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

WIDTH, CLASSES, SAMPLES = 8, 6, 8


class Block(nn.Module):
    """Two linear layers; subclasses say what happens between them.

    Attributes:
        has_residual: Whether the input is added, so that some of each sample passes by the layers.
    """

    has_residual = True

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def between(self, h: Tensor) -> Tensor:
        """Return the hidden values."""
        return h

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        added: Tensor = self.down(self.between(torch.tanh(self.up(x))))
        return x + added if self.has_residual else added


class NoGrad(Block):
    """Scales by what is computed without gradients."""

    def between(self, h: Tensor) -> Tensor:
        """Scale by a mean of the sample."""
        with torch.no_grad():
            scale = torch.sigmoid(h.mean(-1, keepdim=True))
        return h * scale


class DecoratedNoGrad(Block):
    """Has a method under `@torch.no_grad()`."""

    @torch.no_grad()
    def scale(self, h: Tensor) -> Tensor:
        """Return a scale."""
        return h.square().mean(-1, keepdim=True)

    def between(self, h: Tensor) -> Tensor:
        """Scale."""
        return h * self.scale(h)


class BufferRead(Block):
    """Adds a buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 16))

    def between(self, h: Tensor) -> Tensor:
        """Add it."""
        return h + self.table


class BufferCounter(Block):
    """Counts its calls in a buffer and reads it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        """Scale by the number of calls."""
        self.calls += 1
        return h / self.calls.sqrt()


class BufferRebound(Block):
    """Replaces a buffer by another tensor in forward."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        """Count without writing in place."""
        self.calls = self.calls + 1
        return h * (1 + 0.1 * self.calls)


class BufferAverage(Block):
    """Keeps a moving average of its own samples."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def between(self, h: Tensor) -> Tensor:
        """Subtract the average."""
        with torch.no_grad():
            self.average.lerp_(h.mean(0), 0.1)
        return h - self.average


class Normed(Block):
    """Has a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(16)

    def between(self, h: Tensor) -> Tensor:
        """Normalise."""
        output: Tensor = self.norm(h)
        return output


class NormAct(nn.BatchNorm1d):
    """A batch norm with its activation."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, and cut off what is negative."""
        return super().forward(x).relu()


class NormedAct(Normed):
    """Has a subclass of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = NormAct(16)


class FrozenNorm(Normed):
    """Has a batch norm in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        self.norm.eval()
        return super().forward(x)


class PreallocatedView(Block):
    """Fills parts of a preallocated tensor."""

    def between(self, h: Tensor) -> Tensor:
        """Write two halves."""
        output = torch.zeros_like(h)
        output[:, :8] = h[:, :8] * 2
        output[:, 8:] = h[:, 8:].square()
        return output


class InPlace(Block):
    """Writes activations in place."""

    def between(self, h: Tensor) -> Tensor:
        """Write a copy."""
        h = h.clone()
        h += 0.5
        h.view(-1, 4, 4)[:, 0].mul_(0.5)
        return h.narrow(1, 0, 16)


class NestedLists(nn.Module):
    """Has lists of lists."""

    def __init__(self) -> None:
        super().__init__()
        inner = [nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)]) for _ in range(2)]
        self.rows = nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        """Run them all."""
        for row in self.rows:
            for layer in row:  # type: ignore[attr-defined]  # a list
                x = torch.tanh(layer(x))
        return x


class ScalarParameter(Block):
    """Has a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def between(self, h: Tensor) -> Tensor:
        """Scale."""
        return h * self.scale.exp()


class Shared(Block):
    """Uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, 16)
        self.again.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        """Run both layers of one weight."""
        return super().forward(torch.tanh(self.down(self.again(x))))


class Frozen(Block):
    """Has a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(requires_grad=False)


class ChildsWeight(Block):
    """Reads the weight of a child outside of the child's forward."""

    def between(self, h: Tensor) -> Tensor:
        """Multiply by the child's weight once more."""
        return functional.linear(functional.linear(h, self.down.weight), self.down.weight.T)


class Parameters(Block):
    """Has a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(16), torch.full((16,), 0.5)])

    def between(self, h: Tensor) -> Tensor:
        """Scale twice."""
        for scale in self.scales:
            h = h * scale
        return h


class Unused(Block):
    """Has a layer that it does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class OwnLinear(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return twice the product."""
        return super().forward(x) * 2


class SubclassedLinear(Block):
    """Has a subclass of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = OwnLinear(WIDTH, 16)


class Spectral(Block):
    """Has a spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.up)


class WeightNormed(Block):
    """Has a weight norm."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.up)


class Dropping(Block):
    """Has a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def between(self, h: Tensor) -> Tensor:
        """Drop."""
        output: Tensor = self.drop(h)
        return output


class ByShape(Block):
    """Reads the shape of its input."""

    def between(self, h: Tensor) -> Tensor:
        """Divide by the width, and take another view."""
        return h.reshape(h.shape[0], 4, -1).flatten(1) / math.sqrt(h.shape[-1])


class ByBranch(Block):
    """Branches on a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.is_gated = True

    def between(self, h: Tensor) -> Tensor:
        """Gate."""
        gate = torch.sigmoid(h) if self.is_gated and self.training else 1.0
        return h * gate


class NamedArguments(Block):
    """Calls a part of itself by name and returns a mapping within."""

    def inner(self, *, hidden: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        """Return a mapping."""
        return {"hidden": hidden * scale}

    def between(self, h: Tensor) -> Tensor:
        """Go through the mapping."""
        return self.inner(hidden=h, scale=0.5)["hidden"]


class Constants(Block):
    """Makes tensors in forward."""

    def between(self, h: Tensor) -> Tensor:
        """Add positions."""
        return h + torch.arange(16, dtype=h.dtype, device=h.device) / 16


class Temperature(Block):
    """Reads a plain number that the script changes between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def between(self, h: Tensor) -> Tensor:
        """Divide by it."""
        return h / self.temperature


BLOCKS: dict[str, type[nn.Module]] = {
    "plain": Block,
    "no_grad": NoGrad,
    "decorated no_grad": DecoratedNoGrad,
    "buffer read": BufferRead,
    "buffer counter": BufferCounter,
    "buffer rebound": BufferRebound,
    "buffer average": BufferAverage,
    "batch norm": Normed,
    "batch norm subclass": NormedAct,
    "frozen batch norm": FrozenNorm,
    "preallocated": PreallocatedView,
    "in place": InPlace,
    "nested lists": NestedLists,
    "scalar parameter": ScalarParameter,
    "shared weight": Shared,
    "frozen layer": Frozen,
    "child's weight": ChildsWeight,
    "parameter list": Parameters,
    "unused layer": Unused,
    "linear subclass": SubclassedLinear,
    "spectral norm": Spectral,
    "weight norm": WeightNormed,
    "dropout": Dropping,
    "shapes": ByShape,
    "branch": ByBranch,
    "named arguments": NamedArguments,
    "constants": Constants,
    "temperature": Temperature,
}
