"""Calls by which a model counts its tokens: ranges, first rows of tables, and sums with all."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class PositionRows:
    """Where an index takes the first rows of a table."""

    def __init__(self, item: int, dim: int) -> None:
        self.item, self.dim = item, dim


def first_rows(x: Any, items: tuple[Any, ...], tokens: int, ranks: int) -> PositionRows | None:
    """Return which of `items` takes as many first rows of a table as the part has tokens."""
    old = new = 0
    for at, item in enumerate(items):
        if item is None:
            new += 1
            continue
        if item is ... or isinstance(item, Tensor):
            return None
        if (
            isinstance(item, slice)
            and item.start in (None, 0)
            and item.stop == tokens
            and item.step in (None, 1)
            and x.shape[old] >= tokens * ranks
        ):
            return PositionRows(at, new)
        old += 1
        new += not isinstance(item, int)
    return None


def range_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return start, end and step of `arange`."""
    if len(args) == 1:
        return kwargs.get("start", 0), args[0], kwargs.get("step", 1)
    given = dict(zip(("start", "end", "step"), args, strict=False)) | kwargs
    return given.get("start", 0), given.get("end"), given.get("step", 1)


def with_rows(args: tuple[Any, ...], first: int, tokens: int, ranks: int) -> tuple[Any, ...] | None:
    """Return two tensors that differ in size at the tokens alone, one of which has all.

    Args:
        args: The tensors, or something else.
        first: Number of the first token of this part.
        tokens: In the part.
        ranks: With parts.
    """
    if len(args) != 2 or not all(isinstance(x, Tensor) for x in args):  # noqa: PLR2004 - a sum
        return None
    for own, other in (args, args[::-1]):
        sizes = list(zip(range(-1, -own.dim() - 1, -1), own.shape[::-1], strict=True))
        unlike = [
            at
            for at, size in sizes
            if -at <= other.dim() and size != other.shape[at] and 1 not in (size, other.shape[at])
        ]
        if (
            len(unlike) == 1
            and own.shape[unlike[0]] == tokens
            and other.shape[unlike[0]] == tokens * ranks
        ):
            rows = other.narrow(unlike[0], first, tokens)
            return (own, rows) if own is args[0] else (rows, own)
    return None
