"""Losses that read weights: with stages, a loss function sees those of the last stage alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.pipeline.chunks import STAGES


def check_loss(model: nn.Module, ends: Sequence[Any], loss: Tensor) -> None:
    """Refuse a loss that depends on weights by another way than the output of the model.

    Args:
        model: This rank's stage.
        ends: Where the graph of the output begins.
        loss: Of one micro-batch.

    Raises:
        ModelError: It reads a weight of `model`.
    """
    seen = set(ends)
    pending = [loss.grad_fn]
    found: list[Parameter] = []
    while pending:
        step = pending.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        variable = getattr(step, "variable", None)
        if variable is not None and isinstance(variable, Parameter):
            found.append(variable)
        for following, _ in step.next_functions:
            pending.append(following)
    if not found:
        return
    for name, param in model.named_parameters():
        if any(param is weight for weight in found):
            raise ModelError(
                f"{STAGES}: the loss function reads {name}, and of the model's weights it sees "
                "those of the last stage alone",
                hint="give the optimizer its weight_decay, or let forward return the penalty",
            )
