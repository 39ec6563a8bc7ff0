"""Losses that a script computes of single samples, or of slices, and adds up or collects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msrun.parallel.losses import torch_calls
from msrun.parallel.losses.batch import CUT
from msrun.parallel.losses.linked_terms import SOURCES, LinkedTerms
from msrun.parallel.losses.own_gradients import HAS_ROWS, BatchRows
from msrun.parallel.losses.rows import RowsWatch
from msrun.parallel.losses.terms import NO_LIMIT, Term
from msrun.parallel.torch_compat import active_modes, viewed

OF_ROWS = "losses of samples"
# Of what has means of slices: the number of the watch, and those of the means' terms.
_SLICES = "msrun_slices"
# What may be noted of a tensor of the batch that is nothing else.
_OF_BATCH = frozenset([SOURCES, HAS_ROWS, CUT])


class RowTerms(LinkedTerms):
    """Terms of rows of the batch, and what only gives its tensors another form.

    Args:
        rows: Of each tensor of the batch; 0 if they have no rows in common.
        is_cut: Whether dim 0 of the batch has samples for certain.
        takes_all: As of `LinkedTerms`.
    """

    _batch_rows: BatchRows
    _samples: int

    def __init__(self, rows: int, *, is_cut: bool, takes_all: bool) -> None:
        super().__init__(takes_all=takes_all)
        self._rows = RowsWatch(self._number, rows, is_cut=is_cut) if rows else None
        # Of a sample's tokens some are elsewhere: its mean here is not that of all of them.
        self._has_parts = any(getattr(mode, "divides_samples", False) for mode in active_modes())

    def follow_rows(self, rows: int) -> None:
        """Look at rows of a tensor of the batch from now on, unless a watch does already."""
        self._rows = self._rows or (RowsWatch(self._number, rows) if rows else None)

    def _sums(self, name: str, args: tuple[Any, ...]) -> list[Term]:
        """Return the sums over the batch that a function adds up, or collects; else nothing."""
        parts: Sequence[Any] = ()
        adds = name in torch_calls.ADDING or name in torch_calls.ADDING_IN_PLACE
        if adds or name in torch_calls.SUBTRACTING:
            parts = args
        elif name == "stack" and isinstance(args[0], tuple | list):
            parts = args[0]
        found, rows = [], []
        for part in parts:
            term = self._own_term(part) if isinstance(part, Tensor) else None
            is_plain = term is not None and not (term.is_scaled and name == "stack")
            if term and is_plain and term.is_sum and not term.is_by_hand and term.limit == NO_LIMIT:
                found.append(term)
            elif adds and self._is_of_rows(part, term):
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
        if term.count is None or term.is_scaled or term.is_opaque or self._has_parts:
            return False
        return self._rows is not None and self._rows.is_slice(value)

    def _is_count(self, number: float, elements: int) -> bool:
        """Return whether a sum divided by `number` is a mean over samples or elements."""
        return number == elements or (number == self._samples and not self._has_parts)

    def _is_row(self, value: Any) -> bool:
        """Return whether `value` is computed from one sample alone, as in a loop over samples."""
        if self._rows is None or self._has_parts or not isinstance(value, Tensor):
            return False
        return self._rows.is_one(value)

    def _may_form(self, args: tuple[Any, ...]) -> bool:
        """Return whether a function of `FORMING` gets one plain tensor, a part of the batch.

        Of its result nothing is to be known but what is known of that tensor.  Most functions of
        most losses are such, so less than everything is asked about them.
        """
        x = args[0]
        if type(x) is not Tensor or self._takes_all or (self._rows and self._rows.has_cut):
            return False
        for given in args[1:]:
            if type(given) is not int and type(given) is not torch.Size:
                return False
        noted = vars(x).keys()
        return SOURCES in noted and noted <= _OF_BATCH

    def _formed(self, x: Tensor, result: Tensor) -> Tensor:
        """Return `result`, a form of `x`, with what is known of `x`."""
        sources = getattr(x, SOURCES)
        if result is x:  # other forms of the same memory are known as well
            self._link(viewed(x), frozenset(sources[1:]))
            return result
        if sources[0] == self._number:
            setattr(result, SOURCES, sources)
        self._batch_rows.follow_form(x, result)
        return result
