"""The device mesh by arithmetic: axis sizes, and from them coordinates, groups and parts.

Ranks are numbered in row-major order over the axes: the first axis varies slowest, the last one
fastest, as in `torch.distributed.device_mesh`.  So the ranks of the last axis are neighbours, and
usually share a node.  With sizes (s0, s1, ..., sk) the rank at coordinate (c0, ..., ck) is
((c0 s1 + c1) s2 + ...) sk + ck, and a step along axis i changes the rank by the product of the
sizes after it, its stride.

A tensor dim may be sharded over several axes, the most significant first: over [a, b] the index of
a rank's part is index(a) * size(b) + index(b).  torch lists placements by mesh axis instead;
`tensor.placements` translates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from msrun.errors import ConfigError
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS
from msrun.parallel.notation.dims import axes_of_dims, shown_dims
from msrun.parallel.settings.plan_rules import Dim

# Axis of experts, whose ranks are ranks of `dp` too.
EXPERT_AXIS = "ep"


class MeshLayout(msgspec.Struct, frozen=True):
    """Named axes over the ranks 0 to `world_size` - 1.

    Args:
        axes: Axis name -> size, the slowest-varying first.
        ep: Ranks that share the experts of a module, a divisor of `dp`; 0 without such an axis.
        images: Axes that divide images.
        tokens: Axis that divides sequences; empty without.
    """

    axes: dict[str, int]
    ep: int = 0
    images: tuple[str, ...] = ()
    tokens: str = ""

    @property
    def world_size(self) -> int:
        """Ranks in the mesh."""
        return math.prod(self.axes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size of all axes that have groups; ranks of `ep` are ranks of `dp`, too."""
        return self.axes | ({EXPERT_AXIS: self.ep} if self.ep else {})

    def size(self, axis: str) -> int:
        """Return the size of `axis`; 1 if the mesh has no axis of that name."""
        return self.sizes.get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return axis name -> index of `rank` on it."""
        indices: dict[str, int] = {}
        for name, size in reversed(self.axes.items()):
            rank, indices[name] = divmod(rank, size)
        return {name: indices[name] for name in self.axes}

    def stream(self, rank: int) -> int:
        """Return the number of the random stream of `rank`, from 0.

        Ranks with the same samples and the same layers share a stream.
        """
        place = self.coordinate(rank)
        return place.get(DATA_AXIS, 0) + self.size(DATA_AXIS) * place.get(PIPELINE_AXIS, 0)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only in `axis`, `rank` included."""
        stride = self._stride(axis)
        first = rank - self.coordinate(rank)[axis] * stride
        return tuple(first + i * stride for i in range(self.axes[axis]))

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Yield each group of `axis` once, in the order of their first ranks."""
        if axis == EXPERT_AXIS and self.ep:
            # By rank, as below: the groups of `dp` interleave where other axes follow it.
            whole = self.as_data((self.tokens,)).groups(DATA_AXIS)
            cuts = [g[i : i + self.ep] for g in whole for i in range(0, len(g), self.ep)]
            yield from sorted(cuts)
            return
        stride = self._stride(axis)
        for rank in range(self.world_size):
            if rank // stride % self.axes[axis] == 0:
                yield self.group(axis, rank)

    def as_data(self, inside: Sequence[str]) -> MeshLayout:
        """Return the mesh on which `dp` has the ranks of the axes `inside` too, which follow it."""
        axes: dict[str, int] = {}
        for name, size in self.axes.items():
            key = DATA_AXIS if name in inside else name
            axes[key] = axes.get(key, 1) * size
        return MeshLayout(axes, self.ep)

    def _stride(self, axis: str) -> int:
        names = list(self.axes)
        return math.prod(self.axes[name] for name in names[names.index(axis) + 1 :])


def local_slices(
    shape: Sequence[int], dims: Sequence[Dim], layout: MeshLayout, rank: int
) -> tuple[slice, ...]:
    """Return the part of a tensor of `shape` that `rank` holds, one slice for each dim.

    Example: (2, 8) sharded as ["mp", ["sp", "dp"]] on dp 2, sp 2, mp 2: rank 4 holds row 0 and
    columns 2 and 3.

    Raises:
        ConfigError: The dims do not fit the tensor or the mesh, or a dim does not divide evenly.
    """
    coordinate = layout.coordinate(rank)
    slices: list[slice] = []
    for dim, axes in enumerate(axes_of_dims(dims, len(shape), tuple(layout.axes))):
        parts = math.prod(layout.size(axis) for axis in axes)
        if shape[dim] % parts:
            raise ConfigError(
                f"{shown_dims(dims)}: dim {dim} of size {shape[dim]} can not be split into {parts}"
            )
        index = 0
        for axis in axes:
            index = index * layout.size(axis) + coordinate[axis]
        length = shape[dim] // parts
        slices.append(slice(index * length, (index + 1) * length))
    return tuple(slices)
