"""The model of `rt.shard` with a pipeline: the modules of one stage, and steps through all."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import Parameter

from msrun.errors import DividedModelError, ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.data_parallel.joined_inputs import JoinNotes
from msrun.parallel.exchange import messages
from msrun.parallel.foreach.empty_stages import allow_no_parameters
from msrun.parallel.foreach.lists import refuse_norms
from msrun.parallel.losses.batch import StepBatch
from msrun.parallel.losses.calls.marks import Known
from msrun.parallel.losses.tally import LossTally
from msrun.parallel.losses.terms import TallyRanks
from msrun.parallel.pipeline.border import Borders
from msrun.parallel.pipeline.describe import describe
from msrun.parallel.pipeline.inference.infer import infer
from msrun.parallel.pipeline.microbatch import MicrobatchSplit, WrittenBuffers
from msrun.parallel.pipeline.penalty import check_loss
from msrun.parallel.pipeline.plan import PipelineCut
from msrun.parallel.pipeline.ranks import PipelineRanks
from msrun.parallel.pipeline.reach.stage_reach import StageReach
from msrun.parallel.pipeline.record.follower import Follower
from msrun.parallel.pipeline.schedule import LossFunction, Schedule, StageModel, Work
from msrun.parallel.pipeline.tied import TiedWeights, find_ties
from msrun.parallel.pipeline.tree import graft, members, of_other_stage, release

if TYPE_CHECKING:
    from msrun.parallel.copies.group import Copies

# Schedules are cached for so many shapes of micro-batches: each has buffers for what it receives.
_SCHEDULES_MAX = 4
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class PipelineModel(StageModel):
    """One stage of a model, with parameters under the names they had; calling it runs all stages.

    A subclass knows how a chunk runs and what chunks send each other.

    Args:
        model: The whole model.
        cut: Modules and parameters of each stage.
        microbatches: Parts of a batch.
        ranks: The pipeline.
        slices: Of each micro-batch, which a stage computes each for itself.

    Attributes:
        reduces_once: Fully sharded parameters in it are not reduced before the end of a step.
        keeps_results: Recomputed modules in it save some of their results.
        is_planned: Ranks run the steps of a plan of mode auto together.
        precision: Context of a forward, such as autocast.
    """

    reduces_once = False
    keeps_results = False
    is_planned = False
    precision: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def __init__(
        self,
        model: nn.Module,
        cut: PipelineCut,
        microbatches: int,
        ranks: PipelineRanks,
        slices: int = 1,
    ) -> None:
        super().__init__()
        self._kind = type(model)
        self._members = members(model)
        graft(self, model, cut, ranks.stage)
        release(model, cut, ranks.stage)
        self.training = model.training  # not that of the modules, which may differ
        self._name = type(model).__name__
        self._norms = [n for n, part in model.named_modules() if isinstance(part, _BATCH_NORMS)]
        self._cut = cut
        self._ranks = ranks
        self._slices = slices
        self._pieces = microbatches * slices
        self.written_buffers = WrittenBuffers(self._pieces, has_copies=slices > 1)
        self._schedules: OrderedDict[Borders, Schedule] = OrderedDict()
        self._joins = JoinNotes()
        self._reach: StageReach | None = None
        self._follower = Follower()
        self._tied = TiedWeights(self, find_ties(cut), ranks.group, ranks.device)
        self._sizes = [
            sum({id(p): p.nbytes for p in h.values()}.values()) for h in cut.stage_params
        ]
        refuse_norms(self)
        allow_no_parameters(self)
        for params in cut.stage_params:
            params.clear()  # or parameters of other stages would stay in memory here

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, buffer or module of this stage.

        Raises:
            DividedModelError: The whole model has it, such as `generate` of transformers, or
                another stage.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in vars(self).get("_members", ()):
                raise of_other_stage(name) from None
            if name.startswith("_") or not hasattr(vars(self).get("_kind"), name):
                raise
        raise DividedModelError(
            f"{ROOT}.pipeline: {name} is of {self._name}, of which this rank has one stage",
            hint="call the model itself under torch.no_grad(), which runs all stages; or write "
            "the weights with rt.save_pretrained, and use a whole model in one process",
        )

    @property
    def microbatches(self) -> int:
        """Number of parts of a local batch that run each for itself."""
        return self._pieces

    @property
    def joined_inputs(self) -> JoinNotes:
        """Notes about inputs of modules that autograd joins."""
        return self._joins

    def arguments(self, batch: StepBatch) -> Sequence[Any]:
        """Return the inputs of a batch, as `train_step` takes them.

        Raises:
            ModelError: They have names, and this model takes them by position alone.
        """
        if batch.named:
            raise ModelError(
                f"{self._name} takes its inputs by position",
                hint="pass them in the order of forward: "
                "rt.step(model, optimizer, loss_fn, x, target)",
            )
        return batch.inputs

    def is_any(self, *, flag: bool) -> bool:
        """Return whether `flag` is set on some stage; all ranks of the axis call it."""
        return any(messages.gather_all(flag, bool, self._ranks.group, self._ranks.device))

    def divided(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that no stage calls as a whole, by name: the model itself."""
        return [(self._name, self)]

    def cannot_split(self, samples: int, *, returns_loss: bool) -> str:
        """Return why a batch of so many samples is not split; empty if it is.

        Args:
            samples: Of this rank.
            returns_loss: Whether the model returns its loss.
        """
        norm = self._norms[0] if self.training and self._norms else ""
        needs = norm or ("a model that returns its loss" if returns_loss else "")
        is_even = samples % self._pieces == 0
        return "" if is_even or not needs else f"{self._pieces} equal parts, as {needs} needs"

    def known_outputs(self) -> Sequence[Known]:
        """Return what mixed samples in a micro-batch, of each tensor of the model's output."""
        return ()

    def can_wait(self, chunk: int) -> bool:  # noqa: ARG002 - of others
        """Return whether gradients of the weights of `chunk` can be computed after its inputs'."""
        return True

    def _run_chunk(self, chunk: int, inputs: Sequence[Any]) -> Any:
        """Run a chunk of this stage on the model's inputs and what it received."""
        raise NotImplementedError

    def _prepare(
        self, inputs: Sequence[Any], *, may_differ: bool
    ) -> tuple[MicrobatchSplit, Borders]:
        """Return how a batch is split, and what chunks send for one of its micro-batches.

        Args:
            inputs: Of the whole batch.
            may_differ: Whether there may be another number of micro-batches than configured.

        Raises:
            ModelError: The batch cannot be split, or stages would send something else than tensors.
        """
        raise NotImplementedError

    def forward(self, *inputs: Any, pipeline_chunk: int | None = None, **named: Any) -> Any:
        """Return the output of the whole model for a whole batch, on all ranks of the axis.

        Args:
            inputs: As of the model.
            pipeline_chunk: Runs that chunk alone; a run of the model consists of such calls.
            named: As of the model, by name.

        Raises:
            ModelError: Gradients are enabled: those come from `train_step` alone.
        """
        if pipeline_chunk is not None:
            return self._run_chunk(pipeline_chunk, inputs)
        if self.training and torch.is_grad_enabled():
            raise ModelError(
                f"{ROOT}.pipeline: {self._name} has no gradients outside a step of the pipeline",
                hint="call rt.step to train; evaluate with model.eval() or under torch.no_grad()",
            )
        inputs = tuple(self.arguments(StepBatch(inputs, named, None)))
        with torch.no_grad():
            split, borders = self._prepare(inputs, may_differ=True)
            return infer(self, self._ranks, borders, split, inputs, follower=self._follower)

    def train_step(
        self,
        inputs: Sequence[Any],
        target: Any,
        loss_fn: LossFunction | None,
        ranks: TallyRanks,
        *,
        looks: bool = False,
        items: Any = None,
        copies: Copies | None = None,
    ) -> LossTally:
        """Run forward and backward of a batch; all ranks of the axis take part.

        Gradients are added to those there are.  Those of tied weights are complete after
        `reduce_tied`, and those of a loss with a count after `finish` of the result.

        Args:
            inputs: As of the model, on its device, the same on all ranks of the axis.
            target: Last argument of `loss_fn`.
            loss_fn: Loss of a micro-batch; None if the model returns it.
            ranks: Data-parallel ranks of this stage.
            looks: Whether to refuse a model or a loss that mixes the samples of a micro-batch.
            items: Targets that the script counted in its batch, to compare; None for nothing.
            copies: Runs slices of a micro-batch in turns; None runs one after the other.

        Returns:
            The losses of all micro-batches, from `combine` on the same on all ranks of the axis.

        Raises:
            ModelError: The batch cannot be split, or stages would send something else than tensors.
        """
        split, borders = self._prepare(inputs, may_differ=False)
        self._check_even(split)
        work = Work(
            split=split,
            inputs=inputs,
            target=target,
            loss_fn=loss_fn and self._follower.followed(loss_fn),
            tally=(tally := self._tally(ranks, split, borders, items)),
            follower=self._follower,
            check=partial(check_loss, self) if self._cut.chunks.stages > 1 else lambda *_: None,
            buffers=self.written_buffers,
            known=self.known_outputs() if looks and not tally.is_whole else None,
            copies=copies,
            is_planned=self.is_planned and ranks.size > 1,
        )
        schedule = self._schedule(borders)
        self._reach = StageReach(self, self._ranks, schedule.reach, self._tied)
        schedule.run(work)
        self.written_buffers.is_checked = not tally.has_refused
        tally.note_unreached(self._reach.end())
        # The last stage has the loss, and any stage may have refused.
        tally.begin_adding(self._ranks.group)
        return tally

    def _tally(
        self, ranks: TallyRanks, split: MicrobatchSplit, borders: Borders, items: Any
    ) -> LossTally:
        """Return what adds the losses up; `items` as of `train_step`."""
        # Ranks before the last do not know the type of the loss, only that of tensors sent.
        sent = [border.dtype for border in chain(*borders) if border.dtype.is_floating_point]
        return LossTally(
            ranks,
            parts=split.parts,
            samples=split.samples,
            pipeline=self._ranks.group,
            dtype=reduce(torch.promote_types, sent, torch.float32),
            items=items if items is None or self._ranks.holds(self._ranks.chunks.count - 1) else 0,
        )

    def _check_even(self, split: MicrobatchSplit) -> None:
        if self.training and self._norms and split.repeats:
            raise ModelError(
                f"{ROOT}.pipeline.microbatches: {split.samples} samples do not divide into "
                f"{split.parts} equal micro-batches, and {self._norms[0]} would see some twice"
            )

    def reduce_tied(self) -> None:
        """Sum gradients of tied weights over stages; all ranks of the axis take part.

        After those over data-parallel ranks: so copies stay equal to the last bit.
        """
        self._tied.reduce()

    def settle(self, tally: LossTally, ranks: TallyRanks) -> None:
        """Drop gradients that one process would not have; all ranks of the job take part.

        Args:
            tally: Of the step, which is finished.
            ranks: As of `train_step`.
        """
        reach, self._reach = self._reach, None
        if reach and tally.has_unreached:
            reach.settle(ranks.group)
        for schedule in self._schedules.values():
            schedule.forget()

    def tied_names(self) -> list[str]:
        """Return the names of the parameters here that other stages have, too."""
        return self._tied.names()

    def borrowed(self) -> set[Parameter]:
        """Return the parameters here that an earlier stage has too, and counts in norms."""
        return self._tied.borrowed()

    def describe(self, inputs: Sequence[Any] | None = None) -> str:
        """Return a report of the stages: modules, idle time, activations.

        All ranks of the axis take part.

        Args:
            inputs: As of `train_step`, for the bytes of activations; None leaves them out.
        """
        nothing: Borders = ((),) * (self._cut.chunks.count - 1)
        orders = self._make_schedule(nothing).orders()
        saved_bytes = None if inputs is None else self._saved_bytes(inputs)
        count = self._pieces // self._slices
        if saved_bytes is not None:
            saved_bytes = [each * self._slices for each in saved_bytes]
        return describe(self._cut, self._sizes, count, orders, saved_bytes)

    def _saved_bytes(self, inputs: Sequence[Any]) -> Sequence[int] | None:  # noqa: ARG002 - of others
        """Return the bytes that each chunk saves of a slice for backward; None if unknown."""
        return None

    def _schedule(self, borders: Borders) -> Schedule:
        """Return the schedule for these shapes; the least recently used one is dropped."""
        schedule = self._schedules.pop(borders, None) or self._make_schedule(borders)
        self._schedules[borders] = schedule
        if len(self._schedules) > _SCHEDULES_MAX:
            self._schedules.popitem(last=False)
        return schedule

    def _make_schedule(self, borders: Borders) -> Schedule:
        ranks = self._ranks
        return Schedule(self, ranks, borders, self._pieces // self._slices, self._slices)
