"""Inputs of a module that one step of autograd joins, of which some get no gradient.

The problem.  `fully_shard` passes all inputs of a unit through one step, by which it knows when the
unit's backward pass has ended.  torch gives zeros to each input of such a step if another one has a
gradient.  So parameters that only an unused input depends on get gradients of zeros, where one
process has none, and weight decay or momentum change them.

The idea.  The zeros stay, as the collectives of `fully_shard` depend on them on all ranks, and are
noted.  How many there were is one number in the all-reduce that compares the order of collectives
anyway.  If it is 0 on all ranks, nothing is to be done.  Else each rank follows the graph of its
losses through joined inputs one by one, and what no rank's loss depends on loses its gradient:
after gradients are reduced, and before hooks of parameters, clipping and the optimizer.  A plain
loop does not tell its losses; where zeros alone may have reached a parameter, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.exchange import messages
from msrun.parallel.local import local_gradient
from msrun.parallel.torch_compat import passes_straight, shards_of_gathered

_NAMES_SHOWN = 3


class JoinNotes:
    """Notes about the joined inputs of the modules of one stage, or of a whole model.

    Attributes:
        is_needed: Whether some module had several joined inputs.
        missing: Inputs that got zeros in this step, as there was no gradient.
        losses: First step of autograd before each loss of this step; empty in a plain loop.
    """

    def __init__(self) -> None:
        self.is_needed = False
        self.missing = 0
        self.losses: list[Any] = []
        self._behind_missing: set[Parameter] = set()

    def begin(self) -> None:
        """Begin a step."""
        self.missing = 0
        self.losses = []
        self._behind_missing = set()

    def note_loss(self, loss: Tensor) -> None:
        """Note a loss of which the gradients are computed next."""
        if self.is_needed and loss.grad_fn is not None:
            self.losses.append(loss.grad_fn)

    def note_missing(self, start: Any) -> None:
        """Note an input without a gradient, by where its graph begins."""
        self.missing += 1
        if not self.losses:
            self._behind_missing |= parameters_behind(start)

    def watch(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the joined `inputs`, of which is noted what gets no gradient."""
        self.is_needed = True
        watched: Sequence[Tensor] = _NotedInputs.apply(self, *inputs)  # type: ignore[no-untyped-call]
        return watched

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
            if param in suspects and (self.losses or _is_zero(local_gradient(param)))
        )
        is_plain = not self.losses
        self.begin()
        names = set(own).intersection(*messages.gather_all(own, list[str], group, device))
        if names and is_plain:
            raise _refusal(sorted(names))
        for name in names:
            model.get_parameter(name).grad = None


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
        if stops(step):
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


class _NotedInputs(torch.autograd.Function):
    """Returns its inputs."""

    passes_straight = True

    @staticmethod
    def forward(ctx: Any, notes: JoinNotes, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.notes = notes
        ctx.likes = [(x.shape, x.dtype, x.device) for x in inputs]
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        for start, gradient in zip(ctx.next_functions, gradients, strict=True):
            if gradient is None:
                ctx.notes.note_missing(start)
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
