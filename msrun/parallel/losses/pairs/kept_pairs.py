"""How many pairs of samples a mask leaves: all but the diagonal, or those of a sample alone."""

from __future__ import annotations

import torch
from torch import Tensor

from msrun.parallel.losses.calls.marks import TorchCall
from msrun.parallel.losses.torch_calls import ADDING, MULTIPLYING, SUBTRACTING
from msrun.parallel.torch_compat import is_fake, unwatched

_HIDDEN = 1e3  # numbers that are added or subtracted to hide a pair are larger


def kept_share(call: TorchCall, x: Tensor) -> float | None:
    """Return which share of the pairs in `x` a mask leaves that has no samples; None without one.

    Args:
        call: A function that gets `x`.
        x: Has a value for each pair.
    """
    mask, is_shown = _mask(call, x)
    if mask is None or mask.dim() < 2 or call.mark(mask) or is_fake(mask):  # noqa: PLR2004 - pairs
        return None
    with unwatched():
        if mask.dtype == torch.bool:
            shown = mask if is_shown else ~mask
        else:
            is_sum = call.name in ADDING | SUBTRACTING
            shown = mask.abs() < _HIDDEN if is_sum else mask != 0
        return float(shown.double().mean())


def _mask(call: TorchCall, x: Tensor) -> tuple[Tensor | None, bool]:
    """Return what may be a mask, and whether it says which pairs are shown."""
    if call.name == "where":
        found, is_shown = call.value(0, "condition"), x is call.value(1, "input")
    elif call.name in ("masked_fill", "masked_select"):
        found, is_shown = call.value(1, "mask"), call.name == "masked_select"
    elif call.name == "__getitem__":
        found, is_shown = call.args[1], True
    elif call.name in ADDING | SUBTRACTING | MULTIPLYING:
        others = [value for value in call.args if isinstance(value, Tensor) and value is not x]
        found, is_shown = (others[0] if others else None), True
    else:
        found, is_shown = None, True
    is_mask = isinstance(found, Tensor) and (
        found.dtype == torch.bool or (found.is_floating_point() and not found.requires_grad)
    )
    return (found if is_mask else None), is_shown
