"""Which of torch's optimizers cannot do their work on many ranks."""

from __future__ import annotations

import torch

from msrun.errors import ModelError
from msrun.parallel.local import is_sharded

# Name in `torch.optim`, which not every release has -> what it does that parts do not allow.
_NEEDS_REPLICATED = {
    "Adafactor": "takes norms of whole rows and columns",
    "Muon": "multiplies whole matrices, in a short type whose rounding depends on their parts",
    "Rprop": "writes elements by a mask",
    "SparseAdam": "takes sparse gradients",
}


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would stop in the middle of a step, or learn something else.

    Raises:
        ModelError: It needs the loss again within a step, or whole parameters.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(
            f"{name} computes the loss several times a step, and rt.step does once",
            hint="choose another, or give it to a plain loop as it is, where parameters are whole",
        )
    for kind, reason in _NEEDS_REPLICATED.items():
        if isinstance(optimizer, getattr(torch.optim, kind, ())):
            _check_replicated(optimizer, f"{name} {reason}")


def _check_replicated(optimizer: torch.optim.Optimizer, reason: str) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if sharded := sum(map(is_sharded, params)):
        raise ModelError(
            f"{reason}, and {sharded} of its {len(params)} parameters are divided",
            hint="choose another such as AdamW, or give it only parameters that stay whole",
        )
