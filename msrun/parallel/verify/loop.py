"""A plain loop, which calls the model, `backward` and the optimizer itself, as `verify` sees it.

The problem.  The loss is code of the script, and cannot be computed for the batch of all ranks.
The gradients that the optimizer sees may hold more than the model gives: a penalty on weights, a
clipped norm, a scaled loss, the passes of another model's step.

The idea.  The gradients of a model are linear in the gradients of its outputs, whatever made these.
So one call of the model is observed: its inputs, and the gradients that its outputs get.  Before
the optimizer changes a weight, the ranks compute this call again, forward and backward from those
gradients, and rank 0 does it with the copy, all samples and the gradients of all ranks.  Outputs,
gradients of parameters and buffers must be equal.  Whatever the repetition changed is put back.

The runtime takes the mean of the gradients of ranks.  So one process gets those of the outputs
divided by the ranks.  An output without samples, such as the loss that a model returns, is the mean
of those of the ranks in one process, and its gradient is theirs.

Not compared: the loss function of the script, other calls of the step, and where the script pauses
the reduction of gradients.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.local import full_tensor
from msrun.parallel.losses.batch import StepBatch, batch_size, map_leaves, tensors_in
from msrun.parallel.rank_context import RankContext
from msrun.parallel.sharded_model import ShardedModel
from msrun.parallel.verify.gather import NotOneBatchError, complete_flags, whole_batch
from msrun.parallel.verify.reference import CannotRunError, Reference
from msrun.parallel.verify.verified_step import VerifiedStep


@dataclass(slots=True, kw_only=True)
class ObservedCall:
    """One call of a model.

    Args:
        inputs: Copies of its arguments by position.
        named: Copies of its arguments by name.
        autocast: Type of `torch.autocast` around it; None without.
        gradients: Of its outputs that need one, as soon as backward reaches them.
    """

    inputs: Sequence[Any]
    named: Mapping[str, Any]
    autocast: torch.dtype | None
    gradients: list[Tensor | None] = field(default_factory=list)
    _outputs: list[Tensor] = field(default_factory=list)

    @property
    def has_gradient(self) -> bool:
        """Whether backward has reached an output."""
        return any(gradient is not None for gradient in self.gradients)

    def follow(self, outputs: Sequence[Tensor]) -> None:
        """Keep the gradients that `outputs` will get; one that gets none has zeros."""
        self._outputs = [output.detach() for output in outputs]
        self.gradients = [None] * len(outputs)
        for index, output in enumerate(outputs):
            output.register_hook(partial(self._reached, index))

    def _reached(self, index: int, gradient: Tensor) -> None:
        before = self.gradients[index]
        # A second backward pass through a kept graph adds.
        own = gradient.detach()
        self.gradients[index] = own.clone() if before is None else before + own

    def take_gradients(self, used: Sequence[bool]) -> list[Tensor]:
        """Return the gradients of the outputs that are `used`, whole; all ranks call it alike."""
        pairs = zip(self.gradients, self._outputs, strict=True)
        kept = [torch.zeros_like(output) if own is None else own for own, output in pairs]
        return [full_tensor(gradient) for gradient in itertools.compress(kept, used)]


class LoopObserver:
    """Observes calls of one model that the script makes by itself.

    Args:
        model: The model after `rt.shard`.
        device: Of this rank.

    Attributes:
        call: The first call of a step that backward reached; until it does, the last call.
        is_paused: Whether the runtime calls the model, and not the script.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.call: ObservedCall | None = None
        self.is_paused = False
        self._next: ObservedCall | None = None
        self._device = device
        own, observed = weakref.ref(self), weakref.ref(model)

        # Functions, since a copy of the model copies what other hooks are bound to.
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            observer = own()
            # A compiled call cannot be observed without breaking its graph.
            is_here = not torch.compiler.is_compiling() and module is observed()
            if observer and is_here and torch.is_grad_enabled():
                observer._begin(args, kwargs)  # noqa: SLF001 - of this class

        def after(module: nn.Module, args: Any, output: Any) -> None:
            del args
            observer = own()
            if observer and not torch.compiler.is_compiling() and module is observed():
                observer._end(output)  # noqa: SLF001 - of this class

        # The first to see the inputs, and the last to see the outputs.
        self._handles = [
            model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            model.register_forward_hook(after),
        ]

    def close(self) -> None:
        """Observe no more."""
        self.call = self._next = None
        for handle in self._handles:
            handle.remove()

    def _begin(self, args: Any, kwargs: Any) -> None:
        if self.is_paused or (self.call and self.call.has_gradient):
            return
        if not any(tensor.dim() for tensor in tensors_in((args, kwargs))):
            return
        kind = self._device.type
        is_narrow = torch.is_autocast_enabled(kind)
        # Copies: the script may write into its batch.
        self._next = ObservedCall(
            inputs=map_leaves(_copied, args),
            named=map_leaves(_copied, kwargs),
            autocast=torch.get_autocast_dtype(kind) if is_narrow else None,
        )

    def _end(self, output: Any) -> None:
        call, self._next = self._next, None
        if call:
            call.follow(_differentiable(output))
            self.call = call


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _differentiable(output: Any) -> list[Tensor]:
    tensors = tensors_in(output)
    return [each for each in tensors if each.requires_grad and each.is_floating_point()]


class Replay:
    """A call that ranks and one process compute again.

    Args:
        context: This rank.
        sharded: The model.
        call: What was observed of it; all ranks make their `Replay` together.
    """

    def __init__(self, context: RankContext, sharded: ShardedModel, call: ObservedCall) -> None:
        self._context, self._sharded, self._call = context, sharded, call
        # What the script does not use has no gradient, and may be anything.
        reached = [gradient is not None for gradient in call.gradients]
        self._used = complete_flags(context, reached)
        self.batch = StepBatch(call.inputs, call.named, call.take_gradients(self._used))
        self._ranks = context.layout.size(DATA_AXIS)
        self._samples = batch_size(self.batch)
        self._shapes = [gradient.shape for gradient in self.batch.target]
        self._outputs: list[Tensor] = []
        self._of_one: list[Tensor] = []

    @property
    def returns_loss(self) -> bool:
        """Whether an output is one number."""
        return any(not shape for shape in self._shapes)

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast of the call."""
        dtype = self._call.autocast
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._context.device.type, dtype)

    def compute(self) -> Tensor:
        """Compute the gradients of the ranks; return the mean of their `product`.

        Raises:
            ModelError: The model returns others than before.
        """
        model = self._sharded.model()
        for param in model.parameters():
            param.grad = None
        with torch.enable_grad():
            with self.around():
                output = model(*self.batch.inputs, **self.batch.named)
            try:
                product = self.product(output, self.batch.target)
            except CannotRunError as error:
                raise ModelError(str(error)) from None
            product.backward()
        mean = product.detach() / self._ranks
        if self._ranks > 1:
            dist.all_reduce(mean, group=self._context.group(DATA_AXIS))
        return mean

    def product(self, output: Any, gradients: Sequence[Tensor]) -> Tensor:
        """Return a number whose backward pass gives outputs `gradients`, or one process its own.

        Raises:
            CannotRunError: They are not of this output.
        """
        returned = _differentiable(output)
        if len(returned) != len(self._used):
            raise CannotRunError(
                f"the model returned {len(self._used)} tensors with gradients, and "
                f"{len(returned)} when it computed the call again"
            )
        outputs = [full_tensor(each) for each in itertools.compress(returned, self._used)]
        is_whole = self._context.batch.is_whole
        kept = [each.detach() for each in outputs]
        if is_whole:
            self._of_one = kept
        else:
            self._outputs = kept
        total = torch.zeros((), device=self._context.device)
        for value, gradient, shape in zip(outputs, gradients, self._shapes, strict=True):
            if value.shape != gradient.shape:
                raise CannotRunError(
                    f"an output of shape {tuple(shape)} does not begin with the samples of the "
                    "batch"
                )
            wide = torch.promote_types(value.dtype, torch.float32)
            is_joined = gradient.shape != shape
            weight = 1.0 / self._ranks if is_joined and is_whole else 1.0
            total = total + (value.to(wide) * gradient.to(wide)).sum() * weight
        return total

    def found(self) -> Tensor:
        """Return the outputs of all ranks in one row, on rank 0; all ranks call it."""
        rows = [value for value in self._outputs if self._has_samples(value.shape)]
        numbers = [value.detach() / self._ranks for value in self._outputs if not value.dim()]
        if self._ranks > 1:
            for number in numbers:
                dist.all_reduce(number, group=self._context.group(DATA_AXIS))
        first = torch.zeros(self._samples, device=self._context.device)
        try:
            joined = whole_batch(self._context, [first, *rows])
        except NotOneBatchError:  # unlike the gradients of the outputs: these are others
            joined = [first]
        return _row([*(joined or [first])[1:], *numbers])

    def expected(self) -> Tensor:
        """Return the outputs of one process in one row, after it called `product`."""
        pairs = list(zip(self._of_one, self._shapes, strict=True))
        rows = [value for value, shape in pairs if self._has_samples(shape)]
        return _row([*rows, *(value for value, shape in pairs if not shape)])

    def _has_samples(self, shape: torch.Size) -> bool:
        return shape[:1] == (self._samples,)


def _row(values: Sequence[Tensor]) -> Tensor:
    flat = [value.detach().double().reshape(-1) for value in values]
    return torch.cat(flat) if flat else torch.zeros(0)


@dataclass(frozen=True, kw_only=True)
class LoopStep(VerifiedStep):
    """A step of a plain loop.

    Args:
        replay: The call that is compared.
    """

    replay: Replay

    @property
    def is_loop(self) -> bool:
        """Whether the script computed it."""
        return True

    @property
    def loss_hint(self) -> str:
        """What to do about a loss that the model returns."""
        if not self.replay.returns_loss:
            return ""
        return "train with rt.step, which counts the terms of a loss over ranks"

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast of the call."""
        return self.replay.around()

    def found(self, loss: Tensor) -> Tensor:
        """Return the outputs of the ranks."""
        del loss
        return self.replay.found()

    def expected(self, reference: Reference) -> Tensor:
        """Return the outputs of one process."""
        del reference
        return self.replay.expected()

    def parts(self) -> int:
        """Return 1: a plain loop splits its batch itself."""
        return 1


def loop_step(
    context: RankContext,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    call: ObservedCall | None,
) -> LoopStep | None:
    """Return the step that ends with `optimizer`; None if some rank has nothing to compare.

    All ranks call it together.
    """
    count = len(call.gradients) if call and call.has_gradient else 0
    if not _is_alike(context, count) or call is None or not count:
        return None
    replay = Replay(context, sharded, call)
    return LoopStep(
        sharded=sharded,
        optimizer=optimizer,
        loss_fn=replay.product,
        batch=replay.batch,
        compute=replay.compute,
        replay=replay,
    )


def _is_alike(context: RankContext, count: int) -> bool:
    """Return whether all ranks have the same `count`."""
    found = torch.tensor([count, -count], device=context.device)
    if context.world_size > 1:
        dist.all_reduce(found, dist.ReduceOp.MIN)
    least, most = found.tolist()
    return bool(least == -most)
