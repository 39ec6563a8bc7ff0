"""Flags and whole numbers: counts of samples, indices of the best ones, and running counts.

They have no gradients, so the graph of autograd does not lead from a loss to them.  What makes them
depend on other samples is noted at the tensors instead, and goes on to all that is computed of
them.

As an index most of them are right: how many tokens an expert gets, and the order that sorts them by
experts, say only where a token goes.  Their mixture is one of places (`Mixture.place`),
and an index does not hand it on.  An index of the best samples is none: what it reads are samples
that others look at, and what it writes is a mask of samples that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from msrun.parallel.local import takes_gradients
from msrun.parallel.losses.calls.marks import Mark, Mixture, Outcome, TorchCall
from msrun.parallel.losses.mixing import dims_of
from msrun.parallel.losses.torch_calls import of_values, over_samples, tensors_of

# Without a dim these take the last one, and the others all.
_OF_LAST = frozenset(["topk", "kthvalue", "mode", "sort", "argsort", "cumsum", "cumprod"])
# They return numbers of elements or of rows.
_FINDING = frozenset(["nonzero", "argwhere", "where"])
# Where functions have their indices, and the names of these.
_INDEX_AT: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    **dict.fromkeys(["__getitem__", "__setitem__", "index_put", "take"], ((1,), ("indices",))),
    **dict.fromkeys(["repeat_interleave", "take_along_dim"], ((1,), ("repeats", "indices"))),
    **dict.fromkeys(["gather", "index_select", "index_add", "index_copy"], ((2,), ("index",))),
    **dict.fromkeys(["index_fill", "index_reduce", "scatter"], ((2,), ("index",))),
    **dict.fromkeys(["scatter_add", "scatter_reduce"], ((2,), ("index",))),
    **dict.fromkeys(["cross_entropy", "nll_loss"], ((1,), ("target",))),
    "embedding": ((0,), ("input",)),
    "embedding_bag": ((0, 2), ("input", "offsets")),
    "grouped_mm": ((2,), ("offs",)),
    "_grouped_mm": ((2,), ("offs",)),
    "segment_reduce": ((), ("lengths", "indices", "offsets")),
    **dict.fromkeys(["split", "tensor_split", "split_with_sizes"], ((1,), ("indices",))),
}


# On the CPU `histc` counts real numbers alone: a count goes through these as one.
_REAL: Final = "real count"
_REAL_FORMS = frozenset(["float", "double", "to", "type", "histc", "cumsum"])


def handed_on(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mixture_of: Callable[[Tensor], Mixture | None],
    has_samples: Callable[[Tensor], bool],
) -> Mixture | None:
    """Return the mixture that the result of a function has from what it gets, if any.

    Args:
        name: Of the function.
        args: What it gets.
        kwargs: What it gets by name.
        mixture_of: Returns that of a tensor.
        has_samples: Returns whether a tensor has samples in some dim.
    """
    given = tensors_of(of_values(name, args, kwargs))
    found = [(x, mixture) for x in given if (mixture := mixture_of(x))]
    if name == "grad":  # of a mean times samples: each sample has its own
        found = [(x, mixture) for x, mixture in found if not mixture.unless_counted]
    found += [(x, mixture) for x in _indices(name, args, kwargs) if (mixture := mixture_of(x))]
    places = {id(x) for x in _indices(name, args, kwargs)} if found else ()
    left = (each for x, each in found if not (each.place and id(x) in places))
    mixture = next(left, None)
    if mixture and (mixture.place == _REAL or (mixture.place == "count" and name in _REAL_FORMS)):
        mixture = mixture._replace(place=_REAL if name in _REAL_FORMS else "")
    if mixture and name in _FINDING and not (mixture.place or any(map(has_samples, given))):
        return mixture._replace(place="count")
    return mixture


def of_result(mixture: Mixture, result: Tensor) -> Mixture | None:
    """Return a mixture that was handed on to `result`: flags and real numbers are no places."""
    if result.dtype == torch.bool and mixture.place == "position":
        return None  # such as those of the diagonal
    if result.dtype == torch.bool:
        return mixture._replace(place="")
    is_real = mixture.place == _REAL
    if takes_gradients(result):
        return mixture if is_real else mixture._replace(place="")
    return mixture._replace(place="count") if is_real else mixture


def _indices(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    at, names = _INDEX_AT.get(name, ((), ()))
    values = [args[place] for place in at if len(args) > place]
    values += [kwargs[key] for key in names if key in kwargs]
    return [x for value in values for x in (tensors_of([value]))]


def whole_numbers(call: TorchCall) -> Outcome:
    """Return what is known of flags, counts or other whole numbers that a function returned."""
    if call.name in _FINDING and len(call.args) == 1:
        return _found(call)
    is_real = takes_gradients(call.result) and call.name not in _OF_COUNTS
    rule = None if is_real else _RULES.get(call.name)
    mark = call.mark(call.x) if rule and call.args else None
    if rule is None or mark is None or mark.is_extreme:
        return None
    is_last = call.name in _OF_LAST
    count = call.x.dim()
    default = {count - 1} if is_last else set(range(count))
    dims = dims_of(call.name, call.args, call.kwargs, count) or default
    if (0 if mark.is_chosen else mark.dim) in dims:
        return rule(call)
    if mark.statistic:
        return Mixture(mark.statistic)
    if mark.dim is None or call.result.dim() == count:
        return mark._replace(statistic="")
    return Mark(mark.dim - sum(dim < mark.dim for dim in dims), inputs=mark.inputs)


def _found(call: TorchCall) -> Outcome:
    """Return what is known of the numbers of samples that a mask chooses."""
    mark = call.mark(call.x)
    return Mark(None, is_chosen=True) if mark and mark.dim is not None else None


def _number(call: TorchCall) -> Outcome:
    """Return what is known of a sum of whole numbers or flags."""
    return Mark(None, over_samples(call.name) + call.line())


def _decision(call: TorchCall) -> Outcome:
    """Return what is known of `any` and `all`; one flag is what a script decides by."""
    return call.mixture(call.name) if call.result.dim() else None


def _best(call: TorchCall) -> Outcome:
    """Return what is known of indices of the best samples; maxima of integers crop padding."""
    is_all = call.name == "topk" and call.result.shape == call.x.shape
    if is_all and call.samples > 1:
        return _place(call)
    return call.mixture(call.name) if takes_gradients(call.x) else None


def _place(call: TorchCall) -> Outcome:
    return call.mixture(call.name)._replace(place="count")


def _unique(call: TorchCall) -> Outcome:
    """Return what is known of different values: numbers of samples are those of which some are."""
    mark = call.mark(call.x)
    return Mark(None, is_chosen=True) if mark and mark.is_chosen else _place(call)


_RULES: Mapping[str, Callable[[TorchCall], Outcome]] = {
    **dict.fromkeys(["sum", "count_nonzero", "bincount", "histc"], _number),
    **dict.fromkeys(["any", "all"], _decision),
    **dict.fromkeys(["argmax", "argmin", "max", "min", "median", "nanmedian"], _best),
    **dict.fromkeys(["topk", "kthvalue", "mode"], _best),
    **dict.fromkeys(["sort", "argsort", "cumsum", "cumprod"], _place),
    **dict.fromkeys(["unique", "unique_consecutive", "_unique2"], _unique),
}
_OF_COUNTS = frozenset(["bincount", "histc"])  # also where they return real numbers
