"""A tensor that is computed later: by who made it, or once something looks at it.

It becomes the tensor that it stands for, and is an ordinary one from then on.  As parameters of
lazy modules do in torch, it has a class of its own until then.  What gets it in between computes
it first, so only the order of computing is another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.torch_compat import write_count

_COMPUTE = "msrun_compute"


class CallModes(NamedTuple):
    """What the caller of a module may switch: gradients, and autocast with its type."""

    has_gradients: bool
    is_cast: bool
    dtype: torch.dtype | None


class LaterTensor(Tensor):
    """A tensor without values yet; see the module."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            settle(tensor)
        return func(*args, **kwargs)


def later(compute: Callable[[], Tensor], like: Tensor) -> Tensor:
    """Return what `compute` will, on the device of `like`, before it is called."""
    found = torch_compat.of_class(like.detach().new_empty(0), LaterTensor)
    vars(found)[_COMPUTE] = compute
    return found


def settle(tensor: Tensor) -> None:
    """Compute `tensor` now, unless that was done."""
    if type(tensor) is not LaterTensor:
        return
    compute = vars(tensor).pop(_COMPUTE)
    tensor.__class__ = Tensor  # type: ignore[assignment]  # before anything asks it
    values = compute()
    if type(values) is not Tensor:
        raise ModelError(
            f"a module beside experts returned {type(values).__name__}, and a tensor before"
        )
    if values.requires_grad:
        with torch.enable_grad():
            _Become.apply(tensor, values)  # type: ignore[no-untyped-call]
    else:
        tensor.data = values.detach()


class _Become(Function):
    """Gives a tensor the values of another one, whose gradient it passes on."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, values: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        tensor.data = values.detach()
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        del ctx
        return None, gradient


def postponed(call: Callable[..., Any], given: Tensor) -> Callable[[], Any]:
    """Return what calls a module with `given` later, as it would be called now."""
    return partial(_run_late, call, given, write_count(given), modes_of(given))


def _run_late(call: Callable[..., Any], given: Tensor, written: int, modes: CallModes) -> Any:
    """Run a module after its call, on what it got and as it was called."""
    if write_count(given) != written:
        raise ModelError(
            "the input of a shared expert was written in place before the other experts were "
            "called, and was not in an earlier call",
            hint="call the shared expert after the others",
        )
    if modes == modes_of(given):
        return call(given)
    cast = torch.autocast(given.device.type, dtype=modes.dtype, enabled=modes.is_cast)
    with torch.set_grad_enabled(modes.has_gradients), cast:
        return call(given)


def modes_of(x: Tensor) -> CallModes:
    """Return the modes of now, for the device of `x`."""
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_cast else None
    return CallModes(torch.is_grad_enabled(), is_cast, dtype)
