"""The device mesh by arithmetic: axis sizes, and from them coordinates, groups and parts.

Positions on the mesh are numbered in row-major order over the axes: the first axis varies slowest,
the last one fastest, as in `torch.distributed.device_mesh`.  With sizes (s0, s1, ..., sk) the
coordinate (c0, ..., ck) is position ((c0 s1 + c1) s2 + ...) sk + ck, and a step along axis i
changes it by the product of the sizes after it, its stride.  Rank r has position r, so the ranks of
the last axis are neighbours and usually share a node, unless `ranks` names the rank of each.

A tensor dim may be sharded over several axes, the most significant first: over [a, b] the index of
a rank's part is index(a) * size(b) + index(b).  torch lists placements by mesh axis instead;
`tensor.placements` translates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

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
        ranks: The rank at each position; empty if every rank has its own number as position.
    """

    axes: dict[str, int]
    ep: int = 0
    images: tuple[str, ...] = ()
    tokens: str = ""
    ranks: tuple[int, ...] = ()

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

    def rank_at(self, position: int) -> int:
        """Return the rank at `position`."""
        return self.ranks[position] if self.ranks else position

    def position(self, rank: int) -> int:
        """Return the position of `rank`."""
        return self.ranks.index(rank) if self.ranks else rank

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return axis name -> index of `rank` on it."""
        left, indices = self.position(rank), dict[str, int]()
        for name, size in reversed(self.axes.items()):
            left, indices[name] = divmod(left, size)
        return {name: indices[name] for name in self.axes}

    def stream(self, rank: int) -> int:
        """Return the number of the random stream of `rank`, from 0.

        Ranks with the same samples and the same layers share a stream.
        """
        place = self.coordinate(rank)
        return place.get(DATA_AXIS, 0) + self.size(DATA_AXIS) * place.get(PIPELINE_AXIS, 0)

    def along(self, axes: Collection[str], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only on `axes`, in the order of positions."""
        own = self.position(rank)
        positions = [0]
        for axis, index in self.coordinate(rank).items():
            stride = self._stride(axis)
            own -= index * stride if axis in axes else 0
            steps = range(self.axes[axis] if axis in axes else 1)
            positions = [found + step * stride for found in positions for step in steps]
        return tuple(self.rank_at(own + found) for found in positions)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only in `axis`, `rank` included."""
        return self.along((axis,), rank)

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Yield each group of `axis` once, in the order of the positions of their first ranks."""
        if axis == EXPERT_AXIS and self.ep:
            # The groups of `dp` interleave where other axes follow it.
            whole = self.as_data((self.tokens,)).groups(DATA_AXIS)
            cuts = [g[i : i + self.ep] for g in whole for i in range(0, len(g), self.ep)]
            yield from sorted(cuts, key=lambda ranks: self.position(ranks[0]))
            return
        stride = self._stride(axis)
        for position in range(self.world_size):
            if position // stride % self.axes[axis] == 0:
                yield self.group(axis, self.rank_at(position))

    def as_data(self, inside: Sequence[str]) -> MeshLayout:
        """Return the mesh on which `dp` has the ranks of the axes `inside` too, which follow it."""
        axes: dict[str, int] = {}
        for name, size in self.axes.items():
            key = DATA_AXIS if name in inside else name
            axes[key] = axes.get(key, 1) * size
        return MeshLayout(axes, self.ep, ranks=self.ranks)

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
