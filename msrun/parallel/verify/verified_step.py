"""What is compared of one step: how ranks compute it, and with what of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msrun.parallel.losses.batch import StepBatch
from msrun.parallel.sharded_model import ShardedModel
from msrun.parallel.verify.reference import Reference

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class VerifiedStep:
    """The arguments of one `rt.step`.

    Args:
        sharded: The model.
        optimizer: Its optimizer.
        loss_fn: Of `rt.step`.
        batch: Of this rank, on its device.
        compute: Computes the complete gradients, and returns the loss of all ranks.
    """

    sharded: ShardedModel
    optimizer: torch.optim.Optimizer
    loss_fn: LossFunction | None
    batch: StepBatch
    compute: Callable[[], Tensor]

    @property
    def is_loop(self) -> bool:
        """Whether the script computed it, and not `rt.step`."""
        return False

    @property
    def loss_hint(self) -> str:
        """What to do about a loss that is no mean of those of parts; empty without a loss."""
        return "return (sum, count) from the loss function, or gather the samples with rt.gather"

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the script computes the step."""
        return contextlib.nullcontext()

    def found(self, loss: Tensor) -> Tensor:
        """Return what the ranks computed, on rank 0, after `compute` returned `loss`."""
        return loss.detach()

    def expected(self, reference: Reference) -> Tensor:
        """Return the same of the last run of one process."""
        return reference.loss.detach()

    def parts(self) -> int:
        """Return the micro-batches of a step."""
        sharded = self.sharded
        return sharded.pipeline().microbatches if sharded.is_pipeline else sharded.microbatches
