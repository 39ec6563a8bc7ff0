"""This rank's part of a tensor, for plain tensors and DTensors alike.

`torch.distributed.tensor` takes a second to import.  A process that has not imported it has no
DTensor, so these functions look it up in `sys.modules` and never import it themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from msrun.parallel import torch_compat

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_SPECS = torch_compat.ShardSpecs()


_PLAIN = (Tensor, Parameter)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether `tensor` is a `DTensor`."""
    if type(tensor) in _PLAIN:  # most are, and steps ask often
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def takes_gradients(tensor: Tensor) -> bool:
    """Return whether a tensor of this type may have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def has_memory(tensor: Tensor) -> bool:
    """Return whether a plain tensor has an element for each index, and is not one in its shape."""
    return tensor.numel() <= 1 or any(tensor.stride())


def has_parts(tensor: Tensor) -> bool:
    """Return whether ranks have a part of an image each that `tensor` is of, of all its channels.

    A tensor with few rows is whole on each rank, and has none.
    """
    return is_image(tensor) and bool(tensor.is_in_parts)  # type: ignore[attr-defined]


def is_image(tensor: Tensor) -> bool:
    """Return whether `tensor` is of images that ranks divide."""
    module = sys.modules.get("msrun.parallel.images.image_tensor")
    return module is not None and isinstance(tensor, module.ImageTensor)


def is_unit(module: nn.Module) -> bool:
    """Return whether `fully_shard` gathers the parameters of `module` for each of its calls."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def on_parts(image: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return an image whose part is what `change` returns for that of `image`."""
    result: Tensor = image.like(change(image.local))  # type: ignore[attr-defined]
    return result


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, without a copy; all of it if it is a plain tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return all of `tensor` on every rank; gradients flow through the gather."""
    if type(tensor) is Tensor or not is_sharded(tensor):
        return tensor
    # Such as a loss.
    is_number = not tensor.dim() and all(map(_is_summed, tensor.placements))
    return _Number.apply(tensor) if is_number else tensor.full_tensor()  # type: ignore[no-untyped-call]


def _is_summed(placement: Placement) -> bool:
    # The parts of a norm say that they are summed too: their powers are.
    is_norm = hasattr(placement, "norm_type")
    is_sum = placement.is_partial("sum") and not is_norm
    return placement.is_replicate() or is_sum or placement.is_partial("avg")


class _Number(Function):
    """Adds one number up, in a fraction of the time that `full_tensor` takes for any tensor."""

    @staticmethod
    def forward(ctx: Any, number: DTensor) -> Tensor:
        ctx.mesh = mesh = number.device_mesh
        part = torch_compat.local_tensor(number)
        part = part.view_as(part)
        for axis, placement in enumerate(number.placements):
            if placement.is_partial():
                group = mesh.get_group(axis)
                part = torch_compat.functional_collective("all_reduce", part, "sum", group=group)
                if placement.is_partial("avg"):
                    part /= group.size()
        return part

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        from torch.distributed.tensor import DTensor, Replicate

        whole = (Replicate(),) * ctx.mesh.ndim
        if not torch.is_grad_enabled():
            return _SPECS.tensor(gradient, ctx.mesh, whole)
        return DTensor.from_local(gradient, ctx.mesh, whole, run_check=False)


def replace_parameter(old: Parameter, new: Parameter) -> None:
    """Give `new`, which takes the place of `old` in a model, its attributes and gradient hooks.

    Scripts mark parameters for their optimizer by attributes, such as `no_weight_decay`.
    """
    if new is not old:
        for name, value in vars(old).items():
            vars(new).setdefault(name, value)
        torch_compat.share_gradient_hooks(old, new)


def on_accumulation(param: Parameter, call: Callable[[Tensor], None]) -> None:
    """Have `call` run after each gradient of `param` that autograd adds, also once it is thawed.

    torch takes such a hook for trained parameters alone, and keeps it while they are frozen.
    """
    if not takes_gradients(param):
        return
    is_trained = param.requires_grad
    param.requires_grad = True
    tensor: Tensor = param
    tensor.register_post_accumulate_grad_hook(call)
    param.requires_grad = is_trained


def local_gradient(param: Parameter) -> Tensor | None:
    """Return this rank's part of the gradient of `param`; None without a gradient.

    A partial gradient, of which each rank holds one summand, is reduced first.
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


@torch.no_grad()
def scale_gradients(params: Callable[[], Iterable[Parameter]], factor: float) -> None:
    """Multiply the gradients of what `params` returns by `factor` in place."""
    for param in params() if factor != 1.0 else ():
        if (gradient := local_gradient(param)) is not None:
            gradient.mul_(factor)


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal; elements that are no number are."""
    if one.shape != other.shape:
        return False
    # An element that is no number, and stays none, was not changed.
    are_none = one.isnan() & other.isnan() if one.is_floating_point() else False
    return bool(((one == other) | are_none).all())


def numbers(model: nn.Module) -> dict[str, float]:
    """Return the numbers in attributes of the modules of `model`, by their full names."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in (int, float)
    }
