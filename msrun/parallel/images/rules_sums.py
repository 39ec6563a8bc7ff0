"""Rules for what is computed over an image: sums, means, maxima, norms of torch, and losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from msrun.parallel.autocast.casts import wide
from msrun.parallel.collectives import all_reduce
from msrun.parallel.images.image_tensor import (
    Axes,
    ImageAxis,
    ImageCall,
    ImageDim,
    ImageTensor,
    Places,
    each_of,
    gathered,
    rule,
)
from msrun.parallel.images.rules_elements import common, fit
from msrun.parallel.losses.calls.torch_losses import reduction_of
from msrun.parallel.losses.mixing import dims_of


def over(x: Tensor, axes: Iterable[ImageAxis], op: Any = "sum") -> Tensor:
    """Return the sum, or the maximum, of `x` over the ranks of `axes`."""
    for axis in axes:
        x = all_reduce(x, axis.group, op)
    return x


class _Largest(Function):
    """The largest of one value of each rank; `claims` divide its gradient among those that have it.

    With the `op` "max" the largest claim gets it, with "sum" each gets its share of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        claims: Tensor,
        axes: Sequence[ImageAxis],
        op: str,
    ) -> Tensor:
        largest = over(own, axes, "max")
        ctx.save_for_backward(claims.where(own == largest, 0))
        ctx.axes, ctx.op = axes, op
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (claims,) = ctx.saved_tensors
        total = over(claims, ctx.axes, ctx.op)
        # Whole numbers by themselves would divide in float32, and float16 cannot count that far.
        claims = claims.to(wide(gradient))
        share = claims / total if ctx.op == "sum" else claims == total
        return over(gradient, ctx.axes) * share.to(gradient.dtype), None, None, None


def _largest(x: Tensor, dims: list[int], axes: Sequence[ImageAxis]) -> Tensor:
    """Return the largest value over `dims`, kept in size 1; equal ones share its gradient."""
    own = x.amax(dims, keepdim=True)
    counts = (x == own).sum(dims, keepdim=True)
    found: Tensor = _Largest.apply(own, counts, axes, "sum")  # type: ignore[no-untyped-call]
    return found


def first_largest(own: Tensor, axis: ImageAxis) -> Tensor:
    """Return the largest of one value of each rank; the first that has it gets its gradient."""
    claims = torch.full_like(own, axis.size - axis.rank, dtype=torch.int64)
    found: Tensor = _Largest.apply(own, claims, [axis], "max")  # type: ignore[no-untyped-call]
    return found


def crossed(x: ImageTensor, dims: Iterable[int]) -> list[ImageAxis]:
    """Return the axes that divide some of `dims`."""
    divided = x.divided()
    return [x.axes[divided[dim]] for dim in sorted(set(dims)) if dim in divided]


def left(x: ImageTensor, dims: set[int], *, keeps: bool) -> Places:
    """Return the places in a result from which `dims` are gone, or of size 1."""
    found: list[ImageDim | None] = []
    for place in x.places:
        if place is None:
            found.append(None)
        elif place.dim not in dims:
            gone = 0 if keeps else sum(dim < place.dim for dim in dims)
            found.append(ImageDim(place.dim - gone, place.rows))
        else:
            found.append(ImageDim(place.dim, 1) if keeps else None)
    return tuple(found)


_REDUCING = (
    "sum nansum mean amax amin any all std var std_mean var_mean max min prod logsumexp norm "
    "vector_norm argmax argmin median nanmean count_nonzero aminmax linalg_vector_norm mode "
    "quantile"
)
_ADDED = frozenset(["sum", "nansum", "count_nonzero"])


@rule(_REDUCING)
def reduced(call: ImageCall) -> Any:
    """Sums, means, maxima and their like over some dims or all."""
    if len(call.tensors()) > 1:
        return _extreme(call)
    x, name, count = call.x, call.name, call.x.dim()
    if name in ("norm", "vector_norm", "linalg_vector_norm"):
        return _norm(call)
    dims = dims_of(name, call.args, call.kwargs, count) or set(range(count))
    axes = crossed(x, dims)
    if not axes:
        return _placed(x, call.on(x.local), dims)
    if name in ("std", "var", "std_mean", "var_mean"):
        return _spread(call, dims, axes)
    result = _added(call, dims, axes)
    return call.whole() if result is None else _placed(x, result, dims)


def _added(call: ImageCall, dims: set[int], axes: Sequence[ImageAxis]) -> Tensor | None:
    """Return what follows from that of each part; None if it does not."""
    x, name = call.x, call.name
    if name in _ADDED:
        return _total_of(call.on(x.local), axes)
    if name == "mean":
        total = over(_summed(call, dims), axes)
        return (total / math.prod(x.shape[dim] for dim in dims)).to(_dtype_of(call))
    is_alone = len(dims) == x.dim() and not _named(call)
    if name in ("amax", "amin") or (name in ("max", "min") and is_alone):
        sign = 1 if name in ("amax", "max") else -1
        values = x.local if x.is_floating_point() else x.local.long()  # bytes have no sign
        found = (sign * _largest(sign * values, sorted(dims), axes)).to(x.dtype)
        keeps = name in ("amax", "amin") and call.value(2, "keepdim", False)  # noqa: FBT003
        return found if keeps else found.squeeze(sorted(dims))
    if name in ("any", "all"):
        sign = 1 if name == "any" else -1
        return (sign * over(sign * call.on(x.local).int(), axes, "max")).bool()
    return None


def _named(call: ImageCall) -> bool:
    """Return whether a maximum is told its dim, and so returns places as well."""
    return len(call.args) > 1 or "dim" in call.kwargs


def _extreme(call: ImageCall) -> Any:
    """`max` and `min` of two tensors, element by element; or quantiles that a tensor names."""
    if call.name in ("max", "min"):
        return ImageTensor.rules["maximum"](call)
    return call.whole()


def _summed(call: ImageCall, dims: set[int]) -> Tensor:
    """Return the sum of the part over the dims of a mean."""
    keeps = bool(call.value(2, "keepdim", False))  # noqa: FBT003
    local, dtype = call.x.local, _dtype_of(call)
    return local.sum(sorted(dims), keepdim=keeps, dtype=wide(local.new_empty(0, dtype=dtype)))


def _dtype_of(call: ImageCall) -> torch.dtype:
    """Return the type of a mean."""
    found: torch.dtype = call.kwargs.get("dtype") or call.x.dtype
    return found if found.is_floating_point or found.is_complex else torch.get_default_dtype()


def _total_of(x: Tensor, axes: Iterable[ImageAxis]) -> Tensor:
    """Return the sum of `x` over the ranks of `axes`, which is added up in a wide type."""
    return over(x.to(wide(x)) if x.is_floating_point() else x, axes).to(x.dtype)


def _placed(x: ImageTensor, result: Any, dims: set[int]) -> Any:
    """Return what is left of an image in a result, or in several."""

    def placed(item: Tensor) -> Tensor:
        return x.like(item, left(x, dims, keeps=item.dim() == x.dim()))

    return each_of(result, placed)


def moments(
    x: Tensor, dims: list[int], axes: Sequence[ImageAxis], rows: int
) -> tuple[Tensor, Tensor]:
    """Return mean and summed squares of distances from it, kept in size 1, of so many values.

    Two sums over the ranks, since one with sums of squares would lose precision; both are wide.
    """
    x = x.to(wide(x))
    mean = over(x.sum(dims, keepdim=True), axes) / rows
    return mean, over((x - mean).square().sum(dims, keepdim=True), axes)


def _spread(call: ImageCall, dims: set[int], axes: Sequence[ImageAxis]) -> Any:
    """Variances and standard deviations."""
    x = call.x
    if x.is_complex():
        return call.whole()
    if isinstance(call.value(1, ""), bool):  # `std(unbiased)`, which has no dims
        call = replace(call, args=(call.args[0], None, call.args[1]))
    correction = call.kwargs.get("correction")
    if correction is None:
        correction = int(call.value(2, "unbiased", True))  # noqa: FBT003
    rows = math.prod(x.shape[dim] for dim in dims)
    mean, squares = moments(x.local, sorted(dims), axes, rows)
    found = squares / max(rows - correction, 0)
    if call.name.startswith("std"):
        found = _root(found)
    results = [found, mean] if call.name.endswith("_mean") else [found]
    if not call.value(3, "keepdim", False):  # noqa: FBT003
        results = [result.squeeze(sorted(dims)) for result in results]
    placed = [_placed(x, result.to(x.dtype), dims) for result in results]
    return tuple(placed) if len(placed) > 1 else placed[0]


def _root(squares: Tensor) -> Tensor:
    """Return the square root with a gradient of 0 at 0, as norms and deviations of torch have."""
    is_zero = squares == 0
    return squares.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)


def _norm(call: ImageCall) -> Any:
    """Roots of sums of squares; other norms where no rank has a part of what they are over."""
    x = call.x
    p = call.value(1, "p", call.kwargs.get("ord", 2))
    given = call.value(2, "dim")
    dims = set(range(x.dim()))
    if given is not None:
        listed = given if isinstance(given, tuple | list) else [given]
        dims = {dim % x.dim() for dim in listed}
    axes = crossed(x, dims)
    if not axes:
        return _placed(x, call.on(x.local), dims)
    if p not in (None, 2, 2.0) or x.is_complex() or call.kwargs.get("dtype") is not None:
        return call.whole()
    keeps = bool(call.value(3, "keepdim", False))  # noqa: FBT003
    total = over(x.local.to(wide(x.local)).square().sum(sorted(dims), keepdim=keeps), axes)
    return _placed(x, _root(total).to(x.dtype), dims)


_ALONG = (
    "softmax log_softmax softmin cumsum cumprod sort argsort topk kthvalue diff cummax cummin "
    "logcumsumexp glu unique cosine_similarity pairwise_distance"
)


@rule(_ALONG)
def along(call: ImageCall) -> Any:
    """A function along one dim."""
    x, count = call.x, call.x.dim()
    dims = dims_of(call.name, call.args, call.kwargs, count)
    is_guessed = not dims and call.name in ("softmax", "log_softmax", "softmin")
    if len(call.tensors()) > 1 or call.name == "unique" or is_guessed:
        return call.whole()
    dims = dims or {-1 % count}
    if dims & set(x.divided()):
        return call.whole()

    def placed(item: Tensor) -> Tensor:
        is_gone = item.dim() < count
        return x.like(item, left(x, dims, keeps=False) if is_gone else x.without(dims))

    return each_of(call.on(x.local), placed)


@rule("one_hot")
def told_apart(call: ImageCall) -> Any:
    """One dim more, of classes; if their number is not given, it is that of the whole image."""
    x, classes = call.x, call.value(1, "num_classes", -1)
    if classes == -1:
        classes = int(over(x.local.max(), crossed(x, x.divided()), "max")) + 1
    return x.like(functional.one_hot(x.local, classes))


@rule("normalize")
def normalized_along(call: ImageCall) -> Any:
    """A division by the norm along a dim."""
    x, dim = call.x, call.value(2, "dim", 1)
    dims = dim if isinstance(dim, tuple | list) else [dim]
    if {d % x.dim() for d in dims} & set(x.divided()):
        return call.whole()
    return x.like(call.on(x.local))


# Losses.

_BY_ELEMENT = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div soft_margin_loss poisson_nll_loss"
)


def _each(call: ImageCall) -> dict[str, Any]:
    """Return the options of a loss that give that of each element."""
    return call.kwargs | {"size_average": None, "reduce": None, "reduction": "none"}


@rule(_BY_ELEMENT)
def loss_of_elements(call: ImageCall) -> Any:
    """A loss of each element of two tensors."""
    tensors = call.tensors()
    shape = torch.broadcast_shapes(*(x.shape for x in tensors[:2]))
    axes, places = common(list(call.images()), torch.broadcast_shapes(*(x.shape for x in tensors)))
    count = len(shape)
    options = {
        key: fit(value, axes, places, count) if isinstance(value, Tensor) else value
        for key, value in _each(call).items()
    }
    options = {key: value for key, value in options.items() if key in (*call.kwargs, "reduction")}
    args = [fit(x, axes, places, count) if isinstance(x, Tensor) else x for x in call.args]
    each = call.func(*args, **options)
    reduction = reduction_of(call.kwargs)
    if call.kwargs.get("reduction") == "batchmean":
        return _total(each, axes, places) / shape[0]
    if reduction == "none":
        return ImageTensor(each, axes, places)
    total = _total(each, axes, places)
    return total / shape.numel() if reduction == "mean" else total


def _total(each: Tensor, axes: Axes, places: Places) -> Tensor:
    """Return the sum over the whole image."""
    return over(each.sum(), _divided(axes, places))


def _divided(axes: Axes, places: Places) -> Axes:
    return tuple(a for a, p in zip(axes, places, strict=True) if p and a.divides(p.rows))


@rule("cross_entropy nll_loss")
def loss_by_class(call: ImageCall) -> Any:
    """A loss of classes, in dim 1, of each pixel."""
    values, target = call.value(0, "input"), call.value(1, "target")
    is_short = target.dim() < values.dim()
    source = values if isinstance(values, ImageTensor) else target
    places = source.places
    if source is target and is_short:
        places = tuple(p and ImageDim(p.dim + 1, p.rows) for p in places)
    if any(place and place.dim <= 1 for place in places):
        return call.whole()
    axes = source.axes
    values = fit(values, axes, places, values.dim())
    behind = tuple(p and ImageDim(p.dim - 1, p.rows) for p in places) if is_short else places
    target = fit(target, axes, behind, target.dim())
    weight = gathered(found) if (found := call.value(2, "weight")) is not None else None
    options = {k: v for k, v in _each(call).items() if k in call.kwargs or k == "reduction"}
    options.pop("weight", None)
    each = call.func(values, target, weight=weight, **options)
    result_places = tuple(p and ImageDim(p.dim - 1, p.rows) for p in places)
    reduction = reduction_of(call.kwargs)
    if reduction == "none":
        return ImageTensor(each, axes, result_places)
    if reduction == "sum":
        return _total(each, axes, result_places)
    if target.is_floating_point():
        total = _total(each, axes, result_places)
        return total / math.prod([values.shape[0], *_sizes(result_places, each)])
    counts = target != call.kwargs.get("ignore_index", -100)
    if weight is not None:
        counts = weight.detach()[torch.where(counts, target, 0)] * counts
    both = torch.stack([each.sum(), counts.sum().to(each.dtype)])
    total, number = over(both, _divided(axes, result_places)).unbind()
    return total / number


def _sizes(places: Places, each: Tensor) -> list[int]:
    """Return the sizes of the whole of `each` behind the samples."""
    sizes = list(each.shape)
    for place in places:
        if place:
            sizes[place.dim] = place.rows
    return sizes[1:]
