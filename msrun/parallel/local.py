"""The part of a tensor that lies on this rank, for plain tensors and sharded ones alike.

`torch.distributed.tensor` takes a second to import, so it is looked at only where something
has imported it: without it there are no sharded tensors.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor
from torch.nn import Parameter

from msrun.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether `tensor` is a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return what of `tensor` lies here, without a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return all of `tensor`, on every rank; gradients flow through."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def scalar_loss(loss: Any) -> Tensor:
    """Return all of a loss.

    Raises:
        ModelError: It is not one number that gradients can come from.
    """
    if not isinstance(loss, Tensor):
        raise ModelError(f"the loss is {type(loss).__name__}, and must be a tensor of one number")
    if loss.numel() != 1:
        raise ModelError(f"the loss has shape {tuple(loss.shape)}, and must be one number")
    return full_tensor(loss)


def local_gradient(param: Parameter) -> Tensor | None:
    """Return this rank's part of the gradient of `param`, None without one.

    A gradient that is still a sum over ranks is summed first.
    """
    gradient = param.grad
    if gradient is None or not is_sharded(param):
        return gradient
    if not is_sharded(gradient):
        raise TypeError("a sharded parameter has a plain gradient")
    if gradient.placements != param.placements:
        param.grad = gradient = gradient.redistribute(param.device_mesh, param.placements)
    return gradient.to_local()


def set_local_gradient(param: Parameter, part: Tensor) -> None:
    """Make `part`, this rank's part, the gradient of `param`."""
    if part.dtype != param.dtype:
        part = part.to(param.dtype)
    if not is_sharded(param):
        param.grad = part
        return
    from torch.distributed.tensor import DTensor

    param.grad = DTensor.from_local(
        part,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
