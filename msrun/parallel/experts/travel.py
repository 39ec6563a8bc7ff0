"""Rows on their way to other ranks, with their gradients on the way back.

An exchange is two nodes of autograd: one begins it, the other waits for it.  What runs between the
two computes while rows travel.  In the backward pass the later node begins the exchange of the
gradients and the earlier one waits for it, so the backward pass of what ran between them computes
while gradients travel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from msrun.errors import ModelError
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS
from msrun.parallel.torch_compat import begin_collective

# Ranks, the rows that go to each, and the rows that come from each.
Peers = tuple[dist.ProcessGroup, list[int], list[int]]


def travelling(
    peers: Peers, factor: float, *given: Tensor, is_packed: bool = False
) -> Callable[[], tuple[Tensor, ...]]:
    """Begin to exchange tensors, and return what waits for those that come.

    All of them travel in each pass, so the gradients of all do if one has any.

    Args:
        peers: Ranks and sizes.
        factor: Of the gradients.
        given: Tensors of as many rows.
        is_packed: Whether they are rows and a number for each, whose bits become further columns:
            these take one exchange and not two.
    """
    travel = _Travel(peers, factor, is_packed=is_packed)
    begun = _Begin.apply(travel, *given)  # type: ignore[no-untyped-call]
    return partial(_Arrive.apply, travel, begun)


class _Travel:
    """Tensors on their way, or their gradients on the way back.

    Args:
        peers: Ranks and sizes.
        factor: Of the gradients.
        is_packed: Whether two tensors travel as one.

    Attributes:
        arriving: Waits for the tensors.
        returning: Waits for the gradients.
    """

    def __init__(self, peers: Peers, factor: float, *, is_packed: bool) -> None:
        self.peers, self.factor, self.is_packed = peers, factor, is_packed
        self.arriving: Callable[[], tuple[Tensor, ...]] = tuple
        self.returning: Callable[[], tuple[Tensor, ...]] = tuple


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, travel: _Travel, *given: Tensor) -> Tensor:
        ctx.travel, ctx.is_float = travel, [x.is_floating_point() for x in given]
        travel.arriving = _packed(travel, *given) if travel.is_packed else _apart(travel, *given)
        return given[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        travel = ctx.travel
        came, travel.returning = iter(travel.returning()), tuple
        found = [next(came) if is_float else None for is_float in ctx.is_float]
        if travel.factor != 1:
            found = [x if x is None else x * travel.factor for x in found]
        return None, *found


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, travel: _Travel, begun: Tensor) -> tuple[Tensor, ...]:
        found, travel.arriving = travel.arriving(), tuple
        ctx.travel, ctx.begun = travel, begun.shape
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        travel = ctx.travel
        _refuse_second(travel.factor)
        group, away, here = travel.peers
        of_floats = [x for x in gradients if x.is_floating_point()]
        travel.returning = travelling(
            (group, here, away), 1.0, *of_floats, is_packed=travel.is_packed
        )
        return None, gradients[0].new_zeros(ctx.begun, dtype=torch.float32)


def _apart(travel: _Travel, *given: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    dtypes = [x.dtype for x in given]
    waits = [_begun(travel, x.to(torch.uint8) if x.dtype == torch.bool else x) for x in given]
    return lambda: tuple(wait().to(dtype) for wait, dtype in zip(waits, dtypes, strict=True))


def _packed(travel: _Travel, x: Tensor, numbers: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    width, dtype = x.size(1), numbers.dtype
    bits = numbers.contiguous().unsqueeze(1).view(x.dtype)
    wait = _begun(travel, torch.cat([x, bits], 1))

    def arrived() -> tuple[Tensor, ...]:
        both = wait()
        return both[:, :width].contiguous(), both[:, width:].contiguous().view(dtype).squeeze(1)

    return arrived


def _begun(travel: _Travel, x: Tensor) -> Callable[[], Tensor]:
    group, away, here = travel.peers
    return begin_collective("all_to_all_single", x.contiguous(), here, away, group=group)


def _refuse_second(factor: float) -> None:
    """Refuse a backward pass that is to be differentiated, through an exchange with a `factor`.

    Rows lose on the way to experts the factor that they get on the way back.  A second gradient
    also comes to them by what experts have saved, and would lose it twice.

    Raises:
        ModelError: It is, and `factor` is not 1.
    """
    if factor != 1 and torch.is_grad_enabled():
        raise ModelError(
            f"gradients of gradients (create_graph=True) through experts over {EXPERT_AXIS} would "
            "not be those of one process",
            hint=f"take the penalty outside of the experts, or leave out {EXPERT_AXIS}",
        )
