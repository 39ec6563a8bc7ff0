"""MindSpore's `Layout`: tensors sharded over a device matrix that has axis names of its own.

A tensor layout lists the aliases of each dim, as ours lists axis names.  On a mesh an alias stands
for mesh axes by the rule of strategies: one after the other, as many as make its size.  A
`rank_list` says in which order: the axes of the mesh are taken in the order that gives this list.
The ranks of the mesh may have any order themselves: see `notation.rank_order`.

The last alias may be `interleaved_parallel`, an axis of no devices: the part of a rank is cut once
more, and the module computes these pieces one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from msrun.errors import ConfigError, UsageError
from msrun.parallel.notation.dims import consecutive_axes, dim_of, shown_mesh, shown_ranks
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.settings.plan_rules import Dims
from msrun.units import quoted

WHOLE = "None"
INTERLEAVED = "interleaved_parallel"

Entry = str | Sequence[str] | None


class Layout(msgspec.Struct, frozen=True):
    """MindSpore's named device matrix; called with one entry for each dim of a tensor.

    Example: `Layout((2, 2, 2), ("dp", "sp", "mp"))("mp", ("sp", "dp"))`.

    Args:
        device_matrix: Size of each axis, the slowest-varying first.
        alias_name: Name of each axis; the last may be `interleaved_parallel`.
        rank_list: Ranks in row-major order; None is the order of the mesh, usually 0, 1 and so on.
    """

    device_matrix: tuple[int, ...]
    alias_name: tuple[str, ...]
    rank_list: list[int] | None = None

    def __post_init__(self) -> None:
        _check_layout(self.device_matrix, self.alias_name, self.rank_list)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis of devices."""
        named = zip(self.alias_name, self.device_matrix, strict=True)
        return {name: size for name, size in named if name != INTERLEAVED}

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes.values())

    @property
    def copies(self) -> int:
        """Pieces that a rank computes one after the other; 1 without `interleaved_parallel`."""
        return math.prod(self.device_matrix) // self.devices

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
        for names in map(_aliases, entries):
            if INTERLEAVED in names[:-1]:
                raise ConfigError(f"{INTERLEAVED} is the last alias of its dim: it cuts inside")
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
        return [dim_of(_device_aliases(entry)) for entry in self.entries]

    @property
    def interleaved_dim(self) -> int | None:
        """The dim that `interleaved_parallel` cuts; None without one."""
        dims = (dim for dim, entry in enumerate(self.entries) if INTERLEAVED in _aliases(entry))
        return next(dims, None)

    def on_mesh(self, axes: Mapping[str, int], mesh: MeshLayout | None = None) -> Dims:
        """Return the names of mesh axes instead of aliases.

        Args:
            axes: Mesh axis -> size, the slowest-varying first.
            mesh: Has these axes, and the ranks that `rank_list` names; None has no others.

        Raises:
            ConfigError: The device matrix is neither that mesh nor that mesh with axes merged.
        """
        sizes = self.layout.sizes
        where = f"device_matrix {self.layout.device_matrix}"
        if self.layout.devices != math.prod(axes.values()):
            raise ConfigError(
                f"{where} has {self.layout.devices} devices, and {shown_ranks(axes)}",
                hint="it counts the ranks of the plan's axes, with or without dp, and never of pp",
            )
        ranks = self.layout.rank_list
        ordered = axes if ranks is None else in_order(axes, ranks, mesh or MeshLayout(dict(axes)))
        try:
            axes_of = consecutive_axes(sizes, ordered)
        except UsageError as error:
            raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None
        for alias, names in axes_of.items():
            if alias in axes and names != [alias] and sizes[alias] > 1:
                raise ConfigError(
                    f"{where}: alias {alias} stands for mesh axis {' and '.join(names)}"
                )
        axes_of[INTERLEAVED] = []
        return [dim_of([n for alias in _aliases(e) for n in axes_of[alias]]) for e in self.entries]

    def to_dict(self) -> dict[str, Any]:
        """Return what MindSpore's `Layout.to_dict` does: axes are counted from the last, 0."""
        ranks = range(self.layout.devices)
        return {
            "device_matrix": self.layout.device_matrix,
            "tensor_map": tuple(self._mapped(entry) for entry in self.entries),
            "interleaved_parallel": INTERLEAVED in self.layout.alias_name,
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


def _device_aliases(entry: Entry) -> list[str]:
    return [alias for alias in _aliases(entry) if alias != INTERLEAVED]


def in_order(axes: Mapping[str, int], ranks: Sequence[int], mesh: MeshLayout) -> dict[str, int]:
    """Return `axes` in the order in which `ranks` is row-major over them.

    Args:
        axes: Mesh axis -> size.
        ranks: As many as the axes have, which differ only on these.
        mesh: Has the axes and the ranks.

    Raises:
        ConfigError: There is none.
    """
    if unknown := set(ranks) - set(range(mesh.world_size)):
        raise ConfigError(
            f"rank_list {list(ranks)}: rank {min(unknown)} is none of the {mesh.world_size} ranks"
        )
    block = mesh.along(axes, ranks[0])
    if set(ranks) != set(block):
        raise ConfigError(
            f"rank_list {list(ranks)}: differ not only on {', '.join(axes)}, as ranks "
            f"{list(block)} do"
        )
    strides: dict[str, int] = {}
    for name in reversed(list(axes)):
        strides[name] = math.prod(axes[other] for other in strides)
    ordered: dict[str, int] = {}
    # From the fastest-varying axis on: it is the one whose stride the next ranks are apart.
    places = given = [block.index(rank) for rank in ranks]
    left = {name for name, size in axes.items() if size > 1}
    while left:
        step = places[1] - places[0]
        axis = next((name for name in left if strides[name] == step), "")
        if not axis:
            break
        left.remove(axis)
        ordered = {axis: axes[axis], **ordered}
        places = places[:: axes[axis]]
    found = [0]
    for name, size in ordered.items():
        found = [place + index * strides[name] for place in found for index in range(size)]
    if left or found != given:
        raise ConfigError(
            f"rank_list {list(ranks)}: no order of the axes in {shown_mesh(axes)} gives these "
            "ranks",
            hint="say with parallel.rank_list in which order the mesh has its ranks",
        )
    return ordered | dict.fromkeys((name for name in axes if axes[name] == 1), 1)


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
        is_cut = bool(names) and names[-1] == INTERLEAVED
        _check_ranks(ranks, math.prod(matrix[:-1] if is_cut else matrix))


def _check_names(names: tuple[object, ...]) -> None:
    for name in names:
        if not isinstance(name, str) or name in ("", WHOLE):
            raise ConfigError(f"alias_name {names}: {name!r} is no name of an axis")
        if name == INTERLEAVED and (name != names[-1] or len(names) == 1):
            raise ConfigError(f"alias_name {names}: {INTERLEAVED} is the last of several")
        if names.count(name) > 1:
            raise ConfigError(f"alias_name {names}: {name!r} stands there twice")


def _check_ranks(ranks: object, count: int) -> None:
    if not isinstance(ranks, list) or any(type(rank) is not int for rank in ranks):
        raise ConfigError(f"rank_list {ranks!r} is no list of ranks")
    if len(ranks) != count:
        raise ConfigError(f"rank_list has {len(ranks)} ranks and device_matrix {count}")
    if len(set(ranks)) != count:
        raise ConfigError(f"rank_list {ranks}: a rank stands there twice")
