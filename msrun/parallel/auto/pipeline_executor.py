"""The model of `rt.shard` under a searched plan with pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.auto.execute import Executor
from msrun.parallel.auto.joined_outputs import joined
from msrun.parallel.auto.random_steps.step_rng import StepRng
from msrun.parallel.auto.tracing.trace import Traced
from msrun.parallel.config import ROOT
from msrun.parallel.losses.batch import StepBatch
from msrun.parallel.losses.sample_dims import Known
from msrun.parallel.losses.tally import LossTally
from msrun.parallel.losses.terms import TallyRanks
from msrun.parallel.pipeline.border import Border, Borders
from msrun.parallel.pipeline.chunks import Chunks
from msrun.parallel.pipeline.microbatch import MicrobatchSplit, split_batch
from msrun.parallel.pipeline.model import PipelineModel
from msrun.parallel.pipeline.ranks import PipelineRanks
from msrun.parallel.pipeline.tree import check_names
from msrun.parallel.search.mesh.stages import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """A traced model in stages; a `Cut`.

    Args:
        chunks: The chunks there are.
        parts: What each chunk runs.
        stage_params: Parameters of each stage, by all their names.
        buffers: Names of those of each stage.
    """

    chunks: Chunks
    parts: Sequence[Part]
    stage_params: list[dict[str, Parameter]]
    buffers: list[list[str]]
    measure: str | None = None
    constants: dict[str, Tensor] = field(default_factory=dict)

    def modules(self, stage: int) -> list[str]:
        """Return nothing: stages own parameters and buffers, in modules without a forward."""
        del stage
        return []

    def attributes(self, stage: int) -> list[str]:
        """Return the names of the parameters and buffers of `stage`."""
        return [*self.stage_params[stage], *self.buffers[stage]]

    def shown(self, stage: int) -> str:
        """Return the first and the last module that `stage` runs."""
        return " | ".join(_shown(self.parts[chunk]) for chunk in self.chunks.of_stage(stage))


def _shown(part: Part) -> str:
    names = [step.module for step in part.steps if step.module]
    return " to ".join(dict.fromkeys([*names[:1], *names[-1:]])) or "the model itself"


def slices(model: nn.Module, traced: Traced, parts: Sequence[Part], chunks: Chunks) -> Slices:
    """Return the stages of `model`; buffers that no step reads are the first's."""
    owners = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    stage_params, stage_buffers = [], []
    for stage in range(chunks.stages):
        here = [parts[chunk] for chunk in chunks.of_stage(stage)]
        own = {id(owners[traced.program.params[value]]) for part in here for value in part.params}
        stage_params.append({name: param for name, param in owners.items() if id(param) in own})
        given = set[str]().union(*(part.given for part in here))
        read = {traced.buffers[value] for value in given if value in traced.buffers}
        stage_buffers.append([name for name in buffers if name in read])
    stage_buffers[0] += sorted(set(buffers).difference(*stage_buffers))
    return Slices(chunks=chunks, parts=parts, stage_params=stage_params, buffers=stage_buffers)


class PlannedModel(PipelineModel):
    """One stage of a model under a searched plan.

    Args:
        model: The whole model, which is used up.
        cut: Its stages.
        microbatches: Parts of a local batch.
        ranks: The pipeline.
        traced: The whole model.
        make: Returns the executor of a part, given the module with its parameters.
    """

    is_planned = True

    def __init__(
        self,
        model: nn.Module,
        cut: Slices,
        microbatches: int,
        ranks: PipelineRanks,
        *,
        traced: Traced,
        make: Callable[..., Executor],
    ) -> None:
        check_names(PlannedModel, model)
        super().__init__(model, cut, microbatches, ranks)
        self._traced = traced
        self._parts = cut.parts
        own = cut.chunks.of_stage(ranks.stage)
        self._runs = {chunk: make(self, part=cut.parts[chunk]) for chunk in own}
        for run in self._runs.values():
            run.join = partial(joined, watch=self.joined_inputs.watch)
        self._any = self._runs[own[0]]
        self._borders = _borders(cut.parts, traced, self._any)
        # Other references to the model must not keep its parameters in memory.
        model.to("meta")

    @property
    def step_rngs(self) -> tuple[StepRng, ...]:
        """The dropout masks of each chunk."""
        return tuple(run.step_rng for run in self._runs.values())

    def arguments(self, batch: StepBatch) -> Sequence[Any]:
        """Return the inputs of a batch, as `train_step` takes them."""
        if not batch.named:
            return batch.inputs
        return self._traced.positional(batch.inputs, batch.named)

    def train_step(
        self, inputs: Sequence[Any], target: Any, loss_fn: Any, ranks: TallyRanks, **options: Any
    ) -> LossTally:
        """Run forward and backward of a batch, as any pipeline does.

        Raises:
            ModelError: The losses that the model returns do not make that of the batch.
        """
        if loss_fn is None and self._pieces > 1 and not self._traced.has_plain_losses:
            raise ModelError(
                f"{ROOT}.mode: auto runs a model that returns its loss on {self._pieces} "
                "micro-batches, and does not know how their losses make that of the batch",
                hint="return the logits and give rt.step a loss function, or choose another mode, "
                "or a mesh without stages",
            )
        return super().train_step(inputs, target, loss_fn, ranks, **options)

    def known_outputs(self) -> Sequence[Known]:
        """Return what mixed samples in a micro-batch, of each tensor of the model's output."""
        return self._traced.known

    def chunk_parameters(self, chunk: int) -> set[Parameter]:
        """Return the parameters that `chunk` uses."""
        names = [self._traced.program.params[value] for value in self._parts[chunk].params]
        return {self.get_parameter(name) for name in names}

    def _run_chunk(self, chunk: int, inputs: Sequence[Any]) -> Any:
        """Run a chunk under the plan."""
        return self._runs[chunk](*inputs)

    def _prepare(
        self, inputs: Sequence[Any], *, may_differ: bool
    ) -> tuple[MicrobatchSplit, Borders]:
        """Return how a batch is split, and what stages send, which follows from the plan."""
        # Before a stage waits for another, so that all of them raise.
        if self._any.behaviour:
            self._any.behaviour.check(self)
        split = split_batch(inputs, self._pieces, may_differ=may_differ)
        self._any.read(split.padded(inputs, 0), {})
        return split, self._borders


def _borders(parts: Sequence[Part], traced: Traced, run: Executor) -> Borders:
    trained = traced.program.trained()
    return tuple(
        tuple(
            Border(
                name=name,
                shape=run.local_shape(name, run.layout_of(name)),
                dtype=traced.dtypes[name],
                requires_grad=name in trained,
            )
            for name in part.sent or ()
        )
        for part in parts[:-1]
    )
