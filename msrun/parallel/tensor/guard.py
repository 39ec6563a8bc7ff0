"""Which functions may run on the shards of a tensor: a guard around the model's own code.

The problem.  A plan shards modules of an unmodified model, so the code between them, and the loss,
computes on sharded activations.  As plain local tensors these are fast and wrong in silence: a view
with the full number of heads fails, a norm over a sharded dim is simply another number.  `DTensor`
knows its placement, but in the tested versions of torch it is itself silently wrong for some
functions (`cumsum` with a negative dim, convolutions, dropout), gathers all heads of attention on a
CPU, and refuses others.

The idea.  Activations stay `DTensor`s, and while model, loss and recomputation run, a
`TorchFunctionMode` sees every function that gets one:

- A function of `VERIFIED` runs on shards as torch has it, one of `ON_SHARDS` runs on each rank's
  shard if it reads no sharded dim (`along`, `labels`, `channels`, `shard_functions`).
  `tests/torch/tensor/test_guard.py` compares each entry with one process for every sharding,
  gradients included.
- `INSPECTING` functions say something about a tensor and compute nothing: they pass.
- Attention (by heads), norms over a sharded dim, dropout (the mask of one process), embedding,
  cross entropy and `copy_` have an implementation here.
- Any other function gets replicated, plain tensors: right, if slow, with one warning a function.
  One that writes its argument runs on a gathered copy, which is written back to the shards.

Invariants.

- Being on a list makes a function fast, never right: without any list every model is still right.
- A plain tensor that meets a `DTensor` is the same on all ranks, and becomes a replicated one.
- What `torch.utils.checkpoint` runs again is guarded again.  A region that begins under the guard
  is noted; one that a script begins outside is guarded from the first planned module on, and what
  it does with a sharded tensor before that is refused: dropout would get another mask in silence.
- A script's `torch.autograd.Function` gets whole tensors (`foreach.own_functions`).
- Only the loss of `rt.step` takes logits sharded by class; others get the output replicated.

What was tried and lost.  Local tensors between modules, as hand-written tensor parallel has them:
silently wrong.  A list of functions known to be wrong: the next one is not on it.  Wrapping
`torch.autograd.backward`: it passes through the mode as well, so it had no effect.  Watching for
gathers inside of a recomputation that saves results: it mixed up whose results they were, so the
guard does not watch while another dispatch mode does.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.foreach.own_functions import apply_whole
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.summands.late import LateSums
from msrun.parallel.tensor import (
    along,
    channels,
    guard_refusals,
    labels,
    shard_functions,
    sharded_losses,
    sharded_norms,
)
from msrun.parallel.tensor.attention import attend
from msrun.parallel.tensor.placements import Layouts, on_mesh
from msrun.parallel.tensor.samples import quick

Function = Callable[..., Any]

# Names of functions and methods of tensors that are right on shards, whatever the placement.
_VERIFIED = """
    abs add add_ addcmul bfloat16 cos div div_ erf exp float gelu half leaky_relu log
    log1p masked_fill mul mul_ neg pow reciprocal relu relu_ rsqrt rsub sigmoid silu sin
    sqrt square sub sub_ tanh to true_divide type_as where __add__ __iadd__ __imul__ __isub__
    __mul__ __neg__ __pow__ __radd__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__
    broadcast_to clone contiguous detach expand flatten permute reshape squeeze t transpose
    unflatten unsqueeze view view_as
    addmm bmm embedding layer_norm linear matmul mean softmax sum __matmul__
"""
# Functions that inspect a tensor or redistribute it, and compute nothing.
_INSPECTING = """
    backward data_ptr detach_ dim element_size full_tensor get_device grad has_names is_complex
    is_contiguous is_floating_point is_inference ndimension nelement numel redistribute
    register_hook requires_grad_ retain_grad size storage_offset stride to_local
    __format__ __get__ __hash__ __len__ __repr__ __set__
"""
# Collectives by which torch gathers shards for a function; reductions are needed anyway.
_GATHERING = frozenset(["all_gather_into_tensor", "all_to_all_single"])
_LAYOUTS = Layouts()
# Distinct calls that are watched: a program may have any number.
_CALLS_MAX = 1000
_SEQUENCES = (tuple, list)
# Functions that run on each rank's shard, if no dim that they mix is sharded.
_ON_SHARDS = {
    **shard_functions.FUNCTIONS,
    **shard_functions.VIEWS,
    **along.FUNCTIONS,
    **labels.FUNCTIONS,
    **channels.FUNCTIONS,
}
ON_SHARDS = frozenset(func.__name__ for func in _ON_SHARDS)
VERIFIED = frozenset(_VERIFIED.split())
INSPECTING = frozenset(_INSPECTING.split())


class Guard(TorchFunctionMode):
    """While it is active, functions that get a `DTensor` give the single-process result.

    Args:
        mesh: Of all sharded tensors.
        place: What of the script sharded them, for messages; None is the operator plan.

    Attributes:
        draw: Returns the mask of a dropout.
        has_loss: Whether the loss is guarded too, and may get sharded logits.
        shared: Of the innermost `active`, the module input that was placed last, if any, so that
            modules with one input place it once; None outside.  A region that may be recomputed
            has its own, so that it finds the same again.
        late: Takes summands of gradients of parameters; None has them added up at once.
        followed: Runs it in graphs of compiled modules; None in a function of the script.
    """

    followed: Any = None

    def __init__(self, mesh: DeviceMesh, place: str | None = None) -> None:
        super().__init__()
        self._place = place
        self.draw = _draw
        self.has_loss = False
        self.shared: list[Any] | None = None
        self.late: LateSums | None = None
        self._regions: weakref.WeakSet[Any] = weakref.WeakSet()
        self.views = guard_refusals.Views()
        self._mesh = mesh
        self._replicated = (Replicate(),) * mesh.ndim
        self._warned: set[str] = set()
        self._calls: set[tuple[Any, ...]] = set()
        self._special = self._implementations()

    def __getstate__(self) -> dict[str, Any]:
        passing = ("shared", "late", "_regions", "_special", "views")
        return {name: value for name, value in vars(self).items() if name not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, shared=None, late=None, _regions=weakref.WeakSet())
        self.views, self._special = guard_refusals.Views(), self._implementations()

    def _implementations(self) -> dict[Function, Function]:
        """Return what runs instead of each function that has a form of ours."""
        found: dict[Function, Function] = {
            functional.scaled_dot_product_attention: self._attend,
            functional.dropout: self._dropout,
            functional.cross_entropy: self._cross_entropy,
            functional.embedding: self._embed,
            Tensor.copy_: self._copy,
            functional.layer_norm: partial(self._normalize, sharded_norms.layer_norm),
            functional.rms_norm: partial(self._normalize, sharded_norms.rms_norm),
        }
        return found | {func: partial(self._run_each_shard, func) for func in _ON_SHARDS}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Guard the code inside, also where it is guarded already."""
        outer, self.shared = self.shared, []
        self._begin_region()
        try:
            with contextlib.nullcontext() if torch_compat.is_active(self) else self:
                yield
        except RuntimeError as error:
            if sentence := guard_refusals.sentence_of(error, self._place):
                raise sentence from error
            raise
        finally:
            self.shared = outer
            if outer is None:
                self.views.clear()

    def check_returned(self, output: Any) -> None:
        """Refuse an output of which a view was written, which it does not know."""
        self.views.check(tensors_in(output), self._place)

    def resume(self) -> None:
        """Guard the rest of a script's own recomputation, once it calls a planned module."""
        self._begin_region()
        if torch_compat.is_in_backward() and not torch_compat.is_active(self):
            # torch leaves the mode at the end of the node that recomputes.
            self.__enter__()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def active_with_loss(self) -> Iterator[None]:
        """Guard model, loss and backward; logits may stay sharded by class."""
        self.has_loss = True
        try:
            with sharded_losses.by_class(), self.active():
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
        # Every function of a step passes here, most inspecting or on plain tensors: this is hot.
        name = getattr(func, "__name__", "")
        if self.views and name not in INSPECTING:
            self.views.watch(name, args, kwargs, self._place)
        if name in INSPECTING or not _has_dtensor(args, kwargs):
            if name == "__set__" and self.shared:  # such as `x.data = y`, which counts as no write
                self.shared.clear()
            result = func(*args, **kwargs)
            return self.views.detached(func, args[0], result) if name == "__get__" else result
        is_safe = name in VERIFIED and func not in self._special and not self._place
        if not is_safe or guard_refusals.has_plain(args, kwargs):
            self._require_guarded(name)
        if args and isinstance(args[0], Tensor) and guard_refusals.is_writing(name, kwargs):
            is_verified = name in VERIFIED or (func in self._special and func not in _ON_SHARDS)
            if not is_verified or not isinstance(args[0], DTensor):
                return self._write(func, name, args, kwargs)
        by_sample = quick.FUNCTIONS.get(func)
        if by_sample and (found := by_sample(self.late, *args, **kwargs)) is not None:
            return found
        args = tuple(map(self._as_dtensor, args))
        kwargs = {key: self._as_dtensor(value) for key, value in kwargs.items()}
        if func in self._special:
            return self._special[func](*args, **kwargs)
        if name not in VERIFIED or guard_refusals.has_no_layout(name, args, kwargs):
            return self._run_replicated(func, name, args, kwargs)
        result = self._run_on_shards(func, name, args, kwargs)
        return self.views.detached(func, args[0], result) if name == "detach" else result

    def apply_own(
        self, kind: type, apply: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Apply a script's `torch.autograd.Function` to whole tensors."""
        if not _has_dtensor(args, kwargs):
            return apply(*args, **kwargs)
        name = kind.__name__
        self._require_guarded(name)
        self._warn_of_whole(name, (*args, *kwargs.values()))
        return apply_whole(name, apply, self._gather, args, kwargs)

    def _begin_region(self) -> None:
        """Note that this region of `torch.utils.checkpoint` is guarded, when it runs again too."""
        region = torch_compat.checkpointed()
        if region is not None:
            self._regions.add(region)

    def _require_guarded(self, name: str) -> None:
        """Refuse a function in a script's own checkpointed region that is not guarded.

        A region that begins outside of `active` is guarded from the first planned module on.
        """
        region = torch_compat.checkpointed()
        if region is not None and region not in self._regions:
            raise ModelError(
                f"torch.utils.checkpoint would run {name} of a divided tensor again without msrun, "
                "and get something else",
                hint="checkpoint the call of what msrun.shard returned"
                if self._place
                else "let it begin with a module of parallel.plan, or use parallel.recompute",
            )

    def _as_dtensor(self, value: Any) -> Any:
        """Return `value` with plain tensors, equal on all ranks, as replicated `DTensor`s."""
        if isinstance(value, DTensor):
            return value
        if isinstance(value, Tensor):
            if refuse := getattr(value, "refuse_values", None):  # it has rows of a table alone
                refuse("a function")
            return on_mesh(value, self._mesh, self._replicated, self.late)
        if isinstance(value, _SEQUENCES) and _dtensors(value):
            return type(value)(map(self._as_dtensor, value))
        return value

    def _run_on_shards(
        self, func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `func`, and at the first such call watch whether torch gathers shards for it."""
        values = (*args, *kwargs.values())
        numbers = [value for value in values if isinstance(value, int)]  # such as a dim
        placed = [_LAYOUTS.number(part.placements) for part in _dtensors(values)]
        call = (name, *placed, -1, *numbers)
        is_known = call in self._calls or len(self._calls) == _CALLS_MAX
        # Another dispatch mode, as of a recomputation that saves results, would see others.
        if is_known or torch_compat.is_dispatching():
            return func(*args, **kwargs)
        self._calls.add(call)
        with torch_compat.dispatching(partial(self._watch, name)):
            return func(*args, **kwargs)

    def _watch(
        self, name: str, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch turns it into operators on shards first
        if (
            operator.namespace == "_c10d_functional"
            and operator.__name__.partition(".")[0] in _GATHERING
        ):
            self._warn_once(name, f"torch gathers what is divided for {name}")
        return operator(*args, **kwargs)

    def _warn_once(self, name: str, text: str) -> None:
        """Warn of the function `name`, once."""
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"msrun: {text}", stacklevel=6)

    def _warn_of_whole(self, name: str, values: Sequence[Any]) -> None:
        """Warn of a function that gets divided tensors whole, once."""
        placements = {placement for tensor in _dtensors(values) for placement in tensor.placements}
        if any(not p.is_replicate() and not p.is_partial() for p in placements):
            self._warn_once(name, f"{name} is computed whole on every rank")

    def _write(
        self, func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `func`, which writes its first argument, on replicated tensors; write the result."""
        target, *others = args
        if not isinstance(target, DTensor):  # other references to it must see what is written
            return self._run_replicated(func, name, args, kwargs)
        if "inplace" in kwargs:
            result = self._run_replicated(func, name, args, {**kwargs, "inplace": False})
        else:
            result = self._gather(target).clone()
            self._run_replicated(func, name, (result, *others), kwargs)
        if result.shape != target.shape:
            raise ModelError(
                f"{name} changes the shape of a divided tensor in place, from "
                f"{list(target.shape)} to {list(result.shape)}",
                hint="use the result of the function without the underscore",
            )
        self._overwrite(target, result)
        return None if name == "__setitem__" else target

    def _copy(self, target: DTensor, src: DTensor, *_: Any, **__: Any) -> DTensor:
        self._overwrite(target, src if src.shape == target.shape else src.expand(target.shape))
        return target

    def _overwrite(self, target: DTensor, value: Tensor) -> None:
        placed: DTensor = self._as_dtensor(value)
        if any(placement.is_partial() for placement in target.placements):
            raise guard_refusals.unfinished_sum(self._place)
        target.copy_(placed.redistribute(self._mesh, target.placements))

    def _run_replicated(
        self, func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._warn_of_whole(name, (*args, *kwargs.values()))
        out = kwargs.get("out")
        if isinstance(out, DTensor):
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        kwargs = {key: self._gather(value) for key, value in kwargs.items()}
        result = func(*map(self._gather, args), **kwargs)
        if func not in _ON_SHARDS and guard_refusals.makes_view(name, args):
            self.views.note(args[0], result)
        if not isinstance(out, DTensor):
            return result
        self._overwrite(out, result)
        return out

    def _gather(self, value: Any) -> Any:
        """Return `value` with plain tensors of the full size."""
        if isinstance(value, DTensor):
            return value.redistribute(self._mesh, self._replicated).to_local()
        if isinstance(value, _SEQUENCES) and _dtensors(value):
            return type(value)(map(self._gather, value))
        return value

    def _attend(self, *args: Any, **options: Any) -> Any:
        """Run attention by sample and head, on shards."""
        if (output := attend(self._dropout, *args, **options)) is not None:
            return output
        function = functional.scaled_dot_product_attention
        return self._run_replicated(function, function.__name__, args, options)

    def _normalize(self, on_parts: Function, *args: Any, **options: Any) -> Any:
        """Run a norm over a sharded last dim on shards; elsewhere as torch does."""
        if (output := on_parts(*args, **options)) is not None:
            return output
        name = on_parts.__name__
        function = getattr(functional, name)
        if name in VERIFIED:
            return self._run_on_shards(function, name, args, options)
        return self._run_replicated(function, name, args, options)

    def _run_each_shard(self, func: Function, *args: Any, **options: Any) -> Any:
        """Run a function of `shard_functions` on shards; elsewhere as torch does, or whole."""
        tensors = [*_dtensors(args), *_dtensors(tuple(options.values()))]
        result = self._on_each_shard(func, tensors, args, options)
        if guard_refusals.makes_view(func.__name__, args):
            self.views.note(args[0], result)
        return result

    def _on_each_shard(
        self,
        func: Function,
        tensors: Sequence[DTensor],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        name = func.__name__
        is_view = func in shard_functions.VIEWS
        on_shard = _ON_SHARDS[func]
        if all(map(shard_functions.is_even, tensors)):
            is_run = not is_view or shard_functions.is_packed(tensors[0])
            if is_run and (result := on_shard(*args, **options)) is not None:
                return result
        if is_view and not shard_functions.is_packed(tensors[0]):
            with contextlib.suppress(RuntimeError):  # such as heads that do not divide
                return shard_functions.viewed(self._run_on_shards(func, name, args, options))
        return self._run_replicated(func, name, args, options)

    def _dropout(self, x: DTensor, p: float, training: Any, inplace: Any) -> Any:
        """Drop out as one process would: draw the mask of the full tensor and use its shard."""
        if not training or p == 0.0:
            return x
        target = x
        if any(placement.is_partial() for placement in x.placements):
            x = x.redistribute(self._mesh, self._replicated)
        keep = self.draw(x, 1 - p)
        mask = on_mesh(keep, self._mesh, self._replicated)
        result = x * mask.redistribute(self._mesh, x.placements).div(1 - p)
        if not inplace:
            return result
        self._overwrite(target, result)
        return target

    def _embed(self, *args: Any, **options: Any) -> Any:
        """Look rows up; with sharded rows reduce at once, since torch can do it only once."""
        rows: Any = functional.embedding(*args, **options)
        placements = [Replicate() if p.is_partial() else p for p in rows.placements]
        return rows.redistribute(self._mesh, placements)

    def _cross_entropy(self, logits: DTensor, target: DTensor, **options: Any) -> Any:
        """Compute the loss of logits that are sharded by sample, or by torch's `loss_parallel`."""
        if (by_sample := sharded_losses.cross_entropy(logits, target, **options)) is not None:
            return by_sample
        is_plain = options.get("weight") is None and not options.get("label_smoothing")
        is_by_class = logits.dim() > 1 and all(
            placement.is_replicate() or placement.is_shard(1) for placement in logits.placements
        )
        function = functional.cross_entropy
        axes = [axis for axis, p in enumerate(logits.placements) if p.is_shard()]
        is_on_axis = len(axes) == 1
        # Elsewhere the backward pass would run outside of torch's context, which it needs.
        is_guarded = self.has_loss or not torch.is_grad_enabled()
        if is_plain and is_by_class and is_on_axis and is_guarded:
            logits = sharded_losses.once(logits)
            with contextlib.nullcontext() if self.has_loss else sharded_losses.by_class():
                if logits.device_mesh.ndim == 1:
                    return function(logits, target, **options)
                return self._on_axis(axes[0], logits, target, **options)
        return self._run_replicated(function, function.__name__, (logits, target), options)

    def _on_axis(self, axis: int, logits: DTensor, target: DTensor, **options: Any) -> DTensor:
        """Compute the loss on the one mesh axis that shards it: torch knows no mesh of several."""
        mesh = self._mesh[(self._mesh.mesh_dim_names or ())[axis]]
        loss = functional.cross_entropy(
            on_mesh(logits.to_local(), mesh, [logits.placements[axis]]),
            on_mesh(target.to_local(), mesh, [Replicate()]),
            **options,
        )
        return on_mesh(loss.to_local(), self._mesh, self._replicated)  # type: ignore[attr-defined]


def _draw(x: Tensor, share: float) -> Tensor:
    """Return a mask of the full shape of `x`: ones with probability `share`, else zeros."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(share)


def _has_dtensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, DTensor) or (isinstance(value, _SEQUENCES) and _dtensors(value)):
            return True
    return False


def _dtensors(values: Iterable[Any]) -> list[DTensor]:
    tensors: list[DTensor] = []
    for value in values:
        if isinstance(value, DTensor):
            tensors.append(value)
        elif isinstance(value, _SEQUENCES):
            tensors += [item for item in value if isinstance(item, DTensor)]
    return tensors
