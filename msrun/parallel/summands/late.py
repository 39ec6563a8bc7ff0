"""Gradients of parameters that every rank has, where a plan has each rank compute a summand.

The problem.  Where a model computes on shards with a parameter that is not sharded, such as the
head behind a table of uneven rows, or a norm between sequence shards, each rank computes a summand
of its gradient.  Autograd asks for each sum where it arises, so a model has as many all-reduces in
the midst of its backward pass as it has such parameters, and most of them are small.

The idea.  In a step of `rt.step` nobody reads a gradient before the last backward pass ends: hooks
of the script are off, and run later (`data_parallel.parameter_hooks`).  So summands wait until all
are there that the forward pass of the last micro-batch announced.  One all-reduce for each bucket
then adds them up, while the backward pass goes on.  Summands of micro-batches are added on each
rank first, which sends nothing.

Invariants:

- A gradient waits only in the backward pass of the step itself, which `begin` tells from those that
  run inside of it: a reentrant recomputation, and `torch.autograd.grad` of the script, get sums at
  once.  So does whatever reads gradients during the pass: parameters with a hook, such as that of
  data parallelism, ZeRO, and plain loops.
- All ranks keep the same summands in the same order, as they would reduce them one by one, and
  send them at the same place of the backward pass: at one that follows from the graph, or its end.
- After `open` a gradient is what it would have been: the sum, added to what was there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from msrun.parallel import torch_compat

# Summands that travel together; as many as a bucket of data parallelism has.
_BUCKET_BYTES = 25 * 2**20
_NO_PASS = -1


class LateSums:
    """The summands of one model's gradients, which wait for the end of a step."""

    def __init__(self) -> None:
        self._is_open = False
        self._pass = _NO_PASS
        # Passes of this step that have not begun, and uses of parameters not yet differentiated.
        self._left = self._uses = 0
        self._waiting: dict[dist.ProcessGroup, dict[Parameter, Tensor]] = {}
        self._sent: list[_Bucket] = []

    @contextlib.contextmanager
    def open(self, passes: int) -> Iterator[None]:
        """Have summands of so many backward passes wait; gradients are complete at the end."""
        self._is_open, self._left, self._uses = True, passes, 0
        try:
            yield
            self._finish()
        finally:
            self._is_open, self._pass = False, _NO_PASS
            self._waiting.clear()
            self._sent.clear()

    def begin(self, objective: Tensor) -> None:
        """Note that the next backward pass is that of `objective`."""
        self._left -= 1
        handle: Any = None

        def note(_: Tensor) -> None:
            self._pass = torch_compat.backward_number()
            handle.remove()

        handle = objective.register_hook(note)

    def takes(self, value: Tensor) -> bool:
        """Return whether summands of the gradient of `value`, used now, may wait.

        Then `passed` is called once its gradient was computed.
        """
        if not (self._is_open and isinstance(value, Parameter) and value.requires_grad):
            return False
        if not torch.is_grad_enabled() or torch_compat.is_in_backward():
            return False
        self._uses += 1
        return True

    def keep(self, param: Parameter, summand: Tensor, group: dist.ProcessGroup) -> bool:
        """Keep a summand of the gradient of `param`, if it may wait.

        Args:
            param: As `takes` accepts it.
            summand: This rank's.
            group: Ranks that have the others.
        """
        if not self._is_open or torch_compat.backward_number() != self._pass:
            return False
        if any(torch_compat.gradient_hooks(param)):
            return False
        waiting = self._waiting.setdefault(group, {})
        before = waiting.get(param)
        waiting[param] = summand if before is None else before + summand
        return True

    def passed(self) -> None:
        """Note that the gradient of a use was computed; after the last one all are sent."""
        self._uses -= 1
        if not (self._uses or self._left):
            self._send()

    @torch.no_grad()
    def _finish(self) -> None:
        """Add up what waits, over its ranks, and add it to the gradients."""
        self._send()
        sent, self._sent = self._sent, []
        for bucket in sent:
            bucket.finish()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for group, summands in waiting.items():
            while summands:
                self._sent.append(_Bucket(_taken(summands), group))


class _Bucket:
    """Summands that travel together.

    Args:
        summands: Of gradients, of one type.
        group: Ranks that have the others.
    """

    def __init__(self, summands: dict[Parameter, Tensor], group: dist.ProcessGroup) -> None:
        self._flat = torch.cat([summand.reshape(-1) for summand in summands.values()])
        self._shapes = {param: summand.shape for param, summand in summands.items()}
        self._work: Any = dist.all_reduce(self._flat, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for the sums, and add them to the gradients."""
        self._work.wait()
        parts = self._flat.split([shape.numel() for shape in self._shapes.values()])
        for (param, shape), part in zip(self._shapes.items(), parts, strict=True):
            if param.grad is None:
                param.grad = part.view(shape)
            else:
                param.grad += part.view(shape)


def _taken(summands: dict[Parameter, Tensor]) -> dict[Parameter, Tensor]:
    """Take those out of `summands` that travel with the first."""
    like, room = next(iter(summands.values())), _BUCKET_BYTES
    taken: dict[Parameter, Tensor] = {}
    for param, summand in list(summands.items()):
        is_alike = (summand.dtype, summand.device) == (like.dtype, like.device)
        if is_alike and (not taken or summand.nbytes <= room):
            taken[param] = summands.pop(param)
            room -= summand.nbytes
    return taken
