"""Numbers of a sharded step beside those of one process: which of them differ, and by how much.

Sums in another order round otherwise, so a difference counts from a tolerance on: of the loss
itself, of the norm of a gradient, and of the root mean square of all gradients, below which a
gradient is rounding, such as that of a bias before a normalisation.  Differences beyond it may
still be rounding in an unstable model: the step is then computed in float64 too, and a difference
counts if float32 is much nearer to float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msrun.parallel.config import ParallelConfig

# Of gradients, relative to their norm; a tenth of it for the loss.
_TOLERANCES = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
_OF_LOSS = 0.1
# Accelerators multiply float32 in narrower types.
_ON_ACCELERATOR = 10.0
_ROUNDING = 20.0
_SAME_FACTOR = 1e-3
# Of one number such as a loss, which rounding moves by some units whatever it is made of.
_LEAST = 1e-6
_TINY = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One tensor, of both.

    Args:
        name: Of a parameter or buffer.
        gap: Norm of the difference.
        norm: Norm of the tensor of one process.
        count: Its elements.
        factor: Of the tensor of one process that comes nearest to the other; nan if it is zero.
        is_between_ranks: Whether both are of ranks that should have the same.
    """

    name: str
    gap: float
    norm: float
    count: int
    factor: float
    is_between_ranks: bool = False

    @property
    def share(self) -> float:
        """The difference in parts of the norm."""
        return self.gap / self.norm if self.norm else math.inf

    def __str__(self) -> str:
        if self.is_between_ranks:
            return f"{self.name} (ranks differ by {self.share:.2g} of its norm)"
        if not self.norm:
            return f"{self.name} (0 in one process)"
        return f"{self.name} ({self.share:.2g} of its norm)" if self.gap == self.gap else self.name


def measure(name: str, found: Tensor, expected: Tensor) -> Gap:
    """Return the gap between two tensors, which may hold no numbers in the same places."""
    one, other = (t.to_dense() if t.is_sparse else t for t in (found.detach(), expected.detach()))
    one, other = one.to(other.device, torch.float64), other.to(torch.float64)
    if one.shape != other.shape:
        return Gap(name=name, gap=math.inf, norm=float(other.norm()), count=1, factor=math.nan)
    is_same = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(is_same, 0.0, one - other).norm()
    norm = other.norm()
    factor = float((one * other).sum() / norm.square()) if float(norm) else math.nan
    return Gap(name=name, gap=float(gap), norm=float(norm), count=other.numel(), factor=factor)


def tolerance(config: ParallelConfig, dtypes: Sequence[torch.dtype], device: torch.device) -> float:
    """Return the tolerance of gradients for the narrowest type that takes part."""
    named = [name for name in (config.optimizer.dtype, config.reduce.dtype) if name]
    found = [*dtypes, *(getattr(torch, name) for name in named)]
    widest = max((_TOLERANCES[dtype] for dtype in found if dtype in _TOLERANCES), default=1e-4)
    return widest * _ON_ACCELERATOR if device.type != "cpu" else widest


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What differs in one step.

    Args:
        loss: The loss, if it differs.
        gradients: Gradients that do, the largest difference first.
        buffers: Buffers that do.
        compared: Gradients that were compared.
        largest: The largest difference of a gradient, relative to what it was compared with.
    """

    loss: Gap | None
    gradients: Sequence[Gap]
    buffers: Sequence[Gap]
    compared: int
    largest: tuple[float, str] = (0.0, "")

    def __bool__(self) -> bool:
        return bool(self.loss or self.gradients or self.buffers)

    def is_scaled(self) -> float | None:
        """Return the factor if every gradient is that of one process times it."""
        factors = [gap.factor for gap in self.gradients if gap.norm]
        if len(self.gradients) != self.compared or not factors:
            return None
        middle = sorted(factors)[len(factors) // 2]
        is_one = all(abs(f - middle) <= _SAME_FACTOR * abs(middle) for f in factors)
        fits = all(
            gap.gap**2 - (gap.factor - 1) ** 2 * gap.norm**2 <= _SAME_FACTOR * gap.norm**2
            for gap in self.gradients
        )
        return middle if is_one and fits else None


def find(
    loss: Gap, gradients: Sequence[Gap], buffers: Sequence[Gap], allowed: float
) -> Differences:
    """Return what differs by more than `allowed`, the tolerance of gradients."""
    finite = [gap for gap in gradients if math.isfinite(gap.norm)]
    squares, count = sum(gap.norm**2 for gap in finite), sum(gap.count for gap in finite)
    mean = math.sqrt(squares / count) if count else 0.0
    of_scale = [
        (gap.gap / max(gap.norm + mean * math.sqrt(gap.count), _TINY), gap) for gap in gradients
    ]
    # Written so that a gap of nan differs.
    differing = [gap for share, gap in of_scale if not share <= allowed]
    is_loss = not loss.gap <= _OF_LOSS * allowed * max(loss.norm, _LEAST)
    return Differences(
        loss=loss if is_loss else None,
        gradients=sorted(differing, key=lambda gap: -gap.gap),
        buffers=[gap for gap in buffers if not gap.gap <= allowed * gap.norm + _LEAST * allowed],
        compared=len(gradients),
        largest=max(((share, gap.name) for share, gap in of_scale), default=(0.0, "")),
    )


def beyond_rounding(found: Differences, rounding: Mapping[str, Gap], loss: Gap) -> Differences:
    """Return the differences that are larger than the rounding of one process.

    Args:
        found: Differences.
        rounding: Parameter or buffer -> gap between one process and itself in float64.
        loss: The same of the loss.
    """

    def counts(gap: Gap) -> bool:
        own = rounding.get(gap.name)
        return own is None or not gap.gap <= _ROUNDING * own.gap

    is_loss = found.loss and not found.loss.gap <= _ROUNDING * loss.gap
    return Differences(
        loss=found.loss if is_loss else None,
        gradients=[gap for gap in found.gradients if counts(gap)],
        buffers=[gap for gap in found.buffers if counts(gap)],
        compared=found.compared,
    )
