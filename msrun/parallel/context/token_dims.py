"""Where the dim of tokens goes in functions of torch, and which of them mix tokens.

Theory of operation.  A rank of the axis `cp` has consecutive tokens of each sequence, and runs the
model on them as if they were all.  That is right for every function that treats tokens one by one.
So each tensor that is computed from the batch has a `TokenPlace`, the dim with the tokens, and
`place_of` follows it through one function of torch:

- A `TokenPlace`: the result has the tokens there, each still by itself.
- A `Taint`: the result is a number of this part of the sequences that the whole ones do not have,
  such as the maximum of token numbers.  Nothing has depended on it yet: a test, a metric, or the
  loss, which is put together over all ranks.  It must not meet tokens again.
- A refusal (`MixedTokensError`) with the name of what mixes tokens.

`losses.sample_dims` asks the same of samples, and what it does not know is not noticed.  Here a
function that is not known is refused: sequences that are cut are often mixed, samples hardly ever.
Dims follow from the functions; sizes that are equal by chance mean nothing.

A dim may hold more than the tokens: after `view(-1, width)` of (samples, tokens, width) its index
counts (samples, tokens).  `before` and `after` are what its index counts before and after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from msrun.parallel.context.token_calls import (
    MixedTokensError,
    Taint,
    TokenCall,
    TokenPlace,
    check_alike,
    shown,
)
from msrun.parallel.losses.mixing import dims_of
from msrun.parallel.losses.torch_calls import dim_order


def place_of(call: TokenCall) -> TokenPlace | Taint | None:
    """Return what is known of the result of `call`, some of whose arguments have tokens.

    Raises:
        MixedTokensError: It mixes tokens, or is not known.
    """
    rule = _RULES.get(call.name)
    if rule is None:
        raise call.mixed()
    try:
        return rule(call)
    except (TypeError, ValueError, IndexError, AttributeError):
        raise call.mixed() from None


def elementwise(call: TokenCall) -> TokenPlace:
    """Functions of values at one place each, which may be broadcast."""
    count = call.result.dim()
    found = {}
    for tensor in call.tensors():
        if place := call.place(tensor):
            found[place._replace(dim=place.dim + count - tensor.dim())] = tensor
    if len(found) > 1:
        raise MixedTokensError(f"{shown(call)} of pairs of tokens")
    place = next(iter(found))
    for tensor in call.tensors():
        at = place.dim - count + tensor.dim()
        is_made = at >= 0 and call.place(tensor) is None
        if is_made and tensor.shape[at] == call.result.shape[place.dim]:
            check_alike(call, tensor, at)
        for dim, size in enumerate(tensor.shape):
            # Of a table of all positions the rows of this part were taken.
            if dim != at and size not in (1, call.result.shape[dim + count - tensor.dim()]):
                raise call.mixed()
    return place


def _kept(call: TokenCall) -> TokenPlace | None:
    """A function of each value by itself, whose other arguments are plain numbers or a pattern."""
    return call.place(call.x)


def _constant(call: TokenCall) -> None:
    """A new tensor of the type of another; it may have one value for each token, or one for all."""
    del call


def _reduced(call: TokenCall) -> TokenPlace | Taint:
    """Sums, means, maxima and their like."""
    place, count = call.own, call.x.dim()
    dims = dims_of(call.name, call.args, call.kwargs, count) or set(range(count))
    if place.dim not in dims:
        gone = 0 if call.result.dim() == count else sum(dim < place.dim for dim in dims)
        return place._replace(dim=place.dim - gone)
    if call.result.dim() == 0 or not call.result.is_floating_point():
        return Taint(f"{shown(call)} over tokens")
    raise call.over()


def _along(call: TokenCall, default: int = -1) -> TokenPlace | Taint:
    """A function along one dim, such as a softmax or a sort."""
    place, count = call.own, call.x.dim()
    dims = dims_of(call.name, call.args, call.kwargs, count) or {default % count}
    if place.dim not in dims:
        return place
    if not call.result.is_floating_point():
        return Taint(f"{shown(call)} over tokens")
    raise call.over()


def _normalized_over(call: TokenCall) -> TokenPlace:
    place, shape = call.own, call.value(1, "normalized_shape")
    if place.dim >= call.x.dim() - len(shape):
        raise call.over()
    return place


def _linear(call: TokenCall) -> TokenPlace:
    if call.place(call.value(1, "weight")) or call.own.dim == call.x.dim() - 1:
        raise call.over()
    return call.own


def _rows(call: TokenCall) -> TokenPlace:
    """A function of each row of dim 0, such as a convolution of each token by itself."""
    place = call.own
    if place.dim or len(call.result) != len(call.x) or call.result.dim() != call.x.dim():
        raise call.over()
    return place


def _matmul(call: TokenCall) -> TokenPlace:
    """(..., i, k) @ (..., k, j), or with a vector on the right."""
    left, right = call.x, call.value(1, "mat2", call.kwargs.get("other"))
    if call.name == "__rmatmul__":
        left, right = right, left
    count, found = call.result.dim(), set()
    for tensor, contracted in ((left, 1), (right, min(2, right.dim()))):
        if place := call.place(tensor):
            if tensor.dim() - place.dim == contracted:
                raise call.over()
            vector = tensor is left and right.dim() == 1
            found.add(place._replace(dim=place.dim + (count + vector) - tensor.dim()))
    if len(found) > 1:
        raise MixedTokensError(f"{shown(call)} of pairs of tokens")
    return found.pop()


def _added_product(call: TokenCall) -> TokenPlace:
    """A product with something added, such as the bias of a layer."""
    added, left, right = call.args
    place = _matmul(replace(call, args=(left, right), kwargs={}))
    if (own := call.place(added)) and own != place:
        raise call.mixed()
    at = place.dim - call.result.dim() + added.dim()
    if own is None and at >= 0:
        check_alike(call, added, at)
    return place


def _outer(call: TokenCall) -> TokenPlace:
    first, second = call.x, call.value(1, "vec2")
    if call.place(first) and call.place(second):
        raise MixedTokensError("an outer product of pairs of tokens")
    return call.own if call.place(first) else TokenPlace(1)


def _einsum(call: TokenCall) -> TokenPlace:
    equation, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    given, _, out = equation.replace(" ", "").partition("->")
    letters = set()
    for term, operand in zip(given.split(","), operands, strict=True):
        if place := call.place(operand):
            letters.add((term[place.dim], place.before, place.after))
    letter, before, after = next(iter(letters))
    if len(letters) > 1 or "." in equation or letter not in out:
        raise call.over()
    for term, operand in zip(given.split(","), operands, strict=True):
        if letter in term and not call.place(operand):
            check_alike(call, operand, term.index(letter))
    return TokenPlace(out.index(letter), before, after)


def _attention(call: TokenCall) -> TokenPlace:
    """Attention of tokens, which is that of all ranks, or in each row of dim 0 by itself."""
    if call.own.dim not in (0, call.x.dim() - 2):
        raise call.over()
    return call.own


def _embedding(call: TokenCall) -> TokenPlace:
    if call.place(call.value(1, "weight")):
        raise call.mixed()
    return call.own


def _scored(call: TokenCall) -> TokenPlace | Taint:
    """A loss of values and targets, whose classes are in dim 1."""
    values, targets = call.x, call.value(1, "target")
    place = call.place(values)
    if place is None or (place.dim == 1 and call.name in _CLASSES and values.dim() > 1):
        raise call.over()
    at = place._replace(dim=max(place.dim - 1, 0)) if _is_short(values, targets) else place
    other = call.place(targets)
    if other is None:
        check_alike(call, targets, at.dim)
    elif other != at:
        raise MixedTokensError(f"a {call.name} of tokens with others")
    if call.kwargs.get("reduction") == "batchmean" and at.dim:
        raise MixedTokensError(f"a {call.name} that is divided by samples, and not by tokens")
    if call.result.dim() == 0:
        return Taint("a loss over tokens")
    return at


def _is_short(values: Tensor, targets: Tensor) -> bool:
    """Return whether targets are classes of (samples, classes, tokens)."""
    return targets.dim() < values.dim() and values.dim() > 2  # noqa: PLR2004 - more than classes


def _viewed(call: TokenCall) -> TokenPlace | None:
    """The same values in the same order in another shape."""
    place, old, new = call.place(call.x), call.x.shape, call.result.shape
    if place is None:
        return None
    before = prod(old[: place.dim]) * place.before
    for dim, length in enumerate(new):
        ahead = prod(new[:dim])
        if before % ahead == 0 and (ahead * length) % (before * call.tokens) == 0:
            return TokenPlace(dim, before // ahead, ahead * length // (before * call.tokens))
    raise MixedTokensError(f"a {call.name} that divides the dim of tokens")


def _permuted(call: TokenCall) -> TokenPlace:
    place = call.own
    order = dim_order(call.name, call.x.dim(), call.args, call.kwargs)
    return place._replace(dim=order.index(place.dim))


def _unsqueezed(call: TokenCall) -> TokenPlace:
    at = call.value(1, "dim") % call.result.dim()
    return call.own._replace(dim=call.own.dim + (at <= call.own.dim))


def _squeezed(call: TokenCall) -> TokenPlace:
    place, at, shape = call.own, call.value(1, "dim"), call.x.shape
    dims = range(len(shape)) if at is None else [at] if isinstance(at, int) else at
    gone = [dim % len(shape) for dim in dims if shape[dim] == 1]
    if place.dim in gone:
        raise call.over()
    return place._replace(dim=place.dim - sum(dim < place.dim for dim in gone))


def _expanded(call: TokenCall) -> TokenPlace | None:
    place = call.place(call.x)
    if place is None:
        return None
    moved = place.dim + call.result.dim() - call.x.dim()
    if call.result.shape[moved] != call.x.shape[place.dim]:
        raise call.over()
    return place._replace(dim=moved)


def _joined(call: TokenCall) -> TokenPlace:
    """`cat` and `stack`."""
    parts = call.value(0, "tensors")
    at = call.value(1, "dim", call.kwargs.get("axis", 0)) % call.result.dim()
    found = {place for part in parts if (place := call.place(part))}
    if len(found) > 1:
        raise call.over()
    place = found.pop()
    filled = [part for part in parts if part.numel()]  # a cache begins with an empty tensor
    if call.name == "stack":
        return place._replace(dim=place.dim + (at <= place.dim))
    if at == place.dim:
        if len(filled) > 1:
            raise call.over()
        return place
    for part in filled:
        if call.place(part) is None:
            check_alike(call, part, place.dim)
    return place


def _split(call: TokenCall) -> TokenPlace | Taint:
    """Parts along one dim, and what is taken or repeated along one."""
    place = call.own
    at = call.value(_DIM_AT.get(call.name, 2), "dim", 0) % call.x.dim()
    if at == place.dim:
        return _taint(call)
    removed = call.name in ("unbind", "select") and at < place.dim
    return place._replace(dim=place.dim - removed)


def _taint(call: TokenCall) -> Taint:
    if call.result.is_floating_point():
        raise call.over()
    return Taint(f"{shown(call)} over tokens")


def _repeated(call: TokenCall) -> TokenPlace | Taint:
    sizes = call.kwargs.get("repeats", call.args[1:])
    sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    at = call.own.dim + call.result.dim() - call.x.dim()
    return call.own._replace(dim=at) if sizes[at] == 1 else _taint(call)


def _padded(call: TokenCall) -> TokenPlace | Taint:
    pads = call.value(1, "pad")
    dims = {call.x.dim() - 1 - at // 2 for at, size in enumerate(pads) if size}
    return _taint(call) if call.own.dim in dims else call.own


def _rolled(call: TokenCall) -> TokenPlace | Taint:
    given = call.args[1:] if call.name == "flip" else (call.value(2, "dims"),)
    named = call.kwargs.get("dims", given[0] if len(given) == 1 else given)
    dims = named if isinstance(named, tuple | list) else [named]
    if any(dim is None or dim % call.x.dim() == call.own.dim for dim in dims):
        return _taint(call)
    return call.own


def _gathered(call: TokenCall) -> TokenPlace | Taint:
    """Values along one dim by their numbers: `gather` and `scatter`."""
    at = call.value(1, "dim") % call.x.dim()
    others = [call.place(x) for x in call.tensors()]
    known = {place for place in others if place}
    if len(known) > 1 or known.pop().dim == at:
        return _taint(call)
    return next(place for place in others if place)


def _taken(call: TokenCall) -> TokenPlace | Taint:
    """`x[...]`: by slices, None, numbers and `...`; or rows of a table by token."""
    given = call.args[1]
    items = list(given) if isinstance(given, tuple) else [given]
    place = call.place(call.x)
    if place is None:  # rows of a table
        chosen = call.place(items[0]) if isinstance(items[0], Tensor) else None
        if chosen is None or any(isinstance(item, Tensor) for item in items[1:]):
            raise call.mixed()
        return chosen
    if not all(item is None or type(item) in (int, slice, type(...)) for item in items):
        return _taint(call)
    used = sum(item is not None and item is not ... for item in items)
    at = next((index for index, item in enumerate(items) if item is ...), len(items))
    items[at : at + 1] = [slice(None)] * (call.x.dim() - used)
    old = new = 0
    for item in items:
        if item is None:
            new += 1
            continue
        if old == place.dim:
            is_whole = isinstance(item, slice) and call.result.shape[new] == call.x.shape[old]
            return place._replace(dim=new) if is_whole else _taint(call)
        old += 1
        new += not isinstance(item, int)
    raise call.mixed()


_CLASSES = frozenset(["cross_entropy", "nll_loss"])
# Where functions along one dim have it among positional arguments, if not at 2.
_DIM_AT = {"unbind": 1, "select": 1, "index_select": 1, "narrow": 1}
Rule = Callable[[TokenCall], TokenPlace | Taint | None]
_NAMES: tuple[tuple[Rule, str], ...] = (
    (
        elementwise,
        (
            "add sub subtract mul multiply div divide true_divide floor_divide remainder __add__ "
            "__radd__ __iadd__ __sub__ __rsub__ __isub__ rsub __mul__ __rmul__ __imul__ "
            "__truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __floordiv__ fmod "
            "__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __ipow__ pow maximum minimum lerp eq "
            "ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isclose where logical_and "
            "logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __rand__ __iand__ "
            "__or__ __ror__ __ior__ __xor__ addcmul addcdiv masked_fill xlogy atan2 clamp "
            "clamp_min clamp_max clip prelu copysign polar complex"
        ),
    ),
    (_constant, "__get__ __set__ new_zeros new_ones new_full new_empty new_tensor"),
    (
        _kept,
        (
            "neg __neg__ negative to float double half bfloat16 int long bool type type_as cpu "
            "cuda clone contiguous detach dropout alpha_dropout requires_grad_ requires_grad relu "
            "relu6 gelu silu tanh sigmoid logsigmoid softplus leaky_relu elu selu mish hardtanh "
            "hardswish hardsigmoid celu threshold softsign tanhshrink erf erfc exp exp2 log log1p "
            "log2 log10 expm1 sqrt rsqrt square abs absolute __abs__ sin cos reciprocal sign sgn "
            "floor ceil round trunc nan_to_num isnan isinf isfinite logical_not bitwise_not "
            "__invert__ zeros_like ones_like full_like empty_like rand_like randn_like bernoulli "
            "one_hot view_as_real view_as_complex data real imag alias retain_grad all_reduce "
            "wait_tensor _wrap_tensor_autograd register_hook positive hardshrink softshrink zero "
            "fill"
        ),
    ),
    (
        _reduced,
        (
            "sum nansum mean nanmean std var std_mean var_mean max min amax amin aminmax argmax "
            "argmin any all prod logsumexp norm vector_norm median count_nonzero"
        ),
    ),
    (
        _along,
        (
            "softmax log_softmax softmin cumsum cumprod sort argsort topk kthvalue diff unique "
            "cummax cummin logcumsumexp glu"
        ),
    ),
    (lambda call: _along(call, 1), "normalize"),
    (_normalized_over, "layer_norm rms_norm"),
    (_linear, "linear"),
    (
        _rows,
        (
            "conv1d conv2d conv3d max_pool1d max_pool2d avg_pool1d avg_pool2d group_norm "
            "adaptive_avg_pool1d adaptive_avg_pool2d instance_norm interpolate conv_transpose1d"
        ),
    ),
    (_matmul, "matmul mm bmm __matmul__ __rmatmul__"),
    (_added_product, "addmm baddbmm"),
    (_outer, "outer ger"),
    (_einsum, "einsum"),
    (_embedding, "embedding"),
    (_attention, "scaled_dot_product_attention"),
    (
        _scored,
        (
            "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
            "binary_cross_entropy binary_cross_entropy_with_logits"
        ),
    ),
    (_viewed, "view reshape flatten unflatten view_as reshape_as ravel"),
    (_permuted, "permute transpose swapaxes swapdims t T mT H mH adjoint movedim moveaxis"),
    (_unsqueezed, "unsqueeze"),
    (_squeezed, "squeeze"),
    (_expanded, "expand expand_as broadcast_to"),
    (_joined, "cat concat concatenate stack"),
    (_split, "chunk split tensor_split unbind select narrow index_select repeat_interleave"),
    (_repeated, "repeat tile"),
    (_padded, "pad"),
    (_rolled, "flip roll"),
    (_gathered, "gather take_along_dim scatter scatter_add"),
    (_taken, "__getitem__"),
)
_RULES = {name: rule for rule, names in _NAMES for name in names.split()}
# What attributes of tensors are, as functions.
PROPERTIES: Mapping[Any, str] = {
    torch.Tensor.T.__get__: "T",  # type: ignore[attr-defined]
    torch.Tensor.mT.__get__: "mT",  # type: ignore[attr-defined]
    torch.Tensor.data.__get__: "data",  # type: ignore[attr-defined]
    torch.Tensor.real.__get__: "real",  # type: ignore[attr-defined]
    torch.Tensor.imag.__get__: "imag",  # type: ignore[attr-defined]
}
