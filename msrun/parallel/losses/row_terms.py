"""Losses that a script computes of single samples, or of slices, and adds up or collects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from msrun.parallel.losses import torch_calls
from msrun.parallel.losses.linked_terms import LinkedTerms
from msrun.parallel.losses.rows import RowsWatch
from msrun.parallel.losses.terms import NO_LIMIT, Term

OF_ROWS = "losses of samples"
# Of what has means of slices: the number of the watch, and those of the means' terms.
_SLICES = "msrun_slices"


class RowTerms(LinkedTerms):
    """Terms of rows of the batch.

    Args:
        rows: Of each tensor of the batch; 0 if they have no rows in common.
        is_cut: Whether dim 0 of the batch has samples for certain.
        takes_all: As of `LinkedTerms`.
    """

    def __init__(self, rows: int, *, is_cut: bool, takes_all: bool) -> None:
        super().__init__(takes_all=takes_all)
        self._rows = RowsWatch(self._number, rows, is_cut=is_cut) if rows else None

    def follow_rows(self, rows: int) -> None:
        """Look at rows of a tensor of the batch from now on, unless a watch does already."""
        self._rows = self._rows or (RowsWatch(self._number, rows) if rows else None)

    def _sums(self, name: str, args: tuple[Any, ...]) -> list[Term]:
        """Return the sums over the batch that a function adds up, or collects; else nothing."""
        parts: Sequence[Any] = ()
        if name in torch_calls.ADDING or name in torch_calls.ADDING_IN_PLACE:
            parts = args
        elif name == "stack" and isinstance(args[0], tuple | list):
            parts = args[0]
        found, rows = [], []
        for part in parts:
            term = self._own_term(part) if isinstance(part, Tensor) else None
            if term and term.is_sum and not term.is_scaled and term.limit == NO_LIMIT:
                found.append(term)
            elif name != "stack" and self._is_of_rows(part, term):
                rows.append(part)
            elif not torch_calls.is_zero(part) or name == "stack":
                return []
        if rows and self._rows and not self._rows.are_different(rows):
            return []
        return [*found, *(Term(name=OF_ROWS, total=x, elements=1) for x in rows)]

    def _note_slices(self, result: Tensor, parts: Sequence[Tensor]) -> None:
        """Note that `result` has means of slices, of which a larger batch has more."""
        terms = [self._own_term(part) for part in parts]
        pairs = zip(parts, terms, strict=True)
        if all(term and self._is_of_rows(part, term) for part, term in pairs):
            numbers = [self._terms.index(term) for term in terms if term]
            setattr(result, _SLICES, (self._number, *numbers))

    def _means_of(self, collected: Tensor) -> frozenset[int]:
        """Return the terms of the means of slices that a tensor has; none of another."""
        number, *means = getattr(collected, _SLICES, (None,))
        return frozenset(means) if number == self._number else frozenset()

    def _is_of_rows(self, value: Any, term: Term | None) -> bool:
        """Return whether `value` is a number of one sample, or a mean of a slice of some size."""
        if term is None:
            return self._is_row(value)
        is_mean = term.count is not None and not (term.is_scaled or term.is_opaque)
        return is_mean and self._rows is not None and self._rows.is_slice(value)

    def _is_row(self, value: Any) -> bool:
        """Return whether `value` is computed from one sample alone, as in a loop over samples."""
        return self._rows is not None and isinstance(value, Tensor) and self._rows.is_one(value)
