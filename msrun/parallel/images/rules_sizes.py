"""Rules for what gives an image another size: padding, resizing, adaptive pooling, shuffles."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from msrun.parallel.autocast.casts import wide
from msrun.parallel.images.image_tensor import ImageAxis, ImageCall, ImageDim, ImageTensor, rule
from msrun.parallel.images.rules_sums import first_largest, over
from msrun.parallel.notation.image_parts import Span, Spans, one_each, scaled
from msrun.parallel.torch_compat import with_values

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_RESIZED = {"linear": 1, "bilinear": 2, "trilinear": 3}


def redistributed(x: Tensor, axis: ImageAxis, dim: int, have: Spans, rows: int) -> Tensor:
    """Return this rank's part of so many rows, of which ranks `have` other parts."""
    return axis.move(x, dim, have, one_each(axis.spans(rows)))


@rule("pad")
def padded(call: ImageCall) -> Any:
    """Rows around an image, or fewer of them."""
    x, sides = call.x, list(call.value(1, "pad"))
    mode, value = call.value(2, "mode", "constant"), call.value(3, "value")
    if mode == "circular" and min(sides) < 0 < max(sides):
        # It goes around what is left of the image.
        cropped = functional.pad(x, [min(side, 0) for side in sides])
        return functional.pad(cropped, [max(side, 0) for side in sides], mode)
    local, places = x.local, list(x.places)
    for at, place in enumerate(x.places):
        behind = 2 * (x.dim() - 1 - place.dim) if place else 0
        if place is None or behind >= len(sides) or not any(sides[behind : behind + 2]):
            continue
        before, after = sides[behind : behind + 2]
        rows = place.rows + before + after
        if rows < 1:
            raise call.refusal(f"a pad of {place.rows} rows by {before} and {after}")
        places[at] = ImageDim(place.dim, rows)
        if not x.is_divided(at):
            continue
        sides[behind : behind + 2] = [0, 0]
        check_pad(call, mode, place.rows, before, after)
        local = _padded_rows(local, x.axes[at], place, (before, after), (mode, value))
    if any(sides):
        local = call.func(local, sides, mode, value)
    return x.like(_copied(x, local), tuple(places))


def _copied(x: ImageTensor, local: Tensor) -> Tensor:
    """Return `local`, or a copy if it has values of `x` itself: torch makes a new tensor."""
    return local.clone() if local.untyped_storage() is x.local.untyped_storage() else local


def check_pad(call: ImageCall, mode: str, rows: int, before: int, after: int) -> None:
    """Refuse what torch refuses, which sees the rows of one rank alone."""
    most = max(before, after)
    if (mode == "reflect" and most >= rows) or (mode == "circular" and most > rows):
        raise call.refusal(f"a pad by {most} rows of an image of {rows} with mode {mode}")


def _padded_rows(
    x: Tensor,
    axis: ImageAxis,
    place: ImageDim,
    sides: tuple[int, int],
    how: tuple[str, float | None],
) -> Tensor:
    """Return this rank's rows of the padded image."""
    mode, value = how
    before, after = sides
    rows = place.rows
    total = rows + before + after
    plans = [
        _sources((first - before, end - before), rows, mode) for first, end in axis.spans(total)
    ]
    needs = tuple(tuple(span for span, _ in plan if span[1] > span[0]) for plan in plans)
    moved = axis.move(x, place.dim, axis.spans(rows), needs)
    # A rank that has padding alone takes part in the backward pass all the same.
    parts, row = [moved.narrow(place.dim, 0, 0)], 0
    for (first, end), change in plans[axis.rank]:
        length = end - first
        part = moved.narrow(place.dim, row, length)
        row += length
        if isinstance(change, _Count):
            shape = list(x.shape)
            shape[place.dim] = change
            same = part.expand(shape) if length else x.new_full(shape, value or 0.0)
            parts.append(same)
        else:
            parts.append(part.flip(place.dim) if change else part)
    return torch.cat(parts, place.dim)


def _sources(span: Span, rows: int, mode: str) -> list[tuple[Span, bool | int]]:
    """Return the rows that a span of a padded image consists of.

    Each with whether they are reversed, or how many rows of padding they stand for.
    """
    first, end = span
    found: list[tuple[Span, bool | int]] = []
    if first < 0:
        stop = min(end, 0)
        found.append(_outside(first, stop, rows, mode, edge=0))
    inside = (max(first, 0), min(end, rows))
    if inside[0] < inside[1]:
        found.append((inside, False))
    if end > rows:
        found.append(_outside(max(first, rows), end, rows, mode, edge=rows - 1))
    return found


def _outside(first: int, end: int, rows: int, mode: str, edge: int) -> tuple[Span, bool | int]:
    if mode == "reflect":
        return (
            (1 - end, 1 - first) if edge == 0 else (2 * rows - 1 - end, 2 * rows - 1 - first)
        ), True
    if mode == "circular":
        shift = rows if edge == 0 else -rows
        return (first + shift, end + shift), False
    if mode == "replicate":
        return (edge, edge + 1), _Count(end - first)
    return (0, 0), _Count(end - first)


class _Count(int):
    """Rows of padding; a number that is no truth value."""


@rule("roll")
def rolled(call: ImageCall) -> Any:
    """Rows that move around the image."""
    x = call.x
    shifts, dims = call.value(1, "shifts"), call.value(2, "dims")
    if dims is None or dims == ():
        return call.whole()
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    local, divided = x.local, x.divided()
    for shift, dim in zip(shifts, (dim % x.dim() for dim in dims), strict=True):
        if dim not in divided:
            local = local.roll(shift, dim)
            continue
        axis, rows = x.axes[divided[dim]], x.shape[dim]
        needs = tuple(_around(first - shift, end - shift, rows) for first, end in axis.spans(rows))
        local = axis.move(local, dim, axis.spans(rows), needs)
    return x.like(_copied(x, local))


def _around(first: int, end: int, rows: int) -> Spans:
    """Return the rows from `first` on, where row 0 follows the last."""
    begin, length = first % rows, end - first
    if begin + length <= rows:
        return ((begin, begin + length),)
    return (begin, rows), (0, begin + length - rows)


@rule("flip fliplr flipud")
def flipped(call: ImageCall) -> Any:
    """Rows in the other order."""
    x = call.x
    given = call.kwargs.get("dims", call.args[1:])
    given = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
    if call.name != "flip":
        given = [1 if call.name == "fliplr" else 0]
    local, divided = x.local, x.divided()
    for dim in (dim % x.dim() for dim in given):
        if dim in divided:
            axis, rows = x.axes[divided[dim]], x.shape[dim]
            needs = tuple(((rows - end, rows - first),) for first, end in axis.spans(rows))
            local = axis.move(local, dim, axis.spans(rows), needs)
        local = local.flip(dim)
    return x.like(local)


@rule("interpolate upsample")
def interpolated(call: ImageCall) -> Any:
    """Another number of rows: nearest, linear or of areas; others are computed whole."""
    x, count = call.x, call.x.dim() - 2
    mode = call.value(3, "mode", "nearest")
    aligned = bool(call.value(4, "align_corners"))
    size, factor = call.value(1, "size"), call.value(2, "scale_factor")
    is_known = mode in ("nearest", "nearest-exact", "area") or _RESIZED.get(mode) == count
    if not is_known or call.kwargs.get("antialias") or {0, 1} & set(x.divided()):
        return call.whole()
    factors: list[float | None] = [None] * count
    if size is None:
        given = list(factor) if isinstance(factor, tuple | list) else [factor] * count
        sizes = [math.floor(float(n) * f) for n, f in zip(x.shape[2:], given, strict=True)]
        if not call.kwargs.get("recompute_scale_factor"):
            factors = [float(f) for f in given]
    else:
        sizes = [int(n) for n in size] if isinstance(size, tuple | list) else [int(size)] * count
    if mode == "area":
        return functional.__dict__[f"adaptive_avg_pool{count}d"](x, sizes)
    local, places = x.local, list(x.places)
    for d, (rows, scale) in enumerate(zip(sizes, factors, strict=True)):
        at = x.placed().get(d + 2)
        if at is not None:
            places[at] = ImageDim(d + 2, rows)
        divided = at is not None and x.is_divided(at)
        axis = x.axes[at] if at is not None and divided else None
        local = _resized(local, d + 2, axis, (x.shape[d + 2], rows, scale), mode, aligned=aligned)
    return x.like(_copied(x, local), tuple(places))


def _resized(
    x: Tensor,
    dim: int,
    axis: ImageAxis | None,
    sizes: tuple[int, int, float | None],
    mode: str,
    *,
    aligned: bool,
) -> Tensor:
    """Return `x` with another number of rows in one dim, which `axis` may divide."""
    old, new, scale = sizes
    weights = None
    with with_values():  # also where stages are recorded: which rows they are does not depend on x
        if mode.startswith("nearest"):
            lower = upper = _nearest(old, new, scale, mode, _kernel(x, dim))
            if old == new and torch.equal(lower, torch.arange(old)):
                return x
        elif old == new:  # whatever the scale is, as in `compute_source_index_and_lambda` of ATen
            return x
        else:
            lower, upper, weights = _linear(old, new, scale, aligned=aligned)
    parts = axis.spans(new) if axis else ((0, new),)
    first, end = parts[axis.rank] if axis else parts[0]
    begin = 0
    if axis:
        with with_values():
            needs = [(int(lower[a]), int(upper[b - 1]) + 1) for a, b in parts]
        x = axis.move(x, dim, axis.spans(old), one_each(needs))
        begin = needs[axis.rank][0]
    low = x.index_select(dim, (lower[first:end] - begin).to(x.device))
    if weights is None:
        return low
    high = x.index_select(dim, (upper[first:end] - begin).to(x.device))
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.lerp(low, high, weights[first:end].to(x).view(shape))


class _Kernel(NamedTuple):
    """What decides which kernel of ATen runs: they do not agree on `nearest` with a scale.

    Args:
        shape: Of an image of one row.
        dim: The dim that is resized.
        is_last: Whether channels are last in memory.
        device: Where it is.
    """

    shape: tuple[int, ...]
    dim: int
    is_last: bool
    device: torch.device


def _kernel(x: Tensor, dim: int) -> _Kernel:
    last = _CHANNELS_LAST.get(x.dim())
    is_last = last is not None and x.shape[1] > 1 and x.stride(1) == 1
    return _Kernel((1,) * x.dim(), dim, is_last, x.device)


@lru_cache(maxsize=256)
def _nearest(old: int, new: int, scale: float | None, mode: str, kernel: _Kernel) -> Tensor:
    """Return the row of an image that each new row takes, by torch itself."""
    count = len(kernel.shape) - 2
    shape = list(kernel.shape)
    shape[kernel.dim], shape[1] = old, 2
    rows = torch.arange(old, dtype=torch.float32, device=kernel.device)
    one = [-1 if dim == kernel.dim else 1 for dim in range(len(shape))]
    image = rows.view(one).expand(shape)
    image = image.contiguous(memory_format=_CHANNELS_LAST[len(shape)]) if kernel.is_last else image
    by: list[Any] = [1.0 if scale is not None else 1] * count
    by[kernel.dim - 2] = new if scale is None else scale
    how: dict[str, Any] = {"size": by} if scale is None else {"scale_factor": by}
    return functional.interpolate(image, mode=mode, **how)[0, 0].flatten().long().cpu()


def _linear(
    old: int, new: int, scale: float | None, *, aligned: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two rows of an image between which each new row lies, and how near to the second.

    Source: `area_pixel_compute_source_index` of ATen.
    """
    rows = torch.arange(new, dtype=torch.float64)
    if aligned:
        places = rows * ((old - 1) / (new - 1) if new > 1 else 0.0)
    else:
        places = ((rows + 0.5) * (1 / scale if scale else old / new) - 0.5).clamp_(min=0)
    lower = places.floor().long().clamp_(max=old - 1)
    return lower, (lower + 1).clamp_(max=old - 1), places - lower


@rule("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d")
def adaptive_averaged(call: ImageCall) -> Any:
    """Means of so many areas."""
    return _adaptive(call, is_max=False)


@rule("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d")
def adaptive_maxima(call: ImageCall) -> Any:
    """Maxima of so many areas."""
    if call.kwargs.get("return_indices"):
        return call.whole()
    return _adaptive(call, is_max=True)


def _adaptive(call: ImageCall, *, is_max: bool) -> Any:
    x = call.x
    count = int(call.name[-2])
    given = call.value(1, "output_size")
    sizes = list(given) if isinstance(given, tuple | list) else [given] * count
    sizes = list(sizes) * count if len(sizes) == 1 else sizes
    if x.dim() != count + 2 or {0, 1} & set(x.divided()):
        raise call.refusal(f"a {call.name} of {tuple(x.shape)}")
    sizes = [old if new is None else new for old, new in zip(x.shape[2:], sizes, strict=True)]
    local, places, divided = x.local, list(x.places), x.divided()
    for d, new in reversed([*enumerate(sizes)]):  # so that the first of equal maxima is taken
        dim = d + 2
        if (at := x.placed().get(dim)) is not None:
            places[at] = ImageDim(dim, new)
        if dim in divided:
            axis = x.axes[divided[dim]]
            local = _areas(local, axis, dim, (x.shape[dim], new), is_max=is_max)
            sizes[d] = local.shape[dim]
        elif is_max:
            local = call.func(local, [*local.shape[2:dim], new, *local.shape[dim + 1 :]])
    if list(local.shape[2:]) != sizes:
        local = call.func(local, sizes)
    return x.like(_copied(x, local), tuple(places))


def _areas(x: Tensor, axis: ImageAxis, dim: int, sizes: tuple[int, int], *, is_max: bool) -> Tensor:
    """Return means or maxima of areas along a divided dim."""
    old, new = sizes
    areas = [(row * old // new, -(-(row + 1) * old // new)) for row in range(new)]
    if axis.divides(new):
        needs = [(areas[a][0], areas[b - 1][1]) for a, b in axis.spans(new)]
        x = axis.move(x, dim, axis.spans(old), one_each(needs))
        first, end = axis.part(new)
        begin = needs[axis.rank][0]
        parts = [x.narrow(dim, a - begin, b - a) for a, b in areas[first:end]]
        means = [part.mean(dim, keepdim=True) for part in parts] if not is_max else []
        found = means or [part.max(dim, keepdim=True).values for part in parts]
        return torch.cat(found, dim)
    first, end = axis.part(old)
    found = []
    for a, b in areas:
        low, high = max(a, first), min(b, end)
        part = x.narrow(dim, min(max(low - first, 0), end - first), max(high - low, 0))
        if not is_max:
            found.append(part.sum(dim, keepdim=True, dtype=wide(x)) / (b - a))
        elif high > low:
            found.append(part.max(dim, keepdim=True).values)
        else:
            found.append(torch.full_like(x.narrow(dim, 0, 1), -math.inf))
    joined = found[0] if len(found) == 1 else torch.cat(found, dim)
    return first_largest(joined, axis) if is_max else over(joined, [axis]).to(x.dtype)


@rule("pixel_shuffle")
def shuffled(call: ImageCall) -> Any:
    """Channels that become rows."""
    x, factor = call.x, call.value(1, "upscale_factor")
    return _rescaled(x, call.on(x.local), factor)


def _rescaled(x: ImageTensor, local: Tensor, factor: int) -> Tensor:
    """Return a result in which each row of `x` became several."""
    places = tuple(p and ImageDim(p.dim, p.rows * factor) for p in x.places)
    for at, place in enumerate(places):
        if place is None:
            continue
        axis, rows = x.axes[at], x.shape[place.dim]
        if axis.size > 1 and (x.is_divided(at) or axis.divides(place.rows)):
            have = scaled(axis.spans(rows), factor)
            local = redistributed(local, axis, place.dim, have, place.rows)
    return x.like(local, places)


@rule("pixel_unshuffle")
def unshuffled(call: ImageCall) -> Any:
    """Rows that become channels."""
    x, factor = call.x, call.value(1, "downscale_factor")
    local, places = x.local, list(x.places)
    for at, place in enumerate(x.places):
        if place is None:
            continue
        rows = place.rows // factor
        places[at] = ImageDim(place.dim, rows)
        axis = x.axes[at]
        needs = one_each(scaled(axis.spans(rows), factor))
        local = axis.move(local, place.dim, axis.spans(place.rows), needs)
    return x.like(call.on(local), tuple(places))
