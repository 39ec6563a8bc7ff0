"""What one chunk sends to the next: replicated, dense tensors of shapes that both sides know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msrun.errors import ModelError
from msrun.parallel.local import full_tensor
from msrun.parallel.pipeline.chunks import STAGES
from msrun.parallel.torch_compat import function_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """One value that a chunk sends.

    Args:
        name: How messages name it.
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


def with_dense_gradient(tensor: Tensor, number: int, note: Callable[[], object]) -> Tensor:
    """Return `tensor`, whose gradient will be contiguous, so that it can be sent.

    Args:
        tensor: What was received.
        number: Which of the received values it is.
        note: Called if a gradient comes; else it is zeros.
    """
    result: Tensor = _DenseGradient.apply(tensor, number, note)  # type: ignore[no-untyped-call]
    return result


def received_value(step: Any) -> int | None:
    """Return the number of the received value that a step of autograd hands on; None if none."""
    return step.number if function_of(step) is _DenseGradient else None


def ready_to_send(
    values: Sequence[Any], borders: Sequence[Border], received: Sequence[Tensor]
) -> Tensors:
    """Return `values` ready to send: replicated, dense, and as the receiver expects them.

    Args:
        values: The outputs of a chunk.
        borders: What it is expected to send.
        received: What it received.

    Raises:
        ModelError: A value is something else.
    """
    return join_graph(fitting(values, borders), received)


def fitting(values: Sequence[Any], borders: Sequence[Border]) -> list[Tensor]:
    """Return `values` replicated and as the receiver expects them.

    Raises:
        ModelError: A value is something else.
    """
    return [_fitting(value, border) for value, border in zip(values, borders, strict=True)]


def join_graph(values: Sequence[Tensor], received: Sequence[Tensor]) -> Tensors:
    """Return `values` as outputs of one autograd node that also has `received` as inputs.

    torch computes gradients of weights apart from the nodes that their path to the outputs shares
    with that of the inputs.  Without a shared node it would leave them out.
    """
    open_ends = [value for value in values if value.requires_grad]
    if not open_ends:
        return tuple(value.contiguous().detach() for value in values)
    joined = iter(_JoinedGraph.apply(len(open_ends), *open_ends, *received))  # type: ignore[no-untyped-call]
    return tuple(next(joined) if v.requires_grad else v.contiguous().detach() for v in values)


def nothing(tensors: Sequence[Tensor]) -> Tensor:
    """Return 0, whose gradients by all of `tensors` are 0."""
    zero = torch.zeros((), requires_grad=True)
    for tensor in tensors:
        if tensor.requires_grad:
            zero = zero.to(tensor.device) + (tensor * 0.0).sum().real
    return zero


def stand_ins(
    borders: Sequence[Border], received: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    """Return zeros to send in place of values that a chunk refused to compute.

    Args:
        borders: What it is expected to send.
        received: What it received, which gets gradients of 0.
        device: Of this rank.
    """
    zero = nothing(received).to(device)
    values = [torch.zeros(b.shape, dtype=b.dtype, device=device) for b in borders]
    pairs = zip(values, borders, strict=True)
    return [value + zero.to(b.dtype) if b.requires_grad else value for value, b in pairs]


def _fitting(value: Any, border: Border) -> Tensor:
    if not isinstance(value, Tensor):
        raise ModelError(f"{STAGES}: {border.name} yields no tensor but {type(value).__name__}")
    tensor: Tensor = full_tensor(value)
    is_exact = torch.promote_types(tensor.dtype, border.dtype) == border.dtype
    if tensor.is_floating_point() and is_exact:  # the receiver may compute in less again
        tensor = tensor.to(border.dtype)
    if (tuple(tensor.shape), tensor.dtype) != (border.shape, border.dtype):
        raise ModelError(
            f"{STAGES}: {border.name} yields {_kind(tuple(tensor.shape), tensor.dtype)}, "
            f"and the next stage expects {_kind(border.shape, border.dtype)}"
        )
    if tensor.requires_grad and not border.requires_grad:
        raise ModelError(
            f"{STAGES}: {border.name} needs a gradient, and needed none when the model was split, "
            "so the next stage computes none",
            hint="freeze what is to be trained later after rt.shard",
        )
    return tensor


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} of {str(dtype).removeprefix('torch.')}"


class _DenseGradient(torch.autograd.Function):
    """Returns its input; the gradient is contiguous, as torch sends memory and not elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, note: Callable[[], object]) -> Tensor:
        # Else torch makes zeros of a gradient that there is not.
        ctx.set_materialize_grads(False)
        ctx.number, ctx.note, ctx.like = number, note, (x.shape, x.dtype, x.device)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor, None, None]:
        if gradient is None:
            shape, dtype, device = ctx.like
            return torch.zeros(shape, dtype=dtype, device=device), None, None
        ctx.note()
        return gradient.contiguous(), None, None


class _JoinedGraph(torch.autograd.Function):
    """Returns the first `count` tensors, contiguous.

    They are no views, as torch detaches outputs from their graphs in place.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensors:
        ctx.others = len(tensors) - count
        return tuple(x.detach() if x.is_contiguous() else x.contiguous() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *gradients, *[None] * ctx.others)
