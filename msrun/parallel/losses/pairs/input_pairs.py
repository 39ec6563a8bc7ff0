"""Notices an input that was cut with the samples, and has none: class prototypes, anchors, a bank.

Micro-batches cut each tensor of a batch whose first dim is the number of samples.  Whether its rows
are samples shows in how it is used.  A sample meets its own row of another input: `x + noise`.  All
samples meet all rows of prototypes: `x @ prototypes.T` has rows of `x` in one dim, and rows of
`prototypes` in another.  Of such a pair a micro-batch has only a part, whichever the reason is: in
a contrastive loss both have samples, and their pairs are those of the whole batch.

Theory of operation.  A `Mark` knows of which inputs its dim has rows.  Where a function puts rows
of different inputs into two dims of its result, the `Mark` has both, and follows them by the rules
of `sample_dims`, for one dim and for the other.  A function that leaves only one of them, or that
no rule knows, used all pairs, and is a `Mixture`.  The diagonal of a matrix of pairs has each row
with its own, which is right.  Of masks and indices it is not known whether they choose it.

Rows of one input that values of another one choose, such as `table[labels]`, are noticed as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from msrun.parallel.local import takes_gradients
from msrun.parallel.losses.calls.joined import is_joined, one_of_joined
from msrun.parallel.losses.calls.marks import Mark, Mixture, Outcome, Rule, TorchCall
from msrun.parallel.losses.calls.orders import with_order
from msrun.parallel.losses.notes import grad_fn_of
from msrun.parallel.losses.pairs.kept_pairs import kept_share
from msrun.parallel.losses.sample_dims import is_elementwise, result_of
from msrun.parallel.losses.torch_calls import of_values, tensors_of

CUT_HINT = (
    "micro-batches cut every input with as many rows as the batch has samples: pass one that has "
    "no samples with a first dim of 1 (x[None]), or keep it outside of the batch, as a buffer of "
    "the model; a loss of pairs of samples needs the whole batch, without micro-batches"
)
_MATRIX = 2  # dims
_OWN = "pairs of samples"
_ROUNDING = 1e-9
# Functions of two tensors that broadcast, and leave out a dim.
_COMPARING = frozenset(["cosine_similarity", "pairwise_distance"])
# Of each element, as those that `sample_dims` knows; their result has no statistic.
_COMPARISONS = {f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne", "and", "or")}
_COMPARISONS |= {"lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not"}
_COMPARISONS |= {"__invert__", "bitwise_not", "bitwise_and", "bitwise_or", "long", "int", "bool"}
_VIEWS = frozenset(["view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"])
# They may choose the values of a sample with itself.
_CHOOSING = frozenset(["__getitem__", "masked_select", "take", "where", "masked_fill"])
# Positions of what they choose from, of the dim, and of the indices.
_INDEXED = {"index_select": (0, 1, 2), "gather": (0, 1, 2), "take_along_dim": (0, 2, 1)}


def outcome_of(call: TorchCall, rule: Rule = result_of) -> Outcome:
    """Return what `rule` knows of the result of `call`, and what is known of pairs in it."""
    values = tensors_of(of_values(call.name, call.args, call.kwargs))
    call = replace(call, marks={id(x): mark for x in values if (mark := call.mark(x))})
    try:
        outcome = with_order(call, _outcome(call, rule) or one_of_joined(call))
    except (TypeError, ValueError, IndexError, RuntimeError):
        return None  # a form of arguments that no rule here knows
    if not isinstance(outcome, Mark) or outcome.dim is None:
        return outcome
    marks = call.marks.values()
    of_samples = [mark for mark in marks if mark.dim is not None]
    # A dim that one of them has for certain is that of the others.
    is_guess = outcome.is_guess or (bool(of_samples) and all(x.is_guess for x in of_samples))
    inputs = outcome.inputs or _inputs(*marks)
    return outcome._replace(inputs=inputs, is_guess=is_guess, is_joined=is_joined(call, outcome))


def input_marks(
    batch: Sequence[Tensor], names: Iterable[str], samples: int, dim: int, parts: int
) -> Iterator[tuple[Tensor, Mark | None]]:
    """Yield inputs of a batch and what is known of those that have samples.

    Args:
        batch: The inputs.
        names: Of them; empty for those that micro-batches do not cut.
        samples: Samples in the batch.
        dim: That of samples.
        parts: Micro-batches.
    """
    given = itertools.zip_longest(batch, names if parts > 1 else ())
    # One label for each item of dim 1 of an input: its dim 0 has the sequence.
    labels = len(batch[-1]) if parts == 1 and batch and batch[-1].dim() == 1 else samples
    for place, (x, name) in enumerate(given):
        is_sequence = labels != samples and x.shape[1:2] == (labels,)
        if name == "" or is_sequence or x.dim() <= dim or x.shape[dim] != samples:
            yield x, None
        elif parts == 1:
            yield x, Mark(dim, inputs=(f"input {place}",))
        else:  # what a micro-batch has of it
            yield x, Mark(dim, inputs=(f"`{name}` {list(x.shape)}",) if name else ())


def chosen_samples(call: TorchCall) -> Mark | None:
    """Return that indices or a mask choose among samples, so that no dim has all of them."""
    if call.name in ("masked_select", "take"):
        return Mark(None) if call.mark(call.x) else None
    source, dim, indices = _indexed(call)
    mark = call.mark(source)
    if mark is None or mark.dim is None or mark.dim != dim:
        return None
    if not isinstance(indices, Tensor | list):
        return None
    is_mask = isinstance(indices, Tensor) and indices.dtype == torch.bool
    index = call.mark(indices)
    is_chosen = is_mask or bool(index and index.is_chosen)
    return Mark(None, is_chosen=is_chosen and dim == 0)


def failure_of(call: TorchCall, parts: int) -> str:
    """Return of which inputs a function got a part, and raised; empty if they are not the cause.

    Args:
        call: Its result is not there.
        parts: Micro-batches.
    """
    if chosen := _chosen_rows(call):
        return chosen.name
    inputs = _inputs(*call.marks.values())
    most = call.samples * parts  # samples of the whole batch, if all parts have as many
    given = tensors_of((*call.args, *call.kwargs.values()))
    if len(inputs) == 1:  # weights and samples may have as many features by chance
        given = [x for x in given if grad_fn_of(x) and not _inputs(call.mark(x) or Mark(None))]
    has_all = any(
        most - parts < length <= most and not (mark and dim in (mark.dim, mark.across))
        for x, mark in ((x, call.mark(x)) for x in given)
        for dim, length in enumerate(x.shape)
    )
    return " and ".join(inputs) if has_all and parts > 1 else ""


def _outcome(call: TorchCall, rule: Rule) -> Outcome:
    if any(mark.across is not None for mark in call.marks.values()):
        return _of_pairs(call, rule)
    if not any(mark.inputs for mark in call.marks.values()):
        outcome = rule(call)
        return _paired(call) if outcome is None else outcome
    if chosen := _chosen_rows(call):
        return chosen
    if call.samples == 1 and call.is_cut and call.name in _VIEWS:
        return _viewed_one(call)
    outcome = rule(call)
    if outcome is None:
        outcome = _paired(call)
    if outcome is None and call.name in _COMPARISONS:
        places = {at for _, at in _places(call)}
        return Mark(places.pop()) if len(places) == 1 else None
    return outcome


def _viewed_one(call: TorchCall) -> Outcome:
    """Return what is known of a view of one sample: it is in the first dim, if this is one."""
    mark, shape = call.mark(call.x), call.result.shape
    if mark is None or mark.dim is None:
        return mark
    is_first = mark.dim == 0 and shape[:1] == (1,) and 1 not in shape[1:2]
    return Mark(0, mark.statistic, is_guess=True) if is_first else None


def _inputs(*marks: Mark) -> tuple[str, ...]:
    found = [name for mark in marks if mark.dim is not None for name in mark.inputs]
    return tuple(dict.fromkeys(found))


def _mixture(call: TorchCall, name: str, mark: Mark) -> Mixture:
    """Return that pairs were used, of the inputs of `mark`, or of one input."""
    if call.is_cut or not mark.others:
        return Mixture(name, hint=CUT_HINT if mark.others else "")
    return Mixture(name, between=(mark.inputs, mark.others))


def _shown(first: tuple[str, ...], second: tuple[str, ...], call: TorchCall) -> str:
    return f"pairs of rows of {first[0]} with rows of {second[0]} ({_place(call)})"


def _place(call: TorchCall) -> str:
    line = call.line().removeprefix(" (").removesuffix(")")
    return ", ".join(filter(None, [call.name.strip("_"), line]))


def _paired(call: TorchCall) -> Outcome:
    """Return that rows of inputs, or samples, are in two dims of the result, if they are."""
    places: dict[int, tuple[str, ...]] = {}
    for mark, at in _places(call):
        if mark.is_guess or mark.dim is None:
            return None
        names = places.get(at, ())
        places[at] = tuple(dict.fromkeys([*names, *mark.inputs]))
    if len(places) != 2:  # noqa: PLR2004 - a pair
        return None
    dim, across = places
    first, second = places[dim], places[across]
    is_own = bool(set(first) & set(second))
    if not (first and second) or (is_own and call.name in _ATTENDING and not call.is_cut):
        return None  # of attention, which `over_sequence` knows
    if is_own:
        is_of_samples = call.samples > 1 and takes_gradients(call.result)
        own = Mark(dim, inputs=first, across=across, pairs=_OWN + call.line())
        return own if is_of_samples else None
    shown = _shown(first, second, call)
    pairs = Mark(dim, inputs=first, across=across, pairs=shown, others=second)
    return _mixture(call, shown, pairs) if call.name in _ATTENDING else pairs


def _places(call: TorchCall) -> Iterator[tuple[Mark, int]]:
    """Yield marks of arguments, and where in the result their rows would be."""
    if is_elementwise(call.name) or call.name in _COMPARISONS:
        count = call.result.dim()
    elif call.name in _COMPARING:
        count = max(x.dim() for x in call.args[:2])
    else:
        find = _FINDING.get(call.name)
        yield from find(call) if find else ()
        return
    given = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    gone = call.value(2, "dim", 1) % count if call.name == "cosine_similarity" else count - 1
    for x in given:
        if (mark := call.mark(x)) and mark.dim is not None:
            at = mark.dim + count - x.dim()
            if call.name not in _COMPARING:
                yield mark, at
            elif at != gone:
                yield mark, at - (at > gone)


def _rows_of(call: TorchCall, x: object) -> tuple[Mark, int] | None:
    """Return what is known of a tensor, and which dim from the end has its rows."""
    mark = call.mark(x)
    if not isinstance(x, Tensor) or mark is None or mark.dim is None:
        return None
    return mark, mark.dim - x.dim()


def _of_matrices(call: TorchCall) -> Iterator[tuple[Mark, int]]:
    """(..., i, k) @ (..., k, j)."""
    left, right = call.args[-2:]
    if call.name == "__rmatmul__":
        left, right = right, left
    if min(left.dim(), right.dim()) < _MATRIX:
        return
    count = call.result.dim()
    if (found := _rows_of(call, left)) and found[1] != -1:
        yield found[0], count + found[1]
    if (found := _rows_of(call, right)) and found[1] != -_MATRIX:
        yield found[0], count + found[1]


def _of_rows(call: TorchCall) -> Iterator[tuple[Mark, int]]:
    """(..., i, k) with (..., j, k): `cdist`, `linear`, `inner`."""
    left, right = call.args[:2]
    if min(left.dim(), right.dim()) < _MATRIX:
        return
    count = call.result.dim()
    if (found := _rows_of(call, left)) and found[1] != -1:
        yield found[0], count + found[1]
    if (found := _rows_of(call, right)) and found[1] != -1:
        yield found[0], count + (-1 if found[1] == -_MATRIX else found[1])


def _of_outer(call: TorchCall) -> Iterator[tuple[Mark, int]]:
    for place, x in enumerate(call.args[:2]):
        if found := _rows_of(call, x):
            yield found[0], place


def _of_letters(call: TorchCall) -> Iterator[tuple[Mark, int]]:
    """`einsum`."""
    equation, *given = call.args
    operands = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
    sources, arrow, target = str(equation).replace(" ", "").partition("->")
    if not arrow or "." in equation:
        return
    for letters, x in zip(sources.split(","), operands, strict=True):
        found = _rows_of(call, x)
        if found and letters[found[0].dim or 0] in target:
            yield found[0], target.index(letters[found[0].dim or 0])


def _of_queries(call: TorchCall) -> Iterator[tuple[Mark, int]]:
    """Attention, in which rows of one input look at all those of another."""
    is_layer = call.name == "multi_head_attention_forward"
    for place, name in enumerate(["query", "key", "value"]):
        x = call.value(place, name)
        found = _rows_of(call, x)
        tokens = -x.dim() if is_layer else -_MATRIX
        if found and found[1] == tokens:
            yield found[0], min(place, 1)


_ATTENDING = frozenset(["scaled_dot_product_attention", "multi_head_attention_forward"])
_FINDING: Mapping[str, Callable[[TorchCall], Iterator[tuple[Mark, int]]]] = {
    **dict.fromkeys(["matmul", "mm", "bmm", "__matmul__", "__rmatmul__"], _of_matrices),
    **dict.fromkeys(["addmm", "baddbmm", "addbmm"], _of_matrices),
    **dict.fromkeys(["cdist", "linear", "inner"], _of_rows),
    **dict.fromkeys(["outer", "ger"], _of_outer),
    **dict.fromkeys(_ATTENDING, _of_queries),
    "einsum": _of_letters,
}


def _chosen_rows(call: TorchCall) -> Mixture | None:
    """Return that values of one input choose rows of another, of which a part is there."""
    source, dim, indices = _indexed(call) if call.is_cut else (None, None, None)
    mark = call.mark(source)
    if mark is None or not mark.inputs or mark.dim is None or mark.dim != dim:
        return None
    for index in tensors_of([indices]):
        own = call.mark(index)
        is_place = not (index.is_floating_point() or index.dtype == torch.bool)
        if is_place and own and own.inputs and not set(own.inputs) & set(mark.inputs):
            name = f"rows of {mark.inputs[0]} that values of {own.inputs[0]} choose"
            return Mixture(f"{name} ({_place(call)})", hint=CUT_HINT)
    return None


def _indexed(call: TorchCall) -> tuple[object, int | None, object]:
    """Return from what a function chooses rows, along which dim, and by which indices."""
    if call.name == "embedding":
        return call.value(1, "weight"), 0, call.x
    if call.name == "__getitem__":
        return call.x, *_index_along(call)
    if call.name in _INDEXED:
        source, dim, index = _INDEXED[call.name]
        along = call.value(dim, "dim")
        if isinstance(along, int):
            x = call.value(source, "input")
            return x, along % x.dim(), call.value(index, "indices", call.kwargs.get("index"))
    return None, None, None


def _index_along(call: TorchCall) -> tuple[int | None, object]:
    """Return the dim of samples of `x[...]` and the item of the index that it has there."""
    mark, given = call.mark(call.x), call.args[1]
    items = list(given) if isinstance(given, tuple) else [given]
    if mark is None or mark.dim is None:
        return None, None
    at = next((place for place, item in enumerate(items) if item is ...), len(items))
    used = [_dims_of_item(item) for item in items]
    rest = call.x.dim() - sum(used)
    items[at : at + 1] = [slice(None)] * rest
    old = 0
    for item in items:
        count = _dims_of_item(item)
        if old <= mark.dim < old + count:
            return mark.dim, item
        old += count
    return None, None


def _dims_of_item(item: object) -> int:
    if item is None or item is ... or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _of_pairs(call: TorchCall, rule: Rule) -> Outcome:
    """Return what is known of the result of a function that got pairs."""
    given = tensors_of((*call.args, *call.kwargs.values()))
    pairs = [(x, mark) for x in given if (mark := call.mark(x)) and mark.across is not None]
    x, mark = pairs[0]
    if _may_choose_own(call, x, mark):
        return None
    if call.name in ("diagonal", "diag"):
        return _diagonal(call, mark)
    if call.name == "trace":
        return None
    first, second = (_along(call, rule, pairs, attribute) for attribute in ("dim", "across"))
    dims = [found.dim for found in (first, second) if isinstance(found, Mark)]
    if None in dims or len(set(dims)) < _MATRIX:
        return _mixture(call, mark.pairs, mark)
    return mark._replace(dim=dims[0], across=dims[1])


def _along(
    call: TorchCall, rule: Rule, pairs: Sequence[tuple[Tensor, Mark]], attribute: str
) -> Outcome:
    """Return where one of the two dims goes."""
    others = {key: mark for key, mark in call.marks.items() if mark.across is None}
    own = {id(x): Mark(getattr(mark, attribute), inputs=mark.inputs) for x, mark in pairs}
    found = rule(replace(call, marks=own))
    if isinstance(found, Mixture) or found is None or not others:
        return found
    # Elementwise with values of each sample, which lie along one of the two dims.
    return found if is_elementwise(call.name) else None


def _may_choose_own(call: TorchCall, x: Tensor, mark: Mark) -> bool:
    """Return whether a mask or indices may leave the pairs of a sample with itself."""
    if (kept := kept_share(call, x)) is not None and kept * call.samples > 1 + _ROUNDING:
        return False  # more than those of a sample with itself can be
    if call.name in _CHOOSING and call.name != "__getitem__":
        return True
    if call.name == "__getitem__":
        if not tensors_of([call.args[1]]):
            return False
        return not any(call.mark(index) for index in tensors_of([call.args[1]]))
    if not is_elementwise(call.name) or mark.dim is None or mark.across is None:
        return False
    both = (mark.dim - x.dim(), mark.across - x.dim())
    return any(
        other is not x
        and not call.mark(other)
        and other.dim() >= -min(both)
        and all(other.shape[dim] == x.shape[dim] for dim in both)
        for other in tensors_of((*call.args, *call.kwargs.values()))
    )


def _diagonal(call: TorchCall, mark: Mark) -> Outcome:
    dims = {mark.dim, mark.across}
    if call.name == "diag":
        return Mark(0, inputs=mark.inputs)
    first, second = call.value(2, "dim1", 0), call.value(3, "dim2", 1)
    if call.value(1, "offset", 0) or {first % call.x.dim(), second % call.x.dim()} != dims:
        return _mixture(call, mark.pairs, mark)
    return Mark(call.result.dim() - 1, inputs=mark.inputs)
