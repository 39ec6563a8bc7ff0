"""Gradient and autocast modes of steps: as they were when a step was recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

# Modes that are entered and not yet left, in this thread: programs of chunks do not nest.
_entered: list[ExitStack] = []


class Modes(NamedTuple):
    """What the result of an operation depends on besides its arguments.

    Args:
        grad: Whether autograd records.
        inference: Whether tensors are made for inference only.
        autocast: Whether autocast is on, its type and whether it caches, for each device type.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]

    @classmethod
    def current(cls, device: torch.device) -> Modes:
        """Return the modes of now, for the CPU and the type of `device`."""
        autocast = tuple(
            (
                kind,
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in dict.fromkeys(("cpu", device.type))
        )
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def enter(self, outside: Modes) -> None:
        """Make these the modes, where they differ from those `outside` at the recording.

        Only what the model itself switched is switched again: a step that ran with gradients as
        everything around it runs without them in an evaluation without gradients.
        """
        stack = ExitStack()
        if self.inference and not outside.inference:
            stack.enter_context(torch.inference_mode())
        if self.grad != outside.grad:
            stack.enter_context(torch.set_grad_enabled(self.grad))
        for own, other in zip(self.autocast, outside.autocast, strict=True):
            if own != other:
                kind, is_on, dtype, caches = own
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=caches)
                )
        _entered.append(stack)


class Enter:
    """Enters the modes of the steps that follow; a step of a graph.

    Args:
        modes: Of those steps.
        outside: At the begin of the recording.
    """

    __name__ = "enter_modes"

    def __init__(self, modes: Modes, outside: Modes) -> None:
        self._modes = modes
        self._outside = outside

    def __call__(self) -> None:
        """Enter them."""
        self._modes.enter(self._outside)


def leave_modes() -> None:
    """Leave the modes that were entered last; a step of a graph."""
    _entered.pop().close()


def closing(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return `program`, which leaves all modes also where it raises."""

    def run(*args: Any) -> Any:
        depth = len(_entered)
        try:
            return program(*args)
        finally:
            while len(_entered) > depth:
                leave_modes()

    return run
