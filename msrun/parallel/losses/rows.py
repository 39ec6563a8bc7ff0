"""Samples that a loss function or a model takes by their position, such as `output[:k]`.

The first k samples of each part of the batch are not the first k of the batch.  A loop over slices
that does the same with each, such as a loss in chunks to save memory, is right: its slices have all
samples together.  So of a tensor it is known which rows it comes from, and by which functions since
they were cut.  Where slices meet again, in `cat` or in a sum of numbers, they are the batch if they
have all rows and went through the same functions.  Refused are

- rows that leave out others, where the loss depends on them,
- rows of which others are treated otherwise, and
- functions of several rows at once, such as the difference of two halves of the batch.

A loss may shift by few rows where no micro-batches cut rows: in batches with the sequence
first, targets are behind by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from msrun.parallel.losses.notes import carried, leave
from msrun.parallel.torch_compat import viewed

# Attributes of tensors: of a watch of the loss function, and of one of the model.
_OF_LOSS, _OF_MODEL = "msrun_rows", "msrun_model_rows"
# Of one whose rows were given values that are of no sample, each by its position.
_WRITTEN = "msrun_written_rows"
_CUTTING = frozenset(
    ["__getitem__", "narrow", "select", "chunk", "split", "tensor_split", "unbind"]
)
_NUMBERING = ("chunk", "tensor_split")
_JOINING = frozenset(["cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"])
_JOINING |= {"row_stack", "column_stack", "pad_sequence", "block_diag", "as_nested_tensor"}
_JOINING |= {"nested_tensor", "_nested_tensor_from_tensor_list"}
_FILLING = frozenset(["zero_", "fill_", "copy_"])
_ADDING = frozenset(["add", "__add__", "__radd__", "__iadd__", "add_"])

Rows = frozenset[int]
# Rows that were computed with others.
_MIXED: Rows = frozenset([-1])


class RowsOrigin(NamedTuple):
    """Where a tensor comes from.

    Args:
        rows: Of the batch.
        history: A number of the functions since they were cut.
    """

    rows: Rows
    history: int = 0


class RowsWatch:
    """What a loss function does with rows of samples.

    Args:
        number: Of the watch.
        samples: Samples of this part of the batch.
        of_model: Whether it also looks at the model; both kinds look at a loss function.
        is_cut: Whether micro-batches cut dim 0, so that it has samples for certain.

    Attributes:
        has_cut: Whether rows were cut.
    """

    has_cut = False

    def __init__(
        self, number: int, samples: int, *, of_model: bool = False, is_cut: bool = False
    ) -> None:
        self._number = number
        self._is_cut = is_cut
        self._mark = _OF_MODEL if of_model else _OF_LOSS
        self._samples = samples
        # A part of one sample says what is cut, and not what is left out: as of two samples.
        self._every: Rows = frozenset(range(max(samples, 2)))
        self._numbered: set[Rows] = set()  # slices of which there are as many in any batch

    def may_follow(self, name: str) -> bool:
        """Return whether `follow` has something to do for a function of this name."""
        return self.has_cut or name in _CUTTING or name == "__setitem__"

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
        if name == "__setitem__":
            self._write(args, is_sample)
            return
        if name in _FILLING and isinstance(first, Tensor):
            self._fill(first, args[1:], is_sample)
        if name in _CUTTING and isinstance(first, Tensor) and is_sample(first):
            self._cut(name, args, kwargs, results)
            return
        if not self.has_cut:
            return
        given = _tensors((*args, *kwargs.values()))
        found = [(tensor, origin) for tensor in given if (origin := self._noted(tensor))]
        if not found:
            return
        origins = [origin for _, origin in found]
        has_whole = any(
            tensor.dim() and len(tensor) == self._samples and is_sample(tensor)
            for tensor in given
            if not self._noted(tensor)
        )
        sets = {rows for rows, _ in origins}
        is_of_others = len(sets) > 1 or len(origins) == 1
        is_sum = name in _ADDING and is_of_others and all(not tensor.dim() for tensor in results)
        if is_sum or name in _JOINING:
            self._note(results, self._joined(origins, has_whole=has_whole))
            return
        if len(sets) + has_whole == 1 and _MIXED not in sets:
            # One row of integers may be left alone by `SampleWatch`, and so have no history.
            histories = tuple(own.history for x, own in found if x.is_floating_point())
            self._note(results, RowsOrigin(next(iter(sets)), hash((name, histories))))
        elif self._is_cut or not any(_is_shift(one, other) for one in sets for other in sets):
            self._note(results, RowsOrigin(_MIXED))

    def is_part(self, value: Tensor) -> bool:
        """Return whether `value` is computed from some rows and not from all."""
        return self._noted(value) is not None

    def is_one(self, value: Tensor) -> bool:
        """Return whether `value` is computed from one row alone, and is no slice with this row."""
        origin = None if value.shape[:1] == (1,) else self._noted(value)
        return origin is not None and len(origin.rows) == 1 and origin.rows != _MIXED

    def is_slice(self, value: Tensor) -> bool:
        """Return whether `value` is a number of some rows, of which a batch has as many slices.

        Of `chunk(4)` any batch has four.
        """
        origin = None if value.dim() else self._noted(value)
        return origin is not None and -1 not in origin.rows and origin.rows not in self._numbered

    def are_different(self, values: Sequence[Tensor]) -> bool:
        """Return whether each of `values` is a number, and comes from other rows."""
        rows = {origin.rows for value in values if (origin := self._noted(value))}
        return len(rows) == len(values) and not any(value.dim() for value in values)

    def _joined(self, origins: Sequence[RowsOrigin], *, has_whole: bool) -> RowsOrigin | None:
        """Return where values that come together are from; None for the whole batch."""
        rows = frozenset[int]().union(*(origin.rows for origin in origins))
        histories = {origin.history for origin in origins}
        if has_whole or len(histories) > 1 or -1 in rows:
            return RowsOrigin(_MIXED)
        return None if rows == self._every else RowsOrigin(rows, histories.pop())

    def problem(self, loss: Tensor) -> str:
        """Return what `loss` depends on that has no counterpart in the whole batch; or nothing."""
        origin = self._noted(loss)
        if origin is None or (self._samples == 1 and origin.rows != _MIXED):
            return ""
        return "samples by their position"

    def _cut(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor]
    ) -> None:
        """Note the rows of parts along dim 0 of a tensor."""
        x: Tensor = args[0]
        own = self._origin(x)
        places = [*range(self._samples)] if own is None else sorted(own.rows)
        parts = None
        if x.dim() and len(x) == len(places) and -1 not in places:
            parts = _parts(name, args, kwargs, results, places)
        if parts is None:
            self._note(results, own)
            return
        for tensor, part in zip(results, parts, strict=True):
            rows = frozenset(part)
            if self._samples == 1 and name == "__getitem__" and _is_place(args[1]):
                rows = _MIXED
            elif part == places and (self._samples > 1 or _is_all(args[1:])):
                self._note([tensor], own)
                continue
            self.has_cut = True
            if name in _NUMBERING:
                self._numbered.add(rows)
            self._note([tensor], RowsOrigin(rows, own.history if own else 0))

    def _write(self, args: Sequence[Any], is_sample: Callable[[Tensor], bool]) -> None:
        """Note the rows of a tensor of samples that get a value of no sample.

        Code that gives each row its own value, such as a mask by its length, writes all of them.
        """
        x, index, value = args
        has_rows = self._samples > 1 and x.dim() and len(x) == self._samples and is_sample(x)
        if not has_rows or (isinstance(value, Tensor) and is_sample(value)):
            return
        places = [*range(self._samples)]
        parts = _parts("__getitem__", (x, index), {}, (x,), places)
        if parts is not None and parts[0] != places:
            self.has_cut = True
            setattr(x, _WRITTEN, (self._number, *{*self._written(x), *parts[0]}))

    def _fill(
        self, part: Tensor, values: Sequence[Any], is_sample: Callable[[Tensor], bool]
    ) -> None:
        """Note the rows of the tensor that `part` is a view of, as `_write` does."""
        origin, whole = self._origin(part), viewed(part)
        is_own = any(isinstance(value, Tensor) and is_sample(value) for value in values)
        if origin is None or is_own or -1 in origin.rows or whole is None or not whole.dim():
            return
        if len(whole) == self._samples > 1:
            setattr(whole, _WRITTEN, (self._number, *{*self._written(whole), *origin.rows}))

    def _written(self, x: Tensor) -> tuple[int, ...]:
        number, *rows = getattr(x, _WRITTEN, (None,))
        return tuple(rows) if number == self._number else ()

    def _note(self, results: Sequence[Tensor], origin: RowsOrigin | None) -> None:
        for tensor in results:
            if origin is not None or self._noted(tensor):
                noted = (origin.history, *origin.rows) if origin else ()
                leave(tensor, self._mark, (self._number, *noted))

    def _noted(self, tensor: Tensor) -> RowsOrigin | None:
        if not self.has_cut:
            return None  # nothing has a note of this watch
        is_partly_written = 0 < len(self._written(tensor)) < self._samples
        return RowsOrigin(_MIXED) if is_partly_written else self._origin(tensor)

    def _origin(self, tensor: Tensor) -> RowsOrigin | None:
        """As `_noted`, whatever was written to some rows."""
        found = getattr(tensor, self._mark, None) or carried(tensor, self._mark)
        number, *noted = found or (None,)
        if number != self._number or not noted:
            return None
        return RowsOrigin(frozenset(noted[1:]), noted[0])


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


def takes_by(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dims: Mapping[int, int | None],
    places: Collection[int],
) -> bool:
    """Return whether a function takes samples by their `places`, the `id`s of tensors of these.

    Args:
        name: Of the function.
        args: What it got.
        kwargs: What it got by name.
        dims: The dim of samples of tensors, by their `id`.
        places: Tensors that have places in the batch.
    """
    x = args[0] if args else kwargs.get("input")
    of_samples = dims.get(id(x))
    if of_samples is None or not isinstance(x, Tensor):
        return False
    if name == "__getitem__":
        items = args[1] if isinstance(args[1], tuple) else (args[1],)
        is_plain = all(item is not None and item is not ... for item in items[:of_samples])
        return is_plain and len(items) > of_samples and id(items[of_samples]) in places
    if name not in ("index_select", "gather"):
        return False
    dim, index = (*args[1:], kwargs.get("dim", kwargs.get("index")), kwargs.get("index"))[:2]
    return isinstance(dim, int) and dim % x.dim() == of_samples and id(index) in places


def is_row_of_integers(args: Sequence[Any], results: Sequence[Tensor]) -> bool:
    """Return whether a function takes one row of integers: of positions or masks all are equal."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.is_floating_point() or not x.dim():
        return False
    return all(tensor.dim() < x.dim() or len(tensor) == 1 for tensor in results)
