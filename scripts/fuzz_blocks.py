"""More blocks that scripts/fuzz_models.py draws: calls, contexts and state."""

# mypy cannot follow scripts that import each other.
# mypy: disable-error-code="import-not-found, misc, no-any-return"

from __future__ import annotations

import random
from typing import Any

import torch
from fuzz_quirks import WIDTH, Block
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Autocast(Block):
    """Rounds under autocast, which moves no gradient."""

    def between(self, h: Tensor) -> Tensor:
        """Add what 8 bits leave of the values."""
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = functional.linear(h.float(), torch.eye(16, device=h.device))
        return h + rounded.to(h.dtype)


class CheckpointsItself(Block):
    """Recomputes its hidden values by torch's own function."""

    is_reentrant = False

    def between(self, h: Tensor) -> Tensor:
        """Recompute."""

        def inner(value: Tensor) -> Tensor:
            return torch.sigmoid(value) * value

        result: Tensor = checkpoint(inner, h, use_reentrant=self.is_reentrant)
        return result


class CheckpointsReentrant(CheckpointsItself):
    """The same by the older implementation."""

    is_reentrant = True


class CheckpointsLayer(Block):
    """Recomputes a layer with weights by torch's own function."""

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        hidden: Tensor = checkpoint(self.up, x, use_reentrant=False)
        added: Tensor = self.down(torch.tanh(hidden))
        return x + added


class _StraightThrough(torch.autograd.Function):
    """Rounds; the gradient is twice that of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return (x * 4).floor() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        return gradient * 2


class OwnFunction(Block):
    """Has a gradient of its own."""

    def between(self, h: Tensor) -> Tensor:
        """Round, with a gradient all the same."""
        rounded: Tensor = _StraightThrough.apply(h)  # type: ignore[no-untyped-call]
        return h + rounded * 0.1


class GradientInside(Block):
    """Differentiates within forward, as force fields do."""

    def between(self, h: Tensor) -> Tensor:
        """Add the slope of an energy of the sample."""
        with torch.enable_grad():
            value = h if h.requires_grad else h.detach().requires_grad_()
            energy = torch.sin(value).mul(value).sum()
            (slope,) = torch.autograd.grad(energy, value, create_graph=True)
        return h + 0.1 * slope


class Mapped(Block):
    """Maps a function over samples by `torch.vmap`."""

    def between(self, h: Tensor) -> Tensor:
        """Divide each sample by its norm."""
        result: Tensor = torch.vmap(lambda row: row / (1 + row.square().sum()))(h)
        return result


class Jacobian(Block):
    """Has a directional derivative of `torch.func`."""

    def between(self, h: Tensor) -> Tensor:
        """Return the derivative of the sine in the direction of the values."""
        _, slope = torch.func.jvp(torch.sin, (h,), (h.detach(),))
        return h + 0.1 * slope


class FunctionalCall(Block):
    """Calls a child with other weights by `torch.func.functional_call`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        halved = {name: value * 0.5 for name, value in self.down.named_parameters()}
        added = torch.func.functional_call(self.down, halved, (torch.tanh(self.up(x)),))
        result: Tensor = x + added
        return result


class Twice(Block):
    """Calls the same layers twice."""

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        once = torch.tanh(self.down(torch.tanh(self.up(x))))
        added: Tensor = self.down(torch.sigmoid(self.up(once)))
        return once + added


class Stores(Block):
    """Keeps an auxiliary loss, which a loss of the model adds."""

    auxiliary: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        """Keep the mean of the squares."""
        self.auxiliary = h.square().mean()
        return h


class History(Block):
    """Keeps a list of what it saw, and reads nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def between(self, h: Tensor) -> Tensor:
        """Append."""
        self.seen = [*self.seen[-2:], h.detach()]
        return h


class AttributeCounter(Block):
    """Counts its calls in a plain attribute and reads it."""

    calls = 0

    def between(self, h: Tensor) -> Tensor:
        """Scale by the number of calls."""
        self.calls += 1
        return h / (1 + 0.1 * self.calls)


class PythonNumber(Block):
    """Draws a number of Python, as stochastic depth does."""

    def between(self, h: Tensor) -> Tensor:
        """Scale by the number."""
        return h * (0.5 + random.random())  # noqa: S311 - no secret


class DrawnNumber(Block):
    """Draws one number of torch for all samples."""

    def between(self, h: Tensor) -> Tensor:
        """Scale by the number."""
        return h * (0.5 + torch.rand((), dtype=h.dtype))


class Aliases(Block):
    """Returns its input itself, in a tuple and out of it, and a view of its result."""

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        parts = (x, super().forward(x))
        first, second = parts
        return torch.stack([first, second])[1].view_as(x)[:, :WIDTH]


class WritesInput(Block):
    """Writes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        if not (x.requires_grad and x.is_leaf):
            x.mul_(0.5)
        return super().forward(x)


class WritesResult(Block):
    """Writes the result of a layer in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        added: Tensor = self.down(torch.relu_(self.up(x)))
        if self.has_residual:
            added += x
        return added


class Selects(Block):
    """Computes on chosen samples, as a mixture of experts does."""

    def between(self, h: Tensor) -> Tensor:
        """Double the samples whose first value is positive."""
        chosen = (h[:, 0] > 0).nonzero().flatten()
        return h.index_add(0, chosen, h[chosen].sin())


class MaskedWrite(Block):
    """Writes by a mask."""

    def between(self, h: Tensor) -> Tensor:
        """Cut off what is negative."""
        h = h.clone()
        h[h < 0] *= 0.1
        return h.masked_fill(h > 0.9, 0.9)  # noqa: PLR2004 - below 1


class RawWeights(Block):
    """Has parameters without a module, and one that only a loss of the model reads."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.eye(16) * 0.5)
        self.gate = nn.Parameter(torch.zeros(1))

    def between(self, h: Tensor) -> Tensor:
        """Mix."""
        return torch.einsum("bi,ij->bj", h, self.mixing) * torch.sigmoid(self.gate)


class ComplexWeight(Block):
    """Has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(
            torch.polar(torch.ones(16), torch.linspace(0, 1, 16)).to(torch.complex128)
        )

    def between(self, h: Tensor) -> Tensor:
        """Rotate."""
        return torch.view_as_real(h * self.phase).sum(-1)


class MixedTypes(Block):
    """Has a parameter of another type; its values are small whole numbers, which are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(16.0) - 8)

    def settle(self) -> None:
        """Take the type, after that of the model was set."""
        self.table = nn.Parameter(self.table.detach().float(), requires_grad=True)

    def between(self, h: Tensor) -> Tensor:
        """Add the table."""
        return h + 0.1 * self.table


class NamedParts(Block):
    """Has dictionaries of modules and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Tanh()})
        self.scales = nn.ParameterDict({"a": torch.ones(16), "b": torch.full((1,), 0.5)})

    def between(self, h: Tensor) -> Tensor:
        """Run all."""
        for part in self.parts.values():
            h = part(h)
        return h * self.scales["a"] * self.scales["b"]


class PlainTensor(Block):
    """Has a tensor that is no buffer, and a buffer that no checkpoint has."""

    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.linspace(-1, 1, 16, dtype=torch.float64)
        self.register_buffer("hidden", torch.linspace(0, 1, 16), persistent=False)
        self.register_buffer("nothing", None)

    def between(self, h: Tensor) -> Tensor:
        """Add both."""
        return h + self.shift * self.hidden


class ReadsWeight(Block):
    """Branches on the value of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor([0.5]))

    def between(self, h: Tensor) -> Tensor:
        """Gate if the gate is open."""
        return h * self.gate if self.gate.item() > 0 else h


class ReturnsMapping(nn.Module):
    """Hands a mapping and a tuple from part to part."""

    class Inner(nn.Module):
        """A part that takes and returns several values."""

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, values: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
            """Return a mapping."""
            return {"x": torch.tanh(self.up(values["x"])) * scale, "skip": values["x"]}

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([self.Inner(), self.Inner()])

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        values = {"x": x, "skip": x}
        for part in self.parts:
            values = part(values, scale=0.7)
        return values["x"] + values["skip"]


BLOCKS: dict[str, type[nn.Module]] = {
    "autocast": Autocast,
    "own checkpoint": CheckpointsItself,
    "own reentrant checkpoint": CheckpointsReentrant,
    "checkpoint of a layer": CheckpointsLayer,
    "own function": OwnFunction,
    "gradient inside": GradientInside,
    "vmap": Mapped,
    "jvp": Jacobian,
    "functional call": FunctionalCall,
    "twice": Twice,
    "auxiliary loss": Stores,
    "history": History,
    "attribute counter": AttributeCounter,
    "python number": PythonNumber,
    "drawn number": DrawnNumber,
    "aliases": Aliases,
    "writes input": WritesInput,
    "writes result": WritesResult,
    "selects samples": Selects,
    "masked write": MaskedWrite,
    "raw weights": RawWeights,
    "complex weight": ComplexWeight,
    "mixed types": MixedTypes,
    "named parts": NamedParts,
    "plain tensor": PlainTensor,
    "reads a weight": ReadsWeight,
    "mappings": ReturnsMapping,
}
