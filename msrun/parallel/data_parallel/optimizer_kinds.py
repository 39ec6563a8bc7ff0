"""Refuses optimizers of torch that are wrong on sharded parameters or in `rt.step`."""

from __future__ import annotations

import torch

from msrun.errors import ModelError
from msrun.parallel.local import is_sharded

# Optimizer of `torch.optim` -> the operation that is wrong on shards.  By name, since not every
# release of torch has all of them.
_NEEDS_REPLICATED = {
    "Adafactor": "takes norms of whole rows and columns",
    "Muon": "multiplies whole matrices, in a short type whose rounding depends on their parts",
    "Rprop": "writes elements by a mask",
    "SparseAdam": "takes sparse gradients",
}


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would fail in the middle of a step, or give another result.

    Raises:
        ModelError: It computes the loss several times a step, or has sharded parameters and needs
            replicated ones.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(
            f"{name} computes the loss several times a step, and rt.step computes it once",
            hint="choose another, or use it in a plain loop, if no parameter is sharded",
        )
    for kind, reason in _NEEDS_REPLICATED.items():
        if isinstance(optimizer, getattr(torch.optim, kind, ())):
            _check_replicated(optimizer, f"{name} {reason}")


def _check_replicated(optimizer: torch.optim.Optimizer, reason: str) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if sharded := sum(map(is_sharded, params)):
        raise ModelError(
            f"{reason}, and {sharded} of its {len(params)} parameters are sharded",
            hint="choose another such as AdamW, or give it only replicated parameters",
        )
