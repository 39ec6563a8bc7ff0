"""Samples that a loss function takes by their position, such as `output[:k]`.

The first k samples of each part of the batch are not the first k of the batch.  A loop over slices
that does the same with each, such as a loss in chunks to save memory, is right: its slices have all
samples together.  So of a tensor it is known which rows it comes from, and of rows which functions
got them.  Refused are

- rows that leave out others, where the loss depends on them,
- rows of which others are treated otherwise, and
- functions of several rows at once, such as the difference of two halves of the batch.

A shift by few rows is left alone: in batches with the sequence first, targets are behind by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

_ROWS = "msrun_rows"
_CUTTING = frozenset(
    ["__getitem__", "narrow", "select", "chunk", "split", "tensor_split", "unbind"]
)
_JOINING = frozenset(["cat", "concat", "concatenate", "stack"])
_ADDING = frozenset(["add", "__add__", "__radd__", "__iadd__", "add_"])

Rows = frozenset[int]
# Rows that were computed with others.
_MIXED: Rows = frozenset([-1])


class RowsWatch:
    """What a loss function does with rows of samples.

    Args:
        number: Of the watch.
        samples: Samples of this part of the batch.
    """

    def __init__(self, number: int, samples: int) -> None:
        self._number = number
        self._samples = samples
        # A part of one sample says what is cut, and not what is left out: as of two samples.
        self._every: Rows = frozenset(range(max(samples, 2)))
        # Rows -> the functions that got them, in order.
        self._functions: dict[Rows, list[str]] = {}

    def follow(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Tensor],
        is_sample: Callable[[Tensor], bool],
    ) -> None:
        """Note which rows the results of a function come from.

        Args:
            name: Of the function.
            args: What it got.
            kwargs: What it got by name.
            results: Tensors in what it returned.
            is_sample: Whether a tensor is computed from samples.
        """
        first = args[0] if args else None
        if name in _CUTTING and isinstance(first, Tensor) and is_sample(first):
            self._cut(name, args, kwargs, results)
            return
        if not self._functions:
            return
        given = [
            (tensor, rows)
            for tensor in _tensors((*args, *kwargs.values()))
            if (rows := self._rows(tensor, is_sample)) is not None
        ]
        sets = {rows for _, rows in given if rows != self._every}
        if not sets:
            return
        union = frozenset[int]().union(*sets)
        whole = {rows for _, rows in given if rows == self._every}
        is_sum = name in _ADDING and all(not tensor.dim() for tensor in results)
        if len(sets) + len(whole) > 1 and not (is_sum or name in _JOINING):
            if any(_is_shift(one, other) for one in sets for other in sets | whole):
                return
            union = _MIXED
        elif len(sets) == 1 and results and not is_sum:
            self._functions.setdefault(union, []).append(name)
        for tensor in results:
            setattr(tensor, _ROWS, (self._number, union))

    def problem(self, loss: Tensor) -> str:
        """Return what `loss` depends on that has no counterpart in the whole batch; or nothing."""
        rows = self._noted(loss)
        if rows is None or (self._samples == 1 and rows != _MIXED):
            return ""
        kinds = {tuple(names) for own, names in self._functions.items() if own <= rows and names}
        is_right = rows == self._every and len(kinds) < 2  # noqa: PLR2004 - all are alike
        return "" if is_right else "samples by their position"

    def _cut(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor]
    ) -> None:
        """Note the rows of parts along dim 0 of a tensor."""
        x: Tensor = args[0]
        own = self._noted(x)
        places = [*range(self._samples)] if own is None else sorted(own)
        parts = None
        if x.dim() and len(x) == len(places) and -1 not in places:
            parts = _parts(name, args, kwargs, results, places)
        if parts is None:
            self._keep(x, results)
            return
        for tensor, part in zip(results, parts, strict=True):
            rows = frozenset(part)
            if self._samples == 1 and name == "__getitem__" and _is_place(args[1]):
                rows = _MIXED
            elif part == places and (self._samples > 1 or _is_all(args[1:])):
                self._keep(x, [tensor])
                continue
            self._functions.setdefault(rows, [])
            setattr(tensor, _ROWS, (self._number, rows))

    def _keep(self, x: Tensor, results: Sequence[Tensor]) -> None:
        if (rows := self._noted(x)) is not None:
            for tensor in results:
                setattr(tensor, _ROWS, (self._number, rows))

    def _noted(self, tensor: Tensor) -> Rows | None:
        number, rows = getattr(tensor, _ROWS, (None, None))
        return rows if number == self._number else None

    def _rows(self, tensor: Tensor, is_sample: Callable[[Tensor], bool]) -> Rows | None:
        """Return the rows of an argument: all of one that has all samples in dim 0."""
        if (rows := self._noted(tensor)) is not None:
            return rows
        has_all = tensor.dim() > 0 and len(tensor) == self._samples and is_sample(tensor)
        return self._every if has_all else None


def _parts(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Tensor],
    places: list[int],
) -> list[list[int]] | None:
    """Return which of `places`, the rows of dim 0, each result has; None if they are not cut."""
    if name == "__getitem__":
        item = _first(args[1])
        if isinstance(item, bool) or not isinstance(item, int | slice):
            return None
        return [places[item] if isinstance(item, slice) else [places[item]]]
    if name in ("narrow", "select"):
        dim, start, *count = [*args[1:], *kwargs.values()]
        if dim != 0 or not isinstance(start, int):
            return None
        return [places[start:][: count[0] if count else 1]]
    given = args[1:] if name == "unbind" else args[2:]
    if kwargs.get("dim", given[0] if given else 0) != 0:
        return None
    found, at = [], 0
    for tensor in results:
        length = 1 if name == "unbind" else len(tensor)
        found.append(places[at : at + length])
        at += length
    return found


def _first(index: Any) -> Any:
    return index[0] if isinstance(index, tuple) and index else index


def _is_all(args: Sequence[Any]) -> bool:
    item = _first(args[0]) if args else None
    return isinstance(item, slice) and item == slice(None)


def _is_place(index: Any) -> bool:
    """Return whether a slice of one sample is by its position; a chunk of a loop ends beyond it."""
    item = _first(index)
    if not isinstance(item, slice) or item == slice(None):
        return False
    return bool(item.start) or item.stop is None or item.stop <= 1


def _is_shift(one: Rows, other: Rows) -> bool:
    """Return whether the same number of rows begins elsewhere, and most are in both."""
    return len(one) == len(other) and one != other and 2 * len(one & other) >= len(one)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found = []
    for value in values:
        items = value if isinstance(value, tuple | list) else (value,)
        found += [item for item in items if isinstance(item, Tensor)]
    return found
