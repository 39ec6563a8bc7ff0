"""Finds the sum and the count of a loss, in the functions of torch that compute it.

While `LossWatch` is active, it sees every function of torch.  Those that reduce a tensor to one
number leave a `Term`: a mean leaves its sum and its count, and a sum its sum.  A quotient of two
sums is a mean as well.  Then the loss that the script returns is one of these:

- counted: the result of a mean, or a pair that the script returned.
- summed: the result of a sum.
- linear: a linear function of means, such as a cross entropy and a penalty.
- plain: anything else.  Its mean over samples is right for a mean of samples.

A sum of sums is a sum, such as that of the losses of chunks.  A sum times a number is none of
these: it may be a mean by hand or a scaled sum.  It is a mean if the number divides it, or what it
was added to, and is that of the samples or elements; any other one is refused.

A tensor is linked to what it was computed from (`_SOURCES`): to the batch, and to terms.  So a mean
over weights, or over values that contain a mean, is not mistaken for one over samples.  A function
that is not linear is refused: the root of a mean is not the mean of the roots.

Which functions are called follows from the code of the loss and not from values, so ranks find the
same; `tally` compares them to be sure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from msrun.errors import ModelError
from msrun.parallel.local import full_tensor, is_sharded
from msrun.parallel.losses import torch_calls
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.losses.calls.reductions import Reduced, reduced_by, sums_rows
from msrun.parallel.losses.calls.torch_losses import (
    BY_CLASS,
    BY_ELEMENT,
    LOSSES,
    parts_of_mean,
    reduction_of,
)
from msrun.parallel.losses.linearity import check_columns, check_sums, of_part, slopes_by
from msrun.parallel.losses.linked_terms import NOTHING, OF_WEIGHTS, ONLY_BATCH, RANGE
from msrun.parallel.losses.mixing import Columns, columns, has_pairs, moves_samples, scattered
from msrun.parallel.losses.notes import copy_notes
from msrun.parallel.losses.own_gradients import BatchRows, is_gradient, is_sign
from msrun.parallel.losses.row_terms import OF_ROWS, RowTerms
from msrun.parallel.losses.terms import (
    NO_LIMIT,
    Kind,
    Limit,
    PartLoss,
    Term,
    count_type,
    sum_of,
)
from msrun.parallel.torch_compat import checkpointed

_ORDER = "msrun_order"  # of a permutation
_DIVIDED = "msrun_divided"  # of elements that were divided by their number, for a mean
_SCALING = torch_calls.DIVIDING | torch_calls.MULTIPLYING | torch_calls.KEEPING


class LossWatch(RowTerms):
    """While it is active, functions that reduce to one number leave their sum and count.

    Args:
        samples: Samples of the part of the batch that the loss gets.
        data: Tensors that a loss function gets of the batch; None takes all for parts of it but
            parameters and what is computed from them alone.
        inputs: Tensors that the model gets of the batch.
        is_cut: Whether dim 0 of the batch has samples for certain.
        is_beside: Whether a `SampleWatch` notes what is multiplied by samples.
    """

    is_watch = True

    def __init__(
        self,
        samples: int,
        data: Sequence[Tensor] | None = None,
        inputs: Sequence[Tensor] = (),
        *,
        is_cut: bool = False,
        is_beside: bool = False,
    ) -> None:
        has_rows = all(x.shape[:1] in ((samples,), ()) for x in data or ())
        rows = samples if data and has_rows else 0
        super().__init__(rows, is_cut=is_cut, takes_all=data is None)
        self._samples = samples
        self._deciding: Term | None = None
        self._batch_rows = BatchRows(
            self._number, [*inputs, *(data or ())], samples if is_beside else 0
        )
        for tensor in data or ():
            self._link(tensor, ONLY_BATCH)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; see the class."""
        del types
        if func in torch_calls.SIZES:  # to read some here would tell other watches of more
            return func(*args, **(kwargs or {}))
        if func in torch_calls.FORMING and not kwargs and self._may_form(args):
            return self._formed(args[0], func(*args))
        kwargs = kwargs or {}
        count = len(self._terms)
        name = torch_calls.name_of(func)
        result = self._run(func, name, args, kwargs)
        self._batch_rows.follow(name, args, kwargs, result)
        if len(self._terms) > count:
            self._batch_rows.note_terms(args, self._sources(args), range(count, len(self._terms)))
        if self._rows and self._rows.may_follow(name):
            self._rows.follow(name, args, kwargs, tensors_in(result), self._is_of)
        return result

    def _run(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return what `func` returns, or an equal tensor of which more is known."""
        needs = bool(self._terms) or not self._takes_all
        sources = self._sources(torch_calls.deciding(name, args, kwargs)) if needs else NOTHING
        if func in LOSSES:
            return self._loss(func, args, kwargs, sources)
        sums = self._sums(name, args) if not kwargs else None  # before they are written
        if is_sign(name) and (term := self._own_term(args[0])) and term.hint:
            sources -= {self._terms.index(term)}
        result = self._plain_number(func(*args, **kwargs), args)
        if is_gradient(func):
            self._differentiated(result, args[0], args[1], sources)
            return result
        self._mixed(name, result, args, kwargs, sources)
        if not isinstance(result, Tensor):
            return result
        if sums:
            term = sum_of(sums, full_tensor(result), columns="sum" if name == "stack" else "")
            batch = NOTHING if self._takes_all else ONLY_BATCH
            given = [*sums, *map(self._own_term, tensors_in([*args]))]  # also means of slices
            own = {index for index, each in enumerate(self._terms) if each in given}
            self._leave(result, term, sources - own | batch)
        elif self._takes_all and self._are_weights((*args, *kwargs.values())):
            setattr(result, OF_WEIGHTS, self._number)
        elif not result.dim() and (of := reduced_by(name, args, kwargs, self._is_sample)):
            return self._reduced(name, result, of, sources)
        else:
            return self._noted(name, result, args, kwargs)
        return result

    def _plain_number(self, result: Any, args: Sequence[Any]) -> Any:
        """Return `result` of `args` as a plain tensor if it is one number of divided samples.

        As a DTensor it would lose its term: functions with plain tensors, and outputs of modules,
        are tensors made of it.  Numbers of sharded parameters and gradients stay what they are.
        """
        if not isinstance(result, Tensor) or not is_sharded(result):
            return result
        is_number = not result.dim() and result.requires_grad
        is_new = all(result is not value for value in args)
        divided = [x for x in args if isinstance(x, Tensor) and is_sharded(x)]
        # One number of these has been made plain; others are of weights, or have some in them.
        are_samples = all(x.dim() and self._is_sample(x) for x in divided)
        return full_tensor(result) if is_number and is_new and are_samples else result

    def _noted(
        self, name: str, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Return `result`, of which some functions say more."""
        torch_calls.note_zero(name, result, args)
        if name == "arange" and len(args) == 1:
            setattr(result, RANGE, True)
        if name == "randperm":
            setattr(result, _ORDER, True)
        if name == "stack":
            self._note_slices(result, tensors_in(args[0]))
        if name in _SCALING and result.dim():
            self._note_divided(name, result, args)
        if args and isinstance(args[0], Tensor) and result is not args[0]:
            if name in torch_calls.KEEPING:
                self._keep(args[0], result)
            elif (term := self._own_term(args[0])) and term.is_sum:
                return self._changed(term, name, result, args, kwargs)
        return result

    def _note_divided(self, name: str, result: Tensor, args: tuple[Any, ...]) -> None:
        """Note that elements were divided by how many samples or elements there are."""
        number = args[1] if name in torch_calls.DIVIDING and len(args) > 1 else None
        is_count = isinstance(number, int | float) and self._is_count(number, args[0].numel())
        given = torch_calls.tensors_of(args)
        if is_count or any(getattr(x, _DIVIDED, None) == self._number for x in given):
            setattr(result, _DIVIDED, self._number)

    def _differentiated(
        self,
        slopes: Sequence[Tensor | None],
        values: Sequence[Tensor],
        inputs: Sequence[Tensor],
        sources: frozenset[int],
    ) -> None:
        """Link gradients that the script takes; of a sum by samples they are of each sample."""
        rows = self._batch_rows
        pairs = [(value, self._own_term(rows.mean_in(value))) for value in values]
        terms = rows.gradients(pairs, inputs, slopes, sources)
        sums = {self._terms.index(term) for x, term in pairs if term and rows.is_sum(x, term)}
        batch = NOTHING if self._takes_all else ONLY_BATCH
        for x, slope, term in zip(inputs, slopes, terms, strict=True):
            if term is not None:
                self._leave(term.total, term, sources)
            elif rows.has(x):
                self._link(slope, (sources - sums) | batch)
            else:
                self._link(slope, sources)

    def _mixed(
        self,
        name: str,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sources: frozenset[int],
    ) -> None:
        """Link `result`; where it mixes samples it leaves a term that the loss must fit."""
        tensors = [result] if isinstance(result, Tensor) else tensors_in(result)
        written = torch_calls.written_by(name, args, result)
        for tensor in [*tensors, *written]:
            self._link(tensor, sources)
        if name in torch_calls.FINDING or (name == "where" and len(args) == 1):
            self._found(sources)
        if not tensors or (isinstance(result, Tensor) and not result.dim()):
            return
        kind: Columns = ""
        if -1 in sources:
            kind = columns(name, args, kwargs, self._samples)
            kind = scattered(name, args, kwargs, result, self._samples) or kind
            kind = "sum" if sums_rows(name, args, kwargs, self._has_rows) else kind
        shown, shape = "", tuple(tensors[0].shape)
        if name == "__getitem__" and -1 in sources and hasattr(args[1], _ORDER):
            kind, shown = "opaque", "samples in a random order"
        if self._samples == 1 and -1 in sources and moves_samples(name, args, kwargs):
            kind, shown = "opaque", "pairs of samples"
        if has_pairs(name, args, shape, self._samples, self._is_sample, in_model=self._takes_all):
            kind, shown = "opaque", f"pairs of samples ({name})"
        for tensor in tensors if kind else ():
            term = Term(
                name=shown or torch_calls.over_samples(name),
                total=tensor,
                is_opaque=kind == "opaque",
                elements=torch_calls.tensors_of(args)[0].numel() if kind == "sum" else 0,
                columns=kind,
                has_pairs=shown.startswith("pairs"),
            )
            self._leave(tensor, term, sources)

    def _found(self, sources: frozenset[int]) -> None:
        """Note which terms decide how many elements there are, and by this what the loss is."""
        for index in sources - ONLY_BATCH:
            if self._terms[index].has_pairs:
                self._deciding = self._terms[index]

    def _compares(self, values: Tensor, target: Tensor) -> bool:
        """Return whether a loss of each element broadcasts samples over samples."""
        shape = tuple(torch.broadcast_shapes(values.shape, target.shape))
        return has_pairs("", (values, target), shape, self._samples, lambda _: True, in_model=False)

    def _is_of(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is computed from the samples of the part."""
        return -1 in self._sources((tensor,))

    def _is_sample(self, tensor: Tensor) -> bool:
        return not self._are_weights([tensor]) if self._takes_all else self._is_of(tensor)

    def _has_rows(self, tensor: Tensor) -> bool:
        return self._batch_rows.has(tensor) and len(tensor) == self._samples

    def terms_of(self, loss: Tensor) -> list[Term]:
        """Return what `loss`, one number, was computed from.

        Raises:
            ModelError: It depends on a number of the part that the batch has another of.
        """
        if self._rows and not self._takes_all and (problem := self._rows.problem(loss)):
            raise of_part(problem)
        if self._deciding:
            raise of_part(self._deciding.name)
        value = full_tensor(loss)
        terms = [self._terms[index] for index in sorted(self._sources((loss,)) - ONLY_BATCH)]
        for term in terms:
            is_number = bool(term.columns) and value.requires_grad and not term.total.requires_grad
            if term.is_opaque or is_number:
                raise of_part(term.name, term.hint)
        check_columns(value, [term for term in terms if term.columns])
        return terms

    def is_over_rows(self, term: Term) -> bool:
        """Return whether `term` is known to be over rows of the batch."""
        return self._batch_rows.is_over(self._terms.index(term))

    def read(self, loss: Tensor) -> PartLoss:
        """Return what the functions that were seen say about `loss`, one number.

        Raises:
            ModelError: It depends on a number of the part that the batch has another of.
        """
        value = full_tensor(loss)
        terms = self.terms_of(loss)
        term = self._own_term(loss)
        is_whole = term and not (term.is_scaled or term.columns)
        if term and is_whole and len(terms) == 1:
            kind: Kind = "summed" if term.count is None else "counted"
            total = term.total
            if self._takes_all:  # for hooks on it: `fully_shard` has one on each output of a model
                total = total + value.to(total.dtype) * 0.0
            return PartLoss(kind=kind, value=total, count=term.count, limit=term.limit)
        for term in terms:
            if value.requires_grad and not term.total.requires_grad:
                raise of_part(term.name, term.hint)
        check_sums(terms)
        means = [term for term in terms if term.mean is not None and term.mean.requires_grad]
        if means and not value.requires_grad:
            return PartLoss(kind="linear", value=value, terms=means)
        pairs = slopes_by(value, means) if means else {}
        if not pairs:
            return PartLoss(kind="plain", value=value)
        return PartLoss(kind="linear", value=value, terms=[*pairs], slopes=[*pairs.values()])

    def _loss(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sources: frozenset[int],
    ) -> Any:
        """Run a loss of torch; its mean or sum leaves a term."""
        is_row = bool(args) and self._is_row(args[0])
        name, how = func.__name__, "none" if is_row else reduction_of(kwargs)
        if how != "mean" or not (func in BY_CLASS or func in BY_ELEMENT):
            result = self._plain_number(func(*args, **kwargs), args)
            if how == "sum":
                term = Term(name=name, total=full_tensor(result), elements=args[1].numel())
                self._leave(result, term, sources)
            else:
                self._link(result, sources)
            return result
        values, target = args[0], args[1]
        if func in BY_ELEMENT and self._compares(values, target):
            result = func(*args, **kwargs)
            shown = f"pairs of samples ({name} of {tuple(values.shape)} and {tuple(target.shape)})"
            self._leave(result, Term(name=shown, total=full_tensor(result), is_opaque=True))
            return result
        if checkpointed() is not None:
            return self._recomputed(name, func(*args, **kwargs), sources)
        if func in BY_CLASS:
            self._check_target(values, target)
            elements = values.numel() // values.size(min(values.dim() - 1, 1))
        else:
            elements = torch.broadcast_shapes(values.shape, target.shape).numel()
        total, count, kind = parts_of_mean(func, args, kwargs)
        return self._mean(name, total, count, kind, elements=elements, sources=sources)

    def _recomputed(self, name: str, result: Tensor, sources: frozenset[int]) -> Tensor:
        """Return `result` as it is: a recomputation outside of the watch must save as many tensors.

        So nobody has its sum and its count, and no loss may depend on it.
        """
        self._leave(
            result,
            Term(
                name=f"{name} in a module that is recomputed",
                total=full_tensor(result),
                is_opaque=True,
                hint="compute it behind that module, from what the module returns",
            ),
            sources,
        )
        return result

    def _check_target(self, values: Tensor, target: Tensor) -> None:
        """Refuse a loss that compares all samples with each other, of which it has a part."""
        if getattr(target, RANGE, False) and values.shape == (self._samples, self._samples):
            raise ModelError(
                f"the loss compares the {self._samples} samples of this part of the batch with "
                "each other, and not with those of other ranks and micro-batches",
                hint="compare them with rt.gather(x), which has the samples of all ranks",
            )

    def _reduced(self, name: str, result: Tensor, of: Reduced, sources: frozenset[int]) -> Tensor:
        """Return the mean or sum `result`; over elements of the batch it leaves a term."""
        x, kind = of
        means = self._means_of(x)
        if kind == "sum" and means:
            term = Term(name=OF_ROWS, total=full_tensor(result), elements=x.numel())
            self._leave(result, term, sources - means)
            return result
        own = self._own_term(x)
        elements = x.numel()
        if own and own.columns == "sum" and (kind == "sum" or name == "trace"):
            sources -= {self._terms.index(own)}  # the sum of the sums of columns is one sum
            elements, kind = own.elements, "sum"
        self._link(result, sources)
        if not x.dim():
            self._keep(x, result)
        elif self._is_data(sources) and not self._is_row(x):
            if kind == "mean" and checkpointed() is not None:
                return self._recomputed(name, result, sources)
            if kind == "mean":
                wide = torch.promote_types(result.dtype, torch.float32)
                if name == "nanmean":
                    sums = x.nansum(dtype=wide), x.isnan().logical_not().sum()
                else:
                    sums = x.sum(dtype=wide), torch.full((), x.numel(), device=x.device)
                mean = self._mean(name, *sums, result.dtype, elements=elements)
                copy_notes(result, mean)
                return mean
            is_mean = kind == "sum" and getattr(x, _DIVIDED, None) == self._number
            term = Term(
                name=name,
                total=full_tensor(result),
                is_opaque=kind == "opaque",
                elements=elements,
                is_scaled=is_mean,
                is_by_hand=is_mean,
            )
            self._leave(result, term)
        return result

    def _changed(
        self, term: Term, name: str, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Return `result` of a function of a sum: a quotient of two sums, or a limited divisor."""
        other = args[1] if len(args) > 1 else kwargs.get("min")
        names = set(kwargs) - {"min"}
        if len(args) > 2 or names:  # noqa: PLR2004 - a sum and one more
            return result
        if name in torch_calls.DIVIDING and isinstance(other, Tensor):
            count = self._own_term(other)
            if count and count.is_sum and not count.total.requires_grad:
                shown = f"{term.name} / {count.name}"
                if checkpointed() is not None:
                    return self._recomputed(shown, result, NOTHING)
                return self._mean(shown, term.total, count.total, result.dtype, limit=count.limit)
        if isinstance(other, int | float) and term.total.requires_grad:
            return self._scaled(term, name, result, other)
        if isinstance(other, int | float) and not term.total.requires_grad:
            floor, offset = term.limit.floor, term.limit.offset
            if name in torch_calls.LIMITING and not offset:
                limit = Limit(max(floor, other), offset)
            elif name in torch_calls.ADDING:
                limit = Limit(floor, offset + other)
            else:
                return result
            self._leave(result, Term(name=term.name, total=term.total, limit=limit))
        return result

    def _scaled(self, term: Term, name: str, result: Tensor, number: float) -> Tensor:
        """Return the product of a sum and a number, or their quotient, which may be a mean."""
        divides = name in torch_calls.DIVIDING
        is_mean = divides and self._is_count(number, term.elements)
        if (divides and number) or name in torch_calls.MULTIPLYING:
            factor = 1 / number if divides else number
            self._leave(
                result,
                replace(
                    term,
                    total=full_tensor(result),
                    is_scaled=True,
                    factor=term.factor * factor,
                    is_by_hand=term.is_by_hand or is_mean,
                ),
            )
        return result

    def _mean(
        self,
        name: str,
        total: Tensor,
        count: Tensor,
        dtype: torch.dtype,
        *,
        elements: int = 0,
        sources: frozenset[int] = NOTHING,
        limit: Limit = NO_LIMIT,
    ) -> Tensor:
        """Return the mean of a sum and a count, and leave its term.

        The result is a tensor of its own: the script may write it in place, and what the script
        computes with it is differentiated by the mean.
        """
        total, count = full_tensor(total), full_tensor(count)
        count = count.detach().to(count_type(count.device)).reshape(())
        divisor = limit(count)
        mean = total / (divisor + (divisor == 0)).to(total.dtype)
        result = mean.to(dtype, copy=True)
        term = Term(name=name, total=total, count=count, mean=mean, limit=limit, elements=elements)
        self._leave(result, term, sources)
        return result
