"""The random numbers of a plan: those of one process, on whichever ranks a step runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from msrun.parallel.search.graph.program import Program, Step
from msrun.parallel.search.graph.random_ops import draw_of

_WORD = 2**64 - 1


class StepRng:
    """Numbers that follow from a seed, the step, and how often the forward ran: there is no stream.

    So recomputation, and training that resumes from a checkpoint, get the same numbers.

    Args:
        program: The forward pass.
        seed: The same on every rank.
    """

    def __init__(self, program: Program, seed: int) -> None:
        self._seed, self._calls = seed, 0
        self._numbers = {
            step.name: at for at, step in enumerate(program.steps) if draw_of(step) is not None
        }

    def __contains__(self, step: Step) -> bool:
        return step.name in self._numbers

    @property
    def state(self) -> Tensor:
        """The seed, and how often the forward drew numbers."""
        return torch.tensor([self._seed, self._calls])

    @state.setter
    def state(self, state: Tensor) -> None:
        self._seed, self._calls = state.tolist()

    def begin(self) -> None:
        """Begin the next forward."""
        self._calls += 1

    @contextmanager
    def again(self, state: Tensor) -> Iterator[None]:
        """Inside, return the numbers of the time when the generator had `state`."""
        now, self.state = self.state, state
        try:
            yield
        finally:
            self.state = now

    def generator(self, step: Step) -> torch.Generator:
        """Return the generator of what a step draws in this forward, on the CPU."""
        word = self._seed & _WORD
        for number in (self._numbers[step.name], self._calls):
            word = _mixed(word ^ number)
        # torch's generator takes the lower half of a seed.
        return torch.Generator().manual_seed(word >> 32)


def _mixed(word: int) -> int:
    """Return 64 bits that each depend on all of `word`.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
