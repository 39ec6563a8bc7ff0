"""Buffers that forward writes: one process writes them once a step, a stage once a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel.layers.micro_batches import is_equal
from msrun.parallel.pipeline.chunks import MICROBATCHES


class WrittenBuffers:
    """Which buffers of a stage the micro-batches of the first step have written.

    A buffer that one micro-batch fills, and others only read, passes.

    Args:
        parts: Micro-batches of a step.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._written: set[str] = set()
        self.is_checked = parts == 1

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Run a chunk of `model` on a micro-batch.

        Raises:
            ModelError: It writes a buffer that another micro-batch has written.
        """
        if self.is_checked:
            yield
            return
        before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        yield
        written = {name for name, now in model.named_buffers() if _differs(before.get(name), now)}
        again = sorted(written & self._written)
        if again:
            raise ModelError(
                f"{MICROBATCHES}: each of {self._parts} micro-batches changes {again[0]}, which "
                "one process changes once a step",
                hint="say `batch_norm: local` if that is meant",
            )
        self._written |= written


def _differs(before: Tensor | None, now: Tensor) -> bool:
    return before is not None and not is_equal(before, now)
