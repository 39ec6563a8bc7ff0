"""Runs of one process for a verified step, on rank 0.

The copy computes the step once.  If the ranks' numbers are others, it computes again: in float64,
for a difference may be rounding, and with other random numbers, for they may be its cause.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from msrun.parallel.config import ROOT
from msrun.parallel.local import is_sharded
from msrun.parallel.losses.batch import StepBatch
from msrun.parallel.rank_context import RankContext
from msrun.parallel.verify.comparison import Differences, beyond_rounding, find, measure
from msrun.parallel.verify.randomness import other_numbers
from msrun.parallel.verify.reference import CannotRunError, Reference
from msrun.parallel.verify.verified_step import VerifiedStep

# Runs with other random numbers: what one of two layers drops at a rate of 0.1, four in five
# models show in so many.
_DRAWS = 8


@dataclass(frozen=True, slots=True)
class OneProcess:
    """One step as one process computes it.

    Args:
        context: Rank 0.
        step: The step of the ranks.
        reference: The copy of the model.
        batch: Of all ranks.
    """

    context: RankContext
    step: VerifiedStep
    reference: Reference
    batch: StepBatch

    def run(self) -> bool:
        """Run the copy; return whether it drew random numbers.

        A loss that reads parameters of the sharded model counts for those of the copy.

        Raises:
            CannotRunError: One process cannot.
        """
        sharded, of_ranks = self.step.sharded, self.context.batch
        own = list(sharded.model().named_parameters())
        before = [param.grad for _, param in own]
        for _, param in own:
            param.grad = None
        is_whole = not any(is_sharded(param) for _, param in own)
        of_ranks.is_whole = True
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.step.around())
                if is_whole:
                    stack.enter_context(sharded.paused(by_script=True))
                    stack.enter_context(sharded.hooks.suspended())
                try:
                    self.reference.run(self.step.loss_fn, self.batch, self.context.device)
                except torch.OutOfMemoryError:
                    raise CannotRunError(
                        "the whole model and batch of one process do not fit this device; "
                        f"`{ROOT}: {{verify: {{memory: 1GiB}}}}` compares layers within that"
                    ) from None
        finally:
            of_ranks.is_whole = False
            copies = dict(self.reference.model.named_parameters())
            for (name, param), gradient in zip(own, before, strict=True):
                if param.grad is not None and name in copies:
                    added = copies[name].grad
                    copies[name].grad = param.grad if added is None else added + param.grad
                param.grad = gradient
        return self.reference.has_drawn

    def beyond_rounding(self, found: Differences) -> Differences:
        """Return the differences that float64 does not explain by rounding."""
        reference = self.reference
        narrow_value = self.step.expected(reference)
        try:
            wide, values = reference.doubled(self.batch)
            OneProcess(self.context, self.step, wide, values).run()
        except (CannotRunError, RuntimeError):
            return found
        one, other = reference.gradients(), wide.gradients()
        rounding = {
            name: measure(name, gradient, exact)
            for name, gradient in one.items()
            if gradient is not None and (exact := other[name]) is not None
        }
        narrow = reference.buffers()
        rounding |= {
            name: measure(name, narrow[name], buffer) for name, buffer in wide.buffers().items()
        }
        of_loss = measure("the loss", narrow_value, self.step.expected(wide))
        return beyond_rounding(found, rounding, of_loss)

    def depends_on_numbers(self, allowed: float) -> bool:
        """Return whether another run with other random numbers differs by more than `allowed`.

        Numbers that are compared with a rate of 0, such as one of layers to drop, change nothing.
        """
        reference = self.reference
        value = self.step.expected(reference)
        before = {name: g for name, g in reference.gradients().items() if g is not None}
        buffers = {name: buffer.clone() for name, buffer in reference.buffers().items()}
        for number in range(_DRAWS):
            try:
                with other_numbers(number, self.context.device):
                    self.run()
            except CannotRunError:
                return True
            now = {name: g for name, g in reference.gradients().items() if g is not None}
            of_loss = measure("the loss", self.step.expected(reference), value)
            gaps = [measure(name, now[name], g) for name, g in before.items() if name in now]
            there = reference.buffers()
            of_buffers = [measure(name, there[name], b) for name, b in buffers.items()]
            if now.keys() != before.keys() or find(of_loss, gaps, of_buffers, allowed):
                return True
        return False
