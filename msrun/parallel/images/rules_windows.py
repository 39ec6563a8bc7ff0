"""Rules for convolutions and pooling: a rank gets the rows around its part that its windows read.

It computes on them without padding in that dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from msrun.parallel.autocast.casts import as_factor
from msrun.parallel.images.convolution import Options, convolve
from msrun.parallel.images.image_tensor import ImageCall, ImageDim, ImageTensor, Places, rule
from msrun.parallel.images.windows import Reach, drawn_in, extend, extended, reach
from msrun.parallel.notation.image_parts import Span, Window


class _MaxPool(Function):
    """Maxima of windows in a part and the rows around it; it keeps their places alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reaches: Sequence[Reach], options: Any) -> Any:
        found = extended(x, reaches, -math.inf).x
        result, indices = torch.ops.aten.max_pool2d_with_indices(found, *options)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        ctx.reaches, ctx.options, ctx.shape = reaches, options, found.shape
        return result, indices

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        # Of the input only the shape counts, since the places are known.
        like = gradient.new_empty(ctx.shape)
        found = torch.ops.aten.max_pool2d_with_indices_backward(
            gradient, like, *ctx.options, indices
        )
        return drawn_in(found, ctx.reaches), None, None


def numbers(value: Any, count: int) -> list[int]:
    """Return an option of each dim, which may be given once for all."""
    given = [value] if isinstance(value, int) else list(value)
    return [int(number) for number in (given * count if len(given) == 1 else given)]


def _batched(call: ImageCall, count: int) -> ImageTensor:
    """Return the first argument, (samples, channels, ...), with so many dims behind."""
    x = call.x
    if x.dim() != count + 2 or {0, 1} & set(x.divided()):
        raise call.refusal(f"a {call.name} of {tuple(x.shape)}")
    return x


@rule("conv1d conv2d conv3d")
def convolved(call: ImageCall) -> Any:
    """Convolutions, whose windows may have strides, dilations and groups."""
    count = int(call.name[4])
    x = _batched(call, count)
    weight, bias = call.value(1, "weight"), call.value(2, "bias")
    if isinstance(weight, ImageTensor):
        raise call.refusal(f"a {call.name} with a weight that is an image")
    stride = numbers(call.value(3, "stride", 1), count)
    padding = call.value(4, "padding", 0)
    dilation = numbers(call.value(5, "dilation", 1), count)
    groups = call.value(6, "groups", 1)
    kernel = list(weight.shape[2:])
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(size % 2 for size in total):
            sides = [side for size in reversed(total) for side in (size // 2, size - size // 2)]
            args = (functional.pad(x, sides), weight, bias, stride, 0, dilation, groups)
            return call.func(*args)
        padding = [size // 2 for size in total]
    padding = numbers(0 if padding == "valid" else padding, count)
    windows = [Window(*one) for one in zip(kernel, stride, padding, dilation, strict=True)]
    places, reaches = _reaches(call, x, windows)
    for one in reaches:
        padding[one.move.dim - 2] = 0
    # Autocast does not know what `convolve` calls, and rows travel in the type of the product.
    weight, bias = as_factor(weight), None if bias is None else as_factor(bias)
    options = Options(stride, padding, dilation, groups)
    return x.like(convolve(as_factor(x.local), weight, bias, reaches, options), places)


def _reaches(
    call: ImageCall, x: ImageTensor, windows: Sequence[Window], *, ceil: bool = False
) -> tuple[Places, list[Reach]]:
    """Return the places in the output of windows, and the rows that they read of divided dims."""
    places: list[ImageDim | None] = []
    reaches = []
    for at, place in enumerate(x.places):
        if place is None:
            places.append(None)
            continue
        window = windows[place.dim - 2]
        count = window.count(place.rows, ceil=ceil)
        if count < 1:
            raise call.refusal(
                f"a {call.name} with windows of {window.kernel} over {place.rows} rows"
            )
        places.append(ImageDim(place.dim, count))
        if x.is_divided(at):
            reaches.append(reach(x, place.dim, window, count))
    return tuple(places), reaches


@rule("conv_transpose1d conv_transpose2d conv_transpose3d")
def transposed(call: ImageCall) -> Any:
    """Transposed convolutions: each input row is spread over rows of the output."""
    count = int(call.name[-2])
    x = _batched(call, count)
    weight, bias = call.value(1, "weight"), call.value(2, "bias")
    stride, padding, more = (
        numbers(call.value(at, name, default), count)
        for at, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0))
    )
    groups = call.value(6, "groups", 1)
    dilation = numbers(call.value(7, "dilation", 1), count)
    kernel = weight.shape[2:]
    local, sides, places = as_factor(x.local), [0] * (2 * count), list(x.places)
    cut = [*padding], [*more]
    for at, place in enumerate(x.places):
        if place is None:
            continue
        d = place.dim - 2
        reached = dilation[d] * (kernel[d] - 1)
        rows = (place.rows - 1) * stride[d] - 2 * padding[d] + reached + more[d] + 1
        places[at] = ImageDim(place.dim, rows)
        if not x.is_divided(at):
            continue
        axis = x.axes[at]
        needs = tuple(
            _spread_from(out, place.rows, stride[d], padding[d], reached)
            for out in axis.spans(rows)
        )
        local = axis.move(local, place.dim, axis.spans(place.rows), tuple((n,) for n in needs))
        (first, end), (given, last) = axis.part(rows), needs[axis.rank]
        begin = given * stride[d] - padding[d]
        length = (last - given - 1) * stride[d] + reached + 1
        cut[0][d] = cut[1][d] = 0
        if begin + length <= first or begin >= end:  # stride and padding leave these rows empty
            begin = first - length
        behind = 2 * (count - 1 - d)
        sides[behind : behind + 2] = [begin - first, end - begin - length]
    found = call.func(local, weight, None, stride, cut[0], cut[1], groups, dilation)
    found = functional.pad(found, sides)
    if bias is not None:
        found = found + bias.view([1, -1, *[1] * count]).to(found.dtype)
    return x.like(found, tuple(places))


def _spread_from(out: Span, rows: int, stride: int, padding: int, reached: int) -> Span:
    """Return the input rows, one at least, that are spread over the rows `out`."""
    first = -((reached - out[0] - padding) // stride)
    end = (out[1] - 1 + padding) // stride + 1
    first = min(max(first, 0), rows - 1)
    return first, min(max(end, first + 1), rows)


def _pool_windows(call: ImageCall, count: int, at: int) -> list[Window]:
    """Return the windows of a pooling whose dilation is argument number `at`; 0 for none."""
    kernel = numbers(call.value(1, "kernel_size"), count)
    given = call.value(2, "stride")
    stride = numbers(given, count) if given is not None and given != [] else kernel
    padding = numbers(call.value(3, "padding", 0), count)
    dilation = numbers(call.value(at, "dilation", 1) if at else 1, count)
    return [Window(*one) for one in zip(kernel, stride, padding, dilation, strict=True)]


@rule("max_pool1d max_pool2d max_pool3d")
def max_pooled(call: ImageCall) -> Any:
    """Maxima of windows."""
    count = int(call.name[8])
    x = _batched(call, count)
    windows = _pool_windows(call, count, 4)
    ceil = call.value(5, "ceil_mode", False)  # noqa: FBT003
    if call.kwargs.get("return_indices", False):
        return call.whole()
    places, reaches = _reaches(call, x, windows, ceil=ceil)
    padding = [window.padding for window in windows]
    for one in reaches:
        padding[one.move.dim - 2] = 0
    if count == 2:  # noqa: PLR2004 - images
        sizes = [[window[at] for window in windows] for at in (0, 1, 3)]
        options = (sizes[0], sizes[1], padding, sizes[2], bool(ceil))
        found, _ = _MaxPool.apply(x.local, reaches, options)  # type: ignore[no-untyped-call]
        return x.like(found, places)
    local = extend(x.local, reaches, -math.inf)
    found = call.func(
        local,
        [window.kernel for window in windows],
        [window.stride for window in windows],
        padding,
        [window.dilation for window in windows],
        ceil_mode=ceil,
    )
    return x.like(found, places)


@rule("max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices")
def max_pooled_with_indices(call: ImageCall) -> Any:
    """Maxima and their places in the whole image."""
    return call.whole()


@rule("avg_pool1d avg_pool2d avg_pool3d")
def avg_pooled(call: ImageCall) -> Any:
    """Means of windows, which may count padding."""
    count = int(call.name[8])
    x = _batched(call, count)
    windows = _pool_windows(call, count, 0)
    ceil = bool(call.value(4, "ceil_mode", False))  # noqa: FBT003
    counts_padding = bool(call.value(5, "count_include_pad", True))  # noqa: FBT003
    fixed = call.value(6, "divisor_override") if count > 1 else None
    places, reaches = _reaches(call, x, windows, ceil=ceil)
    kernel = [window.kernel for window in windows]
    stride = [window.stride for window in windows]
    sides = [0] * (2 * count)
    divided = {one.move.dim - 2: one for one in reaches}
    for d, window in enumerate(windows):
        if d not in divided:
            rows = x.shape[d + 2]
            last = (window.count(rows, ceil=ceil) - 1) * window.stride + window.kernel
            behind = 2 * (count - 1 - d)
            sides[behind : behind + 2] = [window.padding, last - rows - window.padding]
    local = functional.pad(extend(x.local, reaches), sides)
    found = call.func(local, kernel, stride)
    is_plain = not ceil and not any(window.padding for window in windows)
    if fixed is None and (is_plain or (counts_padding and not ceil)):
        return x.like(found, places)
    found = found * math.prod(kernel)
    if fixed is not None:
        return x.like(found / fixed, places)
    for d, window in enumerate(windows):
        rows = x.shape[d + 2]
        total = window.count(rows, ceil=ceil)
        first, end = (0, total)
        if d in divided:
            axis = x.axes[x.placed()[d + 2]]
            first, end = axis.part(total)
        counted = [
            _counted(window, at, rows, counts_padding=counts_padding) for at in range(first, end)
        ]
        shape = [-1 if at == d else 1 for at in range(count)]
        found = found / found.new_tensor(counted).view(shape)
    return x.like(found, places)


def _counted(window: Window, at: int, rows: int, *, counts_padding: bool) -> int:
    """Return how many rows the window number `at` counts."""
    first = at * window.stride - window.padding
    if counts_padding:
        return min(first + window.kernel, rows + window.padding) - first
    return min(first + window.kernel, rows) - max(first, 0)
