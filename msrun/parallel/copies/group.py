"""The copies of one micro-batch, computed in turns or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from msrun.parallel.copies.turns import Turns, order_backward
from msrun.parallel.torch_compat import eagerly

_ResultT = TypeVar("_ResultT")


class Copies:
    """Copies of a model under a plan.

    Args:
        count: Slices of a micro-batch.
        device: Of this rank.
        own: Objects and names of attributes that each copy has a value of its own for.
        around: Runs a forward, and ends what it leaves open where another copy fails.
    """

    def __init__(
        self,
        count: int,
        device: torch.device,
        own: Sequence[tuple[object, str]],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.count = count
        self._device, self._own, self._around = device, own, around
        self._marks: list[list[int]] = []

    def run(self, tasks: Sequence[Callable[[], _ResultT]]) -> list[_ResultT]:
        """Return the result of each task, all computed in turns."""
        turns = Turns([partial(self._run, task) for task in tasks], self._device, self._own)
        with eagerly():  # what it replaces there is once, and not for each thread
            found = turns.run()
        self._marks = turns.marks
        return found

    def _run(self, task: Callable[[], _ResultT]) -> _ResultT:
        with self._around():
            return task()

    def joined(self, objectives: Sequence[Tensor]) -> Tensor:
        """Return the sum of what each copy differentiates, whose backward passes take turns."""
        self.order([[objective] for objective in objectives])
        return torch.stack([*objectives]).sum()

    def order(self, ends: Sequence[Sequence[Tensor]]) -> None:
        """Have one backward pass from all `ends`, those of each copy, take turns."""
        order_backward([[end.grad_fn for end in of_copy] for of_copy in ends], self._marks)
