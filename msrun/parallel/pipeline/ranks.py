"""The ranks of one pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from msrun.parallel.pipeline.chunks import Chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRanks:
    """The stages of one pipeline, seen from one of them.

    Args:
        chunks: The chunks there are.
        group: The pipeline axis.
        device: Of this rank.
    """

    chunks: Chunks
    group: dist.ProcessGroup
    device: torch.device

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.group.rank()

    def holds(self, chunk: int) -> bool:
        """Return whether this stage holds `chunk`."""
        return self.chunks.stage(chunk) == self.stage

    def rank(self, chunk: int) -> int:
        """Return the rank in the job that holds `chunk`."""
        return dist.get_global_rank(self.group, self.chunks.stage(chunk))
