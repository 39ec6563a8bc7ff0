"""Functions that select, split and join, run on each rank's shard where no sharded dim takes part.

torch gathers for some of them, and knows no form for a tensor that packs several in one dim, such
as query, key and value of a fused projection.  Each function returns None where shards alone do
not do; the guard then computes it whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from msrun.parallel.tensor.placements import (
    Like,
    gradient_of,
    on_mesh,
    part_in,
    part_of,
    placed_on,
)
from msrun.parallel.torch_compat import parts_before, strided_shard

ShardFunction = Callable[..., Any]
# Shape of a part, and placements.
_View = tuple[tuple[int, ...], tuple[Placement, ...]]
# Divisions that are remembered: a program may have any number of shapes.
_DIVISIONS_MAX = 2000


class _DividedShape(NamedTuple):
    """How ranks divide a tensor, of which functions remember what they find.

    A model has few of them, and calls its functions in each step.

    Args:
        shape: Of the tensor.
        placements: Of the tensor.
        mesh: Of the tensor.
    """

    shape: torch.Size
    placements: tuple[Placement, ...]
    mesh: DeviceMesh

    @property
    def dims(self) -> set[int]:
        """The dims that mesh axes shard."""
        return {_dim(p) % len(self.shape) for p in self.placements if parts_before(p) is not None}

    def ranks(self, dim: int) -> int:
        """Return how many ranks share `dim`."""
        on_dim = (i for i, p in enumerate(self.placements) if parts_before(p) and _dim(p) == dim)
        return math.prod(self.mesh.size(i) for i in on_dim)

    def packed_parts(self, dim: int) -> int:
        """Return how many tensors `dim` packs; 1 too where several axes shard it."""
        found = [
            parts_before(p) or 1 for p in self.placements if parts_before(p) and _dim(p) == dim
        ]
        return found[0] if len(found) == 1 else 1


def _division_of(x: DTensor) -> _DividedShape:
    return _DividedShape(x.shape, x.placements, x.device_mesh)


def _index(x: DTensor, key: Any) -> Any:
    """Return `x[key]`; numbers, slices and a list may select of dims that are not sharded."""
    entries = list(key) if isinstance(key, tuple) else [key]
    if not all(map(_selects, entries)) or sum(isinstance(entry, list) for entry in entries) > 1:
        return None  # torch joins what several lists select into one dim
    if Ellipsis not in entries:
        entries.append(Ellipsis)
    at = entries.index(Ellipsis)
    taken = sum(entry is not None for entry in entries) - 1
    entries[at : at + 1] = [slice(None)] * (x.dim() - taken)
    moved: dict[int, int] = {}
    dim = new_dim = 0
    sharded = sharded_dims(x)
    for entry in entries:
        if entry is None:
            new_dim += 1
            continue
        if entry != slice(None) and dim in sharded:
            return None
        if not isinstance(entry, int):
            moved[dim] = new_dim
            new_dim += 1
        dim += 1
    return wrapped(x, part_of(x)[tuple(entries)], moved)


def _selects(entry: Any) -> bool:
    """Return whether `_index` knows what `entry` of a key selects."""
    if isinstance(entry, list):
        return bool(entry) and all(type(item) is int for item in entry)
    return not isinstance(entry, bool) and isinstance(entry, int | slice | EllipsisType | None)


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    if not all(isinstance(x, DTensor) for x in tensors):
        return None
    # torch leaves out an empty tensor of one dim: a cache of keys begins as one.
    filled = [x for x in tensors if x.shape != (0,)]
    if not filled:
        return None
    like = next((x for x in filled if sharded_dims(x)), filled[0])
    if any(x.dim() != like.dim() for x in filled) or dim % like.dim() in sharded_dims(like):
        return None
    placed = [x if sharded_dims(x) else x.redistribute(placements=like.placements) for x in filled]
    if any(x.placements != like.placements for x in placed):
        return None
    return wrapped(like, torch.cat([part_of(x) for x in placed], dim))


def _split(x: DTensor, split_size: Any, dim: int = 0) -> Any:
    dim %= x.dim()
    if dim not in sharded_dims(x):
        return tuple(wrapped(x, part) for part in part_of(x).split(split_size, dim))
    parts = _packed_parts(x, dim)
    sizes = split_size if isinstance(split_size, (list, tuple)) else [split_size] * parts
    if parts == 1 or len(sizes) != parts or any(size * parts != x.shape[dim] for size in sizes):
        return None
    return tuple(_unpacked(x, part, dim) for part in part_of(x).chunk(parts, dim))


def _chunk(x: DTensor, chunks: int, dim: int = 0) -> Any:
    dim %= x.dim()
    if dim not in sharded_dims(x):
        return tuple(wrapped(x, part) for part in part_of(x).chunk(chunks, dim))
    if _packed_parts(x, dim) != chunks or chunks == 1:
        return None
    return tuple(_unpacked(x, part, dim) for part in part_of(x).chunk(chunks, dim))


def _unbind(x: DTensor, dim: int = 0) -> Any:
    dim %= x.dim()
    if dim in sharded_dims(x):
        return None
    moved = {other: other - (other > dim) for other in range(x.dim()) if other != dim}
    return tuple(wrapped(x, part, moved) for part in part_of(x).unbind(dim))


def _view(x: DTensor, *sizes: Any) -> Any:
    """Return `x` in another shape, if that is a view of each part."""
    shape = _shape(x, sizes)
    viewed_as = None if shape is None else _view_of(_division_of(x), tuple(shape))
    if viewed_as is None:
        return None
    found: DTensor = _Viewed.apply(x, *viewed_as)  # type: ignore[no-untyped-call]
    return found


class _Viewed(Function):
    """Views this rank's part: in one function, in less time than by those that know the mesh."""

    @staticmethod
    def forward(
        ctx: Any, x: DTensor, shape: tuple[int, ...], placed: tuple[Placement, ...]
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        part = part_of(x)
        ctx.like, ctx.shape, ctx.placed = Like.of(x), part.shape, placed
        return placed_on(part.reshape(shape), x.device_mesh, placed)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None
        part = part_in(gradient, ctx.placed).reshape(ctx.shape)
        return gradient_of(part, ctx.like.cut, ctx.like), None, None


@functools.lru_cache(_DIVISIONS_MAX)
def _view_of(division: _DividedShape, shape: tuple[int, ...]) -> _View | None:
    """Return the shape of a part, and placements, of a tensor in another shape.

    The last dim of one that packs several tensors there may stay, or become two or more, of which
    the first counts the tensors.
    """
    dim = len(division.shape) - 1
    parts, ranks = division.packed_parts(dim), division.ranks(dim)
    if parts == 1:
        return _view_of_parts(division, shape)
    if division.dims != {dim}:
        return None
    head, width = division.shape[:dim].numel(), division.shape[dim]
    # Several, if dims of one element stand before.
    for at in [i for i in range(len(shape)) if math.prod(shape[:i]) == head]:
        local, rest = list(shape), shape[at:]
        if rest == (width,):
            local[at] //= ranks
            new_dim: Placement = strided_shard(at, parts)
        elif len(rest) > 1 and rest[0] == parts and rest[1] % ranks == 0:
            local[at + 1] //= ranks
            new_dim = Shard(at + 1)
        else:
            continue
        placed = [p if parts_before(p) is None else new_dim for p in division.placements]
        return tuple(local), tuple(placed)
    return None


def _view_of_parts(division: _DividedShape, shape: tuple[int, ...]) -> _View | None:
    """Return `_view_of` where a sharded dim stays, or is cut or joined in its parts.

    Dims are matched from the first on: those of the tensor whose product is that of some of
    `shape`.  A sharded one of the tensor must come first among its own, and the dim that takes its
    place must divide.  Of one that packs several tensors, such as the heads of each sample, dims
    that count them come before it.
    """
    local, placed = list(shape), list(division.placements)
    for dim in sorted(division.dims):
        before, ranks = division.shape[:dim].numel(), division.ranks(dim)
        packs = division.packed_parts(dim)
        at = [i for i in range(len(shape)) if math.prod(shape[:i]) == before and shape[i] > 1]
        if len(at) != 1:
            return None
        place, left = at[0], packs
        while left > 1 and left % shape[place] == 0 and place + 1 < len(shape):
            left //= shape[place]
            place += 1
        if shape[place] % (left * ranks):
            return None
        local[place] //= ranks
        for axis, placement in enumerate(division.placements):
            parts = parts_before(placement)
            if parts is not None and _dim(placement) % len(division.shape) == dim:
                parts = parts if packs == 1 else left
                placed[axis] = strided_shard(place, parts) if parts > 1 else Shard(place)
    return tuple(local), tuple(placed)


def _unflatten(x: DTensor, dim: Any, sizes: Any) -> Any:
    if not isinstance(dim, int):
        return None
    dim %= x.dim()
    return _view(x, [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


def _shape(x: DTensor, sizes: tuple[Any, ...]) -> list[int] | None:
    """Return the shape that a call of `view` asks for; None if it does not fit."""
    shape = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else [*sizes]
    if not all(isinstance(size, int) for size in shape):
        return None
    if -1 in shape:
        rest = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = x.numel() // rest if rest else 0
    return shape if math.prod(shape) == x.numel() else None


FUNCTIONS: dict[ShardFunction, ShardFunction] = {
    Tensor.__getitem__: _index,
    torch.cat: _cat,
    torch.concat: _cat,
    Tensor.split: _split,
    torch.split: _split,
    Tensor.chunk: _chunk,
    torch.chunk: _chunk,
    Tensor.unbind: _unbind,
    torch.unbind: _unbind,
}
# Of these torch has a form of its own, which is taken unless a dim packs several tensors.
VIEWS: dict[ShardFunction, ShardFunction] = {
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.unflatten: _unflatten,
    torch.unflatten: _unflatten,
}


def is_packed(x: DTensor) -> bool:
    """Return whether a dim of `x` packs several tensors, of each of which ranks have a shard."""
    return any(_is_packed(placement) for placement in x.placements)


def is_even(x: DTensor) -> bool:
    """Return whether ranks hold shards of `x` of equal size, and no summands."""
    return _is_even(_division_of(x))


@functools.lru_cache(_DIVISIONS_MAX)
def _is_even(division: _DividedShape) -> bool:
    if any(placement.is_partial() for placement in division.placements):
        return False
    parts = {dim: division.ranks(dim) * division.packed_parts(dim) for dim in division.dims}
    return all(division.shape[dim] % count == 0 for dim, count in parts.items())


def _is_packed(placement: Placement) -> bool:
    return (parts_before(placement) or 1) > 1


def viewed(x: DTensor) -> DTensor:
    """Return `x`, a view, with a gradient that torch can view back.

    It decides by the strides of the whole gradient, and those of the part on a rank may be others.
    """
    if x.requires_grad and isinstance(x, DTensor):
        x.register_hook(_contiguous)
    return x


def _contiguous(gradient: DTensor) -> DTensor | None:
    if torch.is_grad_enabled():  # it is to be differentiated again
        return None
    part = gradient.to_local()
    if part.is_contiguous() and gradient.is_contiguous():
        return None
    whole = torch.empty(gradient.shape, dtype=part.dtype, device="meta")
    return DTensor.from_local(
        part.contiguous(),
        gradient.device_mesh,
        gradient.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _dim(placement: Placement) -> int:
    return int(placement.dim)  # type: ignore[attr-defined]


def sharded_dims(x: DTensor) -> set[int]:
    """Return the dims of `x` that mesh axes shard."""
    return _division_of(x).dims


def _packed_parts(x: DTensor, dim: int) -> int:
    """Return how many tensors `dim` packs; 1 too where several axes shard it."""
    return _division_of(x).packed_parts(dim)


def wrapped(x: DTensor, local: Tensor, moved: dict[int, int] | None = None) -> DTensor:
    """Return `local` as a tensor placed as `x`, after its dims have moved."""
    placed = list(x.placements)
    for axis, placement in enumerate(placed):
        parts = parts_before(placement)
        if parts is not None and moved is not None:
            dim = moved[_dim(placement) % x.dim()]
            placed[axis] = strided_shard(dim, parts) if parts > 1 else Shard(dim)
    return on_mesh(local, x.device_mesh, placed)


def _unpacked(x: DTensor, local: Tensor, dim: int) -> DTensor:
    placed = [Shard(dim) if _is_packed(p) and _dim(p) == dim else p for p in x.placements]
    return on_mesh(local, x.device_mesh, placed)
