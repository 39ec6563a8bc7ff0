"""The random masks of dropout: those of one process, on whichever ranks a step runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from msrun.parallel.search.graph.program import Program, Step

_WORD = 2**64 - 1


class DropoutRng:
    """Masks that follow from a seed, the step, and how often the forward ran: there is no stream.

    So recomputation, and training that resumes from a checkpoint, get the same masks.

    Args:
        program: The forward pass.
        seed: The same on every rank.
    """

    def __init__(self, program: Program, seed: int) -> None:
        self._values, self._seed, self._calls = program.values, seed, 0
        self._numbers = {
            step.name: at for at, step in enumerate(program.steps) if step.packet == "dropout"
        }

    def __contains__(self, step: Step) -> bool:
        return step.name in self._numbers

    @property
    def state(self) -> Tensor:
        """The seed, and how often the forward ran in training."""
        return torch.tensor([self._seed, self._calls])

    @state.setter
    def state(self, state: Tensor) -> None:
        self._seed, self._calls = state.tolist()

    def begin(self) -> None:
        """Begin the next forward."""
        self._calls += 1

    @contextmanager
    def again(self, state: Tensor) -> Iterator[None]:
        """Inside, return the masks of the time when the generator had `state`."""
        now, self.state = self.state, state
        try:
            yield
        finally:
            self.state = now

    def mask(self, step: Step, keep: float) -> Tensor:
        """Return the mask of a step, for the global batch: 1 with probability `keep`."""
        word = self._seed & _WORD
        for number in (self._numbers[step.name], self._calls):
            word = _mixed(word ^ number)
        # torch's generator takes the lower half of a seed.
        generator = torch.Generator().manual_seed(word >> 32)
        mask = torch.empty(self._values[step.outputs[0]].shape)
        return mask.bernoulli_(keep, generator=generator)


def _mixed(word: int) -> int:
    """Return 64 bits that each depend on all of `word`.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
