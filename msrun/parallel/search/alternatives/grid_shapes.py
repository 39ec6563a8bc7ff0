"""Grids that a mesh may have, and the collectives of a product on one: arithmetic alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msrun.parallel.config import DATA_AXIS
from msrun.parallel.search.alternatives.one_rank import Transfer
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.mesh.job_layout import divisors
from msrun.parallel.settings.grids import GRID_AXES


class Grid(NamedTuple):
    """Axes that share products, in the order of the first rule.

    Args:
        style: `2d`, `2.5d` or `3d`.
        sizes: Axis -> size.
    """

    style: str
    sizes: dict[str, int]

    def axes(self, turn: int) -> list[str]:
        """Return the axes of a product whose input has this turn."""
        names = [*self.sizes]
        at = 1 if self.style == "2.5d" else 0
        if turn:
            names[at], names[at + 1] = names[at + 1], names[at]
        return names

    def column_axes(self, turn: int) -> list[str]:
        """Return the axes that shard the columns of a tensor."""
        return self.axes(turn)[:1] if self.style == "3d" else self.axes(0)[-2:]

    @property
    def ranks(self) -> int:
        """Of the grid."""
        return math.prod(self.sizes.values())

    def columns(self, turn: int) -> int:
        """Return into how many parts the columns of a tensor are cut."""
        return math.prod(self.sizes[axis] for axis in self.column_axes(turn))

    def rows(self, turn: int) -> int:
        """Return into how many parts the samples of a tensor are cut."""
        return self.ranks // self.columns(turn)


def product_transfers(
    grid: Grid, turn: int, rows: float, widths: tuple[int, int]
) -> tuple[Transfer, Transfer, Transfer | None]:
    """Return the collectives of a product in forward, of elements; backward mirrors them.

    A rank receives (n - 1) / n of the elements of each, which adds up to the formula of the docs.

    Args:
        grid: The grid.
        turn: Of the input.
        rows: Of the input, over all ranks of the grid.
        widths: Columns of the input and of the output.

    Returns:
        The gather of the input, the scatter of the output, and the gather of the weight of `3d`.
    """
    axes, (width, out) = grid.axes(turn), widths
    if grid.style == "3d":
        x, y, z = axes
        a, b, c = (grid.sizes[axis] for axis in axes)
        return (
            Transfer(MoveKind.GATHER, y, rows * width / (a * c)),
            Transfer(MoveKind.SCATTER, x, rows * out / (b * c)),
            Transfer(MoveKind.GATHER, z, width * out / (a * b)),
        )
    x, y = axes[-2:]
    part = rows / (grid.sizes[axes[0]] if grid.style == "2.5d" else 1)
    return (
        Transfer(MoveKind.GATHER, y, part * width / grid.sizes[x]),
        Transfer(MoveKind.SCATTER, x, part * out / grid.sizes[y]),
        None,
    )


def grids(mesh: Mapping[str, int]) -> Iterator[Grid]:
    """Yield the grids over the axes of a mesh beside `dp`, in each order that may differ."""
    used = {name: size for name, size in mesh.items() if name != DATA_AXIS and size > 1}
    for style, count in GRID_AXES.items():
        if len(used) != count:
            continue
        for names in itertools.permutations(used):
            # Samples are sharded over the outermost axis of the grid.
            if style != "2.5d" or names[0] == next(iter(used)):
                yield Grid(style, {name: used[name] for name in names})


def meshes(world: int, batch: int) -> Iterator[dict[str, int]]:
    """Yield meshes of all ranks with two or three axes for a grid, behind `dp`."""
    for data in (size for size in divisors(world) if batch % size == 0):
        rest = world // data
        for first in divisors(rest)[1:]:
            for second in divisors(rest // first)[1:]:
                third = rest // first // second
                names = ("x", "y") if third == 1 else ("x", "y", "z")
                sizes = (first, second, third)[: len(names)]
                yield {DATA_AXIS: data, **dict(zip(names, sizes, strict=True))}
