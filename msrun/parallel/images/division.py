"""Divides the images of batches for a model, and gives a script whole outputs.

`rt.step` gets whole images, or parts that `rt.loader` has read, and gives the model this rank's
part as an `ImageTensor`.  For everything else the ranks that share images are data-parallel ranks,
as those of context parallelism are: see `rank_context`.  But each of them has the loss of its
whole images, so losses are put together over the ranks that have other samples (`of_samples`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from msrun.errors import ModelError
from msrun.parallel.collectives import all_reduce
from msrun.parallel.config import DATA_AXIS, ROOT, ParallelConfig
from msrun.parallel.images import (
    rules_elements,
    rules_norms,
    rules_shapes,
    rules_sizes,
    rules_sums,
    rules_windows,
)
from msrun.parallel.images.image_tensor import (
    Axes,
    ImageAxis,
    ImageDim,
    ImageTensor,
    Places,
    gathered,
    narrowed,
    wrapped,
)
from msrun.parallel.losses.batch import StepBatch, map_leaves, tensors_in
from msrun.parallel.rank_context import RankContext
from msrun.parallel.torch_compat import is_in_backward

# Their import fills the rules of `ImageTensor`.
RULES = (rules_elements, rules_norms, rules_shapes, rules_sizes, rules_sums, rules_windows)
KEY = f"{ROOT}.data"


class ImageDims:
    """Which dims of the values of a batch are divided.

    Args:
        config: The configuration.
        context: This rank.
    """

    def __init__(self, config: ParallelConfig, context: RankContext) -> None:
        context = context.configured
        self.data = config.data
        self.axes: Axes = tuple(
            ImageAxis(
                name, context.group(name), context.coordinate[name], context.layout.size(name)
            )
            for name in context.layout.images
        )
        self._numbers = {axis.name: at for at, axis in enumerate(self.axes)}

    def divided(self, name: str) -> dict[int, int]:
        """Return dim -> number of its axis, of the value `name`."""
        dims = enumerate(self.data.get(name, ()))
        return {
            dim: self._numbers[axis]
            for dim, axis in dims
            if isinstance(axis, str) and axis != DATA_AXIS
        }

    def places(self, name: str, shape: Sequence[int]) -> Places:
        """Return where a value of `shape` is divided.

        Raises:
            ModelError: It has other dims, or fewer rows than ranks.
        """
        if len(shape) != len(self.data[name]):
            raise ModelError(
                f"{KEY}.{name}: names {len(self.data[name])} dims, and the value has the shape "
                f"{tuple(shape)}"
            )
        found: list[ImageDim | None] = [None] * len(self.axes)
        for dim, at in self.divided(name).items():
            axis, rows = self.axes[at], shape[dim]
            if rows < axis.size:
                raise ModelError(
                    f"{KEY}.{name}: {rows} rows in dim {dim} can not be split into {axis.size} "
                    f"parts, over {axis.name}"
                )
            found[at] = ImageDim(dim, rows)
        return tuple(found)

    def part(self, name: str, x: Tensor) -> Tensor:
        """Return this rank's part of a whole value; one that is a part already as it is."""
        if isinstance(x, ImageTensor) or not self.divided(name):
            return x
        places = self.places(name, x.shape)
        local = x
        for axis, place in zip(self.axes, places, strict=True):
            if place:
                local = narrowed(local, axis, place.dim)
        return wrapped(local.contiguous(), self.axes, places)


class Images:
    """The parts of images that a model computes on.

    Args:
        dims: Which dims of a batch are divided.

    Attributes:
        is_step: Whether a step runs, which has divided its batch.
    """

    guard: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def __init__(self, dims: ImageDims) -> None:
        self._dims = dims
        self.is_step = False

    @property
    def axes(self) -> Axes:
        """The axes that divide images."""
        return self._dims.axes

    def cover(
        self, model: nn.Module, guard: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        """Have `model` divide what a script calls it with."""
        self.guard = guard
        model.forward = update_wrapper(_OnParts(self, model.forward), model.forward)

    def cut(self, model: nn.Module, batch: StepBatch) -> StepBatch:
        """Return a batch with this rank's parts of images."""
        del model
        return self._divided(batch, has_target=batch.target is not None)

    def _divided(self, batch: StepBatch, *, has_target: bool) -> StepBatch:
        """Return `batch` with the values divided that `data` names.

        Raises:
            ModelError: A value is missing, or no tensor.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(tuple(batch))):
            batch = StepBatch(*map_leaves(self._used, tuple(batch)))
        inputs = [*batch.inputs, *([batch.target] if has_target else [])]
        named = {name: x for name, x in batch.named.items() if name in self._dims.data}
        left = [name for name in self._dims.data if name not in named]
        if len(left) > len(inputs) and has_target:
            raise ModelError(
                f"{KEY}.{left[len(inputs)]}: the batch has no such value, and "
                f"{len(inputs)} without a name"
            )
        done = {name: self._part(name, x) for name, x in named.items()}
        for at, name in enumerate(left[: len(inputs)]):
            inputs[at] = self._part(name, inputs[at])
        target = inputs.pop() if has_target else batch.target
        result = batch._replace(inputs=inputs, named={**batch.named, **done}, target=target)
        if not any(isinstance(x, ImageTensor) for x in tensors_in((result.inputs, result.named))):
            raise ModelError(
                f"{KEY}: no input of the model is divided over "
                f"{', '.join(axis.name for axis in self.axes)} (values of the batch are "
                f"{', '.join(self._dims.data)}, in this order)"
            )
        return result

    def _used(self, x: Tensor) -> Tensor:
        """Return a value of the batch whose gradient, if it needs one, is that of one process."""
        if not x.requires_grad:
            return x
        if isinstance(x, ImageTensor):
            raise ModelError(
                f"{KEY}: an input that is read in parts needs a gradient, of which each rank would "
                "have a part",
                hint="give the model a whole image, or compute the gradient of a parameter",
            )
        return _Used.apply(x, self.axes)  # type: ignore[no-untyped-call,no-any-return]

    def _part(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._dims.part(name, value)
        if isinstance(value, Mapping):
            return type(value)({key: self._of(key, x) for key, x in value.items()})  # type: ignore[call-arg]
        if self._dims.divided(name):
            raise ModelError(f"{KEY}.{name}: the value is {type(value).__name__}, and no tensor")
        return value

    def _of(self, name: str, value: Any) -> Any:
        return self._part(name, value) if name in self._dims.data else value

    def begin(self, part: StepBatch) -> None:
        """Begin the forward pass of a micro-batch."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Compute on parts inside: forward, loss and backward of a step."""
        self.is_step = True
        try:
            yield
        finally:
            self.is_step = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Do nothing more inside of all other modes: rules refuse what they do not know."""
        yield

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `forward` on the part of whole arguments; return whole outputs."""
        if self.is_step or is_in_backward():
            return forward(*args, **kwargs)
        part = self._divided(StepBatch(args, kwargs, None), has_target=False)
        with self.guard():
            output = forward(*part.inputs, **part.named)
        return map_leaves(gathered, output)


class _Used(Function):
    """A whole tensor of which ranks use parts, or all of it for their parts of images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes) -> Tensor:
        ctx.axes = axes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # As of a parameter: each rank has the gradient of the losses of all ranks by its part.
        for axis in ctx.axes:
            gradient = all_reduce(gradient, axis.group, "mean")
        return gradient, None


class _OnParts:
    """The forward of a model, which takes and gives whole images unless a step divided them."""

    def __init__(self, images: Images, forward: Callable[..., Any]) -> None:
        self._images, self._forward = images, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._images.run(self._forward, args, kwargs)
