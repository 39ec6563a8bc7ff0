"""Forward only, through all stages; torch's schedules cannot do it where stages form a V."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import ProtocolError
from msrun.parallel.exchange import messages
from msrun.parallel.exchange.frame import fill, frame_of
from msrun.parallel.exchange.stage_stops import StageEnd, StageStops
from msrun.parallel.local import full_tensor
from msrun.parallel.losses.batch import map_leaves, tensors_in
from msrun.parallel.pipeline.border import Border, Borders, ready_to_send, stand_ins
from msrun.parallel.pipeline.microbatch import MicrobatchSplit, join
from msrun.parallel.pipeline.ranks import PipelineRanks
from msrun.parallel.pipeline.record.follower import Follower


def infer(
    model: nn.Module,
    ranks: PipelineRanks,
    borders: Borders,
    split: MicrobatchSplit,
    inputs: Sequence[Any],
    *,
    follower: Follower,
) -> Any:
    """Return the output of the whole batch on every rank of the axis.

    All micro-batches pass a chunk before the next chunk of the same stage begins.

    Raises:
        UsageError: Some stage refused to run, or raised something else; all ranks raise.
    """
    passed_on: dict[tuple[int, int], Sequence[Tensor]] = {}
    sending: list[tuple[dist.Work | None, Tensor]] = []
    outputs: list[Any] = []
    stops = StageStops()
    last = ranks.chunks.count - 1

    def run(chunk: int, part: int, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what a chunk sends; the last one leaves an output instead."""
        follower.begin_part(split, part)
        # Copies: what one stage writes to its inputs, the others would not have.
        pieces = map_leaves(Tensor.clone, split.padded(inputs, part))
        output = model(*pieces, *values, pipeline_chunk=chunk)
        if chunk < last:
            return ready_to_send(output, borders[chunk], ())
        outputs.append(split.trim(map_leaves(full_tensor, output), part))
        return ()

    for chunk in ranks.chunks.of_stage(ranks.stage):
        for part in range(split.parts):
            values = passed_on.pop((chunk, part), None)
            if values is None:
                values = _receive(ranks, chunk, borders[chunk - 1] if chunk else ())
            sent = stops.run(partial(run, chunk, part, values), chunk, part)
            if chunk == last:
                continue
            if sent is None:
                sent = stand_ins(borders[chunk], (), ranks.device)
            if ranks.holds(chunk + 1):
                passed_on[chunk + 1, part] = sent
            else:
                peer = ranks.rank(chunk + 1)
                sending += [(dist.isend(tensor, peer, ranks.group), tensor) for tensor in sent]
    result = stops.run(partial(join, outputs), last, split.parts) if outputs else None
    for work in filter(None, (work for work, _ in sending)):
        work.wait()
    return _share(ranks, result, stops)


def _receive(ranks: PipelineRanks, chunk: int, borders: Sequence[Border]) -> list[Tensor]:
    values = [border.empty(ranks.device).detach() for border in borders]
    for value in values:
        dist.recv(value, ranks.rank(chunk - 1), ranks.group)
    return values


def _share(ranks: PipelineRanks, output: Any, stops: StageStops) -> Any:
    """Return the `output` of the last chunk's rank on all ranks."""
    last = ranks.chunks.count - 1
    source, is_source = ranks.rank(last), ranks.holds(last)
    own = frame_of(output) if is_source and stops.failure is None else None
    ends = messages.gather_all(StageEnd(own, stops.failure), StageEnd, ranks.group, ranks.device)
    stops.check([end.failure for end in ends if end.failure])
    sent = ends[ranks.chunks.stage(last)].output
    if sent is None:
        raise ProtocolError(f"rank {source} has the last stage and sent no output")
    tensors = iter(tensors_in(output) if is_source else ())

    def receive(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        value = next(tensors).contiguous() if is_source else None
        tensor = torch.empty(shape, dtype=dtype, device=ranks.device) if value is None else value
        dist.broadcast(tensor, source, ranks.group)
        return tensor

    received = fill(sent, receive)
    return output if is_source else received
