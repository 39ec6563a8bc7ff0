"""One training step on a local batch: forward, backward, reduction, clipping, optimizer step.

Gradients of all micro-batches but the last accumulate on the rank, and the last backward pass
reduces them.  `losses` adds up the loss over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from msrun.errors import ModelError, RanksDisagreeError
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, ParallelConfig
from msrun.parallel.data_parallel.gradients import clip_gradients
from msrun.parallel.data_parallel.joined_inputs import attached, depends
from msrun.parallel.layers.precision import LossScale, of_loss
from msrun.parallel.losses.batch import (
    StepBatch,
    batch_size,
    has_samples_first,
    input_names,
    move,
    own_loss,
    read_batch,
    sample_dim,
    split_batch,
    tensors_in,
    without_items,
)
from msrun.parallel.losses.calls.counted_samples import counting
from msrun.parallel.losses.calls.marks import of_all_samples
from msrun.parallel.losses.decided.carried import uncarried
from msrun.parallel.losses.decided.decisions import DecisionTrace
from msrun.parallel.losses.sample_watch import SampleWatch
from msrun.parallel.losses.sequence_first import refusing_sequences_first
from msrun.parallel.losses.tally import LossTally
from msrun.parallel.losses.terms import PartLoss, TallyRanks
from msrun.parallel.rank_context import EpochEnd, RankContext
from msrun.parallel.sharded_model import ShardedModel
from msrun.parallel.torch_compat import eagerly, is_compiled, of_plain
from msrun.parallel.uneven_rows.rows import rows_of

if TYPE_CHECKING:
    from msrun.parallel.copies.group import Copies

# Takes the output of the model and the target of the batch; returns the loss, see `Runtime.step`.
LossFunction = Callable[[Any, Any], Any]


def run_step(
    config: ParallelConfig,
    context: RankContext,
    sharded: ShardedModel,
    *,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFunction | None,
    batch: Sequence[Any],
    max_norm: float | None,
    loss_scale: LossScale | None = None,
) -> Tensor:
    """Train on `batch`; see `Runtime.step`."""
    model = sharded.model()
    loss_fn = of_loss(config, loss_fn, context.device)
    values = read_batch(model, batch, has_loss=loss_fn is not None)
    sharded.check(optimizer)
    if batch_size(values) == 0:
        raise ModelError("the batch has no sample")
    context.batch.choose(tensors_in(tuple(values)))
    parts = sharded.pipeline().microbatches if sharded.is_pipeline else sharded.microbatches
    sharded.input_rows.check(model, values, parts, context.batch.current.samples)
    if context.batch.end:
        _check_end(context.batch.end, sharded, returns_loss=loss_fn is None)
    is_cut = parts > 1 or context.layout.size(DATA_AXIS) > 1
    if loss_fn is None and (is_cut or sharded.is_pipeline):
        values = without_items(values)
    values = StepBatch(*move(tuple(values), context.device))
    if sharded.batches:
        sharded.batches.count_step(values)
    if sharded.sequences:
        values = sharded.sequences.cut(model, values)
    _drop_gradients(sharded, optimizer)
    scale = loss_scale.value if loss_scale else 1.0
    compute = partial(_gradients, config, context, sharded, loss_fn, values, scale=scale)
    if sharded.verifier is None:
        loss = compute()
    else:
        from msrun.parallel.verify.verified_step import VerifiedStep

        loss = sharded.verifier.run(
            VerifiedStep(
                sharded=sharded,
                optimizer=optimizer,
                loss_fn=loss_fn,
                batch=values._replace(items=None),
                compute=compute,
            )
        )
    is_finite = loss_scale is None or loss_scale.unscale(sharded.parameters(), context.device)
    if max_norm is not None and is_finite:
        clip(config, context, sharded, max_norm)
    if is_finite:
        step = optimizer.step if loss_scale is None else partial(loss_scale.step, optimizer)
        _update(sharded, optimizer, step)
    return loss


def _drop_gradients(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Drop the gradients of the step before."""
    if sharded.host_step:
        sharded.host_step.drop_gradients(optimizer)
    else:
        optimizer.zero_grad()


def _update(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, step: Callable[[], object]
) -> None:
    """Call `step`, which updates the parameters of `optimizer`, or have it begin."""
    if sharded.host_step:
        sharded.host_step.start(optimizer, step)
    else:
        step()


def _check_end(end: EpochEnd, sharded: ShardedModel, *, returns_loss: bool) -> None:
    """Refuse the last batch of the loader in the first step already, if no step could run it.

    Raises:
        ModelError: It has too few samples, or others than the model was made for.
    """
    key, parts = f"{ROOT}.accumulate", sharded.microbatches
    problem = f"{parts} micro-batches" if end.least < parts else ""
    if sharded.has_fixed_shapes and {end.least, end.most} != {end.full}:
        key, problem = f"{ROOT}.mode: auto", f"a plan for batches of {end.full} on each rank"
    elif sharded.is_pipeline:
        key = f"{ROOT}.pipeline.microbatches"
        for samples in {end.least, end.most}:
            problem = problem or sharded.pipeline().cannot_split(samples, returns_loss=returns_loss)
    if problem:
        raise ModelError(
            f"{key}: the last batch of rt.loader has {end.least} sample(s) on some rank, "
            f"which do not fit {problem}",
            hint="choose drop_last=True in rt.loader, or a batch_size that divides the data",
        )


def _gradients(
    config: ParallelConfig,
    context: RankContext,
    sharded: ShardedModel,
    loss_fn: LossFunction | None,
    values: StepBatch,
    *,
    scale: float,
) -> Tensor:
    """Compute the complete gradients of a batch; return the loss of all ranks."""
    samples = context.of_samples
    has_ranks = samples.layout.size(DATA_AXIS) > 1
    ranks = TallyRanks(
        group=samples.group(DATA_AXIS) if has_ranks else None,
        weight=context.batch.read(),
        op=config.reduce.op,
        device=context.device,
        scale=scale,
    )
    # In the first step copies run one after the other, which shows what they would mix up.
    has_turns = sharded.copies and sharded.is_watched and sharded.verifier is None
    has_turns = has_turns and not sharded.decisions.lines
    train = _train_copies if has_turns else _train
    if sharded.is_pipeline:
        train = partial(_train_pipeline, copies=sharded.copies if has_turns else None)
    looks = not (sharded.is_watched or sharded.verifier or config.batch_norm == "local")
    if order := sharded.order:
        order.joins.begin()
    try:
        with sharded.in_step(looks=looks):
            tally = train(context, sharded, ranks, loss_fn, values, looks=looks)
    finally:
        context.batch.parts = 1
    # Before the optimizer step: ranks that gathered modules in different orders are refused while
    # no weight has changed.
    if order:
        order.settle()
    try:
        loss = tally.finish(sharded.parameters)
    except RuntimeError:  # of a stage's forward, which its contexts may have a sentence for
        with sharded.computing():
            raise
    if sharded.is_pipeline:
        sharded.pipeline().settle(tally, ranks)
    context.batch.scale = tally.scale
    sharded.is_watched = True  # only now, as a refused step may be tried again
    if sharded.remote:
        sharded.remote.complete_gradients()
    sharded.hooks.run()
    return loss


def mean_over_data(context: RankContext, value: Tensor) -> Tensor:
    """Return the mean of `value` over the data-parallel ranks, weighted by their samples."""
    value = value.detach() * context.batch.value
    if context.layout.size(DATA_AXIS) > 1:
        dist.all_reduce(value, group=context.group(DATA_AXIS))
    return value / context.layout.size(DATA_AXIS)


def clip(
    config: ParallelConfig, context: RankContext, sharded: ShardedModel, max_norm: float
) -> Tensor:
    """Clip the gradients of a model by their global norm, and return the norm before.

    Raises:
        ModelError: With `mode: manual` only the script knows how gradients are sharded.
    """
    check_clip(config, context)
    unreduced: dict[Parameter, dist.ProcessGroup] = {}
    counted_elsewhere: Collection[Parameter] = ()
    pipeline = None
    if context.layout.size(DATA_AXIS) > 1:
        # Servers know the norm of the sum of gradients.
        summed = sharded.remote.parameters if sharded.remote else ()
        excluded = [param for param in sharded.excluded() if param not in summed]
        unreduced = dict.fromkeys(excluded, context.group(DATA_AXIS))
    tables = [(param, rows_of(param)) for param in sharded.parameters()]
    unreduced |= {param: rows.group for param, rows in tables if rows}
    if sharded.is_pipeline:
        counted_elsewhere = sharded.pipeline().borrowed()
        pipeline = context.group(PIPELINE_AXIS), context.device
    return clip_gradients(
        sharded.parameters(),
        max_norm,
        unreduced=unreduced,
        counted_elsewhere=counted_elsewhere,
        pipeline=pipeline,
    )


def check_clip(config: ParallelConfig, context: RankContext) -> None:
    """Refuse a norm over parameters whose sharding only the script knows."""
    axes = {name: n for name, n in context.layout.axes.items() if n > 1 and name != DATA_AXIS}
    if config.mode == "manual" and axes:
        raise ModelError(
            f"{ROOT}.mode: manual does not say which gradients are sharded over {next(iter(axes))}"
            f" (size {next(iter(axes.values()))}), so there is no norm of the whole model",
            hint="clip in the script, with all_reduce of msrun.parallel.collectives",
        )
    if config.servers and config.servers.staleness:
        raise ModelError(
            f"{ROOT}.servers: with a staleness servers step with each rank's gradient alone, so "
            "there is no norm of all gradients",
            hint="choose sync: true to clip by a norm",
        )


def _train(
    context: RankContext,
    sharded: ShardedModel,
    ranks: TallyRanks,
    loss_fn: LossFunction | None,
    batch: StepBatch,
    *,
    looks: bool,
) -> LossTally:
    """Run forward and backward of all micro-batches; return their losses, of all ranks.

    Args:
        context: This rank.
        sharded: The model.
        ranks: The data-parallel ranks.
        loss_fn: The loss function.
        batch: Of this rank.
        looks: Whether to look for what mixes samples.
    """
    parts = [StepBatch(*part) for part in split_batch(tuple(batch), sharded.microbatches)]
    context.batch.parts = len(parts)
    tally = LossTally(ranks, parts=len(parts), samples=batch_size(batch), items=batch.items)
    tally.values = sharded.decisions.values
    tally.is_cut |= sharded.has_fixed_shapes  # by a plan of mode auto
    known = context.batch.current.samples if len(parts) == 1 else 0
    # A rank whose loss needs no gradient may skip its backward pass: the reducer still takes part.
    # Not where ZeRO gathers in it, experts exchange tokens, or ranks share the rows of an image.
    may_skip = ranks.size > 1 and not (sharded.order or sharded.exchanges_tokens or context.images)
    looks = looks and _may_look(sharded, tally, len(parts), known)
    model = sharded.decisions.values.followed(sharded.model())
    compute = partial(_loss, model, tally, loss_fn, is_planned=sharded.has_fixed_shapes)
    absent = 0  # parts whose loss depends on no output
    sharded.decisions.begin(ranks.group, context.device, len(parts))
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        reduction = sharded.completed() if is_last else sharded.paused()
        tally.looks = is_traced = looks and not index
        in_part = sharded.decisions.in_part(is_traced=is_traced)
        with tally.explaining(), reduction, sharded.computing(), in_part:
            samples = batch_size(part)
            if sharded.sequences:
                sharded.sequences.begin(part)
            if is_traced:
                loss = _watched(sharded, tally, loss_fn, part, known, parts=len(parts))
            else:
                run = partial(compute, part, known if sample_dim(batch, known) else samples)
                loss = uncarried(sharded.decisions, part, run, tally.refuse_if)
            _check_joins(context, sharded, loss.value)
            absent += not depends(loss.value)
            with of_plain(loss.value, *loss.terms):
                tally.add(loss, samples)
            if is_last:
                sharded.decisions.settle()
                tally.note_unreached(absent)
                tally.combine()
            objective = tally.objective(loss, samples)
            if objective.requires_grad or not may_skip:
                _differentiate(sharded, objective)
    tally.check_reached(absent)
    return tally


def _train_copies(
    context: RankContext,
    sharded: ShardedModel,
    ranks: TallyRanks,
    loss_fn: LossFunction | None,
    batch: StepBatch,
    *,
    looks: bool,
) -> LossTally:
    """As `_train`, with the copies of a micro-batch in turns."""
    del looks
    model, copies = sharded.model(), cast("Copies", sharded.copies)
    parts = [StepBatch(*part) for part in split_batch(tuple(batch), sharded.microbatches)]
    context.batch.parts = len(parts)
    tally = LossTally(ranks, parts=len(parts), samples=batch_size(batch), items=batch.items)
    # What ZeRO gathered must stay until the last copy has computed with it.
    is_zero = sharded.order is not None
    for first in range(0, len(parts), copies.count):
        group = parts[first : first + copies.count]
        is_last = first + copies.count == len(parts)
        in_part = sharded.completed() if is_last and not is_zero else sharded.paused()
        with in_part, sharded.computing():
            sizes = [batch_size(part) for part in group]
            pairs = zip(group, sizes, strict=True)
            losses = copies.run([partial(_loss, model, tally, loss_fn, *pair) for pair in pairs])
            for loss, samples in zip(losses, sizes, strict=True):
                if is_zero:
                    _check_joins(context, sharded, loss.value)
                tally.add(loss, samples)
            if is_last:
                tally.combine()
            objective = copies.joined(list(map(tally.objective, losses, sizes)))
            if objective.requires_grad or is_zero or ranks.size == 1:
                _differentiate(sharded, objective)
    if is_zero:
        sharded.reduce()
    return tally


def _may_look(sharded: ShardedModel, tally: LossTally, parts: int, known: int) -> bool:
    """Return whether to look for what mixes samples; then `tally` may refuse.

    Args:
        sharded: The model.
        tally: Of the step.
        parts: Micro-batches.
        known: Samples, if a loader said how many there are; else 0.
    """
    looks = not (tally.is_whole or is_compiled(sharded.model()))
    if looks and (parts > 1 or known):
        tally.may_refuse()
    return looks


def _differentiate(sharded: ShardedModel, objective: Tensor) -> None:
    if sharded.order:
        sharded.order.joins.note_loss(objective)
    if sharded.late:
        sharded.late.begin(objective)
    objective.backward()


def _check_joins(context: RankContext, sharded: ShardedModel, loss: Tensor) -> None:
    """Refuse a loss whose backward pass would take no part in what ranks do there together."""
    if sharded.order:
        sharded.order.check_trains(loss)
    elif sharded.exchanges_tokens and not loss.requires_grad:
        raise RanksDisagreeError(
            f"the loss of rank {context.rank} depends on no parameter that is trained, and the "
            "experts of other ranks wait for its tokens",
            hint="have every rank compute a loss, times 0 where it has no use",
        )


def _watched(
    sharded: ShardedModel,
    tally: LossTally,
    loss_fn: LossFunction | None,
    part: StepBatch,
    known: int,
    *,
    parts: int,
) -> PartLoss:
    """As `_loss`, in the first step, looking for what mixes samples or decides by values of a part.

    Args:
        sharded: The model.
        tally: Of the step; it refuses.
        loss_fn: The loss function.
        part: The first micro-batch.
        known: Samples in it, if a loader said how many there are; else 0.
        parts: Micro-batches.
    """
    dim = sample_dim(part, known)
    samples = known if dim else batch_size(part)
    given = StepBatch((), {}, part.target) if sharded.has_fixed_shapes else part
    model, sized = sharded.model(), tensors_in(part) if parts == 1 else []
    watch = SampleWatch(given, samples, dim, names=input_names(model, given), parts=parts)
    trace = sharded.decisions.trace = DecisionTrace(sharded.decisions, tensors_in(part))
    known_outputs = sharded.known if parts > 1 else list(map(of_all_samples, sharded.known))

    def run(*args: Any, **kwargs: Any) -> Any:
        with trace.in_model(), watch.numbers.in_model(is_alone=loss_fn is not None):
            output = model(*args, **kwargs)
        watch.seed(tensors_in(output), known_outputs)
        return output

    with refusing_sequences_first(model, watch), counting(model, sized), eagerly(), trace, watch:
        loss = _loss(run, tally, loss_fn, part, samples, is_planned=sharded.has_fixed_shapes)
    if not tally.has_refused:
        is_known = has_samples_first(part, known)
        tally.refuse_if(watch.read(loss.value, is_cut=parts > 1, is_known=is_known))
        sharded.decisions.values.note(watch.pairs)
    return loss


def _loss(
    model: Callable[..., Any],
    tally: LossTally,
    loss_fn: LossFunction | None,
    part: StepBatch,
    samples: int,
    *,
    is_planned: bool = False,
) -> PartLoss:
    """Return the loss of one micro-batch.

    Args:
        model: What computes the output.
        tally: Of the step.
        loss_fn: The loss function.
        part: The micro-batch.
        samples: In it.
        is_planned: Whether ranks run a plan of mode auto together.
    """
    inputs = tensors_in([part.inputs, part.named])
    if loss_fn is None:
        run, whole = partial(model, *part.inputs, **part.named), tally.is_whole
        return tally.measure(lambda: own_loss(run(), is_whole=whole), samples, inputs=inputs)
    output = model(*part.inputs, **part.named)
    data = tensors_in([output, part.target])
    loss = tally.measure(partial(loss_fn, output, part.target), samples, data, inputs)
    if is_planned:  # its backward pass waits for other ranks
        return replace(loss, value=attached(loss.value, tensors_in(output)))
    return loss


def _train_pipeline(
    context: RankContext,
    sharded: ShardedModel,
    ranks: TallyRanks,
    loss_fn: LossFunction | None,
    batch: StepBatch,
    *,
    looks: bool,
    copies: Copies | None,
) -> LossTally:
    """Run the schedule; gradients are reduced once, after the last micro-batch.

    With `copies` those of a micro-batch take turns in each stage.
    """
    pipeline = sharded.pipeline()
    inputs = pipeline.arguments(batch)
    context.batch.parts = pipeline.microbatches
    if not sharded.is_described:
        sharded.is_described = True
        context.print(pipeline.describe(inputs))
    # The schedule runs many backward passes in an order of its own; none of them is the last one
    # for all parameters, so gradients are reduced after it.
    with sharded.paused(), sharded.computing():
        tally = pipeline.train_step(
            inputs, batch.target, loss_fn, ranks, looks=looks, items=batch.items, copies=copies
        )
    sharded.reduce()
    pipeline.reduce_tied()
    tally.combine()  # last: what adds its numbers over stages runs meanwhile
    return tally
