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
        self._every: Rows = frozenset(range(samples))
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
        if rows is None:
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
        places = sorted(self._every if own is None else own)
        if len(x) != len(places) or -1 in places:
            self._keep(x, results)
            return
        at = 0
        for tensor in results:
            if name == "__getitem__":
                item = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
                if isinstance(item, bool) or not isinstance(item, int | slice):
                    self._keep(x, results)
                    return
                chosen = places[item] if isinstance(item, slice) else [places[item]]
            elif name in ("narrow", "select"):
                dim, start, *count = [*args[1:], *kwargs.values()]
                if dim != 0 or not isinstance(start, int):
                    self._keep(x, results)
                    return
                chosen = places[start:][: count[0] if count else 1]
            else:
                dim = kwargs.get("dim", args[2 - (name == "unbind") :] or 0)
                if (dim[0] if isinstance(dim, tuple) else dim) != 0:
                    self._keep(x, results)
                    return
                length = 1 if name == "unbind" else len(tensor)
                chosen, at = places[at : at + length], at + length
            if chosen == places:
                self._keep(x, [tensor])
                continue
            self._functions.setdefault(frozenset(chosen), [])
            setattr(tensor, _ROWS, (self._number, frozenset(chosen)))

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
        has_all = tensor.dim() > 0 and len(tensor) == len(self._every) and is_sample(tensor)
        return self._every if has_all else None


def _is_shift(one: Rows, other: Rows) -> bool:
    """Return whether the same number of rows begins elsewhere, and most are in both."""
    return len(one) == len(other) and one != other and 2 * len(one & other) >= len(one)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found = []
    for value in values:
        items = value if isinstance(value, tuple | list) else (value,)
        found += [item for item in items if isinstance(item, Tensor)]
    return found
