"""The types that autocast chooses, for operators that the runtime computes in place of torch's.

Autocast casts the arguments of torch's own operators.  An attention over the tokens of all ranks, a
convolution of a part and the rows around it, and rows on their way to experts consist of several
operators, or of none that it knows, so they ask here.  They cast before they send: what travels has
the narrow type, and what is added up over ranks has a wide one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_KNOWN = ("cpu", "cuda")  # Devices with an autocast, of which each attention would ask again.


def is_casting(x: Tensor) -> bool:
    """Return whether autocast is on for `x`, which it leaves alone in float64 and integers."""
    kind = x.device.type
    return (
        x.is_floating_point()
        and x.dtype != torch.float64
        and (kind in _KNOWN or torch.amp.is_autocast_available(kind))
        and torch.is_autocast_enabled(kind)
    )


def as_factor(x: Tensor) -> Tensor:
    """Return `x` in the type in which its matrix products are computed."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if is_casting(x) else x


def wide(x: Tensor) -> torch.dtype:
    """Return the type in which values of `x` are added up: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def uncast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which operators on the device of `x` keep their types."""
    if not is_casting(x):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Have autocast keep no weight that it casts inside, where gradients are off.

    Older versions of torch use it later, and the parameter gets no gradient.
    """
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)
