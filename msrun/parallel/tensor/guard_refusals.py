"""What a guard refuses: what torch cannot compute with sharded tensors, and lost writes to views.

What is a view in one process is none here where it was gathered, or is one that autograd does not
know of where it was made of the local tensor: a write to it is in the memory of its base and not in
the gradient.  So such views are noted, and a tensor that missed a write is refused where it is read
next.  `x[1:] *= 2` assigns the view to `x` again, which is right.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import ROOT

# torch's words where a write to a view would be lost: the view is of a gathered tensor, which comes
# from a function with its own gradient.
_VIEW_ERROR = "This view was created inside a custom Function"
# And where code that torch runs by itself meets divided tensors.
_LAYOUT_ERRORS = ("mixed torch.Tensor and DTensor", "autograd.Function with functorch transforms")


# Operators with a form that writes the left side.
_ASSIGNING = "add and floordiv lshift mod mul or pow rshift sub truediv xor"
# Functions that write their first argument, besides names such as `clamp_`.
_WRITING = frozenset(["__setitem__", *(f"__i{name}__" for name in _ASSIGNING.split())])
# What one process has as views.
_VIEWS = """
    __getitem__ chunk split unbind narrow select unfold tensor_split hsplit vsplit diagonal movedim
    swapaxes swapdims view view_as reshape flatten unflatten permute transpose t squeeze unsqueeze
    expand broadcast_to view_as_real view_as_complex split_with_sizes
"""
_MAKING_VIEWS = frozenset(_VIEWS.split())
_PRODUCTS = frozenset(["matmul", "__matmul__", "__rmatmul__", "bmm"])
_MATRIX = 2  # dims


def is_writing(name: str, kwargs: dict[str, Any]) -> bool:
    """Return whether a function writes its first argument."""
    return _is_named_as_writing(name) or bool(kwargs and kwargs.get("inplace"))


@functools.cache
def _is_named_as_writing(name: str) -> bool:
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def has_plain(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function gets a plain tensor, which torch does not take beside divided ones.

    It takes one of one element.
    """
    return any(
        isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() > 1
        for value in (*args, *kwargs.values())
    )


def has_no_layout(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether torch has no layout of a result of a function that otherwise has one.

    Those are a product with a vector whose sum is divided, one of batches of matrices of which
    several axes shard a dim, and the places where a mask is true.
    """
    if name == "where":
        return len(args) + len(kwargs) == 1
    return name in _PRODUCTS and any(
        x.dim() == 1 or (x.dim() > _MATRIX and _is_of_several(x))
        for x in args
        if isinstance(x, Tensor)
    )


def _is_of_several(x: Tensor) -> bool:
    """Return whether several mesh axes shard a dim of `x`."""
    placements: Sequence[Any] = x.placements if isinstance(x, DTensor) else ()
    dims = [each.dim for each in placements if torch_compat.parts_before(each) is not None]
    return len(dims) > len(set(dims))


def makes_view(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether one process has the result of a function as a view of its first argument."""
    if name not in _MAKING_VIEWS or not args or not isinstance(args[0], DTensor):
        return False
    if name != "__getitem__":
        return True
    entries = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(entry is None or isinstance(entry, int | slice | EllipsisType) for entry in entries)


def sentence_of(error: RuntimeError, place: str | None) -> ModelError | None:
    """Return the error of `error`, which a guarded function raised; None if it is the function's.

    Args:
        error: The error.
        place: What of the script sharded the tensors; None is the operator plan.
    """
    said = _said(error)
    where, code = place or f"{ROOT}.plan", "the function" if place else "the model"
    if torch_compat.is_of_compiler(error):
        line = str(error).strip().partition("\n")[0]
        what = "what ranks share" if place else "modules that the plan divides"
        return ModelError(
            f"{where}: torch.cond or another operator that compiles what it calls cannot call "
            f"{what}: {line}",
            hint=_hint(
                place, "call the modules outside of its functions, or leave out their rules"
            ),
        )
    if any(words in said for words in _LAYOUT_ERRORS):
        return ModelError(
            f"{where}: {code} computes with a divided tensor by torch.func, or by a "
            "torch.autograd.Function whose gradient has no layout",
            hint=_hint(
                place, "give the layer before it an `out` that is whole, or leave out its rule"
            ),
        )
    if _VIEW_ERROR not in said:
        return None
    return _lost_write(place)


def _lost_write(place: str | None) -> ModelError:
    """Return why a write to a view is refused; `place` as of `sentence_of`."""
    where, code = place or f"{ROOT}.plan", "the function" if place else "the model"
    return ModelError(
        f"{where}: {code} writes to a view of a divided tensor, such as a slice, which the tensor "
        "would not see",
        hint="compute a new tensor, as with torch.where or torch.cat",
    )


def unfinished_sum(place: str | None) -> ModelError:
    """Return why a write to summands is refused; `place` as of `sentence_of`."""
    where, code = place or f"{ROOT}.plan", "the function" if place else "the model"
    return ModelError(
        f"{where}: {code} writes to a sum in place that ranks have not added up yet",
        hint="compute a new tensor, as with torch.where or torch.cat",
    )


class _Relative(NamedTuple):
    """A tensor of a family: what others are views of, or such a view.

    Args:
        tensor: It.
        call: Which call made it; views of one call do not overlap.  0 is the first tensor.
        is_shared: Whether it has the memory of the first.
        is_detached: Whether autograd takes it for another tensor, as `x.detach()`.
    """

    tensor: weakref.ref[Tensor]
    call: int
    is_shared: bool
    is_detached: bool


class Views:
    """Views that autograd does not know of, from the beginning of a guarded region on."""

    def __init__(self) -> None:
        # By the identity of each member, which another tensor may have later.
        self._families: dict[int, list[_Relative]] = {}
        # A tensor that misses a write, and the view that was written.
        self._lost: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = []
        self._calls = 0

    def __bool__(self) -> bool:
        return bool(self._families)

    def clear(self) -> None:
        """Forget all, at the end of a region."""
        self._families.clear()
        self._lost.clear()

    def detached(self, func: Any, base: Any, result: Any) -> Any:
        """Return `result`, and note it if it is `base` without gradients: `detach()` or `.data`."""
        if not isinstance(result, DTensor):
            return result
        if func in (Tensor.detach, torch.detach) or getattr(func, "__self__", None) is Tensor.data:
            self.note(base, result, is_detached=True)
        return result

    def note(self, base: DTensor, result: Any, *, is_detached: bool = False) -> None:
        """Note the tensors of `result`, which one process has as views of `base`."""
        family = self._family(base)
        if not family:
            family = []
            for each in (base, torch_compat.viewed(base)):
                if each is not None:
                    family.append(
                        _Relative(weakref.ref(each), 0, is_shared=True, is_detached=False)
                    )
                    self._families[id(each)] = family
        self._calls += 1
        memory = _memory(base)
        is_detached |= any(m.is_detached for m in family if m.tensor() is base)
        for view in result if isinstance(result, tuple | list) else [result]:
            if isinstance(view, Tensor) and view is not base:
                is_shared = isinstance(view, DTensor) and _memory(view) == memory
                # Views of a plain view are views of what it is a view of.
                root = None if isinstance(view, DTensor) else torch_compat.viewed(view)
                for each in (view,) if root is None else (view, root):
                    member = _Relative(weakref.ref(each), self._calls, is_shared, is_detached)
                    family.append(member)
                    self._families[id(each)] = family

    def _write(self, target: Tensor, others: Iterable[Any]) -> None:
        """Note a write of `others` to `target`, which its family may miss."""
        family = self._family(target)
        if not family:
            return
        relatives = [x for x in (target, torch_compat.viewed(target)) if x is not None]
        own = [m for m in family if any(m.tensor() is each for each in relatives)]
        calls, is_shared = {m.call for m in own}, all(m.is_shared for m in own)
        found = [(m, m.tensor()) for m in family if m.call not in calls]
        alive = [(m, tensor) for m, tensor in found if tensor is not None]
        is_apart = all(m.is_detached for m in own)

        def has_gradient(relative: _Relative) -> bool:
            if relative.is_detached != is_apart:  # autograd knows of no write here in one process
                return False
            tensors = (target, *others, *(tensor for m, tensor in alive if not m.is_detached))
            return any(isinstance(each, Tensor) and each.requires_grad for each in tensors)

        is_graded = torch.is_grad_enabled()
        self._lost += [
            (m.tensor, weakref.ref(target))
            for m, _ in alive
            if (is_graded and has_gradient(m)) or not (is_shared and m.is_shared)
        ]

    def check(self, values: Iterable[Any], place: str | None) -> None:
        """Refuse tensors of `values` that miss a write; `place` as of `sentence_of`.

        Raises:
            ModelError: There is one.
        """
        if not self._lost:
            return
        tensors = [value for value in values if isinstance(value, Tensor)]
        relatives = [*tensors, *map(torch_compat.viewed, tensors)]
        if any(lost() is each for lost, _ in self._lost for each in relatives if each is not None):
            raise _lost_write(place)

    def watch(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: str | None,
    ) -> None:
        """Look at a call of any function before it runs; `place` as of `sentence_of`.

        Raises:
            ModelError: It gets a tensor that misses a write.
        """
        if name == "__setitem__":
            self._assign(args[0], args[2])
        values = [*args, *kwargs.values()]
        for value in tuple(values):
            if isinstance(value, tuple | list):
                values += value
        self.check(values, place)
        if is_writing(name, kwargs) and args and isinstance(args[0], Tensor):
            self._write(args[0], values)

    def _assign(self, target: object, value: object) -> None:
        """Note that `target` gets `value`, a view of it that was written, as in `x[1:] *= 2`."""
        self._lost = [
            (lost, view) for lost, view in self._lost if lost() is not target or view() is not value
        ]

    def _family(self, x: Tensor) -> list[_Relative]:
        for each in (x, torch_compat.viewed(x)):
            found = self._families.get(id(each), [])
            if each is not None and any(member.tensor() is each for member in found):
                return found
        return []


@torch.no_grad()
def _memory(x: DTensor) -> int:
    """Return a number for the memory of this rank's part of `x`; 0 without memory."""
    part = x.to_local()
    storage = part.untyped_storage()
    # Torch warns where the address of one without values is read.
    return id(storage) if torch_compat.is_fake(part) else storage.data_ptr()


def _hint(place: str | None, of_plan: str) -> str:
    return "leave the tensors that it gets out of in_ and params" if place else of_plan


def _said(error: BaseException) -> str:
    """Return what `error` says, and what it was raised from: stages of a pipeline wrap it."""
    own = str(error)
    return own if error.__cause__ is None else f"{own}\n{_said(error.__cause__)}"
