"""MindSpore's `Layout`: tensors sharded over a device matrix that has axis names of its own.

A tensor layout lists the aliases of each dim, as ours lists axis names.  On a mesh an alias stands
for mesh axes by the rule of strategies: one after the other, as many as make its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from msrun.errors import ConfigError, UsageError
from msrun.parallel.config import Dims
from msrun.parallel.notation.dims import consecutive_axes, dim_of, shown_ranks
from msrun.units import quoted

WHOLE = "None"
INTERLEAVED = "interleaved_parallel"

Entry = str | Sequence[str] | None


class Layout(msgspec.Struct, frozen=True):
    """MindSpore's named device matrix; called with one entry for each dim of a tensor.

    Example: `Layout((2, 2, 2), ("dp", "sp", "mp"))("mp", ("sp", "dp"))`.

    Args:
        device_matrix: Size of each axis, the slowest-varying first.
        alias_name: Name of each axis.
        rank_list: Ranks in row-major order; None is 0, 1 and so on.
    """

    device_matrix: tuple[int, ...]
    alias_name: tuple[str, ...]
    rank_list: list[int] | None = None

    def __post_init__(self) -> None:
        _check_layout(self.device_matrix, self.alias_name, self.rank_list)

    def __call__(self, *entries: Entry) -> TensorLayout:
        """Return how a tensor is sharded.

        Args:
            entries: For each dim an alias, several with the most significant first, or "None".

        Raises:
            ConfigError: An alias is unknown, or stands there twice.
        """
        seen: set[str] = set()
        for alias in (alias for entry in entries for alias in _aliases(entry)):
            if alias not in self.alias_name:
                raise ConfigError(
                    f"alias {quoted(alias)} is not in alias_name ({', '.join(self.alias_name)})"
                )
            if alias in seen:
                raise ConfigError(f"alias {alias!r} cuts two dims, or one dim twice")
            seen.add(alias)
        return TensorLayout(self, entries)


class TensorLayout(msgspec.Struct, frozen=True):
    """A tensor sharded over a `Layout`; calling a `Layout` makes one.

    Args:
        layout: The device matrix.
        entries: Of each dim.
    """

    layout: Layout
    entries: tuple[Entry, ...]

    @property
    def dims(self) -> Dims:
        """Aliases of each dim in our notation."""
        return [dim_of(_aliases(entry)) for entry in self.entries]

    def on_mesh(self, axes: Mapping[str, int]) -> Dims:
        """Return the names of mesh axes instead of aliases.

        Args:
            axes: Mesh axis -> size, the slowest-varying first.

        Raises:
            ConfigError: The device matrix is neither that mesh nor that mesh with axes merged.
        """
        sizes = dict(zip(self.layout.alias_name, self.layout.device_matrix, strict=True))
        devices = math.prod(sizes.values())
        where = f"device_matrix {self.layout.device_matrix}"
        if devices != math.prod(axes.values()):
            raise ConfigError(
                f"{where} has {devices} devices, and {shown_ranks(axes)}",
                hint="leave out of it what divides the batch or the layers, as dp and pp do",
            )
        order = self.layout.rank_list or [0]
        if order != list(range(order[0], order[0] + len(order))):
            raise ConfigError(f"rank_list {order}: ranks of a mesh are in ascending order")
        try:
            axes_of = consecutive_axes(sizes, axes)
        except UsageError as error:
            raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None
        for alias, names in axes_of.items():
            if alias in axes and names != [alias] and sizes[alias] > 1:
                raise ConfigError(
                    f"{where}: alias {alias} stands for mesh axis {' and '.join(names)}"
                )
        return [dim_of([n for alias in _aliases(e) for n in axes_of[alias]]) for e in self.entries]

    def to_dict(self) -> dict[str, Any]:
        """Return what MindSpore's `Layout.to_dict` does: axes are counted from the last, 0."""
        ranks = range(math.prod(self.layout.device_matrix))
        return {
            "device_matrix": self.layout.device_matrix,
            "tensor_map": tuple(self._mapped(entry) for entry in self.entries),
            "interleaved_parallel": False,
            "alias_name": self.layout.alias_name,
            "rank_list": self.layout.rank_list or list(ranks),
        }

    def _mapped(self, entry: Entry) -> int | tuple[int, ...]:
        if entry is None or isinstance(entry, str):
            return self._index(entry)
        return tuple(self._index(alias) for alias in entry)

    def _index(self, alias: str | None) -> int:
        names = self.layout.alias_name
        return -1 if alias in (None, WHOLE) else len(names) - 1 - names.index(str(alias))


def _aliases(entry: Entry) -> list[str]:
    listed = [entry] if isinstance(entry, str) else entry or []
    return [alias for alias in listed if alias != WHOLE]


def _check_layout(matrix: object, names: object, ranks: object) -> None:
    """Refuse what MindSpore's `Layout` refuses."""
    if not isinstance(matrix, tuple):
        raise ConfigError(f"device_matrix {matrix!r} is no tuple")
    if not isinstance(names, tuple):
        raise ConfigError(f"alias_name {names!r} is no tuple")
    if len(matrix) != len(names):
        raise ConfigError(f"device_matrix has {len(matrix)} axes and alias_name {len(names)}")
    for size in matrix:
        if type(size) is not int or size < 1:
            raise ConfigError(f"device_matrix {matrix}: {size!r} is no number of devices")
    _check_names(names)
    if ranks is not None:
        _check_ranks(ranks, math.prod(matrix))


def _check_names(names: tuple[object, ...]) -> None:
    for name in names:
        if not isinstance(name, str) or name in ("", WHOLE):
            raise ConfigError(f"alias_name {names}: {name!r} is no name of an axis")
        if name == INTERLEAVED:
            raise ConfigError(f"alias_name: {INTERLEAVED} is not part of this version")
        if names.count(name) > 1:
            raise ConfigError(f"alias_name {names}: {name!r} stands there twice")


def _check_ranks(ranks: object, count: int) -> None:
    if not isinstance(ranks, list) or any(type(rank) is not int for rank in ranks):
        raise ConfigError(f"rank_list {ranks!r} is no list of ranks")
    if len(ranks) != count:
        raise ConfigError(f"rank_list has {len(ranks)} ranks and device_matrix {count}")
    if len(set(ranks)) != count:
        raise ConfigError(f"rank_list {ranks}: a rank stands there twice")
