"""The numbers that dropout draws: those of one process, wherever a step is run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from msrun.parallel.auto.program import Program, Step

_GOLDEN = 0x9E3779B97F4A7C15


class Draws:
    """A generator for each step that draws, whoever runs the others.

    Args:
        program: The forward pass.
        seed: The same on every rank.
    """

    def __init__(self, program: Program, seed: int) -> None:
        self._values = program.values
        self._generators = {
            step.name: torch.Generator().manual_seed((seed + at * _GOLDEN) % 2**63)
            for at, step in enumerate(program.steps)
            if step.target.split(".")[1] == "dropout"
        }

    def __contains__(self, step: Step) -> bool:
        return step.name in self._generators

    def mask(self, step: Step, keep: float) -> Tensor:
        """Return the next mask of a step, for the whole batch: 1 for the share that it keeps."""
        mask = torch.empty(self._values[step.outputs[0]].shape)
        return mask.bernoulli_(keep, generator=self._generators[step.name])

    def states(self, steps: Iterable[Step]) -> dict[str, Tensor]:
        """Return how far the generators of `steps` are."""
        return {s.name: self._generators[s.name].get_state() for s in steps if s in self}

    def go_on(self, states: Mapping[str, Tensor]) -> None:
        """Let generators draw what followed when they were so far."""
        for name, state in states.items():
            self._generators[name].set_state(state)
