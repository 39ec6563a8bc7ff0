"""Rules for what moves dims and rows, such as views and slices, and for matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msrun.parallel.images.image_tensor import (
    ImageCall,
    ImageDim,
    ImageTensor,
    Places,
    gathered,
    rule,
    wrapped,
)
from msrun.parallel.images.rules_elements import common, fit, written
from msrun.parallel.notation.image_parts import Spans, one_each, scaled

_HEAD_DIMS = 2


def _on_meta(call: ImageCall) -> torch.Size:
    """Return the shape of the result, by running the function without values."""

    def without_values(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    result: Tensor = call.changed(without_values)
    return result.shape


class _Target(NamedTuple):
    """Where a placed dim goes in a view: its new dim, and rows that become one or one that splits.

    Args:
        dim: The new dim.
        joins: Values of the old rows that follow each other in the new dim.
        splits: Rows that make up one of the new dim.
    """

    dim: int
    joins: int = 1
    splits: int = 1


def _target(old: Sequence[int], new: Sequence[int], dim: int) -> _Target | None:
    ahead, rows = math.prod(old[:dim]), old[dim]
    for at, size in enumerate(new):
        if math.prod(new[:at]) != ahead:
            continue
        if size == rows:
            return _Target(at)
        if size > 1 and rows % size == 0:
            return _Target(at, splits=rows // size)
        if rows > 1 and size % rows == 0:
            return _Target(at, joins=size // rows)
    return None


@rule("view reshape flatten unflatten view_as reshape_as ravel")
def viewed(call: ImageCall) -> Any:
    """The same values in the same order in another shape."""
    if not isinstance(call.value(0, "input"), ImageTensor):
        return call.whole(is_expected=True)  # a plain tensor in the shape of an image
    x = call.x
    if call.name == "view" and isinstance(call.value(1, "dtype"), torch.dtype):
        raise call.refusal("a view of another type")
    new = _on_meta(call)
    targets = [p and _target(x.shape, new, p.dim) for p in x.places]
    is_taken = len({t.dim for t in targets if t}) < sum(t is not None for t in targets)
    lost = any(x.is_divided(at) and not targets[at] for at in range(len(targets)))
    mixed = sum(
        x.is_divided(at) and (t is not None and t.joins > 1) for at, t in enumerate(targets)
    )
    if lost or is_taken or (mixed and not _joins_apart(x, new, targets)):
        whole = gathered(x)
        if len(new) > _HEAD_DIMS:
            call.whole()
        return whole.reshape(new)
    return _reshaped(x, new, targets)


def _joins_apart(x: ImageTensor, new: Sequence[int], targets: Sequence[_Target | None]) -> bool:
    """Return whether dims that are joined with a divided one are none themselves."""
    for at, target in enumerate(targets):
        if target is None or target.joins == 1 or not x.is_divided(at):
            continue
        place = x.places[at]
        end = place.dim + 1 if place else 0
        while math.prod(x.shape[:end]) < math.prod(new[: target.dim + 1]):
            if end in x.divided():
                return False
            end += 1
    return True


def _reshaped(x: ImageTensor, new: Sequence[int], targets: Sequence[_Target | None]) -> Tensor:
    local, shape = x.local, list(new)
    places: list[ImageDim | None] = []
    for at, (place, target) in enumerate(zip(x.places, targets, strict=True)):
        if place is None or target is None:
            places.append(None)
            continue
        rows = new[target.dim]
        places.append(ImageDim(target.dim, rows))
        axis = x.axes[at]
        if not x.is_divided(at):
            continue
        if target.splits > 1:
            needs = one_each(scaled(axis.spans(rows), target.splits))
            local = axis.move(local, place.dim, axis.spans(place.rows), needs)
            first, end = axis.part(rows)
            shape[target.dim] = end - first
        else:
            first, end = axis.part(place.rows)
            shape[target.dim] = (end - first) * target.joins
    local = local.reshape(shape)
    for at, (place, target) in enumerate(zip(x.places, targets, strict=True)):
        if place and target and target.joins > 1 and x.is_divided(at):
            axis = x.axes[at]
            have = scaled(axis.spans(place.rows), target.joins)
            local = axis.move(local, target.dim, have, one_each(axis.spans(new[target.dim])))
    return wrapped(local, x.axes, tuple(places))


def _moved(x: ImageTensor, order: Sequence[int]) -> Places:
    """Return the places where dim i of the result is `order[i]` of `x`."""
    return tuple(p and ImageDim(list(order).index(p.dim), p.rows) for p in x.places)


@rule("permute transpose swapaxes swapdims movedim moveaxis t", "__get__.T", "__get__.mT")
def permuted(call: ImageCall) -> Any:
    """Dims in another order."""
    x = call.x
    numbered = torch.empty(tuple(range(2, 2 + x.dim())), device="meta")
    order = [size - 2 for size in call.on(numbered).shape]
    return x.like(call.on(x.local), _moved(x, order))


@rule("unsqueeze")
def unsqueezed(call: ImageCall) -> Any:
    """One dim more."""
    x = call.x
    at = call.value(1, "dim") % (x.dim() + 1)
    places = tuple(p and ImageDim(p.dim + (at <= p.dim), p.rows) for p in x.places)
    return x.like(call.on(x.local), places)


@rule("squeeze")
def squeezed(call: ImageCall) -> Any:
    """Fewer dims of size 1."""
    x, given = call.x, call.value(1, "dim")
    dims = range(x.dim()) if given is None else [given] if isinstance(given, int) else given
    gone = sorted({dim % x.dim() for dim in dims if x.shape[dim] == 1})
    places = tuple(
        None
        if p is None or p.dim in gone
        else ImageDim(p.dim - sum(d < p.dim for d in gone), p.rows)
        for p in x.places
    )
    return x.like(x.local.squeeze(gone) if gone else x.local, places)


@rule("expand expand_as broadcast_to repeat tile")
def expanded(call: ImageCall) -> Any:
    """Values that stand several times."""
    if not isinstance(call.value(0, "input"), ImageTensor):
        image = next(call.images())
        shape = _on_meta(call)
        axes, places = common([image], shape)
        plain = call.value(0, "input").expand(shape)
        return wrapped(fit(plain, axes, places, len(shape)), axes, places)
    x, shape = call.x, _on_meta(call)
    behind = len(shape) - x.dim()
    found: list[ImageDim | None] = []
    sizes = list(shape)
    for place in x.places:
        if place and place.rows not in (1, shape[place.dim + behind]):
            return call.whole()
        found.append(place and ImageDim(place.dim + behind, shape[place.dim + behind]))
    for at, place in enumerate(found):
        if place and x.is_divided(at):
            first, end = x.axes[at].part(place.rows)
            sizes[place.dim] = end - first
    if call.name in ("repeat", "tile"):
        counts = [new // old for new, old in zip(sizes[behind:], x.local.shape, strict=True)]
        local = x.local.repeat(*sizes[:behind], *counts)
    else:
        local = x.local.expand(sizes)
    return wrapped(local, x.axes, tuple(found))


@rule("cat concat concatenate stack")
def joined(call: ImageCall) -> Any:
    """Tensors behind each other along a dim."""
    parts = [part for part in call.value(0, "tensors") if part.dim() > 1 or part.numel()]
    image = next(part for part in parts if isinstance(part, ImageTensor))
    count = image.dim()
    at = call.value(1, "dim", 0)
    if call.name == "stack":
        at %= count + 1
        parts = [part.unsqueeze(at) for part in parts]
        image = next(part for part in parts if isinstance(part, ImageTensor))
        count += 1
    at %= count
    images = [part for part in parts if isinstance(part, ImageTensor)]
    axes, places = common(images, image.shape)
    along = next((number for number, p in enumerate(places) if p and p.dim == at), None)
    if along is not None:
        others = tuple(None if number == along else p for number, p in enumerate(places))
        return _joined_rows(parts, axes, (others, along), at)
    local = [fit(part, axes, places, count) for part in parts]
    return wrapped(torch.cat(local, at), axes, places)


def _joined_rows(parts: Sequence[Tensor], axes: Any, where: tuple[Places, int], dim: int) -> Tensor:
    """Join images along a dim that is placed: each rank gets its rows of the whole."""
    others, along = where
    axis, total = axes[along], sum(part.shape[dim] for part in parts)
    found, before = [], 0
    for part in parts:
        rows = part.shape[dim]
        own = tuple(ImageDim(dim, rows) if n == along else p for n, p in enumerate(others))
        local = fit(part, axes, own, part.dim())
        spans = [
            (min(max(a - before, 0), rows), min(max(b - before, 0), rows))
            for a, b in axis.spans(total)
        ]
        needs = tuple(((a, b),) if b > a else () for a, b in spans)
        found.append(axis.move(local, dim, axis.spans(rows), needs))
        before += rows
    places = tuple(ImageDim(dim, total) if n == along else p for n, p in enumerate(others))
    return wrapped(torch.cat(found, dim), axes, places)


@rule("chunk split tensor_split unbind split_with_sizes __iter__")
def cut(call: ImageCall) -> Any:
    """Parts along a dim."""
    x = call.x
    if call.name == "__iter__":
        return iter(x.unbind(0))
    dim = call.value(1 if call.name == "unbind" else 2, "dim", 0) % x.dim()
    if dim not in x.divided():
        gone = call.name == "unbind"
        places = tuple(
            p and ImageDim(p.dim - (gone and dim < p.dim), p.rows)
            for p in x.without([dim] if gone else [])
        )
        if not gone and dim in x.placed():
            places = x.without([dim])
        return tuple(x.like(part, places) for part in call.on(x.local))
    if call.name == "unbind":
        return tuple(x.select(dim, row) for row in range(x.shape[dim]))
    plain = torch.empty((x.shape[dim],), device="meta")
    given = call.value(1, {"chunk": "chunks"}.get(call.name, "split_size_or_sections"))
    if call.name == "tensor_split":
        given = call.value(1, "sections", call.kwargs.get("indices"))
    parts = getattr(torch.Tensor, call.name)(plain, given)
    firsts = [0]
    for part in parts:
        firsts.append(firsts[-1] + len(part))
    return tuple(
        x.narrow(dim, first, len(part)) for first, part in zip(firsts, parts, strict=False)
    )


@rule("narrow select index_select repeat_interleave gather take_along_dim")
def taken_along(call: ImageCall) -> Any:
    """Some rows along a dim."""
    if not isinstance(call.value(0, "input"), ImageTensor) or call.others() is not None:
        return call.whole()
    x = call.x
    at = 2 if call.name == "repeat_interleave" else 1
    given = call.value(at, "dim")
    if given is None:
        return call.whole()
    dim = given % x.dim()
    if dim in x.divided():
        return _rows_along(call, dim)
    if call.name in ("gather", "take_along_dim"):
        return call.whole()
    gone = call.name == "select"
    places = tuple(p and ImageDim(p.dim - (gone and dim < p.dim), p.rows) for p in x.without([dim]))
    return x.like(call.on(x.local), places)


def _rows_along(call: ImageCall, dim: int) -> Any:
    """Some rows of a divided dim."""
    x = call.x
    index: list[Any] = [slice(None)] * dim
    if call.name == "narrow":
        first = int(call.value(2, "start")) % max(x.shape[dim], 1)
        return x[(*index, slice(first, first + int(call.value(3, "length"))))]
    if call.name == "select":
        return x[(*index, int(call.value(2, "index")))]
    return call.whole()


@rule("__getitem__")
def taken(call: ImageCall) -> Any:
    """`x[...]`: by slices, None, numbers and `...`; by tensors only samples and channels."""
    if not isinstance(call.args[0], ImageTensor):
        return call.whole()
    x, given = call.x, call.args[1]
    items = list(given) if isinstance(given, tuple) else [given]
    if not all(item is None or type(item) in (int, slice, type(...)) for item in items):
        return _taken_by_tensors(call, items)
    used = sum(item is not None and item is not ... for item in items)
    at = next((index for index, item in enumerate(items) if item is ...), len(items))
    items[at : at + 1] = [slice(None)] * (x.dim() - used)
    local, divided = x.local, x.divided()
    places: dict[int, ImageDim] = {}
    old = new = 0
    for index, item in enumerate(items):
        if item is None:
            new += 1
            continue
        axis_number = x.placed().get(old)
        rows = range(x.shape[old])[item]
        if axis_number is not None and isinstance(item, slice):
            places[axis_number] = ImageDim(new, len(rows))
        if old in divided:
            axis = x.axes[divided[old]]
            local, items[index] = _taken_rows(local, axis, old, x.shape[old], rows)
        old += 1
        new += not isinstance(item, int)
    return x.like(local[tuple(items)], tuple(places.get(n) for n in range(len(x.places))))


def _taken_rows(local: Tensor, axis: Any, dim: int, size: int, rows: int | range) -> Any:
    """Return what this rank needs for one row or a range of them, and its index in that."""
    if isinstance(rows, int):
        needs: Spans = ((rows, rows + 1),) * axis.size
        return axis.move(local, dim, axis.spans(size), one_each(needs)), 0
    if not rows:
        return local, slice(0, 0)
    needs = tuple((rows[a], rows[b - 1] + 1) for a, b in axis.spans(len(rows)))
    return axis.move(local, dim, axis.spans(size), one_each(needs)), slice(None, None, rows.step)


def _taken_by_tensors(call: ImageCall, items: Sequence[Any]) -> Any:
    """Rows of samples or channels by their numbers, in front of all placed dims."""
    x = call.x
    first = min((place.dim for place in x.places if place), default=0)
    (index,) = items if len(items) == 1 else (None,)
    is_mask = type(index) is Tensor and index.dtype in (torch.bool, torch.uint8)
    if type(index) is Tensor and first > 0 and (not is_mask or index.dim() <= first):
        local = x.local[index]
        more = local.dim() - x.dim()
        return x.like(local, tuple(p and ImageDim(p.dim + more, p.rows) for p in x.places))
    # Lists in a list are one index or several: that depends on the version of torch.
    if isinstance(index, list) and first > 0 and all(isinstance(item, int) for item in index):
        return x.like(x.local[index])
    return call.whole()


@rule("__setitem__")
def put(call: ImageCall) -> None:
    """`x[...] = value` of samples and channels, or where a mask is true."""
    x, given, value = call.args
    if not isinstance(x, ImageTensor):
        raise call.refusal("a part of an image that is written in another tensor")
    if (
        isinstance(given, ImageTensor)
        and given.dtype == torch.bool
        and not isinstance(value, Tensor)
    ):
        mask: Tensor = given
        for _ in range(x.dim() - given.dim()):  # it is of the first dims
            mask = mask.unsqueeze(-1)
        x.masked_fill_(mask, value)
        return
    target = x[given]
    items = given if isinstance(given, tuple) else (given,)
    is_plain = all(item is None or type(item) in (int, slice, type(...)) for item in items)
    kept = isinstance(target, ImageTensor) and all(
        (a is None) == (b is None) and (a is None or b is None or a.rows == b.rows)
        for a, b in zip(x.places, target.places, strict=True)
    )
    if not (is_plain and kept and isinstance(target, ImageTensor)):
        raise call.refusal("rows of an image that are written")
    part = value
    if isinstance(value, Tensor):
        part = fit(value, x.axes, target.places, target.dim())
    x.local[given] = part
    written(x)


# Matrix products, of which each value of the image has its own.


@rule("linear")
def projected(call: ImageCall) -> Any:
    """A product with the last dim."""
    x = call.value(0, "input")
    if not isinstance(x, ImageTensor) or x.dim() - 1 in x.divided() or call.others() is not None:
        return call.whole()
    return x.like(call.on(x.local), x.without([x.dim() - 1]))


@rule("matmul mm bmm __matmul__ __rmatmul__ mv")
def multiplied(call: ImageCall) -> Any:
    """(..., i, k) @ (..., k, j)."""
    x, other = call.args[0], call.value(1, "mat2", call.kwargs.get("other"))
    if (
        not isinstance(x, ImageTensor)
        or isinstance(other, ImageTensor)
        or call.name == "__rmatmul__"
        or other.dim() != _HEAD_DIMS
        or x.dim() - 1 in x.divided()
    ):
        return call.whole()
    return x.like(call.on(x.local), x.without([x.dim() - 1]))


@rule("einsum")
def contracted(call: ImageCall) -> Any:
    """A product by letters."""
    equation, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    given, _, out = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    images = [(t, x) for t, x in zip(terms, operands, strict=True) if isinstance(x, ImageTensor)]
    axes = images[0][1].axes
    letters: dict[int, tuple[str, int]] = {}
    for term, image in images:
        for at, place in enumerate(image.places):
            if place and "." not in term:
                letters.setdefault(at, (term[place.dim], place.rows))
    named = [letter for letter, _ in letters.values()]
    if "." in equation or "->" not in equation or len(set(named)) < len(named):
        return call.whole()
    if any(letter not in out for letter in named):
        return call.whole()
    parts = []
    for term, operand in zip(terms, operands, strict=True):
        places = tuple(
            ImageDim(term.index(letters[at][0]), letters[at][1])
            if at in letters and letters[at][0] in term
            else None
            for at in range(len(axes))
        )
        parts.append(fit(operand, axes, places, operand.dim()))
    result = tuple(
        ImageDim(out.index(letters[at][0]), letters[at][1]) if at in letters else None
        for at in range(len(axes))
    )
    return wrapped(torch.einsum(equation, *parts), axes, result)


@rule("scaled_dot_product_attention")
def attended(call: ImageCall) -> Any:
    """Attention within rows, columns or channels; one over a divided dim is computed whole."""
    tensors = call.tensors()[:3]
    x = tensors[0]
    same = all(
        isinstance(t, ImageTensor) and isinstance(x, ImageTensor) and t.places == x.places
        for t in tensors
    )
    if not same or len(call.tensors()) > len(tensors) or not isinstance(x, ImageTensor):
        return call.whole()
    if any(dim >= x.dim() - 2 for dim in x.divided()) or call.value(4, "dropout_p", 0.0):
        return call.whole()
    return x.like(call.changed(lambda t: t.local if isinstance(t, ImageTensor) else t))


_WHOLE = (
    "unfold fold grid_sample affine_grid diagonal tril triu cdist histc bincount "
    "masked_select nonzero argwhere lp_pool1d lp_pool2d lp_pool3d max_unpool1d max_unpool2d "
    "max_unpool3d fft_fft2 fft_ifft2 fft_rfft2 "
    "fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn rot90 baddbmm addmm index_add "
    "scatter scatter_add addbmm bilinear outer cross trapz take searchsorted cov "
    "corrcoef adaptive_max_pool2d_with_indices adaptive_max_pool1d_with_indices "
    "adaptive_max_pool3d_with_indices channel_shuffle "
    "multi_head_attention_forward gaussian_nll_loss triplet_margin_loss "
    "cosine_embedding_loss multi_margin_loss hinge_embedding_loss stft"
)


@rule(_WHOLE)
def whole(call: ImageCall) -> Any:
    """What mixes places of an image in some other way: computed of the whole on every rank."""
    return call.whole()
