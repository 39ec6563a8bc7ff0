"""A script's own `torch.autograd.Function`, applied to divided tensors.

Its forward runs under the guard, and its backward pass runs where autograd calls it: outside of the
guard, where functions on shards are wrong, or fail at a gradient without a layout.  So it gets
whole, plain tensors, and autograd shares their gradients out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.torch_compat import write_count


def apply_whole(
    name: str,
    apply: Callable[..., Any],
    gather: Callable[[Any], Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return what the function `name` makes of whole tensors.

    Args:
        name: Of its class.
        apply: Its `apply`.
        gather: Returns a value with plain tensors of the full size.
        args: What it was given.
        kwargs: What it was given by name.

    Raises:
        ModelError: It writes a divided tensor in place.
    """
    whole = [gather(value) for value in args]
    named = {key: gather(value) for key, value in kwargs.items()}
    pairs = zip((*args, *kwargs.values()), (*whole, *named.values()), strict=True)
    gathered = [new for old, new in pairs if isinstance(old, DTensor)]
    counts = list(map(write_count, gathered))
    result = apply(*whole, **named)
    if counts != list(map(write_count, gathered)):
        raise ModelError(
            f"{ROOT}.plan: the torch.autograd.Function {name} writes a divided tensor in place, "
            "which the tensor would not see",
            hint="give it a copy: x.clone()",
        )
    return result
