"""Forward only, through all stages; torch's schedules cannot do it where stages form a V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.parallel.local import full_tensor
from msrun.parallel.losses.batch import map_leaves
from msrun.parallel.pipeline.border import Border, Borders, ready_to_send
from msrun.parallel.pipeline.microbatch import MicrobatchSplit, join
from msrun.parallel.pipeline.ranks import PipelineRanks


def infer(
    model: nn.Module,
    ranks: PipelineRanks,
    borders: Borders,
    split: MicrobatchSplit,
    inputs: Sequence[Any],
) -> Any:
    """Return the output of the whole batch on every rank of the axis.

    All micro-batches pass a chunk before the next chunk of the same stage begins.

    Raises:
        ModelError: The outputs of micro-batches cannot be joined.
    """
    passed_on: dict[tuple[int, int], Sequence[Tensor]] = {}
    sending: list[tuple[dist.Work | None, Tensor]] = []
    outputs: list[Any] = []
    for chunk in ranks.chunks.of_stage(ranks.stage):
        for part in range(split.parts):
            values = passed_on.pop((chunk, part), None)
            if values is None:
                values = _receive(ranks, chunk, borders[chunk - 1] if chunk else ())
            pieces = split.padded(inputs, part)
            output = model(*pieces, *values, pipeline_chunk=chunk)
            if chunk == ranks.chunks.count - 1:
                outputs.append(split.trim(map_leaves(full_tensor, output), part))
                continue
            sent = ready_to_send(output, borders[chunk], ())
            if ranks.holds(chunk + 1):
                passed_on[chunk + 1, part] = sent
            else:
                peer = ranks.rank(chunk + 1)
                sending += [(dist.isend(tensor, peer, ranks.group), tensor) for tensor in sent]
    result = _share(ranks, join(outputs) if outputs else None)
    for work, _ in sending:
        if work is not None:
            work.wait()
    return result


def _receive(ranks: PipelineRanks, chunk: int, borders: Sequence[Border]) -> list[Tensor]:
    values = [border.empty(ranks.device).detach() for border in borders]
    for value in values:
        dist.recv(value, ranks.rank(chunk - 1), ranks.group)
    return values


@dataclass(frozen=True, slots=True)
class _OutputSlot:
    """The place of a tensor in an output that is broadcast."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _share(ranks: PipelineRanks, output: Any) -> Any:
    """Return the `output` of the last chunk's rank on all ranks."""
    source = ranks.rank(ranks.chunks.count - 1)
    tensors: list[Tensor] = []

    def take_out(tensor: Tensor) -> _OutputSlot:
        tensors.append(tensor.contiguous())
        return _OutputSlot(tuple(tensor.shape), tensor.dtype)

    frame = [map_leaves(take_out, output)]
    dist.broadcast_object_list(frame, source, ranks.group, device=ranks.device)
    for tensor in tensors:
        dist.broadcast(tensor, source, ranks.group)
    if ranks.holds(ranks.chunks.count - 1):
        return output

    def fill(place: _OutputSlot) -> Tensor:
        tensor = torch.empty(place.shape, dtype=place.dtype, device=ranks.device)
        dist.broadcast(tensor, source, ranks.group)
        return tensor

    return map_leaves(fill, frame[0], _OutputSlot)
