"""A tensor of which each rank has a part of the image: some rows of its height, width or depth.

The problem.  An image, and what a network keeps of it for its backward pass, may not fit one rank.
Convolutions and most other layers need a part of the image and few rows around it; models are not
written for parts.

The idea.  `ImageTensor` stands for the whole tensor: the model sees the shape of the whole image,
and each function of torch that gets one is computed on this rank's part by a rule (`rules`), with
rows of other ranks where it needs them.  A result that does not depend on the place in the image,
such as the mean over it, is a plain tensor, equal on all ranks.  So every number that a model sees
is that of one process, and it cannot be wrong by a shape that it reads.  A function without a rule
is refused by its name.

Autograd runs on the parts.  The gradient of a part is that of the sum of the losses of all ranks,
as in `collectives`; each rank has the loss of the whole image, and gradients of parameters are
averaged over the ranks, which makes them those of one process.

A dim has equal parts, up to one row (`parts.spans`); a dim with fewer rows than ranks is whole on
each, until something makes it larger.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.collectives import all_gather
from msrun.parallel.images.memory import PartMemory
from msrun.parallel.images.rows import move_rows
from msrun.parallel.local import full_tensor
from msrun.parallel.losses.batch import map_leaves, tensors_in
from msrun.parallel.notation.image_parts import Span, Spans, one_each, spans
from msrun.parallel.tensor import guard_refusals
from msrun.parallel.torch_compat import GENERATED, empty_wrapper, viewed

_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[2])
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_WRITING_OPERATORS = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or")
)
# What numpy calls them, and torch takes as well -> what torch calls them.
_NAMES_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
_HINT = "compute it before the model or after it, or of samples and channels alone"
_LOST = "rows of an image that are written in place in a view, such as x[:, :, 1:3].zero_()"
# What one process has as views.
_VIEWS = """
    __getitem__ narrow select chunk split split_with_sizes tensor_split unbind view view_as
    unflatten permute transpose t swapaxes swapdims movedim moveaxis squeeze unsqueeze expand
    expand_as broadcast_to diagonal detach alias view_as_real view_as_complex real imag
    __get__.T __get__.mT __get__.data __get__.real __get__.imag
"""
# What is a view where the memory allows it.
_MAYBE_VIEWS = "reshape reshape_as flatten ravel unfold"
_ALL_VIEWS, _ALL_MAYBE = frozenset(_VIEWS.split()), frozenset(_MAYBE_VIEWS.split())
_INDICES = (int, slice, type(...), type(None))


class ImageAxis(NamedTuple):
    """A mesh axis that divides a dim of images.

    Args:
        name: Of the axis.
        group: Its ranks.
        rank: Index of this rank among them.
        size: Number of them.
    """

    name: str
    group: dist.ProcessGroup
    rank: int
    size: int

    def spans(self, rows: int) -> Spans:
        """Return the rows of each rank."""
        return spans(rows, self.size)

    def part(self, rows: int) -> Span:
        """Return the rows of this rank."""
        return self.spans(rows)[self.rank]

    def divides(self, rows: int) -> bool:
        """Return whether ranks have parts of so many rows, and not all of them."""
        return self.size > 1 and rows >= self.size

    def move(self, x: Tensor, dim: int, have: Spans, needs: tuple[Spans, ...]) -> Tensor:
        """Return the rows of `dim` that this rank needs."""
        return move_rows(x, dim, (self.group, self.rank), have, needs)


class ImageDim(NamedTuple):
    """The dim that an axis divides, and its rows in the whole image."""

    dim: int
    rows: int


Axes = tuple[ImageAxis, ...]
Places = tuple[ImageDim | None, ...]


class ImageTensor(Tensor):
    """See the module.

    Attributes:
        local: This rank's part.
        axes: All axes that divide images.
        places: For each axis the dim that it divides; None if it divides none.
        memory: Of the part, once it has views.
    """

    local: Tensor
    axes: Axes
    places: Places
    memory: PartMemory | None = None
    # Name of a function -> what computes it; `rules` fills it.
    rules: ClassVar[dict[str, Callable[[ImageCall], Any]]] = {}
    # Names of those whose rule can write in place.
    writing: ClassVar[set[str]] = set()

    def __new__(cls, local: Tensor, axes: Axes, places: Places) -> Self:  # noqa: D102
        shape = list(local.shape)
        for axis, place in zip(axes, places, strict=True):
            if place is None:
                continue
            first, end = axis.part(place.rows)
            if shape[place.dim] != end - first:
                raise RuntimeError(
                    f"a part of {tuple(local.shape)} is not that of rank {axis.rank} of "
                    f"{place.rows} rows in dim {place.dim}"
                )
            shape[place.dim] = place.rows
        self: Self = empty_wrapper(cls, shape, local)
        self.local, self.axes, self.places = local, axes, places
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute `func` by its rule; see the module."""
        del types
        named = {_NAMES_OF_NUMPY.get(key, key): value for key, value in (kwargs or {}).items()}
        call = ImageCall(func, name_of(func), args, named)
        if not torch.is_grad_enabled():
            call.check_outside()
        rule = cls.rules.get(call.name)
        if rule is None or call.kwargs.get("out") is not None:
            raise call.refusal()
        if call.is_in_place and call.name not in cls.writing:
            raise call.refusal(f"{func.__name__}, which writes in place")
        result = call.with_views(rule) if call.makes_views() else rule(call)
        call.check_writes(result)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares that it is disabled
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse an operator that code below Python calls."""
        del types
        raise ImageCall(func, str(func), args, dict(kwargs or {})).refusal()

    def is_divided(self, at: int) -> bool:
        """Return whether ranks of axis number `at` have parts, and not all."""
        place = self.places[at]
        return place is not None and self.axes[at].divides(place.rows)

    def placed(self) -> dict[int, int]:
        """Return dim -> number of the axis that it is placed on."""
        return {place.dim: at for at, place in enumerate(self.places) if place}

    def divided(self) -> dict[int, int]:
        """Return dim -> number of its axis, for dims of which ranks have parts."""
        return {dim: at for dim, at in self.placed().items() if self.is_divided(at)}

    @property
    def is_in_parts(self) -> bool:
        """Whether no two ranks have the same part."""
        return all(self.is_divided(at) or axis.size == 1 for at, axis in enumerate(self.axes))

    def stream(self) -> int:
        """Return a number that ranks with equal parts have in common."""
        number = 0
        for at, axis in enumerate(self.axes):
            number = number * axis.size + (axis.rank if self.is_divided(at) else 0)
        return number

    def like(self, local: Tensor, places: Places | None = None) -> Tensor:
        """Return a tensor with another part; a plain one if no dim is placed."""
        return wrapped(local, self.axes, self.places if places is None else places)

    def without(self, dims: Iterable[int]) -> Places:
        """Return the places of other dims."""
        return tuple(p if p and p.dim not in set(dims) else None for p in self.places)


def wrapped(local: Tensor, axes: Axes, places: Places) -> Tensor:
    """Return the tensor whose part is `local`; itself if no dim is placed.

    Where `local` has all rows of a dim, because it had too few until now, the part is taken.
    """
    for axis, place in zip(axes, places, strict=True):
        if place and axis.divides(place.rows) and local.shape[place.dim] == place.rows:
            local = narrowed(local, axis, place.dim)
    return ImageTensor(local, axes, places) if any(places) else local


def gathered(x: Tensor) -> Tensor:
    """Return the whole of `x`, a plain tensor, on each rank; all call it."""
    if not isinstance(x, ImageTensor):
        return x
    local = full_tensor(part(x))
    for dim, at in sorted(x.divided().items()):
        axis, rows = x.axes[at], x.shape[dim]
        if rows % axis.size:
            whole = one_each([(0, rows)] * axis.size)
            local = axis.move(local, dim, axis.spans(rows), whole)
        else:
            local = all_gather(local, axis.group, dim)
    return local


def part(x: Tensor) -> Tensor:
    """Return the part of an image, and any other tensor as it is.

    Raises:
        ModelError: The part misses a write.
    """
    if not isinstance(x, ImageTensor):
        return x
    if x.memory and x.memory.misses_write():
        raise _refusal(_LOST)
    return x.local


def opened(value: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return `value` with parts in place of images, and a function that puts images around them."""
    found: list[ImageTensor | None] = []

    def inner(x: Tensor) -> Tensor:
        found.append(x if isinstance(x, ImageTensor) else None)
        return part(x)

    inside = map_leaves(inner, value)

    def closed(result: Any) -> Any:
        left = iter(found)

        def image(x: Tensor) -> Tensor:
            before = next(left)
            return x if before is None else before.like(x)

        return map_leaves(image, result)

    return (inside, closed) if any(x is not None for x in found) else (value, _same)


def _same(value: Any) -> Any:
    return value


def narrowed(x: Tensor, axis: ImageAxis, dim: int) -> Tensor:
    """Return this rank's rows of a whole tensor."""
    first, end = axis.part(x.shape[dim])
    return x.narrow(dim, first, end - first)


@dataclass(frozen=True, slots=True)
class ImageCall:
    """A function of torch that got a tensor of an image.

    Args:
        func: The function.
        name: Of it, without what says that it writes in place.
        args: What it got.
        kwargs: What it got by name.
    """

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def value(self, at: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    @property
    def is_in_place(self) -> bool:
        """Whether the function writes its first argument, as its name says."""
        name: str = getattr(self.func, "__name__", "")
        return name in _WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__"))

    @property
    def x(self) -> ImageTensor:
        """The first argument, if it is of an image."""
        found = self.value(0, "input", self.kwargs.get("self"))
        if not isinstance(found, ImageTensor):
            raise self.refusal()
        return found

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]

    def images(self) -> Iterator[ImageTensor]:
        """Yield tensors of images among the arguments and in lists of them."""
        for value in (*self.args, *self.kwargs.values()):
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, ImageTensor):
                    yield item

    def others(self) -> ImageTensor | None:
        """Return a tensor of an image beside the first argument, if there is one."""
        first = self.value(0, "input")
        return next((image for image in self.images() if image is not first), None)

    def on(self, local: Tensor) -> Any:
        """Run the function on the part of its first argument."""
        if self.args:
            return self.func(local, *self.args[1:], **self.kwargs)
        return self.func(**{**self.kwargs, "input": local})

    def changed(self, change: Callable[[Tensor], Tensor]) -> Any:
        """Run the function with each tensor changed, also in lists."""
        args, kwargs = map_leaves(change, (self.args, self.kwargs))
        return self.func(*args, **kwargs)

    def whole(self, *, is_expected: bool = False) -> Any:
        """Run the function on whole tensors, on every rank; the result is plain."""
        if not is_expected:
            warnings.warn(
                f"msrun: {self.name.strip('_')} is computed whole on every rank{_line()}",
                stacklevel=4,
            )
        return self.changed(gathered)

    def refusal(self, what: str = "") -> ModelError:
        """Return the error for a function that has no rule, or not in this use."""
        return _refusal(what or f"{self.name}, which is not known for parts of images")

    def makes_views(self) -> bool:
        """Return whether one process has the results as views of the first argument."""
        base = self.value(0, "input")
        if not isinstance(base, ImageTensor) or type(base.local) not in (Tensor, Parameter):
            return False
        if self.name not in _ALL_VIEWS:
            return self.name in _ALL_MAYBE and self._views_without_values()
        if self.name == "__getitem__":
            index = self.args[1]
            return all(
                type(i) in _INDICES for i in (index if isinstance(index, tuple) else [index])
            )
        return not getattr(self.func, "__name__", "").endswith("_") or self.name[0] == "_"

    def _views_without_values(self) -> bool:
        def empty(x: Tensor) -> Tensor:
            local = x.local if isinstance(x, ImageTensor) else x
            steps = local.stride()
            order = sorted(range(x.dim()), key=lambda dim: -steps[dim])
            whole = torch.empty([x.shape[dim] for dim in order], dtype=x.dtype, device="meta")
            return whole.permute([order.index(dim) for dim in range(x.dim())])

        with torch.inference_mode(mode=False):
            result: Tensor = self.changed(empty)
        return viewed(result) is not None

    def with_views(self, rule: Callable[[ImageCall], Any]) -> Any:
        """Compute views: true ones share their memory, and of others a write is noticed."""
        base = self.x
        memory = base.memory = base.memory or PartMemory(base.local)
        with memory.one_call():
            return self._noted(rule(self), base, memory)

    def _noted(self, result: Any, base: ImageTensor, memory: PartMemory) -> Any:
        address = base.local.untyped_storage().data_ptr()

        def one(x: Tensor) -> Tensor:
            local = x.local if isinstance(x, ImageTensor) else x
            if x is base or not local.numel():
                return x
            if local.untyped_storage().data_ptr() == address:
                if isinstance(x, ImageTensor):
                    x.memory = memory
                    if self.name == "__get__.data":
                        memory.join(local)
                return x
            if local.is_inference():  # torch counts no writes
                with torch.inference_mode(mode=False):
                    local = local.clone()
            if not isinstance(x, ImageTensor):
                memory.copy(local, local)
                return local
            if x.memory is None or local is not x.local:
                x = ImageTensor(local, x.axes, x.places)
                x.memory = memory.copy(local)
            return x

        return map_leaves(one, result)

    def check_writes(self, result: Any) -> None:
        """Refuse to compute with a part that misses a write; `result` is what was computed.

        Raises:
            ModelError: There is one.
        """
        memories = [image.memory for image in self.images() if image.memory]
        if not memories:
            return
        name = getattr(self.func, "__name__", "")
        if guard_refusals.is_writing(name, self.kwargs):
            memories[0].count()
        is_read = result is None or tensors_in(result)
        if is_read and any(memory.misses_write() for memory in memories):
            raise self.refusal(_LOST)

    def check_outside(self) -> None:
        """Refuse to run inside of somebody's autograd function, which gets no gradient of parts."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - a traceback would cost more
        while frame is not None:
            if frame.f_code is _APPLY:
                name = getattr(frame.f_locals.get("cls"), "__name__", "")
                raise self.refusal(f"the autograd function {name}")
            frame = frame.f_back


def _refusal(shown: str) -> ModelError:
    return ModelError(
        f"parallel.data: ranks have parts of images, and the model has {shown}{_line()}",
        hint=_HINT,
    )


def name_of(func: Any) -> str:
    """Return the name of a function of torch, also of one that writes in place."""
    name: str = getattr(func, "__name__", "") or str(func)
    if name in ("__get__", "__set__"):
        owner = func.__self__
        return f"{name}.{getattr(owner, '__name__', '') or owner.fget.__name__}"
    return name if name.endswith("__") else name.removesuffix("_")


def _line() -> str:
    """Return where in the model the running function was called: its last line there."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(GENERATED):  # the program of a stage, which has no line
            return ""
        path = Path(frame.filename)
        if not any(library in path.parents for library in _LIBRARIES):
            return f" ({path.name}, line {frame.lineno})"
    return ""


def each_of(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a result of torch, which may be several tensors, with each changed."""
    if not isinstance(result, tuple):
        return change(result)
    # Those of `torch.return_types`, which have names, are made of one sequence too.
    return type(result)([change(item) for item in result])


def rule(
    *names: str, writes: bool = False
) -> Callable[[Callable[[ImageCall], Any]], Callable[[ImageCall], Any]]:
    """Return a decorator that makes a function the rule of those in `names`, split at spaces.

    Args:
        names: Of functions of torch.
        writes: Whether it can write in place too; otherwise that is refused.
    """

    def add(compute: Callable[[ImageCall], Any]) -> Callable[[ImageCall], Any]:
        known = " ".join(names).split()
        ImageTensor.rules.update(dict.fromkeys(known, compute))
        if writes:
            ImageTensor.writing.update(known)
        return compute

    return add
