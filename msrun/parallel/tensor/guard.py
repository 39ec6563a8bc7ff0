"""Which functions may run on the parts of a divided tensor.

`DTensor` knows many operators, and some of them wrongly in the tested versions of torch.  So
what is not on the list below, each entry of which is tested against one process, gets whole
tensors instead: right, if slow, and said once.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from msrun.errors import UsageError
from msrun.parallel import torch_compat
from msrun.parallel.tensor.placements import on_mesh

Function = Callable[..., Any]

# Names of functions and methods of tensors that are right on parts, whatever the cut.
_VERIFIED = """
    abs add add_ addcmul bfloat16 cos div div_ elu erf exp float gelu half leaky_relu log
    log1p masked_fill mul mul_ neg pow reciprocal relu relu_ rsqrt rsub sigmoid silu sin softplus
    sqrt square sub sub_ tanh to true_divide type_as where __add__ __iadd__ __imul__ __isub__
    __mul__ __neg__ __pow__ __radd__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__
    clone contiguous detach expand flatten permute reshape squeeze t transpose
    unflatten unsqueeze view view_as
    bmm embedding layer_norm linear matmul mean softmax sum __matmul__
"""
# They say something about a tensor, or move it, and compute nothing.
_ASKING = """
    backward data_ptr detach_ dim element_size full_tensor get_device grad has_names is_complex
    is_contiguous is_floating_point is_inference ndimension nelement numel redistribute
    register_hook requires_grad_ retain_grad size storage_offset stride to_local
    __format__ __get__ __hash__ __len__ __repr__ __set__
"""
# What torch does for a function on parts that need one another; sums it has to make anyway.
_MOVING = frozenset(["all_gather_into_tensor", "all_to_all_single"])
# Operators that write their left side.
_ASSIGNING = "add and floordiv lshift mod mul or pow rshift sub truediv xor"
# Calls of other parts, or over other dims, of which a program may have any number.
_CALLS_MAX = 1000
_SEQUENCES = (tuple, list)
# What else writes its first argument than what has a name such as `clamp_`.
_WRITING = frozenset(["__setitem__", *(f"__i{name}__" for name in _ASSIGNING.split())])
VERIFIED = frozenset(_VERIFIED.split())
ASKING = frozenset(_ASKING.split())


class Guard(TorchFunctionMode):
    """While it is active, functions that see a `DTensor` are run in a way that is right.

    Args:
        mesh: Of all divided tensors.

    Attributes:
        draw: Draws the mask of a dropout.
        has_loss: Whether the loss is guarded too, which then takes divided tensors.
        shared: Of the innermost `active`, the input that was placed last, if any; None outside.
            What may run again by itself has one of its own, and so finds then what it found.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.draw = _draw
        self.has_loss = False
        self.shared: list[Any] | None = None
        self._regions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._mesh = mesh
        self._whole = (Replicate(),) * mesh.ndim
        self._told: set[str] = set()
        self._calls: set[tuple[Any, ...]] = set()
        self._special: dict[Function, Function] = {
            functional.scaled_dot_product_attention: self._attend,
            functional.dropout: self._dropout,
            functional.cross_entropy: self._cross_entropy,
            functional.embedding: self._embed,
            Tensor.copy_: self._copy,
        }

    def __getstate__(self) -> dict[str, Any]:
        passing = ("shared", "_regions")
        return {name: value for name, value in vars(self).items() if name not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, shared=None, _regions=weakref.WeakSet())

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Guard what runs inside, also where it is guarded already."""
        outer, self.shared = self.shared, []
        self._begin_region()
        try:
            with contextlib.nullcontext() if torch_compat.is_active(self) else self:
                yield
        finally:
            self.shared = outer

    def resume(self) -> None:
        """Guard the rest of what a script recomputes by itself, once a planned module is called."""
        self._begin_region()
        if torch_compat.is_in_backward() and not torch_compat.is_active(self):
            # torch leaves it at the end of the node that recomputes.
            self.__enter__()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def active_with_loss(self) -> Iterator[None]:
        """Guard model, loss and backward; logits may stay divided by class."""
        self.has_loss = True
        try:
            with loss_parallel(), self.active():
                yield
        finally:
            self.has_loss = False

    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; see the class."""
        del types
        kwargs = kwargs or {}
        # All of a step passes here, most of it asking or plain: that has to be known fast.
        name = getattr(func, "__name__", "")
        if name in ASKING or not _has_divided(args, kwargs):
            if name == "__set__" and self.shared:  # as in `x.data = y`, which nobody counts
                self.shared.clear()
            return func(*args, **kwargs)
        if name not in VERIFIED or func in self._special:
            self._demand_guarded(name)
        if args and isinstance(args[0], Tensor) and _is_writing(name, kwargs):
            is_verified = name in VERIFIED or func in self._special
            if not is_verified or not isinstance(args[0], DTensor):
                return self._write(func, name, args, kwargs)
        args = tuple(map(self._lift, args))
        kwargs = {key: self._lift(value) for key, value in kwargs.items()}
        if func in self._special:
            return self._special[func](*args, **kwargs)
        if name not in VERIFIED:
            return self._run_whole(func, name, args, kwargs)
        return self._run_parts(func, name, args, kwargs)

    def _begin_region(self) -> None:
        """Note that what `torch.utils.checkpoint` runs here is guarded from now on, again too."""
        region = torch_compat.checkpointed()
        if region is not None:
            self._regions.add(region)

    def _demand_guarded(self, name: str) -> None:
        """Refuse a function that a script runs again by itself where nobody will guard it.

        What begins outside of `active` is guarded from the first planned module on.
        """
        region = torch_compat.checkpointed()
        if region is not None and region not in self._regions:
            raise UsageError(
                f"torch.utils.checkpoint would run {name} of a divided tensor again without msrun, "
                "and get something else",
                hint="let it begin with a module of parallel.plan, or use parallel.recompute",
            )

    def _lift(self, value: Any) -> Any:
        """Return `value` with plain tensors, which all ranks have, on the mesh."""
        if isinstance(value, DTensor):
            return value
        if isinstance(value, Tensor):
            return on_mesh(value, self._mesh, self._whole)
        if isinstance(value, _SEQUENCES) and _divided(value):
            return type(value)(map(self._lift, value))
        return value

    def _run_parts(
        self, func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `func`, and at the first such call look whether torch gathers parts for it."""
        values = (*args, *kwargs.values())
        numbers = [value for value in values if isinstance(value, int)]
        call = (name, *[part.placements for part in _divided(values)], *numbers)
        is_known = call in self._calls or len(self._calls) == _CALLS_MAX
        # Others who look, as a recomputation that keeps results, would see other operators.
        if is_known or torch_compat.is_dispatching():
            return func(*args, **kwargs)
        self._calls.add(call)
        with torch_compat.dispatching(partial(self._look, name)):
            return func(*args, **kwargs)

    def _look(
        self, name: str, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch divides it first
        if (
            operator.namespace == "_c10d_functional"
            and operator.__name__.partition(".")[0] in _MOVING
        ):
            self._tell(name, f"torch gathers what is divided for {name}")
        return operator(*args, **kwargs)

    def _tell(self, name: str, text: str) -> None:
        """Warn of the function `name`, once."""
        if name not in self._told:
            self._told.add(name)
            warnings.warn(f"msrun: {text}", stacklevel=5)

    def _write(
        self, func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `func`, which writes its first argument, on whole tensors, and write that."""
        target, *others = args
        if not isinstance(target, DTensor):  # who else knows it shall see what is written
            return self._run_whole(func, name, args, kwargs)
        if "inplace" in kwargs:
            result = self._run_whole(func, name, args, {**kwargs, "inplace": False})
        else:
            result = self._gather(target).clone()
            self._run_whole(func, name, (result, *others), kwargs)
        if result.shape != target.shape:
            raise UsageError(
                f"{name} changes the shape of a divided tensor in place, from "
                f"{list(target.shape)} to {list(result.shape)}",
                hint="use the result of the function without the underscore",
            )
        self._overwrite(target, result)
        return None if name == "__setitem__" else target

    def _copy(self, target: DTensor, src: DTensor, *_: Any, **__: Any) -> DTensor:
        same = src if src.shape == target.shape else src.expand(target.shape)
        self._overwrite(target, same)
        return target

    def _overwrite(self, target: DTensor, value: Tensor) -> None:
        placed: DTensor = self._lift(value)
        target.copy_(placed.redistribute(self._mesh, target.placements))

    def _run_whole(
        self, func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        found = [*_divided(args), *_divided(tuple(kwargs.values()))]
        placed = {placement for tensor in found for placement in tensor.placements}
        is_divided = any(not p.is_replicate() and not p.is_partial() for p in placed)
        if is_divided:
            self._tell(name, f"{name} is computed whole on every rank")
        out = kwargs.get("out")
        if isinstance(out, DTensor):
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        kwargs = {key: self._gather(value) for key, value in kwargs.items()}
        result = func(*map(self._gather, args), **kwargs)
        if not isinstance(out, DTensor):
            return result
        self._overwrite(out, result)
        return out

    def _gather(self, value: Any) -> Any:
        """Return `value` with whole, plain tensors."""
        if isinstance(value, DTensor):
            return value.redistribute(self._mesh, self._whole).to_local()
        if isinstance(value, _SEQUENCES) and _divided(value):
            return type(value)(map(self._gather, value))
        return value

    def _attend(self, query: DTensor, key: DTensor, value: DTensor, *args: Any, **kw: Any) -> Any:
        """Run attention on (batch, heads, sequence, width) by heads, which do not meet.

        torch would gather all heads on a CPU.
        """
        function = functional.scaled_dot_product_attention
        mask = kw.get("attn_mask", args[0] if args else None)
        drops = kw.get("dropout_p", args[1] if len(args) > 1 else 0.0)
        placed = query.placements
        is_apart = all(p.is_replicate() or p.is_shard(0) or p.is_shard(1) for p in placed)
        is_alike = placed == key.placements == value.placements
        if mask is not None or drops or not is_apart or not is_alike:
            return self._run_whole(function, function.__name__, (query, key, value, *args), kw)
        output = function(query.to_local(), key.to_local(), value.to_local(), *args, **kw)
        return on_mesh(output, self._mesh, placed)

    def _dropout(self, x: DTensor, p: float, training: Any, inplace: Any) -> Any:
        """Drop what one process would: the whole mask is drawn, and this rank's part used."""
        if not training or p == 0.0:
            return x
        target = x
        if any(placement.is_partial() for placement in x.placements):
            x = x.redistribute(self._mesh, self._whole)
        keep = self.draw(x, 1 - p)
        mask = on_mesh(keep, self._mesh, self._whole)
        found = x * mask.redistribute(self._mesh, x.placements).div(1 - p)
        if not inplace:
            return found
        self._overwrite(target, found)
        return target

    def _embed(self, *args: Any, **options: Any) -> Any:
        """Look rows up; with divided rows the sum is taken at once, as torch can do it once."""
        found: Any = functional.embedding(*args, **options)
        placed = [Replicate() if p.is_partial() else p for p in found.placements]
        return found.redistribute(self._mesh, placed)

    def _cross_entropy(self, logits: DTensor, target: DTensor, **options: Any) -> Any:
        """Take the loss of logits that are divided by class without gathering them.

        torch's `loss_parallel` does, inside its context, where `rt.step` runs the loss.
        """
        is_plain = options.get("weight") is None and not options.get("label_smoothing")
        is_by_class = logits.dim() > 1 and all(
            placement.is_replicate() or placement.is_shard(1) for placement in logits.placements
        )
        function = functional.cross_entropy
        if is_plain and is_by_class and self.has_loss:
            return function(logits, target, **options)
        return self._run_whole(function, function.__name__, (logits, target), options)


def _draw(x: Tensor, share: float) -> Tensor:
    """Return ones for that `share` of the elements of the whole of `x`, and zeros."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(share)


def _is_writing(name: str, kwargs: dict[str, Any]) -> bool:
    is_named_so = name.endswith("_") and not name.endswith("__")
    return is_named_so or name in _WRITING or bool(kwargs.get("inplace"))


def _has_divided(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, DTensor) or (isinstance(value, _SEQUENCES) and _divided(value)):
            return True
    return False


def _divided(values: Iterable[Any]) -> list[DTensor]:
    found: list[DTensor] = []
    for value in values:
        if isinstance(value, DTensor):
            found.append(value)
        elif isinstance(value, _SEQUENCES):
            found += [item for item in value if isinstance(item, DTensor)]
    return found
