"""Calls by which a model counts its tokens: ranges, first rows of tables, and sums with all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from msrun.parallel.context.token_calls import TokenPlace

Note = Callable[[Tensor, TokenPlace], None]


class PositionRows:
    """Where an index takes the first rows of a table."""

    def __init__(self, item: int, dim: int) -> None:
        self.item, self.dim = item, dim


class RangeOfPart:
    """`torch.arange` as the model calls it, but from the first token of this part on.

    It has a name and no state that changes, so that a graph may call it.

    Args:
        first: Number of that token.
        note: Called with the result.
    """

    __name__ = "range_of_part"

    def __init__(self, first: int, note: Note) -> None:
        self._first, self._note = first, note

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the range."""
        result: Tensor = torch.arange(*args, **kwargs) + self._first
        self._note(result, TokenPlace(0))
        return result


class RowsOfPart:
    """`x[...]` as the model writes it, but with the rows of this part.

    Args:
        at: Where the index takes the first rows.
        first: Number of the first token of this part.
        note: Called with the result.
    """

    __name__ = "rows_of_part"

    def __init__(self, at: PositionRows, first: int, note: Note) -> None:
        self._at, self._first, self._note = at, first, note

    def __call__(self, x: Tensor, items: tuple[Any, ...]) -> Tensor:
        """Return the rows."""
        at = self._at.item
        rows = slice(self._first, self._first + items[at].stop)
        result: Tensor = x[(*items[:at], rows, *items[at + 1 :])]
        self._note(result, TokenPlace(self._at.dim))
        return result


class RowsOfAll:
    """The values of this part of a tensor that has some for all tokens.

    Args:
        first: Number of the first token of this part.
        tokens: In the part.
        note: Called with the result.
    """

    __name__ = "rows_of_all"

    def __init__(self, first: int, tokens: int, note: Note) -> None:
        self._first, self._tokens, self._note = first, tokens, note

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        """Return the values, where `x` has tokens in `dim`."""
        result = x.narrow(dim, self._first, self._tokens)
        self._note(result, TokenPlace(dim % x.dim()))
        return result


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


def with_rows(
    args: tuple[Any, ...], tokens: int, ranks: int, take: Callable[[Tensor, int], Tensor]
) -> tuple[Any, ...] | None:
    """Return two tensors that differed in size at the tokens alone, one of which had all.

    Args:
        args: The tensors, or something else.
        tokens: In the part.
        ranks: With parts.
        take: Returns those of this part of a tensor that has all in a dim.
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
            rows = take(other, unlike[0])
            return (own, rows) if own is args[0] else (rows, own)
    return None
