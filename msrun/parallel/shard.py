"""`rt.shard`: the parts of the runtime, applied to a model in the one order in which they compose.

Equal weights everywhere -> pipeline stages -> operator plan -> batch norms and dropout ->
recomputation -> optimizer sharding or gradient reduction -> random streams.

Each part is a package of its own and knows nothing of the others; the order stands here alone.
Stages come first, so that every later part sees only the modules of this rank.  The operator plan
replaces parameters by DTensors before `fully_shard` shards them once more.  Recomputation wraps
modules after the plan, so that it repeats their collectives too.  What a part needs beyond the
configuration is resolved before the first change, so that a refusal leaves the model untouched.
"""

# tidy: long file, the one order in which all parts of the runtime compose stands here

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from torch import nn

from msrun import environ
from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, ParallelConfig, Pipeline
from msrun.parallel.data_parallel import parameter_hooks, reductions, sparse_embedding
from msrun.parallel.data_parallel.parameter_hooks import ParameterHooks
from msrun.parallel.data_parallel.parameter_snapshot import ParameterSnapshot
from msrun.parallel.data_parallel.replica_digest import ReplicaDigest
from msrun.parallel.foreach.values import refused_penalties
from msrun.parallel.host import activations, host_tables
from msrun.parallel.layers import batch_norm, compiled, float8, micro_batches, precision, recompute
from msrun.parallel.layers.micro_batches import MicroBatches
from msrun.parallel.layout import context_rule, plan_axes, resolve
from msrun.parallel.local import is_sharded
from msrun.parallel.losses.batch import Sample
from msrun.parallel.match import matching
from msrun.parallel.plans.module_shape import ModuleShape, NamedRules
from msrun.parallel.rank_context import Rank, RankContext, placed
from msrun.parallel.replicas import (
    broadcast_weights,
    check_materialized,
    check_memory,
    split_random_streams,
)
from msrun.parallel.settings.plan_rules import PlanRule
from msrun.parallel.sharded_model import (
    Context,
    OriginalParameters,
    ShardedModel,
    each,
    entered,
    prepare_copies,
    refuse_compiled,
    refuse_copies,
    refuse_hooks,
)
from msrun.parallel.tensor.plan import ModulePlan, plan_modules
from msrun.parallel.uneven_rows import rule as rows_rule
from msrun.parallel.weights.memory import plain_tensors, watch_plain_tensors

# Functions below import `torch.distributed.tensor` only where the configuration needs it: that
# takes a second, and a rank that was not forked would wait for it.
if TYPE_CHECKING:
    from msrun.parallel.advise.module_search import WholeModules
    from msrun.parallel.context.sequences import Sequences
    from msrun.parallel.copies.group import Copies
    from msrun.parallel.deferred.fill import Weights
    from msrun.parallel.host.overlapped_step import OverlappedStep
    from msrun.parallel.images.division import Images
    from msrun.parallel.summands.late import LateSums
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
        offloaded: Modules whose activations go to the host.
        float8: Linear layers that multiply in float8.
        compiled: Modules that are compiled.
        excluded: Parameters whose gradients are not reduced.
        remote: Those of them that live on servers.
        placed: Tables that stay on the host.
    """

    config: ParallelConfig
    plans: dict[str, ModulePlan]
    recomputed: list[str]
    offloaded: list[str]
    float8: list[str]
    compiled: list[str]
    excluded: set[str]
    remote: set[str]
    placed: list[str]

    def divides(self, context: RankContext) -> bool:
        """Return whether parameters of the model do not stay as they are on every rank."""
        config = self.config
        is_cut = config.plan or config.pipeline or self.remote or self.placed
        return bool(is_cut) or reductions.is_sharding(config, context.layout)


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
    _warn_of_idle_servers(config)
    if config.mode == "auto":
        return _shard_by_search(config, rank, model, sample)
    context = placed(rank, config)
    if context.world_size == 1 and not reductions.is_sharding(config, context.layout):
        _warn_of_no_effect(config)
    resolved = _resolve_plan(config, context, model)
    check_memory(model, is_divided=resolved.divides(context))
    plain = plain_tensors(model)
    _leave_tables(context, model, resolved)
    weights = None
    if is_deferred := _is_on_meta(model):
        from msrun.parallel.deferred import fill

        if resolved.excluded:
            raise ModelError(f"{ROOT}.reduce.exclude: init_on_meta gives all ranks the same values")
        if resolved.placed:
            raise ModelError(f"{ROOT}.place: init_on_meta makes all of a model on one device")
        weights = fill.find(model)
        fill.move(model, context.device)
    else:
        host_tables.move(model, resolved.placed, context.device)
    originals = OriginalParameters(model, is_strong=weights is not None)
    # Before anything is sharded, while every tensor is whole on every rank.
    if context.world_size > 1:
        broadcast_weights(model, resolved.excluded)
    if config.pipeline:
        model = _cut(context, config.pipeline, model, sample, resolved)
        weights = fill.find(model) if is_deferred else None
    host_tables.attach(model, resolved.placed, context.device)
    state = _make_parallel(context, model, resolved, originals, weights)
    watch_plain_tensors(plain, model)
    _refuse_hooks_of_divided(config, model)
    if context.world_size > 1:
        split_random_streams(context)
    return Sharded(model, state, context)


def _refuse_hooks_of_divided(config: ParallelConfig, model: nn.Module) -> None:
    """Refuse hooks of modules that stages divide."""
    if config.pipeline:
        refuse_hooks(model.divided(), f"{ROOT}.pipeline: no stage calls %s as a whole")  # type: ignore[operator]  # it is a stage


def _cut(
    context: RankContext, settings: Pipeline, model: nn.Module, sample: Sample, plan: _ResolvedPlan
) -> nn.Module:
    """Return this rank's stage of `model`, which is used up."""
    from msrun.parallel.pipeline.ranks import check_parameters
    from msrun.parallel.pipeline.split_model import split_model

    group = context.group(PIPELINE_AXIS)
    stage = split_model(
        model,
        settings,
        group,
        context.device,
        sample,
        slices=plan.config.copies,
        placed=plan.placed,
    )
    check_parameters(stage, group, context.device)
    # With `batch_norm: local` buffers follow what a rank sees at once.
    stage.written_buffers.is_checked |= plan.config.batch_norm == "local"
    return stage


def _leave_tables(context: RankContext, model: nn.Module, resolved: _ResolvedPlan) -> None:
    """Leave tables on the device meta to servers."""
    if resolved.remote:
        from msrun.parallel.servers.first_rows import meta_tables

        meta_tables.take(resolved.config, context, model, resolved.remote)


def _warn_of_no_effect(config: ParallelConfig) -> None:
    """Say that one rank outside of a mesh with `dp` computes as without these keys."""
    for key in ("dtype", "offload"):
        if value := getattr(config.optimizer, key):
            warnings.warn(
                f"msrun: {ROOT}.optimizer.{key}: {str(value).lower()} has no effect on one rank "
                f"without an axis {DATA_AXIS}, which keeps the type and the device of its "
                "parameters",
                stacklevel=4,
            )


def _warn_of_idle_servers(config: ParallelConfig) -> None:
    """Say that a job has servers for nothing, as where its configuration was left out."""
    count = environ.servers_place(environ.current()).count
    if count and config.servers is None:
        warnings.warn(
            f"msrun: this job has {count} parameter server(s), and no parameter lives there: name "
            f"some in {ROOT}.servers, or leave out --server-num",
            stacklevel=4,
        )


def _shard_by_search(
    config: ParallelConfig, rank: Rank, model: nn.Module, sample: Sample
) -> Sharded:
    """Shard `model` by the plan that `mode: auto` finds, or that a file holds."""
    from msrun.parallel.auto.apply import apply, check_sample

    batch_norm.check(config, model)
    check_memory(model)
    sample = check_sample(model, sample)
    model.to(rank.device)
    originals = OriginalParameters(model, is_strong=False)
    if rank.world_size > 1:
        broadcast_weights(model, excluded=())
    hooked = parameter_hooks.hooked(model)
    applied = apply(config, rank, model, sample, partial(_whole_modules, config, rank, sample))
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
            refused_penalties,
            microbatches=applied.microbatches,
            is_pipeline=applied.is_pipeline,
            has_fixed_shapes=True,
            step_rngs=applied.step_rngs,
            hooks=ParameterHooks(applied.model, can_run=False),
            snapshot=_snapshot(applied.model, None, is_pipeline=applied.is_pipeline),
        )
        state.known = applied.known
        return Sharded(applied.model, state, applied.context)
    # The plan is equal to a configuration of the runtime, which runs it without the executor.
    config = applied.config
    resolved = _resolve_plan(config, applied.context, model)
    if config.pipeline:
        model = _cut(applied.context, config.pipeline, model, sample, resolved)
    state = _make_parallel(applied.context, model, resolved, originals)
    _refuse_hooks_of_divided(config, model)
    state.step_rngs = applied.step_rngs
    applied.finish()
    if applied.context.world_size > 1:
        split_random_streams(applied.context)
    return Sharded(model, state, applied.context)


def _whole_modules(
    config: ParallelConfig, rank: Rank, sample: Sequence[Any], model: nn.Module
) -> WholeModules:
    """Return what compares experts and sequences on ranks of their own, for a search."""
    from msrun.parallel.advise.module_search import WholeModules

    return WholeModules(model, sample, config, is_host=rank.device.type == "cpu")


def _resolve_plan(config: ParallelConfig, context: RankContext, model: nn.Module) -> _ResolvedPlan:
    batch_norm.check(config, model)
    micro_batches.check(config, model)
    precision.check(config, model)
    modules = [name for name, _ in model.named_modules()]
    params = [name for name, _ in model.named_parameters()]
    plans = {}
    if torch_compat.is_compiled(model):
        refuse_compiled(config, is_zero=reductions.is_sharding(config, context.layout))
    if config.plan:
        from msrun.parallel.tensor.describe import describe_modules
        from msrun.parallel.tensor.outputs import check_arguments

        source = config.plan if isinstance(config.plan, str) else None
        shapes = describe_modules(model)
        rules = _rules(config, context, model, shapes)
        plans = plan_modules(rules, context.layout, shapes, source)
        check_arguments(model, plans, is_cut=config.pipeline is not None)
        _check_strategy_file(config, plans)
    excluded = matching(config.reduce.exclude, params, "reduce.exclude")
    remote: set[str] = set()
    if config.servers:
        from msrun.parallel.servers.parameters.chosen import find

        remote = find(config, context.layout, model, plans)
        excluded |= remote
    placed_tables = host_tables.find(config, model, plans, remote)
    if context.layout.ep > 1:
        from msrun.parallel.experts import rules as experts_rules

        experts_rules.check(config, model, plans, excluded, has_parts=context.sequence is not None)
    rows_rule.check(config, plans, excluded)
    sparse_embedding.check(config, context.layout, model, plans)
    if reductions.is_sharding(config, context.layout):
        from msrun.parallel.data_parallel.zero import check_dropped_layers

        check_dropped_layers(model)
        small = reductions.small_or_excluded(config, model, excluded)
        tables = [name for name, plan in plans.items() if plan.rows]
        tables += placed_tables
        small |= {model.get_submodule(name).get_parameter("weight") for name in tables}
        sparse_embedding.check_replicated(model, small)
    recomputed = recompute.find(config.recompute, modules) if config.recompute else []
    return _ResolvedPlan(
        config=config,
        plans=plans,
        recomputed=recomputed,
        offloaded=activations.find(config, model, recomputed),
        float8=float8.find(config, model, plans),
        compiled=compiled.find(config, context.layout, model, plans),
        excluded=excluded,
        remote=remote,
        placed=placed_tables,
    )


def _check_strategy_file(config: ParallelConfig, plans: Mapping[str, ModulePlan]) -> None:
    """Refuse a strategy file of parameters whose layout it has no words for."""
    packed = [f"{name}.{param}" for name, plan in plans.items() for param in plan.packed]
    if packed and config.checkpoint and config.checkpoint.strategy:
        raise ModelError(
            f"{ROOT}.checkpoint.strategy: {packed[0]} packs several projections in one dim, which "
            "a strategy file cannot say",
            hint=f"leave out {ROOT}.checkpoint.strategy: checkpoints need none",
        )
    routed = [name for name, plan in plans.items() if plan.is_routed]
    if routed and config.checkpoint and config.checkpoint.strategy:
        raise ModelError(
            f"{ROOT}.checkpoint.strategy: the experts of {routed[0]} are shared over ranks of dp, "
            "which a strategy file cannot say",
            hint=f"leave out {ROOT}.checkpoint.strategy: checkpoints need none",
        )


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
    sequences = _divide_sequences(context, config, model)
    switch = compiled.Switch()
    guard, experts = _change_modules(context, model, resolved, switch, sequences)
    offload = activations.apply(config, model, resolved.offloaded, context.device)
    if sequences:
        sequences.cover(model, guard.active if guard else contextlib.nullcontext)
    zero = _shard_over_data(context, model, resolved, experts)
    if weights is not None:
        _fill(context, config, model, weights, zero)
    hooks = _find_hooks(context, model, zero, originals)
    _support_values(model)
    if guard:
        from msrun.parallel.tensor.hooks import watch

        watch(model, hooks.check)
    precision.apply(config, model, context.device)
    snapshot = _snapshot(model, zero, is_pipeline=config.pipeline is not None)
    prepare_copies(config, model, is_zero=zero is not None)
    if any(plan.rows for plan in resolved.plans.values()):
        refuse_copies(model, f"{ROOT}.plan: rows")
    if zero:
        _begin(context, zero, partial(each, hooks.check, context.batch.check))
    state = ShardedModel(
        model,
        originals.references(),
        reductions.find(
            config,
            context,
            model,
            zero,
            reductions.Checks(partial(each, snapshot.check, context.batch.check), hooks.check),
            excluded=resolved.excluded,
            experts=experts,
        ),
        partial(entered, _computing(model, sequences, guard, zero, config.optimizer.zero)),
        microbatches=config.parts,
        is_pipeline=config.pipeline is not None,
        excluded=resolved.excluded,
        snapshot=snapshot if context.world_size > 1 else None,
        order=zero.order if zero else None,
        replicas=_replicas(context, model, resolved),
        micro_batches=None if config.pipeline else MicroBatches(config, model),
        hooks=hooks,
        exchanges_tokens=bool(experts),
        uncompiled=switch.off,
    )
    state.sequences, state.copies = sequences, _copies(config, context, model, guard)
    state.activations, state.host_step = offload, _host_step(config, model)
    state.late = _late_sums(config, guard, zero)
    return state


def _shard_over_data(
    context: RankContext, model: nn.Module, resolved: _ResolvedPlan, experts: Sequence[nn.Module]
) -> reductions.Zero | None:
    """Apply optimizer parallel; None without.

    It comes after the plan: `fully_shard` shards DTensors once more, but a plan takes plain
    parameters.
    """
    config = resolved.config
    if not reductions.is_sharding(config, context.layout):
        return None
    return reductions.shard_parameters(
        config,
        context,
        model,
        resolved.plans,
        excluded=resolved.excluded,
        experts=experts,
        on_host=host_tables.parameters(model, resolved.placed),
    )


def _copies(
    config: ParallelConfig, context: RankContext, model: nn.Module, guard: Guard | None
) -> Copies | None:
    """Return the copies of each micro-batch, if there are several and a plan for them."""
    if config.copies == 1 or guard is None:
        return None
    from msrun.parallel.copies.group import Copies
    from msrun.parallel.layers.norm_functions import all_left

    own = [(guard, "shared"), *torch_compat.notes_of_forward(model)]
    return Copies(config.copies, context.device, own, all_left)


def _late_sums(
    config: ParallelConfig, guard: Guard | None, zero: reductions.Zero | None
) -> LateSums | None:
    """Have summands of gradients wait for the end of a step, where nothing reads them before.

    Stages and ZeRO read them during the backward pass.
    """
    if guard is None or config.pipeline or zero:
        return None
    from msrun.parallel.summands.late import LateSums

    guard.late = LateSums()
    return guard.late


def _host_step(config: ParallelConfig, model: nn.Module) -> OverlappedStep | None:
    """Return what has steps on the host overlap the next forward; None if they do not."""
    if config.optimizer.offload != "overlap":
        return None
    from msrun.parallel.host.overlapped_step import OverlappedStep

    return OverlappedStep(model)


def _begin(context: RankContext, zero: reductions.Zero, check: Callable[[], None]) -> None:
    """Prepare a model under optimizer parallel for calls of any part of it, in any order."""
    torch_compat.begin_units(zero.model)
    zero.order.check = check
    if context.images:
        from msrun.parallel.images.image_tensor import opened

        torch_compat.open_inputs(zero.model, opened)


def _fill(
    context: RankContext,
    config: ParallelConfig,
    model: nn.Module,
    weights: Weights,
    zero: reductions.Zero | None,
) -> None:
    from msrun.parallel.deferred.fill import fill

    is_offloaded = zero is not None and config.optimizer.offload
    on_host = set(model.parameters()) - zero.replicated if zero and is_offloaded else set()
    fill(model, weights, context.device, on_host)


def _support_values(model: nn.Module) -> None:
    """Have sharded parameters of `model` take plain tensors of the script."""
    if any(map(is_sharded, model.parameters())):
        from msrun.parallel.deferred.fill import part_of
        from msrun.parallel.foreach.whole_operators import support_operators
        from msrun.parallel.foreach.whole_values import support_values

        if support_values(part_of):
            support_operators()


def _replicas(
    context: RankContext, model: nn.Module, resolved: _ResolvedPlan
) -> ReplicaDigest | None:
    digest = ReplicaDigest(model, resolved.config, context, resolved.excluded)
    return digest if context.world_size > 1 else None


def _computing(
    model: nn.Module,
    sequences: Sequences | Images | None,
    guard: Guard | None,
    zero: reductions.Zero | None,
    level: int,
) -> list[Context]:
    """Return the contexts of loss and backward pass."""
    contexts: list[Context] = [sequences.active] if sequences else []
    if guard:
        contexts.append(guard.active_with_loss)
    if zero:
        from msrun.parallel.data_parallel.zero_errors import named_errors

        contexts.append(partial(named_errors, weakref.ref(model), level))
    if sequences:
        contexts.append(sequences.watched)
    return contexts


def _find_hooks(
    context: RankContext,
    model: nn.Module,
    zero: reductions.Zero | None,
    originals: OriginalParameters,
) -> ParameterHooks:
    """Return the gradient hooks on `model`; refuse those that hold a replaced parameter."""
    params = set(model.parameters())
    if context.world_size > 1:
        references = (reference() for reference in originals.references())
        replaced = {id(param) for param in references if param is not None and param not in params}
        parameter_hooks.check_references(model, replaced)
    is_divided = context.layout.size(DATA_AXIS) > 1 or zero is not None
    if is_divided:
        params = params - zero.replicated if zero else set()
    is_once = is_divided and zero is not None
    return ParameterHooks(model, is_after_reduction=params, is_once=is_once)


def _snapshot(
    model: nn.Module, zero: reductions.Zero | None, *, is_pipeline: bool
) -> ParameterSnapshot:
    named = model.named_parameters(remove_duplicate=False)
    gathered = {name for name, param in named if zero and param not in zero.replicated}
    tied = model.tied_names() if is_pipeline else ()  # type: ignore[operator]  # it is a stage
    return ParameterSnapshot(model, gathered, tied)


def _is_on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _change_modules(
    context: RankContext,
    model: nn.Module,
    resolved: _ResolvedPlan,
    switch: compiled.Switch,
    sequences: Sequences | Images | None,
) -> tuple[Guard | None, list[nn.Module]]:
    """Apply the features that change modules: operator plan, batch norms, dropout, recompute.

    Returns:
        The guard of the operator plan, and the modules whose experts ranks share.
    """
    config = resolved.config
    own = {name for name, _ in model.named_modules()}
    plans = {name: plan for name, plan in resolved.plans.items() if name in own}
    is_data_parallel = context.layout.size(DATA_AXIS) > 1
    experts = _share_experts(context, model, resolved, plans, sequences)
    plans = {name: plan for name, plan in plans.items() if not plan.is_routed}
    guard = _shard_operators(context, model, plans)
    group = context.group(DATA_AXIS) if is_data_parallel else None
    norms = batch_norm.synchronize(config, model, group, batch_norm.group_of_samples(context))
    # Modes that a recomputation must enter again.  Exact dropout is outside of the guard, so the
    # guard sees sharded tensors first and draws their masks with it.
    inside: list[Context] = [guard.active] if guard else []
    if guard:
        inside = [*_outside_of_guard(sequences), *inside]
    if norms:
        inside.append(norms.recomputed)
    if is_data_parallel and config.dropout == "exact":
        from msrun.parallel.layers.dropout import ExactDropout

        exact = ExactDropout(context)
        inside.insert(0, exact.active)
        if guard:
            guard.draw = exact.draw
        exact.apply(model)
    if config.float8:
        names = [name for name in resolved.float8 if name in own]
        float8.apply(model, names, config.float8, context.device)
    forwards: dict[str, compiled.CompiledForward] = {}
    if config.compile:
        names = [name for name in resolved.compiled if name in own]
        mode = config.compile.mode
        apart = _apart(sequences)
        forwards = compiled.apply(model, names, mode, switch, apart=apart, guard=guard)
    if config.recompute:
        recomputed = [name for name in resolved.recomputed if name in own]
        # Of what else is inside, functions of norms are in the graph that the compiler makes.
        has_modes = guard or sequences or config.dropout == "exact"
        graphs = {} if has_modes else forwards
        recompute.apply(model, recomputed, config.recompute.save, partial(entered, inside), graphs)
        if config.pipeline:
            model.keeps_results = bool(config.recompute.save)  # type: ignore[assignment]
    return guard, experts


def _outside_of_guard(sequences: Sequences | Images | None) -> list[Context]:
    """Return the mode to which a guard, inside of it, gives the shards of a rank; none without."""
    from msrun.parallel.context.sequences import Sequences

    return [sequences.repeated] if isinstance(sequences, Sequences) else []


def _apart(
    sequences: Sequences | Images | None,
) -> Callable[[str, nn.Module], compiled.Apart] | None:
    """Return what has a module run apart from parts of sequences; None without these."""
    from msrun.parallel.context.sequences import Sequences

    if not isinstance(sequences, Sequences):
        return None
    from msrun.parallel.context.apart import ModuleApart

    return partial(ModuleApart, sequences)


def _share_experts(
    context: RankContext,
    model: nn.Module,
    resolved: _ResolvedPlan,
    plans: Mapping[str, ModulePlan],
    sequences: Sequences | Images | None,
) -> list[nn.Module]:
    """Apply `style: experts` over the axis `ep`; return the modules whose experts ranks share."""
    if context.layout.ep <= 1 and sequences is None:
        return []
    from msrun.parallel.context.sequences import Sequences

    routed_plans = {name: plan for name, plan in resolved.plans.items() if plan.is_routed}
    is_cut = bool(routed_plans) and isinstance(sequences, Sequences)
    if context.layout.ep <= 1 and not is_cut:
        return []
    from msrun.parallel.experts import routed

    if not isinstance(sequences, Sequences):
        return routed.apply(resolved.config, context, model, plans)
    from msrun.parallel.context.experts import run_outside, try_whole

    if context.layout.ep <= 1:  # those of a list are followed, as the loop around them is
        routed_plans = {name: plan for name, plan in routed_plans.items() if plan.params}
    with run_outside(sequences, model, routed_plans):
        if context.layout.ep <= 1:
            try_whole(model, routed_plans)
            return []
        return routed.apply(resolved.config, context, model, plans)


def _divide_sequences(
    context: RankContext, config: ParallelConfig, model: nn.Module
) -> Sequences | Images | None:
    """Apply style `context`, or divide images; None without one."""
    if context.images:
        from msrun.parallel.images.apply import divide_images

        return divide_images(config, context, model)
    found = context_rule(config)
    if found is None or context.sequence is None:
        return None
    from msrun.parallel.context.apply import divide

    return divide(*found, context.sequence, model, is_pipeline=config.pipeline is not None)


def _shard_operators(
    context: RankContext, model: nn.Module, plans: Mapping[str, ModulePlan]
) -> Guard | None:
    """Apply the operator plan and return its guard; None if the plan shards nothing."""
    axes = plan_axes(context.layout)
    if not plans or math.prod(map(context.layout.size, axes)) == 1:
        return None
    from msrun.parallel.tensor import hooks

    of_tables = {name: plan for name, plan in plans.items() if plan.axis}
    plans = {name: plan for name, plan in plans.items() if not plan.axis}
    mesh = context.root_mesh[axes]
    options: dict[str, Any] = {}
    if context.images:
        from msrun.parallel.images.guard import ImageGuard, ImageHooks

        options = {"guard": ImageGuard(mesh), "around": partial(ImageHooks, axes)}
    guard = hooks.apply(model, plans, mesh, **options)
    if of_tables:
        from msrun.parallel.uneven_rows import lookup

        lookup.apply(model, of_tables, context.root_mesh[axes], guard)
    return guard
