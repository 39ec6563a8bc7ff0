"""What crosses from one chunk to the next: whole, dense tensors of shapes both sides know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msrun.errors import UsageError
from msrun.parallel.local import full_tensor
from msrun.parallel.pipeline.chunks import STAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """One value that a chunk sends.

    Args:
        name: How a person finds it.
        shape: Its shape in one micro-batch.
        dtype: Its type.
        requires_grad: Whether a gradient comes back.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor of this kind."""
        return torch.empty(
            self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad
        )


Tensors = tuple[Tensor, ...]
# What each chunk but the last sends.
Borders = tuple[tuple[Border, ...], ...]


def arrive(tensor: Tensor) -> Tensor:
    """Return `tensor`, with a gradient that can be sent as it lies in memory."""
    result: Tensor = _Arrival.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def depart(values: Sequence[Any], borders: Sequence[Border], arrived: Sequence[Tensor]) -> Tensors:
    """Return `values` as they can be sent: whole, dense, and as the receiver expects them.

    Args:
        values: What a chunk yields.
        borders: What it is to send.
        arrived: What it received.

    Raises:
        UsageError: A value is something else.
    """
    pairs = zip(values, borders, strict=True)
    return weld([_fitting(value, border) for value, border in pairs], arrived)


def weld(values: Sequence[Tensor], arrived: Sequence[Tensor]) -> Tensors:
    """Return `values`, with one step of the graph behind all of them and `arrived`.

    torch computes gradients of weights from the steps that their path to the outputs has in common
    with that of the inputs.  Where there is none, it leaves them out.
    """
    open_ends = [value for value in values if value.requires_grad]
    if not open_ends:
        return tuple(value.contiguous().detach() for value in values)
    welded = iter(_Weld.apply(len(open_ends), *open_ends, *arrived))  # type: ignore[no-untyped-call]
    return tuple(next(welded) if v.requires_grad else v.contiguous().detach() for v in values)


def _fitting(value: Any, border: Border) -> Tensor:
    if not isinstance(value, Tensor):
        raise UsageError(f"{STAGES}: {border.name} yields no tensor but {type(value).__name__}")
    tensor: Tensor = full_tensor(value)
    is_exact = torch.promote_types(tensor.dtype, border.dtype) == border.dtype
    if tensor.is_floating_point() and is_exact:  # the receiver may compute in less again
        tensor = tensor.to(border.dtype)
    if (tuple(tensor.shape), tensor.dtype) != (border.shape, border.dtype):
        raise UsageError(
            f"{STAGES}: {border.name} yields {_kind(tuple(tensor.shape), tensor.dtype)}, "
            f"and the next stage expects {_kind(border.shape, border.dtype)}"
        )
    if tensor.requires_grad and not border.requires_grad:
        raise UsageError(f"{STAGES}: {border.name} had no gradient when the model was split")
    return tensor


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} of {str(dtype).removeprefix('torch.')}"


class _Arrival(torch.autograd.Function):
    """Passes a tensor on; its gradient is dense, as torch sends memory and not elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        return gradient.contiguous()


class _Weld(torch.autograd.Function):
    """Passes the first `count` tensors on, dense.

    They are no views, as torch cuts outputs off their graphs in place.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensors:
        ctx.others = len(tensors) - count
        return tuple(x.detach() if x.is_contiguous() else x.contiguous() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *gradients, *[None] * ctx.others)
