"""The key `data`: which dims of a batch the axes of the mesh divide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_DATA = "dp"
_OTHERS = ("pp", "cp", "ep")

Dims = Sequence[str | Sequence[str] | None]


def image_axes(data: Mapping[str, Dims]) -> tuple[str, ...]:
    """Return the axes that divide images, in the order in which `data` first names them."""
    found: list[str] = []
    for dims in data.values():
        found += [d for d in dims if isinstance(d, str) and d != _DATA and d not in found]
    return tuple(found)


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
