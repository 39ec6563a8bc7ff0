"""Values that scripts compute from sharded parameters and gradients, outside of the model.

A norm or another sum over a shard is a DTensor that ranks have not added up yet, and torch's
`item()` returns the summand of this rank: a script that clips by `param.grad.norm().item()` would
scale the gradients of each rank in another way.  To add up here would need all ranks, and a script
may read a value on one rank alone, to print it.  So such a value is refused.

A penalty on sharded parameters is a DTensor as well.  A loss to which it is added makes gradients
that the model cannot take, and `backward()` says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msrun.errors import ModelError
from msrun.parallel import torch_compat

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def watch_values() -> None:
    """Refuse values of which a rank has a part from now on; a second call is none."""
    torch_compat.watch_sharded_values(_check_value, _of_penalty)


@contextlib.contextmanager
def refused_penalties() -> Iterator[None]:
    """Say in one sentence that a loss inside adds sharded parameters to plain outputs."""
    try:
        yield
    except RuntimeError as error:
        if named := _of_penalty(error):
            raise named from None
        raise


def _check_value(tensor: DTensor) -> None:
    """Refuse to read a value that ranks have not added up.

    Raises:
        ModelError: It is one.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise ModelError(
            "the value of a norm, sum or other reduction of a sharded tensor was read, of which "
            "this rank has a part",
            hint="call full_tensor() of the result on all ranks, then item(); for the norm of all "
            "gradients, torch.nn.utils.get_total_norm or clip_grad_norm_",
        )


def _of_penalty(error: RuntimeError) -> ModelError | None:
    """Return the error of a backward pass in one sentence; None if it is another one."""
    if "mixed torch.Tensor and DTensor" not in str(error):
        return None
    return ModelError(
        "the loss adds what was computed from sharded parameters, such as a penalty on weights, to "
        "what the model returned",
        hint="call backward() of the penalty by itself, beside that of the loss, or give the "
        "optimizer its weight_decay",
    )
