"""Products of tensors that add up over dims, such as `z.T @ z` and `einsum("ni,nj->ij", z, z)`.

Each dim of what such a function gets has a label, as in `einsum`.  It adds up over the labels that
its result has not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

Labels = tuple[Hashable, ...]


class Contraction(NamedTuple):
    """A product that adds up over dims.

    Args:
        operands: What is multiplied, with a label for each dim.
        result: Labels of the dims of the result.
    """

    operands: Sequence[tuple[Tensor, Labels]]
    result: Labels


def contraction(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contraction | None:
    """Return what a function of torch multiplies and adds up; None for another function.

    Args:
        name: Of the function.
        args: What it got.
        kwargs: What it got by name.
    """
    make = _MAKING.get(name)
    try:
        return make(args, kwargs) if make else None
    except (TypeError, ValueError, IndexError, AttributeError):
        return None  # a form of arguments that is not known here


def _batch(count: int) -> Labels:
    """Return labels of dims that broadcast, the last one first in number."""
    return tuple(range(-count, 0))


def _product(left: Tensor, right: Tensor) -> Contraction:
    """(..., i, k) @ (..., k, j), where a vector has neither i nor j."""
    counts = [max(x.dim() - 2, 0) for x in (left, right)]
    rows, columns = ("i",) * (left.dim() > 1), ("j",) * (right.dim() > 1)
    return Contraction(
        [(left, (*_batch(counts[0]), *rows, "k")), (right, (*_batch(counts[1]), "k", *columns))],
        (*_batch(max(counts)), *rows, *columns),
    )


def _matmul(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contraction:
    left, right = (*args, *kwargs.values())[:2]
    return _product(left, right)


def _dense(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contraction:
    """(..., k) @ (j, k), where a vector has no j; of the bias nothing is added up."""
    x, weight = (*args, *kwargs.values())[:2]
    rest, columns = _batch(x.dim() - 1), ("j",) * (weight.dim() > 1)
    return Contraction([(x, (*rest, "k")), (weight, (*columns, "k"))], (*rest, *columns))


def _reversed(args: Sequence[Any], _: Mapping[str, Any]) -> Contraction:
    return _product(args[1], args[0])


def _added(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contraction:
    """`addmm(x, left, right)`: of `x` nothing is added up."""
    left, right = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, Tensor)][:2]
    found = _product(left, right)
    return found._replace(operands=[*found.operands, (args[0], found.result[-args[0].dim() :])])


def _summed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contraction:
    """`addbmm`: the products of matrices are added up as well."""
    found = _added(args, kwargs)
    return found._replace(operands=found.operands[:2], result=("i", "j"))


def _inner(args: Sequence[Any], _: Mapping[str, Any]) -> Contraction:
    left, right = args
    first, second = (
        tuple((side, dim) for dim in range(x.dim() - 1)) for side, x in enumerate((left, right))
    )
    return Contraction([(left, (*first, "k")), (right, (*second, "k"))], (*first, *second))


def _vecdot(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contraction:
    count = max(x.dim() for x in args)
    gone = kwargs.get("dim", -1) % count - count
    labels = _batch(count)
    rest = tuple(label for label in labels if label != gone)
    return Contraction([(x, labels[count - x.dim() :]) for x in args], rest)


def _tensordot(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contraction:
    left, right = args[:2]
    dims = args[2] if len(args) > 2 else kwargs.get("dims", 2)  # noqa: PLR2004 - after both tensors
    first, second = dims if not isinstance(dims, int) else (range(-dims, 0), range(dims))
    own: list[Hashable] = [("left", dim) for dim in range(left.dim())]
    other: list[Hashable] = [("right", dim) for dim in range(right.dim())]
    gone = set()
    for ours, theirs in zip(first, second, strict=True):
        gone.add(own[ours])
        other[theirs] = own[ours]
    result = tuple(label for label in [*own, *other] if label not in gone)
    return Contraction([(left, tuple(own)), (right, tuple(other))], result)


def _einsum(args: Sequence[Any], _: Mapping[str, Any]) -> Contraction:
    equation, *operands = args
    if len(operands) == 1 and not isinstance(operands[0], Tensor):
        operands = operands[0]
    given, arrow, result = equation.replace(" ", "").partition("->")
    parts = [_letters(*pair) for pair in zip(given.split(","), operands, strict=True)]
    if arrow:
        counts = [sum(isinstance(label, int) for label in labels) for labels in parts]
        return Contraction(
            [*zip(operands, parts, strict=True)], _spread(result, max(counts, default=0))
        )
    every = [label for labels in parts for label in labels]
    letters = sorted({label for label in every if isinstance(label, str)})
    dims = sorted({label for label in every if isinstance(label, int)})
    return Contraction(
        [*zip(operands, parts, strict=True)],
        (*dims, *(label for label in letters if every.count(label) == 1)),
    )


def _letters(text: str, x: Tensor) -> tuple[str | int, ...]:
    return _spread(text, x.dim() - len(text.replace("...", "")))


def _spread(text: str, count: int) -> tuple[str | int, ...]:
    """Return labels by letters; `...` stands for `count` dims."""
    before, dots, after = text.partition("...")
    return (*before, *(range(-count, 0) if dots else ()), *after)


def _chained(args: Sequence[Any], _: Mapping[str, Any]) -> Contraction:
    """A product of several matrices; the first and the last may be vectors."""
    matrices = args[0] if isinstance(args[0], tuple | list) else args
    last = len(matrices) - 1
    labels: list[Labels] = [(at, at + 1) for at in range(last + 1)]
    result: Labels = (0, last + 1)
    if matrices[0].dim() == 1:
        labels[0], result = labels[0][1:], result[1:]
    if matrices[last].dim() == 1:
        labels[last], result = labels[last][:1], result[:-1]
    return Contraction([*zip(matrices, labels, strict=True)], result)


_Making = Callable[[Sequence[Any], Mapping[str, Any]], Contraction]
_MAKING: Mapping[str, _Making] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "vdot", "__matmul__"), _matmul),
    **dict.fromkeys(("_sparse_mm",), _matmul),
    **dict.fromkeys(("addmm", "addmv", "baddbmm", "_sparse_addmm"), _added),
    **dict.fromkeys(("multi_dot", "chain_matmul"), _chained),
    "__rmatmul__": _reversed,
    "addbmm": _summed,
    "linear": _dense,
    "inner": _inner,
    "vecdot": _vecdot,
    "tensordot": _tensordot,
    "einsum": _einsum,
}
CONTRACTIONS = frozenset(_MAKING)
