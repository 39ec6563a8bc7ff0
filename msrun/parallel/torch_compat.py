"""The names torch does not promise to keep, each behind one function with a test of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.variable import Variable

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement
    from torch.overrides import TorchFunctionMode


def after_backward(call: Callable[[], None]) -> None:
    """Have the running backward pass end with `call`, on the thread that started it.

    Raises:
        RuntimeError: No backward pass is running.
    """
    Variable._execution_engine.queue_callback(call)  # noqa: SLF001 - there is no public form


def strided_shard(dim: int, parts: int) -> Placement:
    """Return the placement of a mesh axis that cuts `dim` into shards after later axes cut it.

    Args:
        dim: Dim of the tensor.
        parts: How many parts the later axes made, more than 1.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


def parts_before(placement: Placement) -> int | None:
    """Return how many parts later axes make before `placement` cuts; None if it cuts no dim."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    if isinstance(placement, _StridedShard):
        return int(placement.split_factor)
    return 1 if isinstance(placement, Shard) else None


def functional_collective(name: str, x: Tensor, *options: Any, group: dist.ProcessGroup) -> Tensor:
    """Return what the functional collective `name` makes of `x`, as a new tensor.

    The public collectives write into a tensor they are given.  A recomputation that keeps the
    results of communication would skip them and go on with that tensor as it was before.

    Args:
        name: Such as `all_reduce`.
        x: Contiguous, on the device of the group.
        options: What stands in the operator's schema between the tensor and the group.
        group: Its ranks all call this.
    """
    operators = torch.ops._c10d_functional  # noqa: SLF001 - the public operators are in place
    pending = getattr(operators, name)(x, *options, group.group_name)
    result: Tensor = operators.wait_tensor(pending)
    return result


def is_active(mode: TorchFunctionMode) -> bool:
    """Return whether functions that are called here and now pass through `mode`.

    In a backward pass they do not pass through the modes around it.
    """
    from torch.overrides import _get_current_function_mode_stack

    return any(active is mode for active in _get_current_function_mode_stack())
