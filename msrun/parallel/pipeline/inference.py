"""Forward alone, through all stages; torch's schedules cannot do it where stages form a V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.parallel.local import full_tensor
from msrun.parallel.pipeline.border import Border, Borders, depart
from msrun.parallel.pipeline.line import PipelineRanks
from msrun.parallel.pipeline.microbatch import MicrobatchSplit, join, map_leaves


def infer(
    model: nn.Module,
    line: PipelineRanks,
    borders: Borders,
    division: MicrobatchSplit,
    inputs: Sequence[Any],
) -> Any:
    """Return the output of the whole batch on every rank of the axis.

    All micro-batches pass a chunk before the next chunk of the same stage begins.

    Raises:
        UsageError: The outputs of micro-batches cannot be joined.
    """
    handed: dict[tuple[int, int], Sequence[Tensor]] = {}
    sending: list[tuple[dist.Work | None, Tensor]] = []
    outputs: list[Any] = []
    for chunk in line.chunks.of_stage(line.stage):
        for part in range(division.parts):
            values = handed.pop((chunk, part), None)
            if values is None:
                values = _receive(line, chunk, borders[chunk - 1] if chunk else ())
            pieces = division.padded(inputs, part)
            output = model(*pieces, *values, pipeline_chunk=chunk)
            if chunk == line.chunks.count - 1:
                outputs.append(division.trim(map_leaves(full_tensor, output), part))
                continue
            sent = depart(output, borders[chunk], ())
            if line.holds(chunk + 1):
                handed[chunk + 1, part] = sent
            else:
                peer = line.rank(chunk + 1)
                sending += [(dist.isend(tensor, peer, line.group), tensor) for tensor in sent]
    result = _share(line, join(outputs) if outputs else None)
    for work, _ in sending:
        if work is not None:
            work.wait()
    return result


def _receive(line: PipelineRanks, chunk: int, borders: Sequence[Border]) -> list[Tensor]:
    values = [border.empty(line.device).detach() for border in borders]
    for value in values:
        dist.recv(value, line.rank(chunk - 1), line.group)
    return values


@dataclass(frozen=True, slots=True)
class _OutputSlot:
    """Where a tensor stands in an output that is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _share(line: PipelineRanks, output: Any) -> Any:
    """Return the `output` of the last chunk's rank on all ranks."""
    source = line.rank(line.chunks.count - 1)
    tensors: list[Tensor] = []

    def take_out(tensor: Tensor) -> _OutputSlot:
        tensors.append(tensor.contiguous())
        return _OutputSlot(tuple(tensor.shape), tensor.dtype)

    frame = [map_leaves(take_out, output)]
    dist.broadcast_object_list(frame, source, line.group, device=line.device)
    for tensor in tensors:
        dist.broadcast(tensor, source, line.group)
    if line.holds(line.chunks.count - 1):
        return output

    def fill(place: _OutputSlot) -> Tensor:
        tensor = torch.empty(place.shape, dtype=place.dtype, device=line.device)
        dist.broadcast(tensor, source, line.group)
        return tensor

    return map_leaves(fill, frame[0], _OutputSlot)
