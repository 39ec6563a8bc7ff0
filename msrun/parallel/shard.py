"""`rt.shard`: the parts of the runtime, applied to a model in the one order in which they compose.

Equal weights everywhere -> pipeline stages -> operator plan -> batch norms and dropout ->
recomputation -> optimizer sharding or gradient reduction -> random streams.

Each part is a package of its own and knows nothing of the others; the order stands here alone.
Stages come first, so that every later part sees only the modules of this rank.  The operator plan
replaces parameters by DTensors before `fully_shard` shards them once more.  Recomputation wraps
modules after the plan, so that it repeats their collectives too.  What a part needs beyond the
configuration is resolved before the first change, so that a refusal leaves the model untouched.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from torch import nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, ParallelConfig, PlanRule
from msrun.parallel.data_parallel import parameter_hooks, sparse_embedding
from msrun.parallel.data_parallel.parameter_hooks import ParameterHooks
from msrun.parallel.data_parallel.reducer import GradientReducer, fill_buckets
from msrun.parallel.data_parallel.replica_digest import ReplicaDigest
from msrun.parallel.layers import batch_norm, compiled, micro_batches, precision, recompute
from msrun.parallel.layers.micro_batches import MicroBatches
from msrun.parallel.layout import plan_axes, resolve
from msrun.parallel.losses.batch import Sample
from msrun.parallel.match import matching
from msrun.parallel.rank_context import Rank, RankContext, placed
from msrun.parallel.replicas import (
    broadcast_weights,
    check_materialized,
    split_random_streams,
)
from msrun.parallel.sharded_model import (
    Context,
    OriginalParameters,
    ParameterSnapshot,
    Reduction,
    ShardedModel,
    each,
    entered,
    refuse_compiled,
    refuse_copies,
    refuse_hooks,
)
from msrun.parallel.tensor.plan import ModulePlan, ModuleShape, NamedRules, plan_modules

# Functions below import `torch.distributed.tensor` only where the configuration needs it: that
# takes a second, and a rank that was not forked would wait for it.
if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from msrun.parallel.data_parallel.collective_order import CollectiveOrder
    from msrun.parallel.deferred.fill import Weights
    from msrun.parallel.tensor.guard import Guard


class Sharded(NamedTuple):
    """The result of `shard_model`.

    Args:
        model: The module to train: the model itself, or this rank's stage of it.
        state: State that its steps need.
        context: This rank on the mesh, which `mesh: auto` chooses only now.
    """

    model: nn.Module
    state: ShardedModel
    context: RankContext


class _ResolvedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration resolved to the names of one model, before the first change.

    Args:
        config: The configuration.
        plans: Module -> its operator plan.
        recomputed: Modules that recompute.
        compiled: Modules that are compiled.
        excluded: Parameters whose gradients are not reduced.
    """

    config: ParallelConfig
    plans: dict[str, ModulePlan]
    recomputed: list[str]
    compiled: list[str]
    excluded: set[str]


def shard_model(config: ParallelConfig, rank: Rank, model: nn.Module, sample: Sample) -> Sharded:
    """Make `model` parallel as `config` says.

    Args:
        config: The parallel configuration.
        rank: This rank; a `RankContext` unless `mesh: auto` is to find the mesh.
        model: The model; with a pipeline it is consumed.
        sample: Inputs of one batch, see `Runtime.shard`.

    Raises:
        ModelError: The configuration does not fit the model; then nothing was changed.
    """
    check_materialized(model)
    if config.mode == "auto":
        return _shard_by_search(config, rank, model, sample)
    context = placed(rank, config)
    if context.world_size == 1:
        _warn_of_no_effect(config)
    resolved = _resolve_plan(config, context, model)
    weights = None
    if is_deferred := any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        from msrun.parallel.deferred import fill

        if resolved.excluded:
            raise ModelError(f"{ROOT}.reduce.exclude: init_on_meta gives all ranks the same values")
        weights = fill.find(model)
        fill.move(model, context.device)
    else:
        model.to(context.device)
    originals = OriginalParameters(model, is_strong=weights is not None)
    # Before anything is sharded, while every tensor is whole on every rank.
    if context.world_size > 1:
        broadcast_weights(model, resolved.excluded)
    if config.pipeline:
        from msrun.parallel.pipeline.model import split_model
        from msrun.parallel.pipeline.ranks import check_parameters

        group = context.group(PIPELINE_AXIS)
        model = split_model(model, config.pipeline, group, context.device, sample)
        check_parameters(model, group, context.device)
        # With `batch_norm: local` buffers follow what a rank sees at once.
        model.written_buffers.is_checked |= config.batch_norm == "local"
        weights = fill.find(model) if is_deferred else None
    state = _make_parallel(context, model, resolved, originals, weights)
    if config.pipeline:
        refuse_hooks(model.divided(), f"{ROOT}.pipeline: no stage calls %s as a whole")  # type: ignore[operator]
    if context.world_size > 1:
        split_random_streams(context)
    return Sharded(model, state, context)


def _warn_of_no_effect(config: ParallelConfig) -> None:
    """Say that one rank, which computes as without the runtime, computes as without these keys."""
    for key in ("dtype", "offload"):
        if value := getattr(config.optimizer, key):
            warnings.warn(
                f"msrun: {ROOT}.optimizer.{key}: {str(value).lower()} has no effect on one rank, "
                "which keeps the type and the device of its parameters",
                stacklevel=4,
            )


def _shard_by_search(
    config: ParallelConfig, rank: Rank, model: nn.Module, sample: Sample
) -> Sharded:
    """Shard `model` by the plan that `mode: auto` finds, or that a file holds."""
    from msrun.parallel.auto.apply import apply, check_sample

    batch_norm.check(config, model)
    sample = check_sample(model, sample)
    model.to(rank.device)
    originals = OriginalParameters(model, is_strong=False)
    if rank.world_size > 1:
        broadcast_weights(model, excluded=())
    hooked = parameter_hooks.hooked(model)
    applied = apply(config, rank, model, sample)
    if applied.config is None:
        parameter_hooks.refuse(hooked)
        refuse_copies(applied.model, f"{ROOT}.mode: auto")
        uncalled = [(name, module) for name, module in applied.model.named_modules() if name]
        if applied.is_pipeline:
            uncalled += applied.model.divided()  # type: ignore[operator]  # it is a stage
        refuse_hooks(uncalled, f"{ROOT}.mode: auto runs a plan, which does not call %s")
        state = ShardedModel(
            applied.model,
            originals.references(),
            [],
            contextlib.nullcontext,
            microbatches=applied.microbatches,
            is_pipeline=applied.is_pipeline,
            has_fixed_shapes=True,
            dropout_rngs=applied.dropout_rngs,
            hooks=ParameterHooks(applied.model, can_run=False),
        )
        state.known = applied.known
        return Sharded(applied.model, state, applied.context)
    # The plan is equal to a configuration of the runtime, which runs it without the executor.
    resolved = _resolve_plan(applied.config, applied.context, model)
    state = _make_parallel(applied.context, model, resolved, originals)
    state.dropout_rngs = applied.dropout_rngs
    applied.finish()
    return Sharded(model, state, applied.context)


def _resolve_plan(config: ParallelConfig, context: RankContext, model: nn.Module) -> _ResolvedPlan:
    batch_norm.check(config, model)
    micro_batches.check(config, model)
    precision.check(config, model)
    modules = [name for name, _ in model.named_modules()]
    params = [name for name, _ in model.named_parameters()]
    plans = {}
    if torch_compat.is_compiled(model):
        refuse_compiled(config, is_zero=context.layout.size(DATA_AXIS) > 1)
    if config.plan:
        from msrun.parallel.tensor.describe import describe_modules

        source = config.plan if isinstance(config.plan, str) else None
        shapes = describe_modules(model)
        rules = _rules(config, context, model, shapes)
        plans = plan_modules(rules, context.layout, shapes, source)
        if config.checkpoint and config.checkpoint.strategy:
            from msrun.parallel.checkpoint.strategy_file import check_expressible

            check_expressible(plans)
    excluded = matching(config.reduce.exclude, params, "reduce.exclude")
    sparse_embedding.check(config, context.layout, model, plans)
    if config.optimizer.zero and context.layout.size(DATA_AXIS) > 1:
        from msrun.parallel.data_parallel.zero import check_dropped_layers

        check_dropped_layers(model)
        sparse_embedding.check_replicated(model, _replicated(config, model, excluded))
    return _ResolvedPlan(
        config=config,
        plans=plans,
        recomputed=recompute.find(config.recompute, modules) if config.recompute else [],
        compiled=compiled.find(config, context.layout, model, plans),
        excluded=excluded,
    )


def _replicated(
    config: ParallelConfig, model: nn.Module, excluded: Collection[str]
) -> set[Parameter]:
    """Return the parameters of `model` that optimizer parallel leaves replicated."""
    from msrun.parallel.data_parallel.zero import small_parameters

    named = model.named_parameters()
    return small_parameters(config, model) | {param for name, param in named if name in excluded}


def _rules(
    config: ParallelConfig,
    context: RankContext,
    model: nn.Module,
    shapes: Mapping[str, ModuleShape],
) -> list[PlanRule | NamedRules]:
    """Return the rules of the plan; a strategy file is read, and a name becomes rules."""
    if not isinstance(config.plan, str):
        from msrun.parallel.tensor.named_plan import named_rules

        return [
            named_rules(rule, context, model, shapes) if isinstance(rule, str) else rule
            for rule in config.plan
        ]
    from msrun.parallel.checkpoint.strategy_file import read_strategy

    named = model.named_parameters(remove_duplicate=False)
    sizes = {name: param.shape for name, param in named}
    rules = read_strategy(config.plan, context.layout, sizes)
    resolve(msgspec.structs.replace(config, plan=rules), context.world_size)
    return [*rules]


def _make_parallel(
    context: RankContext,
    model: nn.Module,
    resolved: _ResolvedPlan,
    originals: OriginalParameters,
    weights: Weights | None = None,
) -> ShardedModel:
    """Make modules and parameters of `model` parallel; `weights` fill a model of `init_on_meta`."""
    config = resolved.config
    switch = compiled.Switch()
    guard = _change_modules(context, model, resolved, switch)
    zero = None
    # After the plan: `fully_shard` shards DTensors once more, but a plan takes plain parameters.
    if config.optimizer.zero and context.layout.size(DATA_AXIS) > 1:
        zero = _shard_parameters(context, model, resolved)
    if weights is not None:
        from msrun.parallel.deferred.fill import fill

        is_offloaded = zero is not None and config.optimizer.offload
        on_host = set(model.parameters()) - zero.replicated if zero and is_offloaded else set()
        fill(model, weights, context.device, on_host)
    hooks = _find_hooks(context, model, zero, originals)
    if guard:
        from msrun.parallel.tensor.hooks import watch

        watch(model, hooks.check)
    precision.apply(config, model, context.device)
    snapshot = _snapshot(config, model, zero)
    _prepare_copies(context, config, model)
    if zero:
        zero.order.check = partial(each, hooks.check, context.batch.check)
    return ShardedModel(
        model,
        originals.references(),
        _reductions(
            context,
            model,
            resolved,
            zero,
            (partial(each, snapshot.check, context.batch.check), hooks.check),
        ),
        partial(entered, _computing(model, guard, zero, config.optimizer.zero)),
        microbatches=config.accumulate,
        is_pipeline=config.pipeline is not None,
        excluded=resolved.excluded,
        snapshot=snapshot if context.world_size > 1 else None,
        order=zero.order if zero else None,
        replicas=_replicas(context, model, resolved),
        micro_batches=None if config.pipeline else MicroBatches(config, model),
        hooks=hooks,
        uncompiled=switch.off,
    )


def _replicas(
    context: RankContext, model: nn.Module, resolved: _ResolvedPlan
) -> ReplicaDigest | None:
    digest = ReplicaDigest(model, resolved.config, context, resolved.excluded)
    return digest if context.world_size > 1 else None


def _prepare_copies(context: RankContext, config: ParallelConfig, model: nn.Module) -> None:
    """Have `copy.deepcopy` say why it does not work on `model`, where it does not."""
    if config.pipeline:
        refuse_copies(model, f"{ROOT}.pipeline")
    elif config.optimizer.zero and context.layout.size(DATA_AXIS) > 1:
        refuse_copies(model, f"{ROOT}.optimizer.zero")


def _computing(
    model: nn.Module, guard: Guard | None, zero: _Zero | None, level: int
) -> list[Context]:
    """Return the contexts of loss and backward pass."""
    contexts: list[Context] = [guard.active_with_loss] if guard else []
    if zero:
        from msrun.parallel.data_parallel.zero import named_errors

        contexts.append(partial(named_errors, model, level))
    return contexts


def _find_hooks(
    context: RankContext, model: nn.Module, zero: _Zero | None, originals: OriginalParameters
) -> ParameterHooks:
    """Return the gradient hooks on `model`; refuse those that hold a replaced parameter."""
    params = set(model.parameters())
    if context.world_size > 1:
        references = (reference() for reference in originals.references())
        replaced = {id(param) for param in references if param is not None and param not in params}
        parameter_hooks.check_references(model, replaced)
    is_divided = context.layout.size(DATA_AXIS) > 1
    if is_divided:
        params = params - zero.replicated if zero else set()
    is_once = is_divided and zero is not None
    return ParameterHooks(model, is_after_reduction=params, is_once=is_once)


def _snapshot(config: ParallelConfig, model: nn.Module, zero: _Zero | None) -> ParameterSnapshot:
    named = model.named_parameters(remove_duplicate=False)
    gathered = {name for name, param in named if zero and param not in zero.replicated}
    tied = model.tied_names() if config.pipeline else ()  # type: ignore[operator]  # it is a stage
    return ParameterSnapshot(model, gathered, tied)


def _change_modules(
    context: RankContext, model: nn.Module, resolved: _ResolvedPlan, switch: compiled.Switch
) -> Guard | None:
    """Apply the features that change modules: operator plan, batch norms, dropout, recompute."""
    config = resolved.config
    own = {name for name, _ in model.named_modules()}
    plans = {name: plan for name, plan in resolved.plans.items() if name in own}
    is_data_parallel = context.layout.size(DATA_AXIS) > 1
    guard = _shard_operators(context, model, plans)
    group = context.group(DATA_AXIS) if is_data_parallel else None
    norms = batch_norm.synchronize(config, model, group)
    # Modes that a recomputation must enter again.  Exact dropout is outside of the guard, so the
    # guard sees sharded tensors first and draws their masks with it.
    inside: list[Context] = [guard.active] if guard else []
    if norms:
        inside.append(norms.recomputed)
    if is_data_parallel and config.dropout == "exact":
        from msrun.parallel.layers.dropout import ExactDropout

        exact = ExactDropout(context)
        inside.insert(0, exact.active)
        if guard:
            guard.draw = exact.draw
        exact.apply(model)
    if config.compile:
        names = [name for name in resolved.compiled if name in own]
        compiled.apply(model, names, config.compile.mode, switch)
    if config.recompute:
        recomputed = [name for name in resolved.recomputed if name in own]
        recompute.apply(model, recomputed, config.recompute.save, partial(entered, inside))
        if config.pipeline:
            model.keeps_results = bool(config.recompute.save)  # type: ignore[assignment]
    return guard


def _shard_operators(
    context: RankContext, model: nn.Module, plans: Mapping[str, ModulePlan]
) -> Guard | None:
    """Apply the operator plan and return its guard; None if the plan shards nothing."""
    axes = plan_axes(context.layout)
    if not plans or math.prod(map(context.layout.size, axes)) == 1:
        return None
    from msrun.parallel.tensor import hooks

    return hooks.apply(model, plans, context.root_mesh[axes])


class _Zero(NamedTuple):
    """A model under optimizer parallel.

    Args:
        model: The model, which `fully_shard` has made an `FSDPModule`.
        replicated: Parameters that stay replicated.
        order: Compares the order in which ranks gather the other parameters.
    """

    model: FSDPModule
    replicated: set[Parameter]
    order: CollectiveOrder


def _shard_parameters(context: RankContext, model: nn.Module, resolved: _ResolvedPlan) -> _Zero:
    from msrun.parallel.data_parallel import zero
    from msrun.parallel.data_parallel.collective_order import CollectiveOrder

    config = resolved.config
    replicated = _replicated(config, model, resolved.excluded)
    units = zero.units(config, model, resolved.plans)
    own = dict(model.named_modules())
    plans = {name: plan for name, plan in resolved.plans.items() if name in own}
    replicated |= zero.packed_parameters(config, model, plans)
    replicated |= zero.rare_types(config, model, units, replicated)
    module = zero.apply(config, context, model, units, replicated)
    level = config.optimizer.zero
    order = CollectiveOrder(module, context.group(DATA_AXIS), context.device, level=level)
    if config.pipeline:
        model.reduces_once = level == 1  # type: ignore[assignment]
    return _Zero(module, replicated, order)


def _reductions(
    context: RankContext,
    model: nn.Module,
    resolved: _ResolvedPlan,
    zero: _Zero | None,
    checks: tuple[Callable[[], None], Callable[[], None]],
) -> list[Reduction]:
    """Return the reductions over data-parallel ranks: of ZeRO, and of replicated parameters."""
    if context.layout.size(DATA_AXIS) == 1:
        return []
    config, group = resolved.config, context.group(DATA_AXIS)
    params = [
        (name, param)
        for name, param in model.named_parameters()
        if (param.is_floating_point() or param.is_complex()) and name not in resolved.excluded
    ]
    reductions: list[Reduction] = []
    if zero is not None:
        from msrun.parallel.data_parallel.zero import paused, reduce

        level = config.optimizer.zero
        reductions.append(
            Reduction(partial(paused, zero.model, level), partial(reduce, model, level))
        )
        params = [(name, param) for name, param in params if param in zero.replicated]
    if params:
        dtype = None if config.reduce.dtype is None else getattr(torch, config.reduce.dtype)
        sparse = sparse_embedding.sparse(model)
        check, check_hooks = checks
        reducer = GradientReducer(
            params,
            partial(fill_buckets, fuse=config.reduce.fuse, dtype=dtype, tables=sparse),
            group,
            context.device,
            scale=1.0 if config.reduce.op == "sum" else 1.0 / group.size(),
            check=check,
            check_hooks=check_hooks,
        )
        reductions.append(Reduction(reducer.paused, reducer.reduce, reducer.completed))
    return reductions
