"""The ranks of one pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from msrun.errors import ModelError
from msrun.parallel.exchange import messages
from msrun.parallel.pipeline.chunks import STAGES, Chunks


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


def check_parameters(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse a stage without parameters, of which torch makes no optimizer; all ranks call it.

    Args:
        model: This rank's stage.
        group: The pipeline axis.
        device: Of this rank.

    Raises:
        ModelError: Some stage has none.
    """
    has_some = messages.gather_all(any(True for _ in model.parameters()), bool, group, device)
    if not all(has_some):
        raise ModelError(
            f"{STAGES}: stage {has_some.index(False)} has no parameter, and an optimizer needs one",
            hint="cut the model elsewhere",
        )
