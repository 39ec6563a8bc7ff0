"""What the loss depends on, over all stages, and gradients of a stage that are zeros alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.data_parallel.joined_inputs import JoinNotes
from msrun.parallel.exchange import messages
from msrun.parallel.local import is_sharded, local_gradient
from msrun.parallel.pipeline.ranks import PipelineRanks
from msrun.parallel.pipeline.reach.border_reach import BorderReach, PartReach
from msrun.parallel.pipeline.tied import TiedWeights
from msrun.parallel.torch_compat import (
    gathered_with_gradient,
    own_parameters,
    shards_of_gathered,
)

Reports = Mapping[int, Sequence[PartReach]]


class StageReach:
    """What the gradients of one step reached on one stage; made before the step.

    Args:
        model: The stage.
        ranks: The pipeline.
        chunks: Notes of each chunk of the stage.
        tied: Weights that other stages have, too.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: PipelineRanks,
        chunks: Mapping[int, BorderReach],
        tied: TiedWeights,
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._chunks = chunks
        self._tied = tied
        # By name: modules may have gathered parameters now, and shards of them later.
        self._untouched: set[str] = set()
        self._zeros: set[str] = set()
        had = {param for param in _parameters(model) if param.grad is not None}
        self._had_before = self._names(had)

    def end(self) -> int:
        """Return how many gradients of this stage may be others than in one process.

        It is called when all are computed and before they are reduced.
        """
        joins: JoinNotes = self._model.joined_inputs  # type: ignore[assignment]  # it is a stage
        missing = sum(chunk.missing() for chunk in self._chunks.values()) + joins.count()
        self._zeros = joins.zeros()
        # Units that are reduced after this add zeros then.
        is_early = bool(getattr(self._model, "reduces_once", False))
        # Completes gradients that were computed apart, without a hook.
        found = _parameters(self._model)
        without = [p for p in found if p.grad is None or local_gradient(p) is None]
        left = {param for param in without if param.requires_grad}
        if not left:
            return missing
        shared, of_units = self._tied.trained(), shards_of_gathered(self._model)
        untouched = left - gathered_with_gradient(self._model)
        self._untouched = self._names(untouched)
        for param in untouched:
            is_of_unit = is_sharded(param) or param in of_units
            missing += param in shared or (is_early and is_of_unit)
        return missing

    def _names(self, params: AbstractSet[Parameter]) -> set[str]:
        named = self._model.named_parameters() if params else ()
        return {name for name, param in named if param in params}

    def settle(self, group: dist.ProcessGroup | None) -> None:
        """Drop the gradients that one process would not have; all ranks of the job call it.

        Args:
            group: The data-parallel ranks; None for one.

        Raises:
            ModelError: No parameter has a gradient left.
        """
        from_zeros = self._from_zeros(self._exchanged())
        params = dict(self._model.named_parameters())
        gone = {
            name
            for name, param in params.items()
            if param in from_zeros or name in self._untouched | self._zeros
        } - self._had_before
        if group is not None:
            own = sorted(gone)
            gone.intersection_update(
                *messages.gather_all(own, list[str], group, self._ranks.device)
            )
        dropped = {params[name] for name in gone}
        for param in dropped - self._tied.needed_elsewhere(dropped):
            param.grad = None
        trains = any(param.grad is not None for param in params.values())
        if not any(messages.gather_all(trains, bool, self._ranks.group, self._ranks.device)):
            raise ModelError("the loss of no rank depends on a parameter that is trained")

    def _exchanged(self) -> dict[int, list[PartReach]]:
        """Return what all chunks reached."""
        own = {chunk: notes.report() for chunk, notes in self._chunks.items()}
        every = messages.gather_all(
            own, dict[int, list[PartReach]], self._ranks.group, self._ranks.device
        )
        return {chunk: report for each in every for chunk, report in each.items()}

    def _from_zeros(self, reports: Reports) -> set[Parameter]:
        """Return the parameters that the loss does not depend on, and which have a gradient."""
        used = needed_values(reports)
        shards = shards_of_gathered(self._model)
        needed: set[Parameter] = set()
        reached: set[Parameter] = set()
        for chunk, notes in self._chunks.items():
            of_chunk = notes.weights(used[chunk])
            needed |= {shards.get(param, param) for param in of_chunk[0]}
            reached |= {shards.get(param, param) for param in of_chunk[1]}
        return reached - needed


def _parameters(model: nn.Module) -> list[Parameter]:
    return [p for _, own in own_parameters(model) for p in own.values() if p is not None]


def needed_values(reports: Reports) -> dict[int, list[set[int]]]:
    """Return, of each chunk and micro-batch, the sent values that the loss depends on.

    Args:
        reports: Of all chunks; the last one sends the loss.
    """
    last = max(reports)
    used = {last: [{0} for _ in reports[last]]}
    for chunk in range(last, 0, -1):
        pairs = zip(reports[chunk], used[chunk], strict=True)
        used[chunk - 1] = [
            {received for at in sent for received in report.paths[at]} for report, sent in pairs
        ]
    return used
