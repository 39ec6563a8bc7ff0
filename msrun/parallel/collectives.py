"""Collectives that gradients flow through, over the ranks of a mesh axis or a process group.

The loss of a group is the sum of the losses of its ranks, and a gradient on one rank is the
gradient of this sum.  So the gradient of every collective is another collective.  This also holds
for the mean of the losses, which is how data parallelism reduces gradients.  A loss that every
rank computes in full counts once for each rank: divide it by their number.

All ranks of the group must call the same collectives in the same order with tensors of equal
shape, forward and backward: a tensor that needs a gradient on one rank must need it on all, and a
received tensor must take part in the loss of its rank, if only multiplied by 0.  In a group of one
rank every collective is the identity.

The operators are torch's functional collectives.  They return new tensors, so a recomputation can
save their results; the public ones write in place (see `torch_compat.functional_collective`).

Example: a linear layer with a weight sharded by columns, followed by one sharded by rows::

    hidden = all_gather(x, "tp", dim=0) @ columns
    y = reduce_scatter(hidden @ rows, "tp", dim=0)
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from msrun.errors import ModelError, UsageError
from msrun.parallel.axes import axis_group
from msrun.parallel.config import DATA_AXIS, ROOT
from msrun.parallel.local import is_sharded
from msrun.parallel.losses.linked_terms import whole
from msrun.parallel.rank_context import RankContext
from msrun.parallel.torch_compat import functional_collective

Axis = str | dist.ProcessGroup
_Peers = tuple[int | None, int | None]


def all_reduce(x: Tensor, axis: Axis, op: Literal["sum", "mean", "max"] = "sum") -> Tensor:
    """Return the sum, mean or elementwise maximum of `x` over `axis`, on each of its ranks.

    The gradient is an all-reduce with the same `op`.  With `max` it is summed and split equally
    among the ranks that hold the maximum.
    """
    group = _group(x, axis, "all_reduce")
    if op not in ("sum", "mean", "max"):
        raise UsageError(f"all_reduce: op {op!r} has no gradient here (choose sum, mean or max)")
    if group.size() == 1:
        return x
    total: Tensor = apply_function(_Max if op == "max" else _Sum, x, group)
    return total / group.size() if op == "mean" else total


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return `x` of all ranks of `axis`, concatenated along `dim` in rank order.

    The gradient is a reduce-scatter, since every rank used every part.
    """
    group = _group(x, axis, "all_gather")
    dim = _dim(x, dim, "all_gather", axis)
    return x if group.size() == 1 else apply_function(_Gather, x, group, dim)


def gather_batch(context: RankContext, x: Tensor, dim: int = 0) -> Tensor:
    """Return `x` of all data-parallel ranks, joined along `dim`; see `Runtime.gather`.

    The gradient of a rank's part is the sum of the gradients of all ranks.  Together with the mean
    over ranks, by which data parallelism reduces the gradients of parameters, that is the gradient
    of the mean of the losses of all ranks.

    Raises:
        ModelError: A step has several micro-batches.
    """
    if context.batch.is_whole:
        return x
    if context.sequence is not None:
        raise ModelError(
            "rt.gather: style context gives this rank a part of each sequence, and no whole sample"
        )
    context = context.of_samples
    if context.batch.parts > 1:
        raise ModelError(
            f"rt.gather: a step of {context.batch.parts} micro-batches never has the whole batch",
            hint=f"set {ROOT}.accumulate or {ROOT}.pipeline.microbatches to 1",
        )
    if DATA_AXIS not in context.layout.axes or context.layout.size(DATA_AXIS) == 1:
        return x
    group = context.group(DATA_AXIS)
    if context.batch.value == 1.0:
        return whole(all_gather(x, group, dim))
    # Of an uneven batch, each rank sends its samples and some more.
    dim = _dim(x, dim, "rt.gather", group)
    sizes: list[int] = all_gather(torch.tensor([x.size(dim)], device=x.device), group).tolist()
    room = list(x.shape)
    room[dim] = max(sizes) - x.size(dim)
    parts = all_gather(torch.cat([x, x.new_zeros(room)], dim), group, dim).split(max(sizes), dim)
    pairs = zip(parts, sizes, strict=True)
    return whole(torch.cat([whole(part).narrow(dim, 0, size) for part, size in pairs], dim))


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return this rank's part, along `dim`, of the sum of `x` over `axis`.

    The gradient is an all-gather.

    Raises:
        UsageError: The ranks do not divide `dim`.
    """
    group = _group(x, axis, "reduce_scatter")
    dim = _dim(x, dim, "reduce_scatter", axis, parts=group.size())
    return x if group.size() == 1 else apply_function(_ReduceScatter, x, group, dim)


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Return this rank's part of `x` along `split_dim` from all ranks, joined along `concat_dim`.

    A tensor that was sharded along `concat_dim` is then sharded along `split_dim`.  The gradient
    is an all-to-all with the two dims exchanged.

    Raises:
        UsageError: The ranks do not divide `split_dim`.
    """
    group = _group(x, axis, "all_to_all")
    split_dim = _dim(x, split_dim, "all_to_all", axis, parts=group.size())
    concat_dim = _dim(x, concat_dim, "all_to_all", axis)
    return x if group.size() == 1 else apply_function(_AllToAll, x, group, split_dim, concat_dim)


def broadcast(x: Tensor, axis: Axis, src: int = 0) -> Tensor:
    """Return `x` of rank `src` of `axis`; other ranks' `x` gives only the shape and the type.

    The gradient is a reduction: `src` gets the sum of gradients, the other ranks get zeros.

    Args:
        x: Must need a gradient on all ranks or on none.
        axis: Axis or group.
        src: Rank inside `axis`, from 0.
    """
    group = _group(x, axis, "broadcast")
    if src not in range(group.size()):
        raise UsageError(
            f"broadcast over {_shown(axis)}: src {src} is no rank of it (0 to {group.size() - 1})"
        )
    return x if group.size() == 1 else apply_function(_Broadcast, x, group, src)


def neighbor_exchange(
    to_previous: Tensor, to_next: Tensor, axis: Axis, *, ring: bool = False, fill: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Send a tensor to each neighbor along `axis`; return those of the previous and next rank.

    An empty tensor sends nothing in its direction.  The gradient is the same exchange: the gradient
    of a received tensor goes back to its sender.

    Example: rows around an image block, `lo` before it and `hi` after it::

        above, below = neighbor_exchange(x[:hi], x[len(x) - lo :], "h")
        x = torch.cat([above, x, below])

    Args:
        to_previous: For the rank before this one.  The tensor from the next rank has its shape.
        to_next: For the rank after this one.  The tensor from the previous rank has its shape.
        axis: Axis or group.
        ring: Whether the last and the first rank are neighbors too.
        fill: Value of the elements that a missing neighbor would send.
    """
    group = _group(to_previous, axis, "neighbor_exchange")
    _group(to_next, axis, "neighbor_exchange")
    if to_previous.dtype != to_next.dtype:
        raise UsageError(
            f"neighbor_exchange over {_shown(axis)}: "
            f"types {to_previous.dtype} and {to_next.dtype} differ"
        )
    if ring and group.size() == 1:
        return to_next, to_previous
    peers = _neighbors(group, ring=ring)
    received: list[Tensor] = list(apply_function(_Exchange, to_previous, to_next, group, peers))
    for index, peer in enumerate(peers):
        if peer is None and fill:
            received[index] = received[index] + fill
    return received[0], received[1]


def shift(
    x: Tensor, axis: Axis, step: Literal[1, -1] = 1, *, ring: bool = True, fill: float = 0.0
) -> Tensor:
    """Send `x` to the next rank of `axis`, or with `step` -1 to the previous; return the received.

    The gradient is a shift by -`step`.

    Args:
        x: Of the same shape on all ranks.
        axis: Axis or group.
        step: Direction.
        ring: Whether the last and the first rank are neighbors too.
        fill: Value of the elements that a missing neighbor would send.
    """
    nothing = x.new_empty(0)
    if step == 1:
        return neighbor_exchange(nothing, x, axis, ring=ring, fill=fill)[0]
    if step == -1:
        return neighbor_exchange(x, nothing, axis, ring=ring, fill=fill)[1]
    raise UsageError(f"shift over {_shown(axis)}: step {step} is neither 1 nor -1")


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return functional_collective("all_reduce", x.contiguous(), "sum", group=group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return apply_function(_Sum, gradient, ctx.group), None


class _Max(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        largest = functional_collective("all_reduce", x.contiguous(), "max", group=group)
        ctx.group = group
        ctx.save_for_backward(x == largest)
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Several ranks may hold the maximum.  Each gets an equal part of the gradient, so that the
        # parts add up to it once.
        (is_largest,) = ctx.saved_tensors
        share = is_largest.to(gradient.dtype)
        share = share / apply_function(_Sum, share, ctx.group)
        return apply_function(_Sum, gradient, ctx.group) * share, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        size = group.size()
        gathered = functional_collective(
            "all_gather_into_tensor", x.contiguous(), size, group=group
        )
        return _join(gathered, size, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return apply_function(_ReduceScatter, gradient, ctx.group, ctx.dim), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        size = group.size()
        parts = _cut(x, size, dim)
        return functional_collective("reduce_scatter_tensor", parts, "sum", size, group=group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return apply_function(_Gather, gradient, ctx.group, ctx.dim), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, split_dim: int, concat_dim: int
    ) -> Tensor:
        ctx.group, ctx.dims = group, (concat_dim, split_dim)
        size = group.size()
        parts = _cut(x, size, split_dim)
        rows = [parts.size(0) // size] * size
        parts = functional_collective("all_to_all_single", parts, rows, rows, group=group)
        return _join(parts, size, concat_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return apply_function(_AllToAll, gradient, ctx.group, *ctx.dims), None, None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, src: int) -> Tensor:
        ctx.group, ctx.src = group, src
        return functional_collective("broadcast", x.contiguous(), src, group=group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total = apply_function(_Sum, gradient, ctx.group)
        # Zeros, not None: the other ranks must take part in collectives further back.
        return total * float(ctx.group.rank() == ctx.src), None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, to_previous: Tensor, to_next: Tensor, group: dist.ProcessGroup, peers: _Peers
    ) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.peers = group, peers
        return _exchange(to_previous, to_next, group, peers)

    @staticmethod
    def backward(ctx: Any, from_previous: Tensor, from_next: Tensor) -> tuple[Tensor | None, ...]:
        gradients = apply_function(_Exchange, from_previous, from_next, ctx.group, ctx.peers)
        return (*gradients, None, None)


def _exchange(
    to_previous: Tensor, to_next: Tensor, group: dist.ProcessGroup, peers: _Peers
) -> tuple[Tensor, Tensor]:
    """Run `neighbor_exchange` as one all-to-all in which most pairs of ranks send nothing.

    Separate sends would be several operators, in an order that could differ between ranks.  One
    operator cannot, and a recomputation can save its result.
    """
    previous, following = peers
    sent, received = [0] * group.size(), [0] * group.size()
    # In a ring of two both neighbors are one rank, which gets both parts.  Every rank sends the
    # part for its next rank first, so the receiver can tell the two apart.
    parts = [(following, to_next, to_previous), (previous, to_previous, to_next)]
    flat: list[Tensor] = [to_next.new_empty(0)]
    for peer in range(group.size()):
        for neighbor, part, expected in parts:
            if neighbor == peer:
                flat.append(part.reshape(-1))
                sent[peer] += part.numel()
                received[peer] += expected.numel()
    arrived = functional_collective(
        "all_to_all_single", torch.cat(flat), received, sent, group=group
    ).split(received)
    from_previous = to_next.new_zeros(to_next.shape)
    from_next = to_previous.new_zeros(to_previous.shape)
    if previous is not None:
        from_previous.view(-1).copy_(arrived[previous][: to_next.numel()])
    if following is not None:
        from_next.view(-1).copy_(arrived[following][received[following] - to_previous.numel() :])
    return from_previous, from_next


def _neighbors(group: dist.ProcessGroup, *, ring: bool) -> _Peers:
    """Return the ranks inside `group` before and after this one; None where there is none."""
    rank, size = group.rank(), group.size()
    if ring:
        return (rank - 1) % size, (rank + 1) % size
    return rank - 1 if rank else None, rank + 1 if rank + 1 < size else None


def _cut(x: Tensor, size: int, dim: int) -> Tensor:
    """Return `size` equal parts of `x` along `dim`, concatenated along dim 0.

    The collectives split and join along dim 0 only.
    """
    return torch.cat(x.tensor_split(size, dim)) if dim else x.contiguous()


def _join(parts: Tensor, size: int, dim: int) -> Tensor:
    """Return `size` parts, which are concatenated along dim 0, concatenated along `dim`."""
    return torch.cat(parts.tensor_split(size), dim) if dim else parts


def _group(x: Tensor, axis: Axis, name: str) -> dist.ProcessGroup:
    """Return the group of `axis`, after checking that `x` is a plain tensor."""
    if is_sharded(x):
        raise UsageError(
            f"{name} over {_shown(axis)}: a DTensor already knows its mesh",
            hint="give it x.to_local(), or use x.redistribute",
        )
    if not isinstance(axis, str):
        return axis
    group = axis_group(axis)
    if group is None:
        raise UsageError(f"{name} over axis {axis}: msrun.init was not called")
    return group


def _dim(x: Tensor, dim: int, name: str, axis: Axis, parts: int = 1) -> int:
    """Return `dim` as a non-negative number, after checking that `parts` divides its size."""
    dims = x.dim()
    if not -dims <= dim < dims:
        raise UsageError(f"{name} over {_shown(axis)}: a {dims}-dim tensor has no dim {dim}")
    if parts > 1 and x.size(dim) % parts:
        raise UsageError(
            f"{name} over {_shown(axis)}: dim {dim} of size {x.size(dim)} can not be split into "
            f"{parts}"
        )
    return dim % dims


def _shown(axis: Axis) -> str:
    return f"axis {axis}" if isinstance(axis, str) else f"a group of {axis.size()} ranks"


def apply_function(function: type[Function], *arguments: Any) -> Any:
    """Return what `function` makes of `arguments`, in less time where gradients are off."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    # As autograd does then, in less time: backward passes and functions of autograd come here.
    return function.forward(_Unrecorded(), *arguments)


class _Unrecorded:
    """What a function gets as its context where nothing is differentiated."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save nothing."""
