"""What a plan must know of a pipeline's schedule: idle time, and micro-batches in flight."""

from __future__ import annotations

from collections.abc import Sequence

from msrun.parallel.pipeline.chunks import Chunks
from msrun.parallel.search.mesh.stages import Pace

_V_SHAPED = ("zbv", "dualpipev")
_ALL_LIVE = ("gpipe", "looped_bfs")
_APART = ("interleaved_zb", *_V_SHAPED)


def rounds(chunks: Chunks, microbatches: int) -> float:
    """Return the micro-batches that a step takes the time of, idle ones included.

    With V chunks on each of S stages ranks idle for (S - 1) / V micro-batches.  Where gradients of
    weights are computed apart, one of three passes that take equally long, they fill two thirds of
    that; in schedules whose chunks form a V only one third while there are fewer micro-batches than
    chunks.

    Sources: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, section 2.2; Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
    """
    idle = (chunks.stages - 1) / chunks.segments
    if chunks.schedule in _APART:
        is_short = chunks.schedule in _V_SHAPED and microbatches < chunks.count
        idle *= 2 / 3 if is_short else 1 / 3
    return microbatches + idle


def paces(chunks: Chunks, microbatches: int) -> Sequence[Pace]:
    """Return how the schedule runs each chunk."""
    return [
        Pace(stage=chunks.stage(chunk), live=min(microbatches, _live(chunks, chunk, microbatches)))
        for chunk in range(chunks.count)
    ]


def _live(chunks: Chunks, chunk: int, microbatches: int) -> int:
    """Return the most micro-batches that a chunk has in flight, if there are enough."""
    if chunks.schedule in _ALL_LIVE:
        return microbatches
    if chunks.segments == 1 or chunks.schedule in _V_SHAPED:
        return chunks.count - chunk
    # Those of a round, and of a second one before the last segment.
    is_last = chunks.segment(chunk) == chunks.segments - 1
    return chunks.stages if is_last else 2 * chunks.stages
