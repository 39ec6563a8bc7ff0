"""Styles of rules that shard a matrix product over a grid of two or three axes."""

from __future__ import annotations

from collections.abc import Sequence

# Style -> how many axes it takes.
GRID_AXES = {"2d": 2, "2.5d": 3, "3d": 3}


def grid_problem(style: str | None, axis: str | None, axes: Sequence[str]) -> str | None:
    """Return what is wrong with the axes of a rule, if something is.

    Args:
        style: Style of the rule.
        axis: Its key `axis`.
        axes: Its key `axes`.
    """
    count = GRID_AXES.get(style or "")
    if count is None:
        return f"axes: belongs to style {', '.join(GRID_AXES)}" if axes else None
    if axis:
        return f"axis: style {style} takes {count} axes (write `axes`)"
    if len(axes) != count:
        given = f"[{', '.join(axes)}]" if axes else "none"
        return f"axes: style {style} takes {count} axes, and {given} are given"
    return None
