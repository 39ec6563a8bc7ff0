"""Collectives that gradients flow through, over the ranks of a mesh axis or a process group.

The loss is the sum of what every rank of the group computes, and the gradient of a tensor on one
rank is that of this sum.  So the gradient of every collective is another one, and it also holds
for a mean of the ranks' losses, which is how gradients are reduced here.  A loss that every rank
computes whole counts once for each rank: divide it by their number.

All ranks of the group call the same collectives in the same order with tensors of equal shape,
and their gradients too: what needs a gradient on one rank needs it on all, and what one rank
receives must take part in its loss, if only times zero.  One rank is the identity.

Example: a linear layer whose weight is cut by columns, and one cut by rows after it::

    hidden = all_gather(x, "tp", dim=0) @ columns
    y = reduce_scatter(hidden @ rows, "tp", dim=0)
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from msrun.errors import UsageError
from msrun.parallel.axes import axis_group
from msrun.parallel.local import is_sharded
from msrun.parallel.torch_compat import functional_collective

Axis = str | dist.ProcessGroup
_Peers = tuple[int | None, int | None]


def all_reduce(x: Tensor, axis: Axis, op: Literal["sum", "mean", "max"] = "sum") -> Tensor:
    """Return the sum, mean or elementwise maximum of `x` over `axis`, on each of its ranks.

    The gradient is an all-reduce with the same `op`; that of `max` is a sum which goes to the
    ranks that have the maximum, in equal parts.
    """
    group = _group(x, axis, "all_reduce")
    if op not in ("sum", "mean", "max"):
        raise UsageError(f"all_reduce: op {op!r} has no gradient here (choose sum, mean or max)")
    if group.size() == 1:
        return x
    total: Tensor = _apply(_Max if op == "max" else _Sum, x, group)
    return total / group.size() if op == "mean" else total


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return `x` of all ranks of `axis`, one after the other along `dim`.

    The gradient is a reduce-scatter: each rank used every part.
    """
    group = _group(x, axis, "all_gather")
    dim = _dim(x, dim, "all_gather", axis)
    return x if group.size() == 1 else _apply(_Gather, x, group, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return this rank's part, along `dim`, of the sum of `x` over `axis`.

    The gradient is an all-gather.

    Raises:
        UsageError: The ranks do not divide `dim`.
    """
    group = _group(x, axis, "reduce_scatter")
    dim = _dim(x, dim, "reduce_scatter", axis, parts=group.size())
    return x if group.size() == 1 else _apply(_ReduceScatter, x, group, dim)


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Return this rank's part of `x` along `split_dim` from all ranks, joined along `concat_dim`.

    What was cut along `concat_dim` is then cut along `split_dim`.  The gradient is an all-to-all
    with the two exchanged.

    Raises:
        UsageError: The ranks do not divide `split_dim`.
    """
    group = _group(x, axis, "all_to_all")
    split_dim = _dim(x, split_dim, "all_to_all", axis, parts=group.size())
    concat_dim = _dim(x, concat_dim, "all_to_all", axis)
    return x if group.size() == 1 else _apply(_AllToAll, x, group, split_dim, concat_dim)


def broadcast(x: Tensor, axis: Axis, src: int = 0) -> Tensor:
    """Return `x` of rank `src` of `axis`; that of the others gives only its shape and type.

    The gradient is a reduction: the sum goes to `src`, and zero to the others.

    Args:
        x: Needs a gradient on all ranks or on none.
        axis: Axis or group.
        src: Rank inside `axis`, from 0.
    """
    group = _group(x, axis, "broadcast")
    if src not in range(group.size()):
        raise UsageError(
            f"broadcast over {_shown(axis)}: src {src} is no rank of it (0 to {group.size() - 1})"
        )
    return x if group.size() == 1 else _apply(_Broadcast, x, group, src)


def neighbor_exchange(
    to_previous: Tensor, to_next: Tensor, axis: Axis, *, ring: bool = False, fill: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Send to both neighbors along `axis`; return what the previous and the next one sent here.

    An empty tensor sends nothing that way.  The gradient is the same exchange: what came from a
    neighbor returns to it.

    Example: rows around an image block, `lo` before it and `hi` after it::

        above, below = neighbor_exchange(x[:hi], x[len(x) - lo :], "h")
        x = torch.cat([above, x, below])

    Args:
        to_previous: For the rank before this one; what comes from the next has its shape.
        to_next: For the rank after this one; what comes from the previous has its shape.
        axis: Axis or group.
        ring: The last and the first rank are neighbors too.
        fill: What a missing neighbor sends.
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
    received: list[Tensor] = list(_apply(_Exchange, to_previous, to_next, group, peers))
    for index, peer in enumerate(peers):
        if peer is None and fill:
            received[index] = received[index] + fill
    return received[0], received[1]


def shift(
    x: Tensor, axis: Axis, step: Literal[1, -1] = 1, *, ring: bool = True, fill: float = 0.0
) -> Tensor:
    """Send `x` to the next rank of `axis`, with `step` -1 to the previous; return what came.

    The gradient is a shift by -`step`.

    Args:
        x: Of the same shape on all ranks.
        axis: Axis or group.
        step: Direction.
        ring: As of `neighbor_exchange`.
        fill: As of `neighbor_exchange`.
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
        return _apply(_Sum, gradient, ctx.group), None


class _Max(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        largest = functional_collective("all_reduce", x.contiguous(), "max", group=group)
        ctx.group = group
        ctx.save_for_backward(x == largest)
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (is_largest,) = ctx.saved_tensors
        share = is_largest.to(gradient.dtype)
        share = share / _apply(_Sum, share, ctx.group)
        return _apply(_Sum, gradient, ctx.group) * share, None


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
        return _apply(_ReduceScatter, gradient, ctx.group, ctx.dim), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        size = group.size()
        parts = _cut(x, size, dim)
        return functional_collective("reduce_scatter_tensor", parts, "sum", size, group=group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(_Gather, gradient, ctx.group, ctx.dim), None, None


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
        return _apply(_AllToAll, gradient, ctx.group, *ctx.dims), None, None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, src: int) -> Tensor:
        ctx.group, ctx.src = group, src
        return functional_collective("broadcast", x.contiguous(), src, group=group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total = _apply(_Sum, gradient, ctx.group)
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
        gradients = _apply(_Exchange, from_previous, from_next, ctx.group, ctx.peers)
        return (*gradients, None, None)


def _exchange(
    to_previous: Tensor, to_next: Tensor, group: dist.ProcessGroup, peers: _Peers
) -> tuple[Tensor, Tensor]:
    """Do `neighbor_exchange` as one all-to-all in which most pairs have nothing to say.

    Unlike single sends it is one operator, whose result a recomputation can keep and whose order
    cannot differ between ranks.
    """
    previous, following = peers
    sent, received = [0] * group.size(), [0] * group.size()
    # In a ring of two, both parts go to one rank: first the one that comes from its previous.
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
    """Return the `size` equal parts of `x` along `dim`, joined along the first dim."""
    return torch.cat(x.tensor_split(size, dim)) if dim else x.contiguous()


def _join(parts: Tensor, size: int, dim: int) -> Tensor:
    """Return `size` parts, joined along the first dim, joined along `dim` instead."""
    return torch.cat(parts.tensor_split(size), dim) if dim else parts


def _group(x: Tensor, axis: Axis, name: str) -> dist.ProcessGroup:
    """Return the group of `axis`, after checking what all collectives ask of `x`."""
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
    """Return `dim` counted from the first, after checking that it can be cut into `parts`."""
    if not -x.dim() <= dim < x.dim():
        raise UsageError(f"{name} over {_shown(axis)}: a {x.dim()}-dim tensor has no dim {dim}")
    if x.size(dim) % parts:
        raise UsageError(
            f"{name} over {_shown(axis)}: dim {dim} of size {x.size(dim)} can not be split into "
            f"{parts}"
        )
    return dim % x.dim()


def _shown(axis: Axis) -> str:
    return f"axis {axis}" if isinstance(axis, str) else f"a group of {axis.size()} ranks"


def _apply(function: type[Function], *arguments: Any) -> Any:
    return function.apply(*arguments)
