"""Redistribution of real tensors, by the same table that its costs come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from msrun.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from msrun.parallel.search.cost.redistribution import Hop, MoveKind, route

# Placement on each axis.
Placements = Sequence[int]


class Redistributor:
    """Redistributes tensors from one layout to another on a mesh.

    Args:
        mesh: Its axes are those of all placements.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
        self._rank = [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]

    def redistribute(self, x: Tensor, source: Placements, target: Placements) -> Tensor:
        """Return this rank's shard of a tensor in layout `target`, given the one in `source`."""
        hops = route(source, target, self._sizes)
        while hops:
            hop = hops.pop(0)
            if hop.kind is MoveKind.REDUCE:
                axes = [hop.axis]
                while hops and hops[0].kind is MoveKind.REDUCE:
                    axes.append(hops.pop(0).axis)
                x = self._reduce(x, axes)
            else:
                x = self._follow(x, hop)
        return x

    def _reduce(self, x: Tensor, axes: list[int]) -> Tensor:
        """All-reduce over `axes`: each on the shard that those before it left."""
        group = self._mesh.get_group(axes[0])
        if len(axes) == 1:
            return all_reduce(x, group)
        size = self._sizes[axes[0]]
        flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % size))
        part = self._reduce(reduce_scatter(flat, group), axes[1:])
        return all_gather(part, group)[: x.numel()].view_as(x)

    def _follow(self, x: Tensor, hop: Hop) -> Tensor:
        group, size, dim = self._mesh.get_group(hop.axis), self._sizes[hop.axis], hop.dim
        match hop.kind:
            case MoveKind.TAKE:
                parts = x.unflatten(dim, (hop.room, size, -1))
                own: Tensor = parts.select(dim + 1, self._rank[hop.axis]).flatten(dim, dim + 1)
                # A view would keep the full tensor alive until backward.
                return own.clone(memory_format=torch.contiguous_format)
            case MoveKind.SCATTER:
                parts = x.unflatten(dim, (hop.room, size, -1)).movedim(dim + 1, 0)
                return reduce_scatter(parts.contiguous(), group)[0].flatten(dim, dim + 1)
            case MoveKind.GATHER:
                parts = all_gather(x.unflatten(dim, (hop.room, -1)).unsqueeze(0), group)
                return parts.movedim(0, dim + 1).flatten(dim, dim + 2)
            case MoveKind.MOVE:
                return all_to_all(x, group, hop.to, dim)
            case _:
                return x if self._rank[hop.axis] == 0 else torch.zeros_like(x)


class RedistributeFunction(Function):
    """Redistribution whose gradient goes back by placements of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        redistributor: Redistributor,
        forward: tuple[Placements, Placements],
        backward: tuple[Placements, Placements],
    ) -> Tensor:
        """Redistribute values."""
        ctx.redistributor, ctx.placements = redistributor, backward
        moved = redistributor.redistribute(x, *forward)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Redistribute the gradient."""
        moved = ctx.redistributor.redistribute(gradient.contiguous(), *ctx.placements)
        return moved, None, None, None


def redistribute_both_ways(
    x: Tensor,
    redistributor: Redistributor,
    forward: tuple[Placements, Placements],
    backward: tuple[Placements, Placements],
) -> Tensor:
    """Return `x` redistributed from one layout to another; its gradient goes back by `backward`."""
    moved: Tensor = _apply(RedistributeFunction, x, redistributor, forward, backward)
    return moved


class _GradientShare(Function):
    """The identity, whose gradient is one of several shares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        """Return `x`."""
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Take the share."""
        return gradient * ctx.share, None


def with_gradient_share(x: Tensor, share: float) -> Tensor:
    """Return `x`, whose gradient is a share of what it gets."""
    output: Tensor = _apply(_GradientShare, x, share)
    return output


def _apply(function: type[Function], *arguments: Any) -> Any:
    return function.apply(*arguments)
