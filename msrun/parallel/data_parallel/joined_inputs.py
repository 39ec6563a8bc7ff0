"""What gets gradients of zeros under ZeRO, where one process has none.

The problem.  `fully_shard` passes all inputs of a unit through one step, by which it knows when the
unit's backward pass has ended.  torch gives zeros to each input of such a step if another one has a
gradient.  So parameters that only an unused input depends on get gradients of zeros, where one
process has none, and weight decay or momentum change them.

The idea.  The zeros stay, as the collectives of `fully_shard` depend on them on all ranks, and are
noted.  How many there were is one number in the all-reduce that compares the order of collectives
anyway.  If it is 0 on all ranks, nothing is to be done.  Else each rank follows the graph of its
losses through joined inputs one by one, and what no rank's loss depends on loses its gradient:
after gradients are reduced, and before hooks of parameters, clipping and the optimizer.  A plain
loop does not tell its losses; where zeros alone may have reached a parameter by a joined input, it
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.exchange import messages
from msrun.parallel.local import local_gradient
from msrun.parallel.torch_compat import function_of, passes_straight, shards_of_gathered

_NAMES_SHOWN = 3


class JoinNotes:
    """Notes about the joined inputs of the modules of one stage, or of a whole model.

    Attributes:
        is_needed: Whether some module had several joined inputs.
        missing: Inputs that got zeros in this step, as there was no gradient.
        losses: First step of autograd before each loss of this step; empty in a plain loop.
        filled: Names of parameters that got zeros in their unit, and had no gradient before.
        touched: Names of those that got a gradient.
    """

    def __init__(self) -> None:
        self.is_needed = False
        self.missing = 0
        self.losses: list[Any] = []
        self.filled: set[str] = set()
        self.touched: set[str] = set()
        self._behind_missing: set[Parameter] = set()

    def begin(self) -> None:
        """Begin a step."""
        self.missing = 0
        self.losses = []
        self.filled, self.touched = set(), set()
        self._behind_missing = set()

    def zeros(self) -> set[str]:
        """Return the names of parameters whose gradient is zeros of their unit alone."""
        return self.filled - self.touched

    def count(self) -> int:
        """Return how many gradients may come from zeros alone."""
        return self.missing + len(self.zeros())

    def note_loss(self, loss: Tensor) -> None:
        """Note a loss of which the gradients are computed next."""
        if self.is_needed and loss.grad_fn is not None:
            self.losses.append(loss.grad_fn)

    def note(self, starts: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
        """Note inputs without a gradient, by where their graphs begin."""
        for start, gradient in zip(starts, gradients, strict=True):
            if gradient is None:
                self.missing += 1
                if not self.losses:
                    self._behind_missing |= parameters_behind(start)

    def watch(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the joined `inputs`, of which is noted what gets no gradient."""
        self.is_needed = True
        return noted(self, inputs)

    def drop(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        """Drop gradients that come from zeros alone on all ranks; each of `group` calls it.

        Raises:
            ModelError: A plain loop has some.
        """
        shards = shards_of_gathered(model)
        needed = {shards.get(p, p) for loss in self.losses for p in parameters_behind(loss)}
        behind = self._behind_missing.union(
            *(parameters_behind(loss, is_joined=True) for loss in self.losses)
        )
        suspects = {shards.get(p, p) for p in behind} - needed
        own = sorted(
            name
            for name, param in model.named_parameters()
            if (shard := shards.get(param, param)) in suspects
            and (self.losses or _is_zero(local_gradient(shard)))
        )
        is_plain, filled = not self.losses, sorted(self.zeros())
        self.begin()
        of_ranks = messages.gather_all([own, filled], list[list[str]], group, device)
        names = set.intersection(*({*behind, *zeros} for behind, zeros in of_ranks))
        unsure = names & set().union(*(behind for behind, _ in of_ranks))
        if unsure and is_plain:
            raise _refusal(sorted(unsure))
        for name in names:  # parameters may still be gathered, as between micro-batches
            param = model.get_parameter(name)
            shards.get(param, param).grad = None


class Notes(Protocol):
    """Notes which values have a gradient."""

    def note(self, starts: Sequence[Any], gradients: Sequence[Tensor | None], /) -> None:
        """Note the gradients of values, each by where its graph begins."""


def noted(notes: Notes, values: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return `values` as those of one step, which gives zeros to those without a gradient."""
    result: Sequence[Tensor] = _NotedInputs.apply(notes, *values)  # type: ignore[no-untyped-call]
    return result


def attached(value: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return `value`, which needs no gradient, so that its backward pass runs that of `others`.

    It gives them no gradient, so steps before them run only where `noted` makes zeros of that.
    """
    graded = [other for other in others if other.requires_grad]
    if value.requires_grad or not graded or not torch.is_grad_enabled():
        return value
    result: Tensor = _Attached.apply(value, *graded)  # type: ignore[no-untyped-call]
    return result


def depends(value: Tensor) -> bool:
    """Return whether `value` depends on something that needs a gradient."""
    return value.requires_grad and function_of(value.grad_fn) is not _Attached


def parameters_behind(
    start: Any, *, is_joined: bool = False, stops: Callable[[Any], bool] = lambda _: False
) -> set[Parameter]:
    """Return the parameters that a step of autograd depends on.

    Args:
        start: The step; or the step, with the number of its output.
        is_joined: Whether inputs that were only joined get gradients together.
        stops: Whether to look no further than a step.
    """
    params: set[Parameter] = set()
    seen: set[Any] = set()
    pending = [start if isinstance(start, tuple) else (start, 0)]
    while pending:
        step, output = pending.pop()
        is_straight = not is_joined and passes_straight(step)
        key = (step, output) if is_straight else step
        if step is None or key in seen:
            continue
        seen.add(key)
        if stops(step) or (not is_joined and function_of(step) is _Attached):
            continue
        variable = getattr(step, "variable", None)
        if isinstance(variable, Parameter):
            params.add(variable)
        following = step.next_functions
        pending += following[output : output + 1] if is_straight else following
    return params


def _is_zero(gradient: Tensor | None) -> bool:
    return gradient is not None and not gradient.count_nonzero().item()


def _refusal(names: Sequence[str]) -> ModelError:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ModelError(
        f"parallel.optimizer.zero: the loss does not depend on {shown}{more} in this step, but "
        "their gradients are zeros: a module takes what they computed and does not use it",
        hint="train by rt.step, which leaves them alone as one process does, or choose zero 0",
    )


class _Attached(torch.autograd.Function):
    """Returns its first input; the others get no gradient, but their steps are run."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        ctx.count = len(others)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        del gradient
        others: tuple[None, ...] = (None,) * ctx.count
        return None, *others


class _NotedInputs(torch.autograd.Function):
    """Returns its inputs."""

    passes_straight = True

    @staticmethod
    def forward(ctx: Any, notes: Notes, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.notes = notes
        ctx.likes = [(x.shape, x.dtype, x.device) for x in inputs]
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.notes.note(ctx.next_functions, gradients)
        pairs = zip(gradients, ctx.likes, strict=True)
        return (
            None,
            *[
                torch.zeros(like[0], dtype=like[1], device=like[2])
                if gradient is None
                else gradient
                for gradient, like in pairs
            ],
        )
