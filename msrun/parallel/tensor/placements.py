"""Translates between axis names of each tensor dim, as configurations have them, and placements.

torch lists one placement for each mesh axis; configurations list axis names for each tensor dim,
the most significant first.  torch applies placements in mesh order, so if a later mesh axis is the
more significant one of a dim, the earlier axis needs a strided shard: it splits each part that the
later axis made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter

from msrun.errors import ConfigError, ModelError, UsageError
from msrun.parallel import torch_compat
from msrun.parallel.collectives import all_gather, all_reduce, reduce_scatter
from msrun.parallel.copies import turns
from msrun.parallel.notation.dims import axes_of_dims, dim_of
from msrun.parallel.settings.plan_rules import Dim, Dims
from msrun.parallel.summands.late import LateSums
from msrun.parallel.tensor.plan import ModulePlan
from msrun.parallel.torch_compat import parts_before, strided_shard

_SPECS = torch_compat.ShardSpecs()
# Shapes of one tensor whose placements are cached; sequences may have any length.
_SHAPES_MAX = 100


def placements(dims: Sequence[Dim], mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """Return the placements of a tensor of `ndim` dims that is sharded as `dims` says.

    Args:
        dims: Axis names of each dim; one `...` stands for as many unsharded dims as fit.
        mesh: Mesh with axes of these names; the tensor is replicated over axes without a name here.
        ndim: Dims of the tensor.

    Raises:
        ConfigError: `dims` has another length, or an axis is unknown or named twice.
    """
    names = mesh.mesh_dim_names or ()
    placed: list[Placement] = [Replicate()] * mesh.ndim
    for dim, axes in enumerate(axes_of_dims(dims, ndim, names)):
        before: list[int] = []
        for index in map(names.index, axes):
            parts = math.prod(mesh.size(other) for other in before if other > index)
            placed[index] = strided_shard(dim, parts) if parts > 1 else Shard(dim)
            before.append(index)
    return tuple(placed)


def joined_axes(plans: Iterable[ModulePlan], names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the sets of axes that shard one dim together, each in the order of `names`."""
    tensors = (
        dims
        for plan in plans
        for dims in (
            *plan.params.values(),
            plan.inputs,
            plan.out,
            *plan.each_input.values(),
            *plan.each_out.values(),
        )
        if dims
    )
    joined = {frozenset(dim) for dims in tensors for dim in dims if isinstance(dim, list)}
    return sorted(tuple(sorted(axes, key=names.index)) for axes in joined if len(axes) > 1)


def packed(placed: Sequence[Placement], parts: int) -> tuple[Placement, ...]:
    """Return `placed` for a tensor whose sharded dim holds `parts` equal tensors, one by one.

    A rank then has its shard of each of them, such as its heads of query, key and value.
    """
    if parts == 1:
        return tuple(placed)
    return tuple(strided_shard(p.dim, parts) if isinstance(p, Shard) else p for p in placed)


def packed_axis(placed: Sequence[Placement]) -> int | None:
    """Return the mesh axis of `packed` in `placed`; None if nothing is packed.

    Where a later axis shards the same dim, a strided shard stands for the order of the axes.
    """
    for axis, placement in enumerate(placed):
        if (parts_before(placement) or 1) > 1:
            dim = getattr(placement, "dim", None)
            later = placed[axis + 1 :]
            if not any(parts_before(p) and getattr(p, "dim", None) == dim for p in later):
                return axis
    return None


def on_mesh(
    part: Tensor,
    mesh: DeviceMesh,
    placed: Sequence[Placement],
    late: LateSums | None = None,
) -> DTensor:
    """Return the DTensor whose part on this rank is `part`; gradients of gradients are right, too.

    `DTensor.from_local` drops gradients of gradients where the first gradient is partial, without
    an error if others flow.

    Args:
        part: This rank's part, of the size that the placements give.
        mesh: Mesh of the tensor.
        placed: Placements, of dims that count from 0; none is partial.
        late: Takes summands of the gradient of a parameter; None has them added up at once.
    """
    late = late if late is not None and late.takes(part) else None
    # Other copies compute in backward, too, while the gradient is on its way.
    is_async = turns.is_in_copy()
    found: DTensor = _OnMesh.apply(part, mesh, tuple(placed), is_async, late)  # type: ignore[no-untyped-call]
    return found


def part_of(tensor: DTensor, gradient: Sequence[Placement] | None = None) -> Tensor:
    """Return this rank's part of `tensor`, as `to_local` does, in less time.

    Args:
        tensor: The tensor.
        gradient: Placements of the gradient of the part, if they are not those of `tensor`.
    """
    if not torch.is_grad_enabled():
        return torch_compat.local_tensor(tensor)
    if gradient is None:
        gradient = [Replicate() if p.is_partial() else p for p in tensor.placements]
    placed = tuple(gradient)
    found: Tensor = _PartOf.apply(tensor, placed)  # type: ignore[no-untyped-call]
    return found


class Like(NamedTuple):
    """What the gradient of a tensor has of it: mesh, shape, placements and stride."""

    mesh: DeviceMesh
    shape: torch.Size
    cut: tuple[Placement, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> Like:
        """Return that of `tensor`."""
        return cls(tensor.device_mesh, tensor.shape, tensor.placements, tensor.stride())


def gradient_of(part: Tensor, placed: tuple[Placement, ...], like: Like) -> DTensor:
    """Return the gradient of a tensor, of which this rank has `part`; for backward.

    Args:
        part: Of the gradient.
        placed: Placements of the gradient, of dims that count from 0.
        like: The tensor.
    """
    if not torch.is_grad_enabled():
        return _SPECS.tensor(part, like.mesh, placed, (like.shape, like.cut))
    return DTensor.from_local(  # it is to be differentiated again
        part, like.mesh, placed, run_check=False, shape=like.shape, stride=like.stride
    )


def placed_on(part: Tensor, mesh: DeviceMesh, placed: tuple[Placement, ...]) -> DTensor:
    """Return the DTensor of `part`, as `on_mesh` does; for forward of an autograd function."""
    return _SPECS.tensor(part, mesh, placed)


def part_in(gradient: DTensor, placed: tuple[Placement, ...]) -> Tensor:
    """Return this rank's part of `gradient` in the placements `placed`; for backward."""
    if gradient.placements != placed:
        gradient = gradient.redistribute(placements=placed)
    return part_of(gradient)


def gathered(x: DTensor, wanted: tuple[Placement, ...], axis: int) -> DTensor:
    """Return `x` in the placements `wanted`, as `redistribute` does, in less time.

    Args:
        x: The tensor, whose part on this rank is there.
        wanted: Its placements without that of `axis`, for which `gathered_axis` is true.
        axis: Index in the mesh.
    """
    found: DTensor = _Gathered.apply(x, wanted, axis)  # type: ignore[no-untyped-call]
    return found


def gathered_axis(
    placed: Sequence[Placement], wanted: Sequence[Placement], mesh: DeviceMesh, shape: torch.Size
) -> int | None:
    """Return the one mesh axis whose parts are joined between `placed` and `wanted`, if any.

    Ranks then have one part of a dim after the other, in their order on this axis.
    """
    changed = [axis for axis, old in enumerate(placed) if old != wanted[axis]]
    try:
        before, after = (dims_of(each, mesh, len(shape)) for each in (placed, wanted))
    except ConfigError:
        return None
    names = mesh.mesh_dim_names or ()
    pairs = enumerate(zip(map(_axes, before), map(_axes, after), strict=True))
    dims = [(dim, old, new) for dim, (old, new) in pairs if old != new]
    if len(changed) != 1 or len(dims) != 1:
        return None
    dim, old, new = dims[0]
    parts = math.prod(mesh.size(names.index(axis)) for axis in old)
    is_last = old == (*new, names[changed[0]])
    return changed[0] if is_last and shape[dim] % parts == 0 else None


class Layouts:
    """Numbers of placements: their hash takes longer than what it is for, and tensors share them.

    Equal ones have one number.
    """

    # A program may make any number of objects.
    _COUNT_MAX = 1000

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[Placement, ...], int]] = {}
        self._numbers: dict[tuple[Placement, ...], int] = {}

    def number(self, placed: tuple[Placement, ...]) -> int:
        """Return the number of `placed`."""
        known = self._known.get(id(placed))
        if known is not None and known[0] is placed:
            return known[1]
        if len(self._known) == self._COUNT_MAX:
            self._known.clear()
        number = self._numbers.setdefault(placed, len(self._numbers))
        self._known[id(placed)] = placed, number
        return number


_LAYOUTS = Layouts()


class Gathers:
    """Over which axis tensors are gathered for one placement, worked out once for each of them."""

    # A program may have any number of shapes.
    _COUNT_MAX = 100

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.Size], int | None] = {}

    def axis(self, x: DTensor, wanted: tuple[Placement, ...]) -> int | None:
        """Return the `gathered_axis` of `x`; `wanted` is the same for each shape."""
        key = _LAYOUTS.number(x.placements), x.shape
        if key not in self._known:
            if len(self._known) == self._COUNT_MAX:
                self._known.clear()
            self._known[key] = gathered_axis(x.placements, wanted, x.device_mesh, x.shape)
        return self._known[key]


def _axes(dim: Dim) -> tuple[str, ...]:
    return (dim,) if isinstance(dim, str) else tuple(dim or ())


class _OnMesh(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd takes no names
        ctx: Any,
        part: Tensor,
        mesh: DeviceMesh,
        placed: tuple[Placement, ...],
        is_async: bool,  # noqa: FBT001
        late: LateSums | None,
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.placed, ctx.is_async = placed, is_async
        ctx.late, ctx.keep = late, late and partial(late.keep, cast("Parameter", part))
        return _SPECS.tensor(part.view_as(part), mesh, placed)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, ...]:
        part = None if gradient is None else _OnMesh._part(ctx, gradient)
        if ctx.late is not None:
            ctx.late.passed()
        return part, None, None, None, None

    @staticmethod
    def _part(ctx: Any, gradient: DTensor) -> Tensor | None:
        """Return the gradient of the part; None if it waits for the end of the step."""
        if gradient.placements == ctx.placed:
            return part_of(gradient)
        axis = None if ctx.is_async else _summed_axis(gradient, ctx.placed)
        if axis is not None:
            summand = torch_compat.local_tensor(gradient)
            group = gradient.device_mesh.get_group(axis)
            if ctx.keep and ctx.keep(summand, group):
                return None
            return all_reduce(summand, group)
        return part_of(gradient.redistribute(placements=ctx.placed, async_op=ctx.is_async))


def _summed_axis(gradient: DTensor, wanted: tuple[Placement, ...]) -> int | None:
    """Return the one mesh axis over which `gradient` is added up for `wanted`, if that is all."""
    pairs = enumerate(zip(gradient.placements, wanted, strict=True))
    changed = [(axis, old, new) for axis, (old, new) in pairs if old != new]
    if len(changed) != 1 or torch.is_grad_enabled():  # then it is to be differentiated again
        return None
    axis, old, new = changed[0]
    is_sum = old == Partial() and new.is_replicate() and not torch_compat.is_pending(gradient)
    return axis if is_sum else None


class _PartOf(Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, placed: tuple[Placement, ...]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.placed, ctx.like = placed, Like.of(tensor)
        local = torch_compat.local_tensor(tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None
        return gradient_of(gradient, ctx.placed, ctx.like), None


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, wanted: tuple[Placement, ...], axis: int) -> DTensor:
        mesh = x.device_mesh
        ctx.set_materialize_grads(False)
        ctx.placed, ctx.axis, ctx.group = x.placements, axis, mesh.get_group(axis)
        ctx.dim = x.placements[axis].dim  # type: ignore[attr-defined]
        # Its ranks each have the gradient by what they computed.
        ctx.summands = (*wanted[:axis], Partial(), *wanted[axis + 1 :])
        part = all_gather(torch_compat.local_tensor(x), ctx.group, ctx.dim)
        return _SPECS.tensor(part, mesh, wanted)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None
        if torch.is_grad_enabled() or gradient.placements != ctx.summands:
            return gradient.redistribute(placements=ctx.placed), None, None
        part = reduce_scatter(torch_compat.local_tensor(gradient), ctx.group, ctx.dim)
        return _SPECS.tensor(part, gradient.device_mesh, ctx.placed), None, None


class Placed:
    """An input in the layout that modules want, valid until somebody writes it."""

    def __init__(self, x: Tensor, place: WantedPlacement) -> None:
        self.result = place.put(x)
        self._x, self._place, self._source = x, place, x.grad_fn
        self._versions = self._count(x)

    def is_right(self, x: Tensor, place: WantedPlacement) -> bool:
        """Return whether the result is `x` at `place`, and up to date."""
        return (
            x is self._x
            and place.is_like(self._place, x)
            and self._count(x) == self._versions
            # `requires_grad_` or `detach_` since then would send gradients elsewhere.
            and x.requires_grad == self.result.requires_grad
            and x.grad_fn is self._source
        )

    def _count(self, x: Tensor) -> tuple[int, int]:
        return torch_compat.write_count(x), torch_compat.write_count(self.result)


class WantedPlacement:
    """The placement that a plan wants for one tensor.

    Args:
        dims: Axes of each dim; None accepts every placement.
        mesh: Mesh that the tensor is on.
        where: Name of the tensor, for messages.
        parts: Equal tensors that follow each other in the sharded dim.
    """

    def __init__(self, dims: Dims | None, mesh: DeviceMesh, where: str, *, parts: int = 1) -> None:
        self._dims, self._mesh, self._where, self._parts = dims, mesh, where, parts
        self._replicated = (Replicate(),) * mesh.ndim
        self._placements: dict[torch.Size, tuple[Placement, ...]] = {}
        self._gathers = Gathers()

    def put(self, x: Tensor, *, is_async: bool = False) -> DTensor:
        """Return `x` in this placement; a plain tensor counts as replicated.

        With `is_async`, what is sent may still be on its way.
        """
        placed = x
        if not isinstance(placed, DTensor):
            placed = on_mesh(x, self._mesh, self._replicated)
        if self._dims is None:
            return placed
        wanted = self.of(x.shape)
        if placed.placements == wanted:
            return placed
        has_turns = turns.is_in_copy()
        if not (is_async or has_turns or torch_compat.is_pending(placed)):
            axis = self._gathers.axis(placed, wanted)
            if axis is not None:
                return gathered(placed, wanted, axis)
        result = placed.redistribute(self._mesh, wanted, async_op=is_async or has_turns)
        if has_turns and torch_compat.is_pending(result):
            turns.begun()
            # Here, as a recomputation does that keeps what was sent, and not where it is read.
            torch_compat.wait(result)
        return result

    def is_to_change(self, x: Tensor) -> bool:
        """Return whether the gradient of `x` in this placement is added up or moved."""
        if not isinstance(x, DTensor):
            return True
        return self._dims is not None and x.placements != self.of(x.shape)

    def is_same(self, other: WantedPlacement) -> bool:
        """Return whether `self` and `other` want the same placement of each tensor."""
        return (self._dims, self._mesh, self._parts) == (other._dims, other._mesh, other._parts)

    def is_like(self, other: WantedPlacement, x: Tensor) -> bool:
        """Return whether `self` and `other` want the same placement of `x`."""
        if self._dims is None or other._dims is None:
            return self._dims is other._dims
        return self.of(x.shape) == other.of(x.shape)

    def of(self, shape: torch.Size) -> tuple[Placement, ...]:
        """Return the placements of a tensor of `shape`."""
        if shape not in self._placements:
            if len(self._placements) == _SHAPES_MAX:
                self._placements.clear()
            self._placements[shape] = self._find(shape)
        return self._placements[shape]

    def _find(self, shape: torch.Size) -> tuple[Placement, ...]:
        """Return the placements of a tensor of `shape`.

        Raises:
            ModelError: They do not divide it evenly.
        """
        try:
            wanted = placements(self._dims or [], self._mesh, len(shape))
        except UsageError as error:
            raise ModelError(f"{self._where}: {error.message}") from None
        for dim, size in enumerate(shape):
            cuts = (i for i, placement in enumerate(wanted) if placement.is_shard(dim))
            parts = math.prod(map(self._mesh.size, cuts))
            if size % parts:
                raise ModelError(
                    f"{self._where}: dim {dim} of {size} can not be split in {parts} parts"
                )
        return packed(wanted, self._parts)


def dims_of(placed: Sequence[Placement], mesh: DeviceMesh, ndim: int) -> list[Dim]:
    """Return the axis names of each of `ndim` dims: the inverse of `placements`.

    Raises:
        ConfigError: Axis names cannot express it: a placement is partial, or a strided shard fits
            no order of the axes.
    """
    names = mesh.mesh_dim_names or ()
    orders: list[list[int]] = [[] for _ in range(ndim)]
    # From the last axis on: a strided shard counts only parts of later axes.
    for index in reversed(range(mesh.ndim)):
        placement = placed[index]
        if placement.is_replicate():
            continue
        parts = parts_before(placement)
        if parts is None:
            raise ConfigError(f"{placement} over axis {names[index]} has no axis names")
        order = orders[getattr(placement, "dim", 0) % ndim]
        order.insert(_position(order, parts, mesh, placement), index)
    return [dim_of(tuple(names[index] for index in order)) for order in orders]


def _position(order: list[int], parts: int, mesh: DeviceMesh, placement: Placement) -> int:
    """Return the position in `order` before which the axes make `parts` parts."""
    for position in range(len(order) + 1):
        if math.prod(mesh.size(index) for index in order[:position]) == parts:
            return position
    raise ConfigError(f"{placement}: no order of the axes after it makes {parts} parts")
