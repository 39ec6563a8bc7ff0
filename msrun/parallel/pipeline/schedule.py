"""torch's schedules over our chunks.

torch moves tensors and keeps the order of work.  Everything else is up to `Runner`: torch gets the
shapes between chunks, gets no inputs, as each chunk knows the order of its micro-batches, and sees
the loss as the output of the last chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.nn import Parameter

from msrun.errors import ModelError, UsageError
from msrun.parallel.data_parallel.joined_inputs import JoinNotes, attached
from msrun.parallel.exchange.stage_stops import is_of_written, usage_error_in
from msrun.parallel.losses.batch import map_leaves, own_loss, tensor_names, tensors_in
from msrun.parallel.losses.calls.marks import Known, without_numbers
from msrun.parallel.losses.sample_watch import SampleWatch
from msrun.parallel.losses.tally import LossTally
from msrun.parallel.pipeline.border import (
    Border,
    Borders,
    fitting,
    join_graph,
    nothing,
    stand_ins,
)
from msrun.parallel.pipeline.chunks import MICROBATCHES, STAGES
from msrun.parallel.pipeline.microbatch import MicrobatchSplit, WrittenBuffers
from msrun.parallel.pipeline.ranks import PipelineRanks
from msrun.parallel.pipeline.reach.border_reach import BorderReach
from msrun.parallel.pipeline.record.follower import Follower
from msrun.parallel.pipeline.timeline import Action, as_actions, plain_order
from msrun.parallel.torch_compat import eagerly, is_fake, write_count

if TYPE_CHECKING:
    from msrun.parallel.copies.group import Copies

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI = {
    "interleaved": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

# The output of the last chunk, which is sent to no other.
_LOSS = (Border(name="loss", shape=(), dtype=torch.float32, requires_grad=True),)

LossFunction = Callable[[Any, Any], Any]


@dataclass(slots=True, kw_only=True)
class Work:
    """What all micro-batches of one step need.

    Args:
        split: How the batch is split.
        inputs: Inputs of the whole batch.
        target: Last argument of the loss.
        loss_fn: Of one micro-batch; None if the model returns its loss.
        tally: Adds losses up, on the last stage.
        check: Called with the ends of the graph of the model and the loss of `loss_fn`.
        buffers: Refuses buffers that several micro-batches write.
        follower: Follows the model.
        known: Of each output of the model, what mixed samples; None does not look at the loss.
        copies: Runs the slices of a micro-batch in turns; None runs one after the other.
        is_planned: Whether data-parallel ranks run the backward pass of the model together.
    """

    split: MicrobatchSplit
    inputs: Sequence[Any]
    target: Any
    loss_fn: LossFunction | None
    tally: LossTally
    check: Callable[[Sequence[Any], Tensor], None]
    buffers: WrittenBuffers
    follower: Follower
    known: Sequence[Known] | None = None
    copies: Copies | None = None
    is_planned: bool = False

    def loss(
        self,
        run: Callable[[], Any],
        part: int,
        received: Sequence[Tensor],
        inputs: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return what is differentiated for micro-batch `part`, whose output `run` returns.

        If the loss is refused, zero, so that other stages get the gradients they wait for.

        Args:
            run: Returns the output of the last stage.
            part: The micro-batch.
            received: Tensors of it from the stage before.
            inputs: Tensors of it that the model got.
        """
        given = [*inputs, *received]
        outputs: list[Any] = []

        def output() -> Any:
            outputs.append(run())
            return outputs[0]

        try:
            self.tally.looks = self.known is not None and not part
            if self.known is None or part:
                return self._loss(output, part, given, self.split.real(self.target, part))
            return self._watched(output, self.known, given)
        except UsageError as error:
            self.tally.refuse(error)
        except Exception as error:  # noqa: BLE001 - other stages wait for gradients
            has_loss = outputs and self.loss_fn is not None
            self.tally.fail(error, "the loss function" if has_loss else "the forward of the model")
        return nothing([*tensors_in(outputs), *received])

    def _watched(
        self, run: Callable[[], Any], known: Sequence[Known], inputs: Sequence[Tensor]
    ) -> Tensor:
        """Return the loss of the first micro-batch.

        Raises:
            ModelError: It depends on something that mixes samples.
        """
        samples = self.split.count(0)
        target, parts = self.split.real(self.target, 0), self.split.parts
        watch = SampleWatch(target, samples, names=tensor_names(target, "target"), parts=parts)
        with watch.explaining(), eagerly(), watch:

            def seeded() -> Any:
                output = run()
                of_loss = self.loss_fn is None  # which watches of losses look at
                watch.seed(tensors_in(output), without_numbers(known) if of_loss else known)
                return output

            loss = self._loss(seeded, 0, inputs, target)
        if error := watch.read(loss, is_cut=parts > 1):
            raise error
        return loss

    def _loss(
        self, run: Callable[[], Any], part: int, inputs: Sequence[Tensor], target: Any
    ) -> Tensor:
        samples, loss_fn = self.split.count(part), self.loss_fn
        if loss_fn is None:
            if self.split.repeats:
                raise ModelError(
                    f"{MICROBATCHES}: {self.split.samples} samples do not divide into "
                    f"{self.split.parts} equal micro-batches, as a model that returns its loss "
                    "needs"
                )
            whole = self.tally.is_whole
            compute = partial(_own_loss, run, is_whole=whole)
            loss = self.tally.measure(compute, samples, inputs=inputs)
        else:
            output = self.split.trim(run(), part)
            compute = partial(loss_fn, output, target)
            ends = [tensor.grad_fn for tensor in tensors_in(output)]
            data = tensors_in([output, target])
            loss = self.tally.measure(compute, max(samples, 1), data, inputs)
            if is_fake(loss.value) and not any(map(is_fake, data)):
                raise ModelError(
                    "the loss function reads a tensor without values, which a hook or an attribute "
                    "of a module has from when the stages were recorded",
                    hint="return what the loss needs from the forward of the model: the last stage "
                    "gets outputs alone, and no activations of other stages",
                )
            self.check(ends, loss.value)
            if self.is_planned:
                loss = replace(loss, value=attached(loss.value, tensors_in(output)))
        self.tally.add(loss, samples)
        return self.tally.objective(loss, samples)


def _own_loss(run: Callable[[], Any], *, is_whole: bool) -> Any:
    return own_loss(run(), is_whole=is_whole)


class StageModel(nn.Module):
    """What a schedule knows of this rank's part of the model."""

    @property
    def joined_inputs(self) -> JoinNotes:
        """Notes about inputs of modules that autograd joins."""
        raise NotImplementedError

    def can_wait(self, chunk: int) -> bool:
        """Return whether gradients of the weights of `chunk` can be computed after its inputs'."""
        raise NotImplementedError

    def chunk_parameters(self, chunk: int) -> Collection[Parameter]:
        """Return the parameters that `chunk` uses."""
        raise NotImplementedError


class Runner(nn.Module):
    """What torch calls as one chunk of the model.

    Args:
        model: This stage's part of the model.
        chunk: Number of the chunk.
        sent: What it sends of a slice; the last chunk yields the loss.
        reach: Notes which gradients there are.
        slices: Of a micro-batch, which run each for itself.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk: int,
        sent: Sequence[Border],
        reach: BorderReach,
        slices: int,
    ) -> None:
        super().__init__()
        # Not as a submodule: torch would throw away gradients of fully sharded parameters.
        self._run = partial(model, pipeline_chunk=chunk)
        self._weights = model.parameters
        self._work: Work | None = None
        self._order: Iterator[int] = iter(())
        self._sent = sent
        self._reach = reach
        self._slices = slices
        # Whether the model writes its inputs in place, as the first micro-batch shows.
        self._writes: bool | None = None

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:  # noqa: FBT001, FBT002
        """Yield the parameters whose gradients torch may compute apart from those of inputs."""
        return self._weights(recurse)

    def begin(self, work: Work | None, order: Sequence[int] = ()) -> None:
        """Begin a step, or end it without `work`.

        Args:
            work: Of the step.
            order: Micro-batches in the order in which torch runs forward on them.
        """
        # Not as attributes of a module, which are looked up in several places.
        vars(self).update(_work=work, _order=iter(order))

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the chunk on the next micro-batch."""
        index = next(self._order)
        tensors = self._reach.watch(index, received)
        sent = self._run_part(index, tensors)
        self._reach.keep(index, sent)
        return sent[0] if self._sent is _LOSS else sent

    def _run_part(self, index: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what the chunk sends of a micro-batch, or the loss alone."""
        work, count = self._work, self._slices
        if work is None:
            raise RuntimeError("there is no batch")
        width, first = len(tensors) // count, index * count
        tasks = [
            partial(self._run_slice, work, first + at, tensors[at * width : (at + 1) * width])
            for at in range(count)
        ]
        found = [task() for task in tasks] if work.copies is None else work.copies.run(tasks)
        if work.copies:
            work.copies.order(found)
        values = list(chain.from_iterable(found))
        if self._sent is _LOSS and count > 1:
            values = [torch.stack([value.to(work.tally.device) for value in values]).sum()]
        joined = join_graph(values, tensors)
        work.follower.begin_backward(joined, work.split, first)
        return joined

    def _run_slice(self, work: Work, part: int, received: Sequence[Tensor]) -> list[Tensor]:
        """Return what the chunk sends of a slice of the batch, or the loss alone."""
        work.follower.begin_part(work.split, part)
        inputs = work.split.padded(work.inputs, part)
        if self._writes is not False:
            # Micro-batches are views of one batch: a write to one would count as one to all.
            inputs = map_leaves(Tensor.clone, inputs)
        run = partial(self._watched, work, inputs, received)
        if self._sent is _LOSS:
            return [work.loss(run, part, received, tensors_in(inputs))]
        try:
            return fitting(run(), self._sent)
        except UsageError as error:
            work.tally.refuse(error)
        except Exception as error:  # noqa: BLE001 - other stages wait for what this one sends
            work.tally.fail(error, "the forward of the model")
        return stand_ins(self._sent, received, work.tally.device)

    def _watched(self, work: Work, inputs: Sequence[Any], received: Sequence[Tensor]) -> Any:
        """Run the chunk.

        Raises:
            ModelError: It writes what it received, which the stage before differentiates.
        """
        model: Any = self._run.func
        marks = [(tensor.grad_fn, write_count(tensor)) for tensor in received]
        own = tensors_in(inputs) if self._writes is None else ()
        given = [(tensor, write_count(tensor)) for tensor in own]
        try:
            with work.buffers.watched(model, work.tally.refuse):
                result = self._run(*inputs, *received)
        except RuntimeError as error:
            if "appears to not have been used in the graph" in str(error):
                raise ModelError(
                    f"{STAGES}: forward differentiates by a value of another stage "
                    "(torch.autograd.grad)",
                    hint="do it in a module that has a stage, or train without a pipeline",
                ) from error
            if "is a view and is being modified" not in str(error):
                raise
            raise _written() from None
        if self._writes is None:
            self._writes = any(write_count(tensor) != count for tensor, count in given)
        for tensor, (source, count) in zip(received, marks, strict=True):
            # A write that autograd has recorded is in the gradient that goes back.
            is_recorded = tensor.grad_fn is not source
            if tensor.requires_grad and write_count(tensor) != count and not is_recorded:
                raise _written()
        return result


def _written() -> ModelError:
    return ModelError(
        f"{STAGES}: a module writes in place what its stage received from the stage before",
        hint="write a copy: x = x.clone()",
    )


class Schedule:
    """One schedule, for micro-batches of one shape.

    Args:
        model: This stage's part of the model.
        ranks: The pipeline.
        borders: What each chunk but the last sends of a slice.
        microbatches: Parts of a batch.
        slices: Of a micro-batch, which run each for itself.

    Attributes:
        reach: Which gradients the last run had, of each chunk of this stage.
    """

    def __init__(
        self,
        model: StageModel,
        ranks: PipelineRanks,
        borders: Borders,
        microbatches: int,
        slices: int = 1,
    ) -> None:
        self._ranks = ranks
        chunks = ranks.chunks
        own = chunks.of_stage(ranks.stage)
        of_slice = [*borders, _LOSS]
        borders = tuple(border * slices for border in borders)
        sent = [*borders, _LOSS]
        self._parts = torch.arange(microbatches)
        self.reach = _reach(model, own, [(), *borders], sent, microbatches)
        self._runners = [
            Runner(model, chunk, of_slice[chunk], self.reach[chunk], slices) for chunk in own
        ]
        stages = [
            PipelineStage(
                runner,
                chunk,
                chunks.count,
                ranks.device,
                input_args=_empty(borders[chunk - 1] if chunk else ()),
                output_args=_empty(sent[chunk]),
                group=ranks.group,
                dw_builder=_builder(model, chunk, borders[chunk - 1] if chunk else ()),
            )
            for runner, chunk in zip(self._runners, own, strict=True)
        ]
        if chunks.schedule in _SINGLE:
            kind = _SINGLE[chunks.schedule]
            self._schedule: Any = kind(stages[0], microbatches, _loss_itself, scale_grads=False)
        else:
            several = _MULTI[chunks.schedule]
            self._schedule = several(stages, microbatches, _loss_itself, scale_grads=False)
        order = self.orders()[ranks.stage]
        self._forwards = [
            [action.part for action in order if action.kind == "F" and action.chunk == chunk]
            for chunk in own
        ]

    def run(self, work: Work) -> None:
        """Run all forwards and backwards of `work`; all ranks of the axis take part."""
        for runner, order in zip(self._runners, self._forwards, strict=True):
            runner.begin(work, order)
        self.forget()
        try:
            self._schedule.step(target=self._parts, return_outputs=False)
        except RuntimeError as error:
            if usage_error := usage_error_in(error):
                raise usage_error from None
            if is_of_written(error):
                raise ModelError(
                    f"{MICROBATCHES}: the forward of one micro-batch writes in place what the "
                    "backward of an earlier one needs, such as a weight",
                    hint="write it between steps, or train without a pipeline",
                ) from error
            raise
        finally:
            for runner in self._runners:
                runner.begin(None)

    def forget(self) -> None:
        """Release what the notes of the last run keep alive."""
        for notes in self.reach.values():
            notes.begin()

    def orders(self) -> list[list[Action]]:
        """Return the actions of each stage, in order."""
        chunks, count = self._ranks.chunks, len(self._parts)
        if chunks.schedule in _MULTI:
            return [as_actions(order) for _, order in sorted(self._schedule.pipeline_order.items())]
        # torch's own order of 1F1B forgets a micro-batch on the last stage.
        stages = range(chunks.stages)
        warm = {s: count if chunks.schedule == "gpipe" else chunks.stages - s for s in stages}
        return [plain_order(stage, count, warm=warm[stage]) for stage in stages]


def _builder(model: StageModel, chunk: int, received: Sequence[Border]) -> Callable[[], Any] | None:
    """Return how gradients of weights are computed apart from inputs'; None leaves it to torch.

    torch's way begins at inputs with a gradient, calls no hook of a parameter, and runs backward
    twice.  Fully sharded parameters that are reduced or sharded again in each backward depend on
    those hooks, and results that a recomputation saves are handed out only once; then both
    gradients are computed together, and nothing is left for later.
    So they are on a host with group norms: if channels are last in memory, torch ends the process
    when it computes the gradients of their weights alone.
    """
    is_hooked = any(isinstance(module, FSDPModule) for module in model.modules())
    can_wait = not is_hooked or getattr(model, "reduces_once", False)
    can_wait = can_wait and not getattr(model, "keeps_results", False)
    on_host = any(param.device.type == "cpu" for param in model.parameters())
    crashes = on_host and any(isinstance(module, nn.GroupNorm) for module in model.modules())
    can_wait = can_wait and not crashes and model.can_wait(chunk)
    if can_wait and any(border.requires_grad for border in received):
        return None
    return lambda: lambda: None


def _reach(
    model: StageModel,
    own: Sequence[int],
    received: Sequence[Sequence[Border]],
    sent: Sequence[Sequence[Border]],
    parts: int,
) -> dict[int, BorderReach]:
    """Return the notes of each chunk of a stage, for the notes of one step after the other."""
    params = {chunk: set(model.chunk_parameters(chunk)) for chunk in own}
    return {
        chunk: BorderReach(
            received[chunk],
            sent[chunk],
            parts,
            model.joined_inputs,
            partial(model.chunk_parameters, chunk),
            shares=any(params[chunk] & params[other] for other in own if other != chunk),
        )
        for chunk in own
    }


def _loss_itself(output: Tensor, part: Tensor) -> Tensor:
    """Return the output of the last chunk, which is the loss."""
    del part
    return output


def _empty(borders: Sequence[Border]) -> tuple[Tensor, ...]:
    return tuple(border.empty(torch.device("meta")) for border in borders)
