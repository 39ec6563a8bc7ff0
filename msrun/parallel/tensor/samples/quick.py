"""Functions behind a layer whose output ranks share by sample, such as a table of uneven rows.

The problem.  DTensor is right there, and a linear layer is a dozen of its operators, forward and
backward, each of which takes as long as an addition of small tensors.  A target beside a divided
output, and a mean, take its slow path: it moves their tensors or gradients from one placement to
another.

The idea.  Where dim 0 of the input is divided evenly over one mesh axis, and all else is on every
rank, these functions need no placement of anything else: each rank computes with its samples, and
with weights it computes a summand of their gradients.

Invariants:

- A function returns None for whatever it does not know; the guard then goes on as without it.
- Results and gradients are those of torch's own formulas, of the samples of this rank.
- A gradient that is to be differentiated again is that of the DTensor form, recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import Parameter, functional

from msrun.parallel import torch_compat
from msrun.parallel.autocast.casts import is_casting
from msrun.parallel.collectives import all_reduce
from msrun.parallel.copies import turns
from msrun.parallel.summands.late import LateSums
from msrun.parallel.tensor.placements import Like, gradient_of, on_mesh, placed_on

_AVERAGE = Partial("avg")
_WHOLE = Replicate()
_PLAIN = (Tensor, Parameter)


def linear(
    late: LateSums | None, x: Any, weight: Any, bias: Any = None, **options: Any
) -> Tensor | None:
    """Return `functional.linear` of samples with plain parameters."""
    if options or type(weight) not in _PLAIN or not (bias is None or type(bias) in _PLAIN):
        return None
    axis = _axis_of_samples(x)
    if axis is None or x.dim() == 1 or is_casting(weight) or x.dtype != weight.dtype:
        return None
    given = [weight] if bias is None else [weight, bias]
    waiting = [late if late is not None and late.takes(each) else None for each in given]
    found: Tensor = _Linear.apply(axis, waiting, x, *given)  # type: ignore[no-untyped-call]
    return found


def mean(late: LateSums | None, x: Any, *args: Any, **options: Any) -> Tensor | None:
    """Return the mean of all elements."""
    del late
    if args or options or not isinstance(x, DTensor) or not x.is_floating_point():
        return None
    axis = _axis_of_samples(x)
    return None if axis is None else _Mean.apply(x, axis)  # type: ignore[no-untyped-call]


def _beside(func: Callable[..., Any], late: Any, *args: Any, **options: Any) -> Tensor | None:
    """Return an elementwise function of samples and a plain tensor of all of them."""
    del late
    if options or len(args) != 2:  # noqa: PLR2004 - two operands
        return None
    at = 0 if isinstance(args[0], DTensor) else 1
    x, other = args[at], args[1 - at]
    is_like = type(other) is Tensor and not other.requires_grad and other.is_contiguous()
    axis = _axis_of_samples(x) if is_like and other.shape == x.shape else None
    if axis is None:
        return None
    local = torch_compat.local_tensor(x)
    first = len(local) * x.device_mesh.get_local_rank(axis)
    part = placed_on(other.narrow(0, first, len(local)), x.device_mesh, x.placements)
    found: Tensor = func(part, x) if at else func(x, part)
    return found


def _axis_of_samples(x: Any) -> int | None:
    """Return the one mesh axis that divides `x`, evenly and in dim 0; None if that is not so."""
    if not isinstance(x, DTensor) or not x.dim() or turns.is_in_copy():
        return None
    divided = [axis for axis, p in enumerate(x.placements) if not p.is_replicate()]
    if len(divided) != 1 or type(x.placements[divided[0]]) is not Shard:
        return None
    is_first = x.placements[divided[0]].is_shard(0)
    if not is_first or x.shape[0] % x.device_mesh.size(divided[0]) or torch_compat.is_pending(x):
        return None
    # Dispatch modes of others see operators of DTensors, and a recomputation without such a mode
    # has to save as many tensors as with it.
    is_watched = torch_compat.is_dispatching()
    is_watched = is_watched or (torch.is_grad_enabled() and torch_compat.checkpointed() is not None)
    # In the first step torch's own nodes say what a gradient comes from.
    is_watched = is_watched or torch_compat.is_graph_read()
    return None if is_watched else divided[0]


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, axis: int, waiting: list[LateSums | None], x: DTensor, *given: Tensor
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *given)
        ctx.axis, ctx.waiting, ctx.like = axis, waiting, Like.of(x)
        local = functional.linear(torch_compat.local_tensor(x), *given)
        return placed_on(local, x.device_mesh, x.placements)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Any, ...]:
        x, *given = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        if gradient is None:
            found: list[Any] = [None] * len(needed)
        elif torch.is_grad_enabled() or gradient.placements != ctx.like.cut:
            found = _again(_linear_of_all, (x, *given), gradient, needed)
        else:
            found = _Linear._of_parts(ctx, gradient, x, given, needed)
        for late in ctx.waiting:
            if late is not None:
                late.passed()
        return None, None, *found

    @staticmethod
    def _of_parts(
        ctx: Any, gradient: DTensor, x: DTensor, given: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Any]:
        """Return the gradients, by the formulas of torch; sums may wait for the end of the step."""
        part = torch_compat.local_tensor(gradient)
        group = x.device_mesh.get_group(ctx.axis)
        found: list[Any] = [None] * len(needed)
        rows = part.reshape(-1, part.shape[-1])
        if needed[0]:
            of_x = rows.mm(given[0]).view(torch_compat.local_tensor(x).shape)
            found[0] = gradient_of(of_x, ctx.like.cut, ctx.like)
        for at, (param, late) in enumerate(zip(given, ctx.waiting, strict=True), 1):
            if not needed[at]:
                continue
            if at == 1:
                summand = rows.t().mm(torch_compat.local_tensor(x).reshape(-1, x.shape[-1]))
            else:
                summand = rows.sum(0)
            is_kept = late is not None and late.keep(cast("Parameter", param), summand, group)
            found[at] = None if is_kept else all_reduce(summand, group)
        return found


class _Mean(Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, axis: int) -> DTensor:
        ctx.save_for_backward(x)
        placed = [_WHOLE] * x.device_mesh.ndim
        placed[axis] = _AVERAGE  # type: ignore[call-overload]
        ctx.whole, ctx.like = (_WHOLE,) * len(placed), Like.of(x)
        return placed_on(torch_compat.local_tensor(x).mean(), x.device_mesh, tuple(placed))

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled() or gradient.placements != ctx.whole:
            return _again(torch.mean, (x,), gradient, (True,))[0], None
        local = torch_compat.local_tensor(x)
        part = torch_compat.local_tensor(gradient).expand(local.shape) / x.numel()
        return gradient_of(part, ctx.like.cut, ctx.like), None


def _linear_of_all(x: DTensor, *given: Tensor) -> Tensor:
    mesh = x.device_mesh
    return functional.linear(x, *(on_mesh(each, mesh, (_WHOLE,) * mesh.ndim) for each in given))


def _again(
    call: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    gradient: DTensor,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of `call`, which may be differentiated, of its form without shortcut."""
    keeps = torch.is_grad_enabled()
    with torch.enable_grad():
        own = inputs if keeps else [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        wanted = [x for x, is_needed in zip(own, needed, strict=True) if is_needed]
        found = iter(torch.autograd.grad(call(*own), wanted, gradient, create_graph=keeps))
    return [next(found) if is_needed else None for is_needed in needed]


def _pair(func: Callable[..., Any]) -> Callable[..., Tensor | None]:
    def call(*args: Any, **options: Any) -> Tensor | None:
        return _beside(func, *args, **options)

    return call


# By what the guard sees; each gets what takes late summands, and the arguments of the function.
FUNCTIONS: dict[Any, Callable[..., Tensor | None]] = {
    functional.linear: linear,
    torch.mean: mean,
    Tensor.mean: mean,
    **{func: _pair(func) for func in (torch.sub, Tensor.sub, torch.mul, Tensor.mul)},
    **{func: _pair(func) for func in (torch.add, Tensor.add, torch.div, Tensor.div)},
}
