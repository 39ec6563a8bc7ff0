"""Batch norms in an executor: by the statistics of the global batch, on shards of it.

The problem.  A batch norm that a plan divides by sample sees some samples on each rank, and one
that it divides by channel sees some of its channels.  Running statistics are buffers of the model,
which every rank has whole; the graph of `torch.export` does not show that a batch norm writes them.

The idea.  `norms.normalize` computes a batch norm from sums, so the sums are reduced over
the axes that divide the samples, and go back as gradients by the same way.  Running statistics of
channels are gathered over the axes that divide these, and written into the model's buffers where
the step stands, as the model's own forward does.  A block that is recomputed writes them once.

What does not divide samples is torch's own function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from msrun.parallel.auto.redistribute import Redistributor, redistribute_both_ways
from msrun.parallel.norms.normalize import normalized
from msrun.parallel.search.graph.axis_placement import PARTIAL, REPLICATED
from msrun.parallel.search.graph.program import Step
from msrun.parallel.search.graph.rules import Choice

_RUNNING = ("running_mean", "running_var")


class BatchNorms:
    """The batch norms of one model.

    Args:
        model: Which has the running statistics.
        buffers: Value -> the buffer of the model that it is.
        redistributor: Of the mesh of the plan.
    """

    def __init__(
        self, model: nn.Module, buffers: Mapping[str, str], redistributor: Redistributor
    ) -> None:
        self._model, self._buffers, self._redistributor = model, buffers, redistributor
        self._is_again = False

    @contextmanager
    def again(self, *, is_again: bool) -> Iterator[None]:
        """Inside, have steps that run again, in the backward pass, write no statistics."""
        before, self._is_again = self._is_again, is_again
        try:
            yield
        finally:
            self._is_again = before

    def run(
        self,
        step: Step,
        ins: Sequence[Tensor],
        choices: Sequence[Choice],
        *,
        is_training: bool,
    ) -> Tensor:
        """Return the output of `step` for this rank's shard.

        Args:
            step: The batch norm.
            ins: Its inputs, on this rank.
            choices: What it does on each axis; none where every rank does all of it.
            is_training: Whether it takes the statistics of the batch.
        """
        given: dict[str, Tensor] = dict(zip(step.inputs, ins, strict=True))
        momentum, eps = float(step.attrs["momentum"]), float(step.attrs["eps"])
        affine = given.get("weight"), given.get("bias")
        running = [given.get(name) for name in _RUNNING]
        if not is_training:
            return functional.batch_norm(
                given["input"], running[0], running[1], *affine, training=False, eps=eps
            )
        samples = [PARTIAL if choice.name == "b" else REPLICATED for choice in choices]
        channels = [0 if choice.name == "c" else REPLICATED for choice in choices]
        kept = [None if old is None else old.clone() for old in running]
        if PARTIAL in samples:
            output = normalized(
                given["input"],
                (kept[0], kept[1]),
                affine,
                momentum=momentum,
                eps=eps,
                total=partial(self._total, samples),
            )
        else:
            output = functional.batch_norm(
                given["input"], kept[0], kept[1], *affine, training=True, momentum=momentum, eps=eps
            )
        if not self._is_again:
            self._keep(step, kept, channels)
        return output

    def _total(self, samples: Sequence[int], x: Tensor) -> Tensor:
        """Return the sum of `x` over the axes that divide the samples."""
        ways = samples, [REPLICATED] * len(samples)
        if not x.requires_grad:
            return self._redistributor.redistribute(x, *ways)
        return redistribute_both_ways(x, self._redistributor, ways, ways)

    @torch.no_grad()
    def _keep(self, step: Step, kept: Sequence[Tensor | None], channels: Sequence[int]) -> None:
        """Write running statistics into the model."""
        for name, new in zip(_RUNNING, kept, strict=True):
            if new is None:
                continue
            whole = self._redistributor.redistribute(new, channels, [REPLICATED] * len(channels))
            self._model.get_buffer(self._buffers[step.inputs[name]]).copy_(whole)
