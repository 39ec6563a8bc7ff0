"""A mesh as people and programs read it: axes, groups along each, coordinates of each rank."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from msrun.cli.job.parallel import Parallel
from msrun.cli.render.section import TextSection
from msrun.units import counted

if TYPE_CHECKING:
    from msrun.parallel.config import ParallelConfig
    from msrun.parallel.notation.mesh_layout import MeshLayout

# Rows of a table, and ranks of a row; a mesh of thousands repeats itself soon.
SHOWN_MAX = 16


def document(parallel: Parallel | None) -> dict[str, object] | None:
    """Return everything about `parallel` for programs; None without a configuration."""
    if parallel is None:
        return None
    config, layout = msgspec.to_builtins(parallel.config), parallel.layout
    words = parallel.translations()
    translated = {"translated": dict(words)} if words else {}
    if layout is None:
        return {
            "config": config,
            **translated,
            "mesh": None,
            "groups": None,
            "coordinates": None,
        }
    return {
        "config": config,
        **translated,
        "mesh": layout.axes,
        "groups": {axis: list(layout.groups(axis)) for axis in layout.sizes},
        "coordinates": [layout.coordinate(rank) for rank in range(layout.world_size)],
    }


def sections(parallel: Parallel | None, *, is_all: bool) -> list[TextSection]:
    """Return `parallel` for people, of large meshes the beginning unless `is_all`."""
    if parallel is None:
        return []
    words = parallel.translations()
    translated = [
        TextSection(heading="words of MindSpore", columns=("given", "read as"), rows=tuple(words))
    ]
    tensors = _named_tensors(parallel.config)
    named = TextSection(
        heading="inputs and outputs of modules", columns=("modules", "tensor", "axes"), rows=tensors
    )
    mesh = _mesh_sections(parallel.layout, is_all=is_all)
    if parallel.layout is None and parallel.config.rank_list:
        ranks, most = tuple(parallel.config.rank_list), SHOWN_MAX
        row = _ranks(ranks, len(ranks) if is_all else most)
        mesh.append(TextSection(heading="ranks in the order of the mesh", rows=((row,),)))
    return [*(translated if words else []), *mesh, *([named] if tensors else [])]


def _named_tensors(config: ParallelConfig) -> tuple[tuple[str, ...], ...]:
    """Return what rules say of several inputs or outputs of modules: modules, tensor, axes."""
    from msrun.parallel.notation.dims import shown_dims
    from msrun.parallel.settings.plan_rules import PlanRule, placed_tensors

    rules = [] if isinstance(config.plan, str) else config.plan
    return tuple(
        (rule.match or "the model", tensor, shown_dims(dims))
        for rule in rules
        if isinstance(rule, PlanRule) and not rule.style
        for tensor, dims in placed_tensors(rule)
    )


def _mesh_sections(layout: MeshLayout | None, *, is_all: bool) -> list[TextSection]:
    if layout is None:
        return []
    axes, sizes, world_size = layout.axes, layout.sizes, layout.world_size
    most = world_size if is_all else SHOWN_MAX
    tables = [
        TextSection(
            heading=f"mesh of {counted(world_size, 'rank')}",
            columns=("axis", "size"),
            rows=(
                *((axis, str(size)) for axis, size in axes.items()),
                *((f"{axis}, of dp", str(sizes[axis])) for axis in sizes if axis not in axes),
            ),
        )
    ]
    # An axis of size 1 has groups of one, which say nothing.
    for axis in (name for name, size in sizes.items() if size > 1):
        groups = islice(layout.groups(axis), most)
        tables.append(
            TextSection(
                heading=_heading(f"groups along {axis}", world_size // sizes[axis], most),
                rows=tuple((_ranks(group, most),) for group in groups),
            )
        )
    coordinates = (layout.coordinate(rank) for rank in range(min(world_size, most)))
    tables.append(
        TextSection(
            heading=_heading("coordinates", world_size, most),
            columns=("rank", *axes),
            rows=tuple(
                (str(rank), *map(str, coordinate.values()))
                for rank, coordinate in enumerate(coordinates)
            ),
        )
    )
    return tables


def _heading(what: str, count: int, most: int) -> str:
    return what if count <= most else f"{what}, {count - most} of {count} left out (see --all)"


def _ranks(group: tuple[int, ...], most: int) -> str:
    if len(group) <= most:
        return ",".join(map(str, group))
    first = ",".join(map(str, group[: most - 1]))
    return f"{first},...,{group[-1]} ({len(group)} ranks)"
