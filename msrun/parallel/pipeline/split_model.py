"""A model that was cut between modules, as `rt.shard` does with a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from msrun.parallel.config import Pipeline
from msrun.parallel.foreach.global_hooks import check_global_hooks
from msrun.parallel.losses.batch import StepBatch, tensors_in
from msrun.parallel.losses.calls.marks import Known
from msrun.parallel.pipeline.border import Borders
from msrun.parallel.pipeline.inference.generation import generate_in_stages
from msrun.parallel.pipeline.microbatch import MicrobatchSplit, split_batch
from msrun.parallel.pipeline.model import PipelineModel
from msrun.parallel.pipeline.plan import SplitPlan, plan_split
from msrun.parallel.pipeline.ranks import PipelineRanks
from msrun.parallel.pipeline.record.follower import Follower
from msrun.parallel.pipeline.record.modes import closing
from msrun.parallel.pipeline.recordings import Recording, Recordings, depends_on_received
from msrun.parallel.pipeline.tied import check_tables, find_ties
from msrun.parallel.pipeline.trace import NamedInputs, program_of
from msrun.parallel.pipeline.tree import check_names


def split_model(
    model: nn.Module,
    settings: Pipeline,
    group: dist.ProcessGroup,
    device: torch.device,
    sample: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    slices: int = 1,
    placed: Collection[str] = (),
) -> PipelineModel:
    """Return this rank's stage of `model`, which is used up: other stages' tensors lose values.

    All ranks of the axis call it with equal models.

    Args:
        model: Between its modules that have stages, its forward reads no value of a tensor.
        settings: Where to cut, and the schedule.
        group: The pipeline axis.
        device: Of this rank.
        sample: Inputs of one batch, in order or by name.  `auto` makes its work even.  Without one
            parameters are made even, and `torch.fx` must find the modules that forward calls.
        slices: Of each micro-batch, which a stage computes each for itself.
        placed: Its tables on the host.

    Raises:
        ModelError: It cannot be cut so; then nothing was changed.
    """
    check_names(PipelineModel, model)
    check_global_hooks("pipeline")
    plan = plan_split(model, settings, group.size(), sample, device)
    check_tables(model, plan, find_ties(plan), placed)
    ranks = PipelineRanks(chunks=plan.chunks, group=group, device=device)
    return SplitModel(model, plan, settings.microbatches, ranks, slices)


class SplitModel(PipelineModel):
    """A stage of a model that was cut between modules, by `split_model`.

    Whatever shards or wraps modules applies to it as to any model.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: SplitPlan,
        microbatches: int,
        ranks: PipelineRanks,
        slices: int = 1,
    ) -> None:
        super().__init__(model, plan, microbatches, ranks, slices)
        plan.skeleton.parts = self._pieces
        self._recordings = Recordings(plan, plan.skeleton)
        named = dict(self.named_modules())
        self._opened = [name for name in plan.opened if name in named]
        for name in self._opened:
            plan.skeleton.adopt(name, model.get_submodule(name), named[name])
        self._own = plan.chunks.of_stage(ranks.stage)
        self._recording: Recording | None = None

    def __getattr__(self, name: str) -> Any:
        """Return a member of this stage, or what generates tokens with all stages; see above."""
        if (module := vars(self)["_modules"].get(name)) is not None:
            return module  # before the slower questions, as steps ask for each
        generate = generate_in_stages(self, self._ranks) if name == "generate" else None
        return generate or super().__getattr__(name)

    def arguments(self, batch: StepBatch) -> Sequence[Any]:
        """Return the inputs of a batch, as `train_step` takes them."""
        return [*batch.inputs, NamedInputs(batch.named)] if batch.named else batch.inputs

    def divided(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that no stage calls as a whole, by name."""
        opened = ((name, self.get_submodule(name)) for name in self._opened if name)
        return [*super().divided(), *opened]

    def follow(self, follower: Follower) -> None:
        """Have `follower` follow the model from now on, and its recordings."""
        self._follower = follower
        self._recordings.follow(follower)

    def can_wait(self, chunk: int) -> bool:
        """Return whether all weights of `chunk` are applied to what it received.

        A path that begins at weights alone, such as the embedding of a decoder in a later chunk,
        would be run backward once for each group of weights on it; torch frees it after the first.
        """
        if (recording := self._recording) is None or not self._follower.can_wait:
            return self._follower.can_wait
        received = recording.borders[chunk - 1] if chunk else ()
        return depends_on_received(self, recording.programs[chunk], received)

    def chunk_parameters(self, chunk: int) -> set[Parameter]:
        """Return the parameters that `chunk` uses."""
        if self._recording is None:
            return set(self.parameters())
        program = self._recording.programs[chunk]
        owners = [self.get_submodule(name) for name in program.modules]
        found = {param for owner in owners for param in owner.parameters()}
        own = dict(self.named_parameters(remove_duplicate=False))
        return found | {own[name] for name in program.attributes if name in own}

    @property
    def whole(self) -> nn.Module:
        """The whole model, without values."""
        return self._recordings.whole

    def known_outputs(self) -> Sequence[Known]:
        """Return what mixed samples in a micro-batch, of each tensor of the model's output."""
        return self._recording.known if self._recording else ()

    def _run_chunk(self, chunk: int, inputs: Sequence[Any]) -> Any:
        """Run the modules of a chunk."""
        recording = cast("Recording", self._recording)  # `_prepare` comes first
        own, received = inputs[: recording.arity], inputs[recording.arity :]
        received = self._follower.receive(recording.notes, chunk, received)
        result = recording.compiled[chunk](self, *tensors_in(own), *received)
        return self._follower.send(recording.notes, chunk, result)

    def _saved_bytes(self, inputs: Sequence[Any]) -> Sequence[int] | None:
        """Return the bytes that a copy without values saves."""
        split = split_batch(inputs, self._pieces, may_differ=False)
        recording = self._record(piece := split.padded(inputs, 0), split.width)
        with self.precision():
            return self._recordings.saved_bytes(piece, recording)

    def _prepare(
        self, inputs: Sequence[Any], *, may_differ: bool
    ) -> tuple[MicrobatchSplit, Borders]:
        """Return how a batch is split, and what chunks send, found with a copy without values."""
        split = split_batch(inputs, self._pieces, may_differ=may_differ)
        return split, self._record(split.padded(inputs, 0), split.width).borders

    def _record(self, piece: Sequence[Any], samples: int) -> Recording:
        """Return the forward of a micro-batch, whose programs chunks run from now on."""
        with self.precision():
            modes = {name: self.get_submodule(name).training for name in self._opened}
            recording = self._recordings.find(piece, modes, samples)
        if not recording.compiled:
            vars(self).update(recording.constants)
            for chunk in self._own:
                program = program_of(self, recording.programs[chunk].graph)
                self._follower.own_program(program)
                recording.compiled[chunk] = closing(program)
        self._recording = recording
        return recording
