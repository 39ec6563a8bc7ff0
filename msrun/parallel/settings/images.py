"""The key `data`: which dims of a batch the axes of the mesh divide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msrun.parallel.settings.grids import GRID_AXES
from msrun.parallel.settings.plan_rules import PlanRule

_DATA = "dp"
_OTHERS = ("pp", "cp", "ep")
# Styles of modules that compute on plain tensors alone.
_STYLES = ("experts", "context", *GRID_AXES)

Dims = Sequence[str | Sequence[str] | None]


def image_axes(data: Mapping[str, Dims]) -> tuple[str, ...]:
    """Return the axes that divide images, in the order in which `data` first names them."""
    found: list[str] = []
    for dims in data.values():
        found += [d for d in dims if isinstance(d, str) and d != _DATA and d not in found]
    return tuple(found)


def without_parts(rules: Sequence[PlanRule | str]) -> dict[str, bool]:
    """Return the paths of what rules say, and whether modules then compute on no part of images."""
    found = {}
    for index, rule in enumerate(rules):
        if isinstance(rule, PlanRule):
            found[f"plan[{index}].style: {rule.style}"] = rule.style in _STYLES
            found[f"plan[{index}].rows"] = rule.rows is not None
            # Numbers of parts of a batch, which ranks that share images are none of.
            found[f"plan[{index}].strategy"] = rule.strategy is not None
            found[f"plan[{index}].layout"] = rule.layout is not None
    return found


def check_data(data: Mapping[str, Dims]) -> None:
    """Check the key `data` by itself.

    Raises:
        ValueError: A list of dims is not one that a batch can be divided by.
    """
    for name, dims in data.items():
        where = f"data.{name}"
        if not dims:
            raise ValueError(f"{where}: [] names no dim (choose such as [dp, null, h, w])")
        for at, dim in enumerate(dims):
            if dim is not None and not isinstance(dim, str):
                raise ValueError(f"{where}: dim {at} is over several axes, and can be over one")
            if dim == "...":
                raise ValueError(f"{where}: ... is for rules of plan (write null for each dim)")
            if dim in _OTHERS:
                raise ValueError(f"{where}: {dim} divides no dim of images (choose such as h)")
            if dim == _DATA and at:
                raise ValueError(f"{where}: {_DATA} divides samples, which are dim 0, not dim {at}")
        if isinstance(dims[0], str) and dims[0] != _DATA:
            raise ValueError(f"{where}: dim 0 has the samples, which {dims[0]} cannot divide")
        named = [dim for dim in dims if dim is not None]
        if len(set(named)) < len(named):
            raise ValueError(f"{where}: an axis stands there twice")
