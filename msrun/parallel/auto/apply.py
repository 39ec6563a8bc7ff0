"""`mode: auto` of `rt.shard`: search on the first rank, or a plan found before; the same on all."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from msrun.errors import ConfigError, ModelError
from msrun.parallel.auto.agreed import PlanBroadcast, agreed
from msrun.parallel.auto.alternatives import in_any_mesh, in_mesh
from msrun.parallel.auto.decided import (
    RuntimePlans,
    decided,
    of_data_ranks,
    recomputes_blocks,
    with_decisions,
)
from msrun.parallel.auto.executable import TracedBehaviour, check_outputs
from msrun.parallel.auto.execute import Executor
from msrun.parallel.auto.left_out import has_modules
from msrun.parallel.auto.module_stages import ModuleStages, possible_stages
from msrun.parallel.auto.modules import faster, names_modules, run_by
from msrun.parallel.auto.named_modules import beside, topology_of
from msrun.parallel.auto.native import configuration, return_means
from msrun.parallel.auto.offline_model import SIZES, resized
from msrun.parallel.auto.outlines import find_technique, outline_of
from msrun.parallel.auto.pipeline_executor import PlannedModel, slices
from msrun.parallel.auto.plan_file import microbatches_of, read_saved
from msrun.parallel.auto.random_steps.step_rng import StepRng
from msrun.parallel.auto.tracing.calls import positional
from msrun.parallel.auto.tracing.structure import leaf_tensors
from msrun.parallel.auto.tracing.trace import Traced, trace
from msrun.parallel.auto.wishes import pins_of
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, ParallelConfig
from msrun.parallel.foreach.global_hooks import check_global_hooks
from msrun.parallel.losses.batch import Sample
from msrun.parallel.losses.sample_dims import Known
from msrun.parallel.pipeline.chunks import Chunks, check_microbatches, read_chunks
from msrun.parallel.pipeline.ranks import PipelineRanks
from msrun.parallel.rank_context import Rank, RankContext, placed
from msrun.parallel.search.alternatives.chosen import Alternatives
from msrun.parallel.search.alternatives.one_rank import Alternative
from msrun.parallel.search.graph.program import ProgramByBatch
from msrun.parallel.search.graph.repeat import find_blocks
from msrun.parallel.search.graph.rules import ShardingRule
from msrun.parallel.search.graph.unsupported_ops import check
from msrun.parallel.search.mesh.schedules import paces, rounds
from msrun.parallel.search.mesh.stage_search import search_stages
from msrun.parallel.search.mesh.stages import cut_between_blocks, divide
from msrun.parallel.search.mesh_choice import ChosenMesh, MeshRequest, choose_mesh
from msrun.parallel.search.modules.job import ModuleSearch, SharedModules
from msrun.parallel.search.plan.lowering import EXECUTOR, Lowering
from msrun.parallel.search.plan.plan_io import check_model, choices_of
from msrun.parallel.search.solve.build import Pin, build
from msrun.parallel.search.solve.modes import MODES, SearchResult, search
from msrun.parallel.search.solve.problem import Setting
from msrun.parallel.search.solve.uses import Uses

_PLAN = f"{ROOT}.plan"
_MODE = f"{ROOT}.mode: auto"


class Applied(NamedTuple):
    """A model that runs a plan.

    Args:
        model: What is to be trained: the model itself, or a stage of it.
        context: This rank on the mesh of the plan.
        step_rngs: Random generators of its dropouts, for checkpoints.
        microbatches: Into how many a step splits a local batch; a pipeline does so itself.
        is_pipeline: Whether the model is a stage.
        config: Configuration with the effect of the plan, to be applied to the unchanged model;
            None where an executor runs the plan already.
        finish: To be called after `config` was applied.
        known: Of each tensor of the output of an executor, what would mix samples in a micro-batch.
    """

    model: nn.Module
    context: RankContext
    step_rngs: tuple[StepRng, ...]
    microbatches: int = 1
    is_pipeline: bool = False
    config: ParallelConfig | None = None
    finish: Callable[[], None] = lambda: None
    known: Sequence[Known] = ()


def apply(
    config: ParallelConfig,
    rank: Rank,
    model: nn.Module,
    sample: Sequence[Any],
    modules: Callable[[nn.Module], ModuleSearch],
) -> Applied:
    """Search a plan for `model`, or read a saved one, and have the model run it.

    Every rank has the same whole parameters before.

    Args:
        config: `mode: auto`.
        rank: This rank; a `RankContext` unless `mesh: auto`.
        model: Of `check_sample`.
        sample: As of `Runtime.shard`.
        modules: Returns what compares techniques that divide whole modules of a model.

    Raises:
        ConfigError: The model cannot be traced, a wish cannot be met, no plan fits, or the one that
            was saved is for something else.
    """
    # Wishes may have given the order, and what runs a plan has other rules.
    order = [*(rank.layout.ranks if isinstance(rank, RankContext) else config.rank_list)]
    own = [*range(rank.world_size)]
    config = msgspec.structs.replace(config, rank_list=[] if order == own else order)
    with _in_training(model):
        plan = _find_plan(config, rank, model, sample, modules)
    if isinstance(plan, PlanBroadcast):
        if plan.name:
            rank.print(f"{_MODE} runs on {plan.name}")
        config = run_by(config, plan.modules)
        return Applied(model, rank.place(config), (), config=config)
    answer, traced, setting, context = plan.answer, plan.traced, plan.setting, plan.context
    if plan.behaviour is None:
        return _run_natively(config, model, plan)
    make = partial(
        Executor,
        traced=traced,
        rules=plan.rules,
        chosen=answer.chosen,
        setting=setting,
        mesh=context.mesh[tuple(_axes(context))],
        seed=_seed(context),
        behaviour=plan.behaviour,
        blocks=find_blocks(traced.program) if answer.recompute else None,
    )
    context.print(f"{_MODE} runs on {EXECUTOR}")
    chunks = plan.chunks
    if chunks.count == 1:
        model.forward = run = make(model)
        rngs = (run.step_rng,)
        number = answer.microbatches
        return Applied(model, context, rngs, microbatches=number, known=traced.known)
    parts = divide(traced.program, Uses(traced.program, setting, traced.rules), answer.starts)
    line = PipelineRanks(chunks=chunks, group=context.group(PIPELINE_AXIS), device=context.device)
    pieces = slices(model, traced, parts, chunks)
    stage = PlannedModel(model, pieces, answer.microbatches, line, traced=traced, make=make)
    return Applied(stage, context, stage.step_rngs, is_pipeline=True)


class _Plan(NamedTuple):
    """A plan, and the trace that it is for.

    Args:
        context: This rank on the mesh of the plan.
        chunks: Of the pipeline.
        setting: What the plan is for.
        traced: The model.
        answer: The strategy of every node.
        rules: Node -> its rule.
        lowering: The configuration that is equal to the plan, if there is one.
        behaviour: What an executor must find as it was; None with a lowering.
        units: What stages of the runtime consist of; None without.
    """

    context: RankContext
    chunks: Chunks
    setting: Setting
    traced: Traced
    answer: PlanBroadcast
    rules: dict[str, ShardingRule]
    lowering: Lowering | None
    behaviour: TracedBehaviour | None
    units: ModuleStages | None


def _find_plan(
    config: ParallelConfig,
    rank: Rank,
    model: nn.Module,
    sample: Sequence[Any],
    modules_of: Callable[[nn.Module], ModuleSearch],
) -> _Plan | PlanBroadcast:
    """Return the plan of a model, which is not changed; or a technique of whole modules."""
    net = outline_of(model, sample)
    if net is not None:
        batch = _samples(rank, sample)
        return find_technique(config, rank, net, sample, modules=modules_of(net), batch=batch)
    modules = partial(modules_of, model)
    if isinstance(rank, RankContext) and not _axes(rank):
        rank = _place(config, rank, {**rank.layout.axes, DATA_AXIS: 1})
    batch = _samples(rank, sample)
    answer = _outline(config, rank, model, sample, batch=batch, modules=modules)
    if answer.modules:
        return answer
    context = rank if isinstance(rank, RankContext) else _place(config, rank, answer.mesh)
    chunks = _chunks(config, context, answer.microbatches)
    setting = _setting(config, context, batch, chunks, answer.microbatches)
    whole = resized(sample, setting.batch)
    traced = trace(model, whole)
    setting = with_decisions(config, setting, traced.program, model)
    compare = partial(beside, config, context, model, sample, modules=modules, batch=batch)
    part = resized(sample, setting.batch // context.layout.size(DATA_AXIS))
    local = functools.cache(lambda: trace(model, part).program)
    others = in_mesh(config, _axes(context), traced, setting, local)
    units = None
    if chunks.count > 1 and decided(config):
        units = ModuleStages(model, traced.program, chunks, answer.microbatches)
    complete = partial(_completed, config, context, model, traced, compare)
    answer = complete(setting=setting, answer=answer, others=others, units=units)
    if answer.modules:
        return answer
    plans = RuntimePlans(config, tuple(_axes(context)), traced, setting, local, units=units)
    behaviour = lowering = None
    if (chunks.count == 1 or units) and not answer.recompute:
        check(traced.program)
        lowering = plans.lowering(answer.chosen)
    if lowering is None and decided(config):
        pins = partial(pins_of, config, context.layout, model, traced.program)
        answer = agreed(partial(plans.search, answer, pins), context)
        lowering = plans.lowering(answer.chosen)
    rules = plans.rules(answer.chosen)
    if lowering is None:
        if context.layout.size(DATA_AXIS) > 1:
            check_outputs(model, traced, setting.batch, lambda: trace(model, part))
        behaviour = TracedBehaviour(
            model, traced, whole, forwards=answer.microbatches, stages=chunks.count
        )
    return _Plan(context, chunks, setting, traced, answer, rules, lowering, behaviour, units)


@contextlib.contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    """Inside, have a model that is evaluated be in training."""
    modes = [(part, part.training) for part in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def check_sample(model: nn.Module, sample: Sample) -> Sequence[Any]:
    """Return `sample`, which `model` is to be traced with, by position.

    Raises:
        ConfigError: There is none, it does not fit the forward, or the model has no values.
    """
    check_global_hooks("mode: auto")
    if sample is None:
        raise ConfigError(
            f"{ROOT}.mode: auto needs a batch to trace the model with",
            hint="rt.shard(model, sample=(x,)) with the inputs of one local batch",
        )
    if any(param.is_meta for param in model.parameters()):
        raise ModelError(f"{ROOT}.mode: auto divides models with values, not those of init_on_meta")
    return positional(model, sample)


def _run_natively(config: ParallelConfig, model: nn.Module, plan: _Plan) -> Applied:
    """Leave a model to the runtime, which does by itself what the plan says."""
    context, traced, lowering = plan.context, plan.traced, plan.lowering
    if lowering is None:
        raise ValueError("no configuration is equal to the plan")
    context.print(f"{_MODE} runs on {lowering.name}")
    # A job that continues from the checkpoint under another plan needs their state.
    rngs = (StepRng(traced.program, _seed(context)),)
    number = plan.answer.microbatches
    pipeline = plan.units.pipeline(plan.answer.starts) if plan.units else None
    config = configuration(config, context.layout.axes, lowering, number, pipeline)
    if context.layout.size(DATA_AXIS) == 1 or pipeline:
        return Applied(model, context, rngs, config=config)
    finish = partial(return_means, model, traced, lowering, context.group(DATA_AXIS))
    return Applied(model, context, rngs, config=config, finish=finish)


def _axes(context: RankContext) -> dict[str, int]:
    """Return the mesh axes that a plan shards over: those within one stage."""
    return {name: size for name, size in context.layout.axes.items() if name != PIPELINE_AXIS}


def _place(config: ParallelConfig, rank: Rank, mesh: dict[str, int]) -> RankContext:
    rules = [] if config.mesh == "auto" else config.plan
    return rank.place(msgspec.structs.replace(config, mesh=mesh, plan=rules))


def _chunks(config: ParallelConfig, context: RankContext, microbatches: int) -> Chunks:
    """Return the chunks of the pipeline, which may be one of one stage."""
    stages, pipeline = context.layout.size(PIPELINE_AXIS), config.pipeline
    if pipeline:
        return read_chunks(msgspec.structs.replace(pipeline, microbatches=microbatches), stages)[0]
    chunks = Chunks(schedule="1f1b", stages=stages)
    check_microbatches(chunks, microbatches)
    return chunks


def _samples(rank: Rank, sample: Sequence[Any]) -> int:
    """Return the samples of a step of all ranks."""
    local = next((len(x) for x in leaf_tensors(list(sample)) if x.dim()), 0)
    if not local:
        raise ConfigError("the sample of rt.shard holds no tensor with a first dim of samples")
    return local * rank.layout.size(DATA_AXIS) if isinstance(rank, RankContext) else local


def _outline(
    config: ParallelConfig,
    rank: Rank,
    model: nn.Module,
    sample: Sequence[Any],
    *,
    batch: int,
    modules: Callable[[], ModuleSearch],
) -> PlanBroadcast:
    """Return mesh and micro-batches, and with them the plan where a file or a search gave both."""
    if isinstance(config.plan, str):
        small = resized(sample, SIZES[0])
        program = lambda: trace(model, small).program  # noqa: E731 - of a plan without operators
        return agreed(partial(read_saved, config, rank, config.plan, program, batch=batch), rank)
    if config.mesh == "auto":
        choose = partial(_choose_mesh, config, rank, model, sample, batch=batch, modules=modules)
        return agreed(choose, rank)
    axes = placed(rank, config).layout.axes
    return PlanBroadcast(mesh=axes, microbatches=microbatches_of(config))


def _choose_mesh(
    config: ParallelConfig,
    rank: Rank,
    model: nn.Module,
    sample: Sequence[Any],
    *,
    batch: int,
    modules: Callable[[], ModuleSearch],
) -> PlanBroadcast:
    """Return the fastest mesh that the runtime can run, and its plan."""
    small, large = (trace(model, resized(sample, number)) for number in SIZES)
    request = MeshRequest(
        programs=ProgramByBatch(small.program, large.program, SIZES),
        is_whole=bool(small.of_whole_batch),
        decided=of_data_ranks(config),
        topology=topology_of(config, rank),
        world=rank.world_size,
        batch=batch,
        mode=MODES[config.search or "exact"],
        limit=None if config.memory is None else float(config.memory),
    )
    if decided(config):
        request = msgspec.structs.replace(
            request,
            recompute=recomputes_blocks(config, small.program, model),
            stages=partial(possible_stages, config, model, small.program, sample, rank.world_size),
        )
    plan = partial(choose_mesh, request, time.perf_counter)
    find = partial(in_any_mesh(config, request, small).fastest, plan)
    best: ChosenMesh | Alternative | SharedModules
    if has_modules(model, sample):
        best, lines = faster(find, modules(), request.of_modules())
        rank.print("\n".join(f"{_MODE}: {line}" for line in lines))
    else:
        best = find()
    if isinstance(best, SharedModules | Alternative):
        rank.print(f"{ROOT}.mesh: {best.name}, {best.seconds:.4g} s a step predicted")
        return PlanBroadcast(modules=best.config)
    mesh = " x ".join(f"{name} {size}" for name, size in best.mesh.items())
    again = ", recomputation" if best.recompute else ""
    rank.print(
        f"{ROOT}.mesh: {mesh}, {best.microbatches} micro-batch(es){again}, "
        f"{best.seconds:.4g} s a step predicted"
    )
    return PlanBroadcast(
        mesh=best.mesh,
        microbatches=best.microbatches,
        recompute=best.recompute and decided(config) is None,
        chosen=best.chosen,
    )


def _setting(
    config: ParallelConfig, context: RankContext, batch: int, chunks: Chunks, microbatches: int
) -> Setting:
    """Return the mesh, the cluster and the micro-batch of all ranks that a plan is for."""
    axes, ranks = _axes(context), context.layout.size(DATA_AXIS)
    if batch % (ranks * microbatches):
        key = "pipeline.microbatches" if config.pipeline else "accumulate"
        raise ConfigError(
            f"{ROOT}.{key}: {microbatches} does not divide the {batch / ranks:g} samples of a "
            "local batch, and mode auto needs equal micro-batches"
        )
    return Setting(
        sizes=tuple(axes.values()),
        topology=topology_of(config, context),
        data_axes=frozenset(at for at, name in enumerate(axes) if name == DATA_AXIS),
        batch=batch // microbatches,
        rounds=rounds(chunks, microbatches),
    )


def _completed(
    config: ParallelConfig,
    context: RankContext,
    model: nn.Module,
    traced: Traced,
    compare: Callable[[Callable[[], PlanBroadcast]], PlanBroadcast],
    *,
    setting: Setting,
    answer: PlanBroadcast,
    others: Alternatives,
    units: ModuleStages | None,
) -> PlanBroadcast:
    """Return `answer` with the strategy of every node, and the first step of every chunk."""
    program, chunks = traced.program, _chunks(config, context, answer.microbatches)
    if answer.plan is None and not answer.chosen:
        pins = pins_of(config, context.layout, model, program)
        find = partial(_search, config, traced, setting, chunks=chunks, pins=pins, units=units)
        if chunks.count == 1 and not pins:
            find = partial(_divided, others, find)
        if names_modules(config, context.layout, chunks.count):
            find = partial(compare, find)
        found = agreed(find, context)
        return msgspec.structs.replace(found, mesh=answer.mesh, microbatches=answer.microbatches)
    chosen, key = answer.chosen, f"{ROOT}.mesh.{PIPELINE_AXIS}"
    if answer.plan is not None:
        key = f"{_PLAN}: {config.plan}"
        check_model(answer.plan, key, program)
        problem = build(program, setting, cuts=answer.plan.shared)
        chosen = choices_of(answer.plan, key, problem, program)
    count = chunks.count
    starts = cut_between_blocks(find_blocks(program), count, key) if count > 1 else [0]
    return msgspec.structs.replace(answer, chosen=chosen, starts=starts)


def _search(
    config: ParallelConfig,
    traced: Traced,
    setting: Setting,
    *,
    chunks: Chunks,
    pins: Sequence[Pin],
    units: ModuleStages | None,
) -> PlanBroadcast:
    limit = None if config.memory is None else float(config.memory)

    def find(total: float | None) -> SearchResult:
        mode = MODES[config.search or "exact"]
        return search(traced.program, setting, mode=mode, pins=pins, limit=total)

    if chunks.count == 1:
        plan = find(limit)
        return PlanBroadcast(chosen=plan.chosen, starts=[0], seconds=plan.seconds)
    staged = search_stages(
        traced.program,
        setting,
        traced.rules,
        find,
        pace=paces(chunks, microbatches_of(config)),
        pins=pins,
        limit=limit,
        allowed=units.starts() if units else None,
    )
    return PlanBroadcast(chosen=staged.result.chosen, starts=staged.starts)


def _divided(others: Alternatives, find: Callable[[], PlanBroadcast]) -> PlanBroadcast:
    """Return the plan that `find` finds, or a division of the whole model that is better."""
    found = others.fastest(find)
    if isinstance(found, Alternative):
        return PlanBroadcast(modules=found.config, name=found.name, seconds=found.seconds)
    return found


def _seed(rank: Rank) -> int:
    """Return the seed of the first rank's generator on every rank."""
    seed = torch.tensor([torch.initial_seed() % 2**62], device=rank.device)
    if rank.world_size > 1:
        dist.broadcast(seed, src=0)
    return int(seed)
