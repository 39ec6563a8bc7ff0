"""What chunks hand each other in a model that does not run without values: seen in one run.

Done once, at the first batch.  Later, ranks that divide data could meet new shapes at different
times, and what communicates inside the model would wait for ever.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import UsageError
from msrun.parallel.local import full_tensor
from msrun.parallel.pipeline.border import Border, Borders
from msrun.parallel.pipeline.chunks import MICROBATCHES
from msrun.parallel.pipeline.line import PipelineRanks
from msrun.parallel.pipeline.microbatch import MicrobatchSplit, map_leaves
from msrun.parallel.pipeline.plan import SplitPlan
from msrun.parallel.pipeline.shapes import kinds, make_border


@dataclass(frozen=True, slots=True)
class MeasuredShapes:
    """What was seen.

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
        self, division: MicrobatchSplit, inputs: Sequence[Any], *, is_free: bool
    ) -> MicrobatchSplit:
        """Return a division of `inputs` whose micro-batches have the shapes that were seen.

        Args:
            division: As it would be without.
            inputs: Of the whole batch.
            is_free: Whether there may be more micro-batches.

        Raises:
            UsageError: There is none.
        """
        needed = -(-division.samples // self.width)
        parts = max(division.parts, needed) if is_free else division.parts
        fitting = replace(division, parts=parts, wide=self.width)
        if kinds(fitting.padded(inputs, 0)) != self.kinds:
            raise UsageError(
                f"{MICROBATCHES}: a micro-batch has another shape than the first, and what stages "
                f"send then cannot be known without values ({self.reason})",
                hint="give every batch the shape of the first; only the last may be smaller",
            )
        return fitting


def measure(
    model: nn.Module,
    plan: SplitPlan,
    line: PipelineRanks,
    division: MicrobatchSplit,
    inputs: Sequence[Any],
) -> Borders:
    """Run one micro-batch through all chunks but the last; return what they send.

    Buffers and random numbers are as before.  All ranks of the axis take part.

    Raises:
        UsageError: A chunk sends something else than tensors; all ranks say so.
    """
    pieces = division.padded(inputs, 0)
    borders: list[tuple[Border, ...]] = []
    values: Sequence[Tensor] = ()
    with torch.no_grad(), _unchanged(model, line.device):
        for chunk in range(line.chunks.count - 1):
            answer: list[tuple[Border, ...] | UsageError] = [()]
            if line.holds(chunk):
                output = model(*pieces, *values, pipeline_chunk=chunk)
                values = map_leaves(full_tensor, output)
                answer = [_seen(plan, chunk, values)]
            dist.broadcast_object_list(answer, line.rank(chunk), line.group, device=line.device)
            if isinstance(answer[0], UsageError):
                raise answer[0]
            borders.append(answer[0])
            values = _pass_on(line, chunk, answer[0], values)
    return tuple(borders)


def _seen(plan: SplitPlan, chunk: int, values: Sequence[Any]) -> tuple[Border, ...] | UsageError:
    try:
        found = [
            make_border(node, value)
            for node, value in zip(plan.programs[chunk].sent, values, strict=True)
        ]
    except UsageError as error:
        return error
    # Without a graph nobody knows which need a gradient; one too many does no harm.
    return tuple(replace(b, requires_grad=b.dtype.is_floating_point) for b in found)


def _pass_on(
    line: PipelineRanks, chunk: int, borders: Sequence[Border], values: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return what `chunk` sends, where the next chunk is."""
    if line.holds(chunk) and line.holds(chunk + 1):
        return values
    if line.holds(chunk):
        for value in values:
            dist.send(value.contiguous(), line.rank(chunk + 1), line.group)
    elif line.holds(chunk + 1):
        received = [border.empty(line.device).detach() for border in borders]
        for value in received:
            dist.recv(value, line.rank(chunk), line.group)
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
