"""Outputs of a model under a plan: each backward pass runs all of its steps, on every rank.

The problem.  Ranks redistribute gradients together, in the backward steps of a plan.  If the loss
of one rank leaves out an output that the loss of another rank uses, its backward pass skips the
steps before that output, and the other ranks would wait for it.

The idea.  All outputs pass through one step of autograd.  One without a gradient gets zeros there,
so every rank runs every step.  Zeros alone make gradients of zeros where one process has none, and
weight decay or momentum would change those parameters.  So they are noted, and dropped at the end
of the backward pass.  Only if all ranks noted some can one process have no gradient: ranks add one
number, which those that noted none need not wait for, and exchange names where all did.

A script may call the model several times before a backward pass.  Ranks run the backward steps of
all calls together, too, so the losses of all ranks must depend on as many calls; which ones does
not matter, as each runs the same steps.  The first step of a backward pass behind several calls
compares that over ranks, before any of them waits for a gradient.

Invariants:

- A gradient that was there before the backward pass stays.
- A rank whose loss depends on no output at all joins by `attached`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import RanksDisagreeError
from msrun.parallel import torch_compat
from msrun.parallel.data_parallel.joined_inputs import noted, parameters_behind
from msrun.parallel.exchange import messages


class JoinedOutputs:
    """Notes about the outputs of a model on all ranks of the job.

    Args:
        model: The model, whose parameters a plan divides.
    """

    def __init__(self, model: nn.Module) -> None:
        # Weak: it is a part of what stands in for the model's forward.
        self._model = weakref.ref(model)
        self._had_before: set[str] | None = None  # None outside of a backward pass
        self._missing: list[Any] = []
        self._reached: list[Any] = []
        # The steps that join outputs of calls since the last backward pass.
        self._calls: list[weakref.ref[Any]] = []

    def join(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return `outputs` as those of one step, if ranks may use different ones."""
        return outputs if dist.get_world_size() == 1 else joined(outputs, self._join)

    def _join(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        together = noted(self, outputs)
        if not torch_compat.is_in_backward():  # a recomputation by the script
            self._calls.append(weakref.ref(together[0].grad_fn))
        return together

    def note(self, starts: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
        """Note which outputs have a gradient, by where their graphs begin.

        Raises:
            RanksDisagreeError: Other ranks run the backward steps of more calls, or of fewer.
        """
        model = self._model()
        if model is None:
            return
        calls, self._calls = self._calls, []
        if len(calls) > 1:
            _compare(calls, next(model.parameters()).device)
        if len(starts) == 1:
            return
        if self._had_before is None:
            named = model.named_parameters()
            self._had_before = {name for name, param in named if param.grad is not None}
            torch_compat.after_backward(self._settle)
        for start, gradient in zip(starts, gradients, strict=True):
            (self._missing if gradient is None else self._reached).append(start)

    def _settle(self) -> None:
        """Drop gradients that come from zeros alone on all ranks."""
        model, had_before = self._model(), self._had_before
        missing, reached = self._missing, self._reached
        self._missing, self._reached, self._had_before = [], [], None
        if model is None or had_before is None:
            return
        device = next(model.parameters()).device
        count = torch.tensor([float(bool(missing))], device=device)
        work = dist.all_reduce(count, async_op=True)
        if not missing:
            return
        if work is not None:
            work.wait()
        if count.item() < dist.get_world_size():
            return
        needed = set().union(*map(parameters_behind, reached))
        behind = set().union(*map(parameters_behind, missing)) - needed
        named = dict(model.named_parameters())
        own = sorted(n for n, p in named.items() if p in behind and n not in had_before)
        for name in set(own).intersection(*messages.gather_all(own, list[str], None, device)):
            named[name].grad = None


def _compare(calls: Sequence[weakref.ref[Any]], device: torch.device) -> None:
    """Refuse a backward pass that runs more or fewer of `calls` than that of another rank."""
    steps = [call() for call in calls]
    own = sum(step is not None and torch_compat.is_to_run(step) for step in steps)
    every = messages.gather_all(own, int, None, device)
    if len(set(every)) == 1:
        return
    least, most = every.index(min(every)), every.index(max(every))
    raise RanksDisagreeError(
        f"parallel.mode: auto: the loss of rank {least} depends on {every[least]} of "
        f"{len(calls)} calls of the model, and that of rank {most} on {every[most]}; ranks run "
        "their backward steps together",
        hint="let the loss of every rank depend on as many calls, times 0 where it has no use",
    )


def joined(
    outputs: list[Tensor], watch: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> list[Tensor]:
    """Return `outputs`, of which those with a gradient are what `watch` returns for them."""
    graded = [at for at, output in enumerate(outputs) if output.requires_grad]
    result = list(outputs)
    if graded and torch.is_grad_enabled():
        watched = watch([outputs[at] for at in graded])
        for at, output in zip(graded, watched, strict=True):
            result[at] = output
    return result
