"""What chunks send each other in a model that does not run without values: measured in one run.

Done once, at the first batch.  Later, data-parallel ranks could meet new shapes at different times,
and collectives inside the model would wait for ever.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import ModelError, UsageError
from msrun.parallel.exchange import messages
from msrun.parallel.local import full_tensor
from msrun.parallel.losses.batch import map_leaves
from msrun.parallel.pipeline.border import Border, Borders
from msrun.parallel.pipeline.chunks import MICROBATCHES
from msrun.parallel.pipeline.microbatch import MicrobatchSplit
from msrun.parallel.pipeline.plan import SplitPlan
from msrun.parallel.pipeline.ranks import PipelineRanks
from msrun.parallel.pipeline.shapes import kinds, make_border


@dataclass(frozen=True, slots=True)
class MeasuredShapes:
    """The shapes of the first batch.

    Args:
        kinds: Of the inputs of one micro-batch.
        width: Samples of one micro-batch.
        borders: What each chunk but the last sends.
        reason: Why it had to be measured.
    """

    kinds: Hashable
    width: int
    borders: Borders
    reason: str

    def fit(
        self, split: MicrobatchSplit, inputs: Sequence[Any], *, may_differ: bool
    ) -> MicrobatchSplit:
        """Return a split of `inputs` whose micro-batches have the shapes of the first batch.

        Args:
            split: As it would be otherwise.
            inputs: Of the whole batch.
            may_differ: Whether there may be more micro-batches.

        Raises:
            ModelError: There is none.
        """
        needed = -(-split.samples // self.width)
        parts = max(split.parts, needed) if may_differ else split.parts
        fitting = replace(split, parts=parts, wide=self.width)
        if kinds(fitting.padded(inputs, 0)) != self.kinds:
            raise ModelError(
                f"{MICROBATCHES}: a micro-batch has another shape than the first, and what stages "
                f"send then cannot be known without values ({self.reason})",
                hint="give every batch the shape of the first; only the last may be smaller",
            )
        return fitting


def measure(
    model: nn.Module,
    plan: SplitPlan,
    ranks: PipelineRanks,
    split: MicrobatchSplit,
    inputs: Sequence[Any],
) -> Borders:
    """Run one micro-batch through all chunks but the last; return what they send.

    Buffers and random numbers are as before.  All ranks of the axis take part.

    Raises:
        ModelError: A chunk sends something else than tensors; all ranks say so.
    """
    pieces = split.padded(inputs, 0)
    borders: list[tuple[Border, ...]] = []
    values: Sequence[Tensor] = ()
    with torch.no_grad(), _unchanged(model, ranks.device):
        for chunk in range(ranks.chunks.count - 1):
            own = None
            if ranks.holds(chunk):
                output = model(*pieces, *values, pipeline_chunk=chunk)
                values = map_leaves(full_tensor, output)
                own = _borders(plan, chunk, values)
            source = ranks.rank(chunk)
            sent = messages.broadcast(own, _SentBorders, source, ranks.group, ranks.device)
            if sent.problem:
                raise ModelError(sent.problem, hint=sent.hint)
            received = tuple(
                Border(
                    name=name,
                    shape=tuple(shape),
                    dtype=messages.dtype_named(dtype),
                    requires_grad=is_trained,
                )
                for name, shape, dtype, is_trained in sent.borders
            )
            borders.append(received)
            values = _pass_on(ranks, chunk, received, values)
    return tuple(borders)


class _SentBorders(msgspec.Struct, frozen=True):
    """What a chunk sends, by name, shape, type and gradient; or why it cannot."""

    borders: list[tuple[str, list[int], str, bool]] = []
    problem: str = ""
    hint: str | None = None


def _borders(plan: SplitPlan, chunk: int, values: Sequence[Any]) -> _SentBorders:
    try:
        borders = [
            make_border(node, value)
            for node, value in zip(plan.programs[chunk].sent, values, strict=True)
        ]
    except UsageError as error:
        return _SentBorders(problem=error.message, hint=error.hint)
    # Without a graph it is not known which need a gradient; one too many does no harm.
    return _SentBorders(
        [
            (b.name, [*b.shape], messages.dtype_name(b.dtype), b.dtype.is_floating_point)
            for b in borders
        ]
    )


def _pass_on(
    ranks: PipelineRanks, chunk: int, borders: Sequence[Border], values: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return what `chunk` sends, where the next chunk is."""
    if ranks.holds(chunk) and ranks.holds(chunk + 1):
        return values
    if ranks.holds(chunk):
        for value in values:
            dist.send(value.contiguous(), ranks.rank(chunk + 1), ranks.group)
    elif ranks.holds(chunk + 1):
        received = [border.empty(ranks.device).detach() for border in borders]
        for value in received:
            dist.recv(value, ranks.rank(chunk), ranks.group)
        return received
    return ()


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give buffers and random generators back what they had."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=None if not devices else device.type):
        yield
    for buffer, before in buffers:
        buffer.copy_(before)
