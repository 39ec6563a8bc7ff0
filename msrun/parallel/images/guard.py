"""An operator plan beside parts of images: images whose parts are sharded over further ranks.

A planned module gets images whose parts are DTensors, such as by channels.  What computes each
place of an image by itself, as the layers of an MLP do, runs on these shards by the guard of the
plan.  Any other function, such as a convolution with a sharded weight, gets whole parts and
weights: right, if slow, with one warning a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from msrun.errors import ConfigError, ModelError
from msrun.parallel.images.image_tensor import ImageCall, ImageTensor, name_of, opened
from msrun.parallel.images.rules_elements import (
    converted,
    dropped,
    elements,
    kept,
    of_part,
    of_whole,
)
from msrun.parallel.images.rules_norms import layer_normed
from msrun.parallel.images.rules_shapes import permuted, projected, squeezed, unsqueezed
from msrun.parallel.local import is_sharded
from msrun.parallel.losses.batch import map_leaves, tensors_in
from msrun.parallel.notation.dims import axes_of_dims
from msrun.parallel.tensor import guard_refusals
from msrun.parallel.tensor.guard import INSPECTING, Guard
from msrun.parallel.tensor.plan import ModulePlan

# Rules that call the function on parts alone, and exchange nothing between ranks of an image.
_ON_SHARDS = (elements, kept, converted, projected, permuted, squeezed, unsqueezed)
_INSPECTING = (of_whole, of_part)


class ImageGuard(Guard):
    """While it is active, functions that get images or DTensors give the single-process result."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; see the module."""
        call = ImageCall(func, name_of(func), args, kwargs or {})
        images = list(call.images())
        if not images:
            return super().__torch_function__(func, types, args, kwargs)
        rule = ImageTensor.rules.get(call.name)
        of_torch = getattr(func, "__name__", "")
        parts, named = map_leaves(_part, (args, call.kwargs))
        is_inspecting = of_torch in INSPECTING or rule in _INSPECTING
        if self.views and not is_inspecting:
            self.views.watch(of_torch, parts, named, None)
        sharded = [x for x in tensors_in((parts, named)) if is_sharded(x)]
        if not sharded or is_inspecting:
            return func(*args, **call.kwargs)
        if rule in _ON_SHARDS or (rule is not None and _is_apart(rule, call)):
            with self:
                return ImageTensor.__torch_function__(func, types, args, kwargs)
        self._require_guarded(call.name)
        if guard_refusals.is_writing(of_torch, call.kwargs):
            raise call.refusal(f"{call.name}, which writes an image that a plan shards")
        self._warn_of_whole(call.name, sharded)
        whole_args, whole_kwargs = map_leaves(self._whole, (args, call.kwargs))
        result = func(*whole_args, **whole_kwargs)
        if guard_refusals.makes_view(of_torch, parts):
            self.views.note(parts[0], map_leaves(_part, result))
        return result

    def check_returned(self, output: Any) -> None:
        """Refuse an output of which a view was written, which it does not know."""
        super().check_returned(map_leaves(_part, output))

    def _whole(self, x: Tensor) -> Tensor:
        """Return `x` without shards: an image of whole parts."""
        return x.like(self._gather(x.local)) if isinstance(x, ImageTensor) else self._gather(x)


def _part(x: Tensor) -> Tensor:
    return x.local if isinstance(x, ImageTensor) else x


def _is_apart(rule: Callable[[ImageCall], Any], call: ImageCall) -> bool:
    """Return whether a rule computes this call of each place of an image by itself."""
    if rule is dropped:
        is_training = call.value(2, "training", True)  # noqa: FBT003
        return not is_training or call.value(1, "p", 0.5) == 0
    if rule is layer_normed:
        count = len(call.value(1, "normalized_shape"))
        return all(dim < call.x.dim() - count for dim in call.x.placed())
    return False


class ImageHooks:
    """Hooks of one planned module that place the parts of images.

    Args:
        axes: Of the mesh of the plan.
        hooks: Place plain tensors.
        name: Of the module.
        plan: Of the module.
    """

    def __init__(self, axes: Sequence[str], hooks: Any, name: str, plan: ModulePlan) -> None:
        self._hooks, self._name, self._plan, self._axes = hooks, name, plan, tuple(axes)

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Place the inputs of `module`."""
        self._check((args, kwargs), "in", (self._plan.inputs, *self._plan.each_input.values()))
        inside, closed = opened((args, kwargs))
        placed: tuple[tuple[Any, ...], dict[str, Any]] = closed(self._hooks.before(module, *inside))
        return placed

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Place the outputs of `module`."""
        self._check(output, "out", (self._plan.out, *self._plan.each_out.values()))
        inside, closed = opened(output)
        return closed(self._hooks.after(module, args, inside))

    def _check(self, value: Any, end: str, wanted: Iterable[Any]) -> None:
        """Refuse to shard rows of an image, of which other ranks have parts."""
        for image in (x for x in tensors_in(value) if isinstance(x, ImageTensor)):
            for dims in wanted:
                found = _axes_of(dims, image.dim(), self._axes)
                for dim, at in image.placed().items():
                    if found and found[dim]:
                        raise ModelError(
                            f"{self._plan.key}.{end}: {self._name} gets images whose dim {dim} "
                            f"{image.axes[at].name} divides, and the rule shards it over "
                            f"{found[dim][0]}",
                            hint="shard channels, or leave this module out",
                        )


def _axes_of(dims: Any, count: int, axes: tuple[str, ...]) -> Sequence[Sequence[str]] | None:
    if dims is None:
        return None
    try:
        return axes_of_dims(dims, count, axes)
    except ConfigError:  # of another tensor
        return None
