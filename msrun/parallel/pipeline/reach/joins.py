"""Inputs of a module that one step of autograd joins, of which some get no gradient.

`fully_shard` passes all inputs of a unit through one step, by which it knows when the unit's
backward pass has ended.  torch gives zeros to each input of such a step if another one has a
gradient.  All ranks have these zeros, on which the collectives of `fully_shard` depend, so they
stay, and are noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class JoinNotes:
    """Notes about the joined inputs of the modules of one stage.

    Attributes:
        is_needed: Whether some module had several joined inputs.
        missing: Inputs that got zeros in this step, as there was no gradient.
    """

    def __init__(self) -> None:
        self.is_needed = False
        self.missing = 0

    def begin(self) -> None:
        """Begin a step."""
        self.missing = 0

    def watch(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the joined `inputs`, of which is noted what gets no gradient."""
        self.is_needed = True
        watched: Sequence[Tensor] = _NotedInputs.apply(self, *inputs)  # type: ignore[no-untyped-call]
        return watched


class _NotedInputs(torch.autograd.Function):
    """Returns its inputs."""

    passes_straight = True

    @staticmethod
    def forward(ctx: Any, notes: JoinNotes, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.notes = notes
        ctx.likes = [(x.shape, x.dtype, x.device) for x in inputs]
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.notes.missing += sum(gradient is None for gradient in gradients)
        pairs = zip(gradients, ctx.likes, strict=True)
        return (
            None,
            *[
                torch.zeros(like[0], dtype=like[1], device=like[2])
                if gradient is None
                else gradient
                for gradient, like in pairs
            ],
        )
