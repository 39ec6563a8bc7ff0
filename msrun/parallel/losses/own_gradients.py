"""Gradients that a model or a loss takes by itself, such as for a penalty on them.

`torch.autograd.grad` of a sum over samples, by values of each sample, gives each sample its own
gradient: in a part of the batch that of the whole batch.  Others have no counterpart in the whole:

- that of a mean over samples: the mean divides by the samples of the part,
- that by weights, or by a value that all samples share: it adds up the samples of the part.

A mean times the number of samples is such a sum, if all its elements count.  Whether a number is
that of samples or equal by chance a `SampleWatch` says, in the first step; so this is for plain
loops, which are looked at in that step, and `rt.step` refuses such a gradient.

So of a tensor it is known whether it has a row for each row of the batch: it is of the batch, or
was computed from such a tensor, is as long and reduces no rows; or it is a stack of what was
computed from single rows.  What is not known to be over samples is left alone: a script may take
the gradient of one sample by weights, as meta-learning does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from msrun.parallel.losses.calls.marks import Mixture
from msrun.parallel.losses.calls.torch_losses import LOSSES
from msrun.parallel.losses.mixing import columns
from msrun.parallel.losses.notes import MIXTURE
from msrun.parallel.losses.terms import NO_LIMIT, Term
from msrun.parallel.losses.torch_calls import MULTIPLYING
from msrun.parallel.torch_compat import write_count

# Attributes of tensors with a row for each row of the batch, and of what torch's losses of them
# gave: the number of the watch.
HAS_ROWS, _OF_LOSS = "msrun_has_rows", "msrun_of_loss"
_OF_ROW = "msrun_of_row"  # of what was computed from single rows
_FACTORS = "msrun_factors"  # of the product of a loss and a number
_GATHERED = -1  # in place of a number of a watch: rows of all ranks
_REDUCING = ("mean", "sum", "norm")
_TAKING = frozenset(["__getitem__", "select", "unbind", "narrow"])
_TAKING |= {"split", "split_with_sizes", "chunk", "tensor_split"}
_JOINING = ("cat", "concat", "concatenate", "hstack", "column_stack", "stack")
_ENDING = ("cat", "concat", "concatenate")
_LOSSES = frozenset(func.__name__ for func in LOSSES)
_SHARED = "return (sum, count) of the terms of the loss; or leave the term out of the loss"
_MEAN = "take the gradient of a sum over samples: torch.autograd.grad(output.sum(), x, ...)"


def is_gradient(func: Callable[..., Any]) -> bool:
    """Return whether a function computes gradients."""
    return func is torch.autograd.grad


class BatchRows:
    """Which tensors have a row for each row of the batch, and which terms are over rows.

    Args:
        number: Of the watch.
        batch: Tensors of this part of the batch.
        samples: In it, if a `SampleWatch` notes what is multiplied by them; else 0.
    """

    def __init__(self, number: int, batch: Sequence[Tensor], samples: int = 0) -> None:
        self._number = number
        self._samples = samples
        self._terms: set[int] = set()
        self._has_losses = False
        self._rows_taken = 0
        for tensor in batch:
            self._mark(tensor)

    def follow(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note which results of a function have rows, or come from a loss of rows."""
        if self._has_losses and any(map(self._is_of_loss, args)):
            self._note_loss(result)
            if self._samples and name in MULTIPLYING and not result.dim():
                setattr(result, _FACTORS, args)
        if name in _JOINING and args and isinstance(args[0], tuple | list):
            is_first = not kwargs.get("dim", args[1] if len(args) > 1 else 0)
            self._join(name, args[0], result, is_first=is_first)
            return
        if self._rows_taken and any(map(self._is_of_row, args)):
            self._note_row(result)
        # Every function of a model that returns its loss passes here: this is hot.
        for given in args:
            if getattr(given, HAS_ROWS, None) in (self._number, _GATHERED):
                break
        else:
            return
        self._follow_rows(name, args, kwargs, result, given)

    def follow_form(self, x: Tensor, result: Tensor) -> None:
        """Note whether a form of `x`, of which nothing else is known, has rows."""
        if self.has(x) and result.shape[:1] == x.shape[:1]:
            setattr(result, HAS_ROWS, self._number)

    def _follow_rows(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, given: Tensor
    ) -> None:
        """Note what has rows of the result of a function that got `given`, which has them."""
        rows = len(given)
        if name in _LOSSES or (name in _REDUCING and not result.dim()):  # not each leaves a term
            self._note_loss(result)
        if columns(name, args, kwargs, rows):
            self._note_loss(result)  # what comes of it is of all rows, as a loss is
            return
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(tensor, Tensor) or tensor.shape[:1] != (rows,):
                continue
            if name not in _TAKING or tensor.stride() != given.stride()[1:]:  # one row has these
                setattr(tensor, HAS_ROWS, self._number)
        if name in _TAKING:
            self._rows_taken = rows
            self._note_row(result)

    def _join(self, name: str, parts: Sequence[Any], result: Any, *, is_first: bool) -> None:
        """Note whether `result`, which `parts` make, has rows: theirs, or some of each."""
        rows = next((len(part) for part in parts if self.has(part)), 0)
        is_of_new_dim = name == "stack" and is_first
        if is_of_new_dim or (name in _ENDING and is_first and not rows):
            rows = self._rows_taken if all(map(self._is_of_row, parts)) else 0
        if rows and result.shape[:1] == (rows,):
            setattr(result, HAS_ROWS, self._number)

    def note_terms(self, args: Sequence[Any], sources: frozenset[int], terms: range) -> None:
        """Note new `terms`, which a function of `args` left; `sources` are those of `args`."""
        if any(map(self.has, args)) or sources & self._terms:
            self._terms.update(terms)

    def is_over(self, term: int) -> bool:
        """Return whether the term of this number is over rows."""
        return term in self._terms

    def has(self, value: Any) -> bool:
        """Return whether `value` is a tensor with rows."""
        return getattr(value, HAS_ROWS, None) in (self._number, _GATHERED)

    def _note_loss(self, result: Any) -> None:
        if isinstance(result, Tensor):
            setattr(result, _OF_LOSS, self._number)
            self._has_losses = True

    def _note_row(self, result: Any) -> None:
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and not self.has(tensor):
                setattr(tensor, _OF_ROW, self._number)

    def _is_of_row(self, value: Any) -> bool:
        return getattr(value, _OF_ROW, None) == self._number

    def _is_of_loss(self, value: Any) -> bool:
        return getattr(value, _OF_LOSS, None) == self._number

    def _mark(self, tensor: Tensor) -> None:
        # The question about parameters is slow, and plain tensors are none.
        if tensor.dim() and (type(tensor) is Tensor or not isinstance(tensor, Parameter)):
            setattr(tensor, HAS_ROWS, self._number)

    def gradients(
        self,
        values: Sequence[tuple[Tensor, Term | None]],
        inputs: Sequence[Tensor],
        slopes: Sequence[Tensor | None],
        sources: frozenset[int],
    ) -> list[Term | None]:
        """Return the term of each gradient that the whole batch has another of; None for others.

        Args:
            values: What is differentiated, each with the term of its `mean_in`.
            inputs: By what.
            slopes: The gradients.
            sources: Terms that values and inputs were computed from.
        """
        is_sum = all(value.dim() or self.is_sum(value, term) for value, term in values)
        is_of_rows = bool(sources & self._terms) or any(
            self.has(value) or self._is_of_loss(value) for value, _ in values
        )
        found: list[Term | None] = []
        for x, slope in zip(inputs, slopes, strict=True):
            term = None
            if slope is not None and self.has(x) and is_sum:
                self._mark(slope)
            elif slope is not None and is_of_rows:
                by = "the samples" if self.has(x) else "what all samples share"
                term = Term(
                    name=f"a gradient by {by}",
                    total=slope,
                    is_opaque=True,
                    hint=_MEAN if self.has(x) else _SHARED,
                )
            found.append(term)
        return found

    def mean_in(self, value: Tensor) -> Tensor:
        """Return the mean that `value` is the product of with a number, or `value` itself."""
        factors = () if write_count(value) else getattr(value, _FACTORS, ())
        return next((x for x in factors if isinstance(x, Tensor)), value)

    def is_sum(self, value: Tensor, term: Term | None) -> bool:
        """Return whether `value` is a sum over samples, where `term` is that of its `mean_in`."""
        if term is None or self.mean_in(value) is value:
            return term is not None and is_pure_sum(term)
        is_number = any(x == self._samples for x in getattr(value, _FACTORS) if type(x) is int)
        noted = getattr(value, MIXTURE, ())[1:]
        if term.count is None or term.limit != NO_LIMIT or not (is_number and noted):
            return False
        is_of_all = term.elements == float(term.count) and term.elements % self._samples == 0
        return is_of_all and Mixture(*noted).unless_counted


def note_gathered(value: Tensor) -> None:
    """Note that `value` has rows of all ranks, of whose loss a rank has a part of the gradients."""
    setattr(value, HAS_ROWS, _GATHERED)


def is_sign(name: str) -> bool:
    """Return whether a function gives the same for the gradient of a mean and of a sum."""
    return name in ("sign", "sgn")


def is_pure_sum(term: Term) -> bool:
    """Return whether a term is a sum that nothing scales or limits."""
    return term.is_sum and not term.is_scaled and term.limit == NO_LIMIT
