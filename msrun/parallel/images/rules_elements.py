"""Rules for functions of each element, attributes, random numbers, and what a script reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from msrun.parallel.images.image_tensor import (
    Axes,
    ImageCall,
    ImageDim,
    ImageTensor,
    Places,
    gathered,
    narrowed,
    rule,
    wrapped,
)
from msrun.parallel.torch_compat import is_fake, of_subclass

_SEEDS = 2**62
_DIMS_OF_PRELU = 2


def fit(x: Tensor, axes: Axes, places: Places, count: int) -> Tensor:
    """Return the part of an operand of a result with `count` dims in `places`."""
    behind = count - x.dim()
    own: Places = x.places if isinstance(x, ImageTensor) else (None,) * len(axes)
    for place, asked in zip(own, places, strict=True):
        if place and (asked is None or place.dim + behind != asked.dim):
            x = gathered(x)
            own = (None,) * len(axes)
            break
    local = x.local if isinstance(x, ImageTensor) else x
    for axis, place, asked in zip(axes, own, places, strict=True):
        if place is None and asked is not None:
            dim = asked.dim - behind
            if dim >= 0 and local.shape[dim] == asked.rows:
                local = narrowed(local, axis, dim)
    return local


def common(images: Sequence[ImageTensor], shape: Sequence[int]) -> tuple[Axes, Places]:
    """Return where operands have images together, in a result of `shape`."""
    axes = images[0].axes
    found: list[ImageDim | None] = [None] * len(axes)
    for image in images:
        for at, place in enumerate(image.places):
            if place and found[at] is None:
                dim = place.dim + len(shape) - image.dim()
                if all(other is None or other.dim != dim for other in found):
                    found[at] = ImageDim(dim, shape[dim])
    return axes, tuple(found)


_ELEMENTS = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder __add__ __radd__ "
    "__sub__ __rsub__ rsub __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __floordiv__ fmod "
    "__rfloordiv__ __mod__ __pow__ __rpow__ pow maximum minimum fmax fmin lerp eq ne lt le gt ge "
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ isclose where logical_and logical_or logical_xor "
    "bitwise_and bitwise_or bitwise_xor __and__ __rand__ __or__ __ror__ __xor__ addcmul addcdiv "
    "masked_fill xlogy atan2 clamp clamp_min clamp_max clip copysign hypot heaviside "
    "__iadd__ __isub__ __imul__ __itruediv__ __ipow__ __iand__ __ior__ polar complex"
)


@rule(_ELEMENTS, writes=True)
def elements(call: ImageCall) -> Any:
    """A function of elements of tensors that broadcast against each other."""
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        return call.whole()
    if len(call.tensors()) == 1:
        return kept(call) if isinstance(call.value(0, "input"), ImageTensor) else _alone(call)
    shape = torch.broadcast_shapes(*(x.shape for x in call.tensors()))
    axes, places = common(list(call.images()), shape)

    def part(x: Tensor) -> Tensor:
        return fit(x, axes, places, len(shape))

    if not call.is_in_place:
        return wrapped(call.changed(part), axes, places)
    x = call.args[0]
    if not isinstance(x, ImageTensor) or x.places != places:
        raise call.refusal(f"{call.name}, which writes parts of an image in another tensor")
    call.changed(part)
    return written(x)


def _alone(call: ImageCall) -> Tensor:
    """A function of a number and an image."""
    (image,) = call.images()
    return image.like(call.changed(lambda _: image.local))


def written(x: ImageTensor) -> ImageTensor:
    """Return `x`, whose part was written; it needs a gradient if the part does now."""
    if x.local.requires_grad:
        with of_subclass():
            x.requires_grad_()
    return x


_KEPT = (
    "neg __neg__ negative float double half bfloat16 int long bool short byte type cpu cuda clone "
    "contiguous detach relu relu6 gelu silu tanh sigmoid logsigmoid softplus "
    "leaky_relu elu selu mish hardtanh hardswish hardsigmoid celu threshold softsign tanhshrink "
    "erf erfc exp exp2 log log1p log2 log10 expm1 sqrt rsqrt square abs absolute __abs__ sin "
    "cos tan asin acos atan sinh cosh reciprocal sign sgn floor ceil round trunc frac nan_to_num "
    "isnan isinf isfinite logical_not bitwise_not __invert__ zeros_like ones_like full_like "
    "empty_like real imag alias positive hardshrink softshrink zero fill "
    "deg2rad rad2deg sinc logit special_expit special_erf requires_grad "
    "local_response_norm"
)


@rule(_KEPT, "__get__.data", "__get__.real", "__get__.imag", writes=True)
def kept(call: ImageCall) -> Any:
    """A function of each element of one tensor, or of its channels."""
    x = call.x
    if call.name == "local_response_norm" and 1 in x.divided():
        return call.whole()
    result = call.on(x.local)
    if call.is_in_place:
        return written(x)
    return x if result is x.local else x.like(result)


@rule("to", "type_as", "view_as_real", "view_as_complex")
def converted(call: ImageCall) -> Any:
    """Another type or device, perhaps that of another tensor; or a last dim more or less."""

    def part(x: Tensor) -> Tensor:
        return x.local if isinstance(x, ImageTensor) else x

    result = call.changed(part)
    first = call.value(0, "input")
    if not isinstance(first, ImageTensor):
        return result  # a plain tensor got the type of an image
    return first if result is first.local else first.like(result)


@rule("prelu")
def prelu(call: ImageCall) -> Any:
    """An activation with a weight for each channel, dim 1."""
    if 1 in call.x.divided():
        return call.whole()
    return call.x.like(call.on(call.x.local))


@rule("new_zeros new_ones new_full new_empty new_tensor")
def made(call: ImageCall) -> Any:
    """A new tensor, whole, of the type of an image."""
    return call.on(call.x.local)


# Attributes and methods that say something of the whole tensor.
_OF_WHOLE = (
    "shape ndim dtype device layout is_cuda is_cpu is_sparse is_quantized is_meta is_nested "
    "itemsize nbytes names is_mkldnn is_mps is_xpu is_sparse_csr is_xla is_ipu is_vulkan is_maia "
    "is_mtia"
)
_METHODS_OF_WHOLE = (
    "size dim numel nelement ndimension __len__ is_floating_point is_complex element_size "
    "get_device is_same_size stride is_signed is_inference __hash__ is_tensor result_type "
    "can_cast has_names is_conj is_neg"
)
# And of the part, as autograd knows it.
_OF_PART = "requires_grad grad_fn is_leaf _version _base output_nr retains_grad"
_METHODS_OF_PART = (
    "is_contiguous is_pinned register_hook register_post_accumulate_grad_hook retain_grad _is_view "
    "data_ptr"
)


@rule(_METHODS_OF_WHOLE)
def of_whole(call: ImageCall) -> Any:
    """What the whole tensor says of itself."""
    with of_subclass():
        return call.func(*call.args, **call.kwargs)


@rule(_METHODS_OF_PART)
def of_part(call: ImageCall) -> Any:
    """What the part says of itself."""
    return call.on(call.x.local)


ImageTensor.rules.update({f"__get__.{name}": of_whole for name in _OF_WHOLE.split()})
ImageTensor.rules.update({f"__get__.{name}": of_part for name in _OF_PART.split()})
ImageTensor.rules["__get__.grad"] = lambda call: (
    None if call.x.local.grad is None else call.x.like(call.x.local.grad)
)


def _set(call: ImageCall) -> None:
    call.on(call.x.local)
    written(call.x)


ImageTensor.rules["__set__.requires_grad"] = _set


@rule("__repr__", "__format__", "__str__")
def shown(call: ImageCall) -> str:
    """The part, and what it is a part of."""
    return f"ImageTensor(of {tuple(call.x.shape)}, this rank has {call.x.local!r})"


@rule("__deepcopy__")
def copied(call: ImageCall) -> Tensor:
    """A copy of a tensor that autograd did not compute."""
    return call.x.like(copy.deepcopy(call.x.local))


@rule("item tolist numpy __bool__ __float__ __int__ __index__ __array__ equal allclose")
def read(call: ImageCall) -> Any:
    """What a script reads of values: of the whole tensor."""
    return call.whole(is_expected=True)


@rule("dropout alpha_dropout", writes=True)
def dropped(call: ImageCall) -> Any:
    """Dropout, whose masks differ from part to part; all ranks draw equally many numbers."""
    x, p = call.x, _dropped_share(call)
    if p == 0:
        return x
    if call.name != "dropout":
        raise call.refusal("alpha_dropout in training")
    keep = torch.empty_like(x.local).bernoulli_(1 - p, generator=generator(x))
    return _times(call, keep.div_(1 - p) if p < 1 else keep)


def _dropped_share(call: ImageCall) -> float:
    """Return the probability of a dropout; 0 outside of training (`train` in `torch.dropout`)."""
    training = call.value(2, "training", call.kwargs.get("train", True))
    share: float = call.value(1, "p", 0.5)
    return share if training else 0.0


def _times(call: ImageCall, factor: Tensor) -> Tensor:
    """Return the image times a factor, in place if a dropout is told so."""
    x = call.x
    if call.is_in_place or call.value(3, "inplace", False):  # noqa: FBT003
        x.local.mul_(factor)
        return written(x)
    return x.like(x.local * factor)


@rule("dropout1d dropout2d dropout3d feature_dropout", writes=True)
def dropped_channels(call: ImageCall) -> Any:
    """Dropout of whole channels, of which all ranks draw the same."""
    x, p = call.x, _dropped_share(call)
    if p == 0:
        return x
    if {0, 1} & set(x.divided()):
        raise call.refusal(f"{call.name} of {tuple(x.shape)}")
    shape = (*x.shape[:2], *[1] * (x.dim() - 2))
    keep = x.local.new_empty(shape).bernoulli_(1 - p)
    return _times(call, keep.div_(1 - p) if p < 1 else keep)


@rule("rand_like randn_like bernoulli")
def drawn(call: ImageCall) -> Any:
    """Random numbers for each element, others on each part."""
    x = call.x
    if call.kwargs.get("generator") is not None:
        raise call.refusal(f"{call.name} with a generator")
    draw = generator(x)
    if call.name == "bernoulli":
        p = call.value(1, "p")
        if p is not None:
            raise call.refusal("bernoulli with p")
        return x.like(torch.bernoulli(x.local, generator=draw))
    make: Callable[..., Tensor] = torch.rand if call.name == "rand_like" else torch.randn
    dtype = call.kwargs.get("dtype") or x.dtype
    made = make(x.local.shape, generator=draw, dtype=dtype, device=x.device)
    return x.like(made.requires_grad_(call.kwargs.get("requires_grad", False)))


def generator(x: ImageTensor) -> torch.Generator | None:
    """Return a generator of this part, seeded by a number that all ranks of the image draw.

    Of a part without values, None: nothing is drawn.
    """
    if is_fake(x.local):
        return None
    seed = int(torch.randint(_SEEDS, ()))
    return torch.Generator(x.device).manual_seed(seed + x.stream())
