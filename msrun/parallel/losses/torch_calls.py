"""What calls of torch say about their arguments, for `watch`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor

from msrun.parallel.torch_compat import viewed, write_count

_ZERO = "msrun_zero"  # 0, to which a script adds losses
_ZEROS = frozenset(["zeros", "new_zeros", "zeros_like"])
# Of their arguments none is a value of the result, or only those of the first.
_OF_SIZES = frozenset(["zeros", "ones", "empty", "rand", "randn", "new_zeros", "new_ones"])
_OF_SIZES |= {"new_empty"}
# They give their first argument the form of the second.
_TO_FORM = frozenset(["to", "type_as", "expand_as", "view_as", "reshape_as"])
_TO_SIZES = frozenset(["narrow", "view", "reshape", "expand", "repeat", "multinomial"])

_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[2])

SUMS = frozenset(["sum", "nansum", "count_nonzero"])
MEANS = frozenset(["mean", "nanmean"])
# A loss of the whole batch has another value of these, which does not follow from those of parts.
OPAQUE = frozenset(
    ["norm", "vector_norm", "matrix_norm", "std", "var", "max", "min", "amax", "amin"]
)
OPAQUE |= {"median", "nanmedian", "quantile", "nanquantile", "prod", "logsumexp", "dist", "trace"}
OPAQUE |= {"cosine_similarity", "pairwise_distance", "nuclear_norm", "frobenius_norm", "det"}
OPAQUE |= {"logdet", "cond"}
DIVIDING = frozenset(["div", "true_divide", "__truediv__"])
MULTIPLYING = frozenset(["mul", "multiply", "__mul__", "__rmul__"])
LIMITING = frozenset(["clamp", "clip", "clamp_min"])
ADDING = frozenset(["add", "__add__", "__radd__"])
ADDING_IN_PLACE = frozenset(["__iadd__", "add_"])
SUBTRACTING = frozenset(["sub", "__sub__", "subtract", "rsub", "__rsub__", "__isub__", "sub_"])
# How many elements their result has depends on values.
FINDING = frozenset(["nonzero", "argwhere"])
# Their result has the values of their first argument.
KEEPING = frozenset(
    ["to", "float", "double", "half", "bfloat16", "int", "long", "type_as", "clone"]
)
KEEPING |= {"contiguous", "squeeze", "view", "reshape"}
# They give their first argument another form, by numbers alone.
FORMING = frozenset([Tensor.flatten, torch.flatten, Tensor.view, Tensor.reshape, torch.reshape])
FORMING |= {Tensor.contiguous, Tensor.float, Tensor.transpose, torch.transpose, Tensor.permute}
FORMING |= {Tensor.squeeze, torch.squeeze, Tensor.unflatten}
# The sizes of a tensor, and how many elements it has.
_SHAPE: Any = Tensor.shape.__get__  # type: ignore[attr-defined]
SIZES = frozenset([_SHAPE, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel])


def name_of(func: Any) -> str:
    """Return the name of a function of torch, in whichever of its modules it is."""
    name: str = getattr(func, "__name__", "")
    return name.removeprefix("linalg_").removeprefix("special_")


def over_samples(name: str) -> str:
    """Return what to call a function that mixes samples."""
    name = name.strip("_")
    return f"{'an' if name[:1] in 'aei' else 'a'} {name} over samples"


def script_line() -> str:
    """Return the last line that runs and is no library's."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if not any(library in path.parents for library in _LIBRARIES):
            return f" ({path.name}, line {frame.lineno})"
    return ""


def is_own_call(name: str, options: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Return whether the function of torch that runs is called by msrun, and not by a script.

    Args:
        name: Of the function.
        options: What it got by name.
    """
    is_own = False
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the public form reads source files
    while frame is not None:
        parents = Path(frame.f_code.co_filename).parents
        if not any(library in parents for library in _LIBRARIES):
            break
        if frame.f_code.co_name == "__torch_function__" and _passes_on(frame, name, options):
            is_own = False
        elif _LIBRARIES[1] in parents:
            is_own = True
        frame = frame.f_back
    return is_own


def _passes_on(mode: FrameType, name: str, options: Mapping[str, Any]) -> bool:
    """Return whether a mode got the function that it runs, and computes no mean by a sum."""
    func, got = mode.f_locals.get("func"), mode.f_locals.get("kwargs") or {}
    return name_of(func) == name and got.get("reduction") == options.get("reduction")


def deciding(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a function got, without numbers of elements.

    They decide how many values the result has, and not what these are.
    """
    if name == "arange" and args and isinstance(args[-1], Tensor) and len(args) < 3:  # noqa: PLR2004
        return args[:-1]
    if name in _OF_SIZES:
        return ()
    if name in _TO_SIZES:
        return args[:1]
    return (*args, *kwargs.values())


def of_values(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return the arguments of a function whose values its result has, and not their form alone."""
    if name.startswith("new_") or name.endswith("_like"):
        return ()
    if name in _TO_FORM:
        return args[:1]
    return (*args, *kwargs.values())


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return tensors among `values` and in lists and tuples among them."""
    found = []
    for value in values:
        items = value if isinstance(value, tuple | list) else (value,)
        found += [item for item in items if isinstance(item, Tensor)]
    return found


def dim_order(name: str, count: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Return which dim of a tensor is where in its `permute`, `transpose` or `T`.

    Args:
        name: Of the function.
        count: Dims of the tensor.
        args: What it got, the tensor first.
        kwargs: What it got by name.
    """
    order = list(range(count))
    if name == "permute":
        given = kwargs.get("dims", args[1:])
        given = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
        return [dim % count for dim in given]
    if name in ("T", "t", "H", "numpy_T"):
        return order[::-1]
    if name in ("movedim", "moveaxis"):
        return _moved(order, *args[1:], *kwargs.values())
    if name in ("mT", "mH", "adjoint"):
        first, second = -1, -2
    else:  # names are dim0 and dim1, or axis0 and axis1, and their order says nothing
        first, second = (*args[1:], *kwargs.values())
    order[first], order[second] = order[second], order[first]
    return order


def _moved(order: list[int], source: Any, destination: Any) -> list[int]:
    """Return `order` with the dims `source` at the places `destination`."""
    count = len(order)
    pairs = (
        [(source, destination)]
        if isinstance(source, int)
        else zip(source, destination, strict=True)
    )
    places = {after % count: before % count for before, after in pairs}
    rest = iter(dim for dim in order if dim not in places.values())
    return [places[at] if at in places else next(rest) for at in order]


def note_zero(name: str, result: Tensor, args: Sequence[Any]) -> None:
    """Note whether a function returned 0."""
    is_number = (
        name == "tensor" and bool(args) and isinstance(args[0], int | float) and args[0] == 0
    )
    if name in _ZEROS or is_number:
        setattr(result, _ZERO, True)


def is_zero(value: Any) -> bool:
    """Return whether a script adds losses to `value`."""
    if isinstance(value, Tensor):
        return hasattr(value, _ZERO) and value.numel() == 1 and not write_count(value)
    return isinstance(value, int | float) and value == 0


def written_by(name: str, args: Sequence[Any], result: Any) -> Iterator[Tensor]:
    """Yield the tensors that a function wrote: its first argument, and what that is a view of."""
    if not args or not isinstance(args[0], Tensor):
        return
    if name == "__setitem__" or result is args[0]:
        yield args[0]
        base = viewed(args[0])
        if base is not None:
            yield base
