"""More blocks that scripts/fuzz_models.py draws: habits of people who write layers."""

# mypy cannot follow scripts that import each other.
# mypy: disable-error-code="import-not-found, misc, no-any-return"

from __future__ import annotations

import warnings
from typing import Any

import torch
from fuzz_quirks import WIDTH, Block
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential


class SometimesUnused(Block):
    """Has a layer that it leaves out in some steps; the script says when."""

    is_used = True

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(16, 16)

    def between(self, h: Tensor) -> Tensor:
        """Add the layer."""
        return h + torch.tanh(self.spare(h)) if self.is_used else h


class LateAttribute(Block):
    """Reads an attribute that the script sets after the first step, if there is one."""

    def between(self, h: Tensor) -> Tensor:
        """Divide by it."""
        return h / getattr(self, "late_scale", 1.0)


class Noise(Block):
    """Adds noise in training."""

    def between(self, h: Tensor) -> Tensor:
        """Add it."""
        return h + 0.1 * torch.randn_like(h) if self.training else h


class StochasticDepth(Block):
    """Leaves out some samples in training."""

    def between(self, h: Tensor) -> Tensor:
        """Multiply each sample by 0 or 1."""
        if not self.training:
            return h
        return h * h.new_empty(len(h), 1).bernoulli_(0.7).div_(0.7)


class Adapter(Block):
    """Has a frozen layer and a product of two small ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(requires_grad=False)
        self.into = nn.Parameter(torch.linspace(-0.1, 0.1, 2 * WIDTH).view(2, WIDTH))
        self.out = nn.Parameter(torch.zeros(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        hidden = self.up(x) + x @ self.into.T @ self.out.T
        added: Tensor = self.down(torch.tanh(hidden))
        return x + added


class StraightThrough(Block):
    """Rounds, with the gradient of what was rounded."""

    def between(self, h: Tensor) -> Tensor:
        """Round."""
        return h + ((h * 4).round() / 4 - h).detach()


class _Product(torch.autograd.Function):
    """A linear layer without a bias, which saves what it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class OwnProduct(Block):
    """Multiplies by a function with a gradient of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        hidden = torch.tanh(_Product.apply(x, self.up.weight) + self.up.bias)  # type: ignore[no-untyped-call]
        added: Tensor = self.down(hidden)
        return x + added


class _Doubles(torch.autograd.Function):
    """Doubles in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        return gradient * 2


class OwnInPlace(Block):
    """Has a function of its own that writes in place."""

    def between(self, h: Tensor) -> Tensor:
        """Double a copy, and use the copy."""
        copied = h.clone()
        _Doubles.apply(copied)  # type: ignore[no-untyped-call]
        return copied * 0.5


class _Parts(torch.autograd.Function):
    """Returns sine and cosine; the derivative may be derived again."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del inputs
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, of_sine: Tensor, of_cosine: Tensor) -> Tensor:
        sine, cosine = ctx.saved_tensors
        return of_sine * cosine - of_cosine * sine


class OwnPair(Block):
    """Has a function of its own with two results."""

    def between(self, h: Tensor) -> Tensor:
        """Multiply them."""
        sine, cosine = _Parts.apply(h)  # type: ignore[no-untyped-call]
        return h + sine * cosine


class InSequence(Block):
    """Recomputes a sequence of layers in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in "abc"])

    def between(self, h: Tensor) -> Tensor:
        """Run them."""
        result: Tensor = checkpoint_sequential(self.layers, 2, h, use_reentrant=False)
        return result


class Numpy(Block):
    """Computes a scale of each sample by numpy, without a gradient."""

    def between(self, h: Tensor) -> Tensor:
        """Scale."""
        scale = torch.from_numpy(abs(h.detach().numpy()).mean(-1, keepdims=True))
        return h / (1 + scale)


class Floats(Block):
    """Takes numbers of samples to Python and back."""

    def between(self, h: Tensor) -> Tensor:
        """Scale."""
        scales = [float(row.norm()) for row in h.detach()]
        return h / (1 + torch.tensor(scales, dtype=h.dtype).unsqueeze(1))


class ClampsWeight(Block):
    """Limits its weight in forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class MomentumCopy(Block):
    """Has a layer that follows another one and is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = nn.Linear(WIDTH, 16).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        with torch.no_grad():
            if self.training:
                for own, other in zip(
                    self.follower.parameters(), self.up.parameters(), strict=True
                ):
                    own.lerp_(other, 0.1)
            target = self.follower(x)
        added: Tensor = self.down(torch.tanh(self.up(x)) * torch.sigmoid(target))
        return x + added


class Spectrum(Block):
    """Computes in frequencies."""

    def between(self, h: Tensor) -> Tensor:
        """Damp high ones."""
        found = torch.fft.rfft(h)
        damping = torch.linspace(1, 0, found.shape[-1], dtype=h.dtype)
        return torch.fft.irfft(found * damping, n=h.shape[-1])


class Ordered(Block):
    """Sorts, adds up and picks within each sample."""

    def between(self, h: Tensor) -> Tensor:
        """Return sums of sorted values where values are small."""
        values, places = h.sort(-1)
        sums = values.cumsum(-1).gather(-1, places.argsort(-1))
        return torch.where(h.abs() < 0.5, sums / 16, h)  # noqa: PLR2004 - half of tanh


class Einsum(Block):
    """Multiplies and adds up by letters."""

    def between(self, h: Tensor) -> Tensor:
        """Return products of quarters of each sample."""
        parts = h.unflatten(-1, (4, 4))
        scores = torch.einsum("bik,bjk->bij", parts, parts).softmax(-1)
        return torch.einsum("bij,bjk->bik", scores, parts).flatten(1)


class Scripted(Block):
    """Has a function that TorchScript compiled."""

    def between(self, h: Tensor) -> Tensor:
        """Run it."""
        result: Tensor = _scripted(h)
        return result


class Recurrent(Block):
    """Has a recurrent layer over four positions."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.GRU(4, 4, batch_first=True)

    def between(self, h: Tensor) -> Tensor:
        """Run it."""
        found, last = self.steps(h.unflatten(-1, (4, 4)))
        return (found + last.movedim(0, 1)).flatten(1)


class Places(Block):
    """Takes and puts values of each sample at places."""

    def between(self, h: Tensor) -> Tensor:
        """Return them at other places, some twice and some filled."""
        places = torch.arange(16).flip(0)
        found = h.index_select(1, places).index_fill(1, places[:2], 0.5)
        found = found.slice_scatter(h[:, :4], 1, 4, 8).index_add(1, places[2:4], h[:, 8:10])
        highest = h.topk(2, dim=1)
        return found.scatter_add(1, highest.indices, highest.values.tanh())


class Windows(Block):
    """Smooths values of each sample over windows."""

    def between(self, h: Tensor) -> Tensor:
        """Return means of windows, as many as there were values."""
        padded = functional.pad(h[:, None], (1, 1), mode="replicate")
        smooth = functional.interpolate(padded.unfold(-1, 3, 1).mean(-1), size=16, mode="linear")
        return smooth[:, 0]


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it is deprecated, and in many models
    _scripted: Any = torch.jit.script(_gelu)


class PlainFunctional(Block):
    """Calls layers as functions with its own weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        hidden = functional.linear(x, self.up.weight, self.up.bias)
        hidden = functional.layer_norm(hidden, (16,)).relu()
        return x + functional.linear(hidden, self.down.weight * 0.5, self.down.bias)


class ReturnsPair(nn.Module):
    """Has a part that returns a pair of which one is not used, and takes keywords alone."""

    class Part(nn.Module):
        """Returns two values."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, *, x: Tensor) -> tuple[Tensor, Tensor]:
            """Return both."""
            return torch.tanh(self.up(x)), torch.sigmoid(self.other(x))

    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = self.Part(), self.Part()

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as came."""
        first, _ = self.part(x=x)
        one, other = self.last(x=first)
        return x + one * other


BLOCKS: dict[str, type[nn.Module]] = {
    "sometimes unused": SometimesUnused,
    "late attribute": LateAttribute,
    "noise": Noise,
    "stochastic depth": StochasticDepth,
    "adapter": Adapter,
    "straight through": StraightThrough,
    "own product": OwnProduct,
    "own in place": OwnInPlace,
    "own pair": OwnPair,
    "sequence recomputed": InSequence,
    "numpy": Numpy,
    "floats": Floats,
    "clamps its weight": ClampsWeight,
    "momentum copy": MomentumCopy,
    "spectrum": Spectrum,
    "ordered": Ordered,
    "einsum": Einsum,
    "scripted": Scripted,
    "recurrent": Recurrent,
    "places": Places,
    "windows": Windows,
    "plain functional": PlainFunctional,
    "pair": ReturnsPair,
}
