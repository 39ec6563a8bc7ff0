"""What `rt.shard` does to a model, in the one order in which the parts fit together.

Equal weights everywhere -> operator plan -> batch norms and dropout -> recomputation -> optimizer
sharding or reduction of gradients -> random streams.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import UsageError
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, ParallelConfig, PlanRule
from msrun.parallel.data_parallel import sparse_embedding
from msrun.parallel.data_parallel.reducer import GradientReducer, fill_buckets
from msrun.parallel.layers import batch_norm, recompute
from msrun.parallel.layout import plan_axes, resolve
from msrun.parallel.match import matching
from msrun.parallel.sharded_model import Context, ParameterSnapshot, Reduction, ShardedModel
from msrun.parallel.tensor.plan import ModulePlan, plan_modules

if TYPE_CHECKING:
    from msrun.parallel.data_parallel.collective_order import CollectiveOrder
    from msrun.parallel.runtime import Runtime
    from msrun.parallel.tensor.guard import Guard

_BROADCAST_BYTES = 25 * 2**20
_GOLDEN = 0x9E3779B97F4A7C15


class _ResolvedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration says about one model, found before anything is changed.

    Args:
        plans: Module -> how it computes.
        recomputed: Modules that recompute.
        excluded: Parameters that are not reduced.
    """

    plans: dict[str, ModulePlan]
    recomputed: list[str]
    excluded: set[str]


def _resolve_plan(runtime: Runtime, model: nn.Module) -> _ResolvedPlan:
    config = runtime.config
    batch_norm.check(config, model)
    modules = [name for name, _ in model.named_modules()]
    params = [name for name, _ in model.named_parameters()]
    plans = {}
    if config.plan and config.mode != "auto":
        shapes = _late("msrun.parallel.tensor.hooks").describe_modules(model)
        source = config.plan if isinstance(config.plan, str) else None
        plans = plan_modules(_rules(runtime, model), runtime.layout, shapes, source)
    excluded = matching(config.reduce.exclude, params, "reduce.exclude")
    if config.mode != "auto":
        sparse_embedding.check(config, runtime.layout, model, plans)
        if config.optimizer.zero and runtime.layout.size(DATA_AXIS) > 1:
            sparse_embedding.check_whole(model, _whole(runtime, model, excluded))
    return _ResolvedPlan(
        plans=plans,
        recomputed=recompute.find(config.recompute, modules) if config.recompute else [],
        excluded=excluded,
    )


def _whole(runtime: Runtime, model: nn.Module, excluded: Collection[str]) -> set[Parameter]:
    """Return the parameters of `model` that optimizer parallel leaves whole."""
    small: set[Parameter] = _late("msrun.parallel.data_parallel.zero").small_parameters(
        runtime.config, model
    )
    return small | {param for name, param in model.named_parameters() if name in excluded}


def _rules(runtime: Runtime, model: nn.Module) -> list[PlanRule]:
    """Return the rules of the plan, for which a strategy file is read."""
    config, layout = runtime.config, runtime.layout
    if not isinstance(config.plan, str):
        return config.plan
    named = model.named_parameters(remove_duplicate=False)
    shapes = {name: param.shape for name, param in named}
    read = _late("msrun.parallel.checkpoint.strategy_file").read_strategy
    rules: list[PlanRule] = read(config.plan, layout, shapes)
    resolve(msgspec.structs.replace(config, plan=rules), layout.world_size)
    return rules


def shard_model(
    runtime: Runtime, model: nn.Module, sample: Sequence[Any] | None
) -> tuple[nn.Module, ShardedModel]:
    """Make `model` parallel, as `runtime.config` says, and return what is to be trained.

    Raises:
        UsageError: The configuration does not fit the model; then nothing was changed.
    """
    config = runtime.config
    resolved = _resolve_plan(runtime, model)
    if resolved.excluded and _is_on_meta(model):
        raise UsageError(f"{ROOT}.reduce.exclude: init_on_meta gives all ranks the same values")
    late = _late("msrun.parallel.deferred.fill") if _is_on_meta(model) else None
    weights = late.find(model) if late else None
    if late:
        late.move(model, runtime.device)
    else:
        model.to(runtime.device)
    originals = _Originals(model, is_strong=weights is not None)
    if runtime.world_size > 1:
        _equalize(model, resolved.excluded)
    if config.mode == "auto":
        applied = _late("msrun.parallel.auto.apply").apply(runtime, model, sample)
        model, references = applied.model, originals.references()
        if applied.config is None:
            nothing = contextlib.nullcontext
            return model, ShardedModel(model, references, [], nothing, **applied.options)
        with _under(runtime, applied.config):
            sharded = _make_parallel(runtime, model, _resolve_plan(runtime, model), originals)
        applied.finish()
        return model, sharded
    if config.pipeline:
        split = _late("msrun.parallel.pipeline.model").split_model
        axis = runtime.group(PIPELINE_AXIS)
        model = split(model, config.pipeline, axis, runtime.device, sample)
        weights = late.find(model) if late else None
    sharded = _make_parallel(runtime, model, resolved, originals, weights)
    if runtime.world_size > 1:
        _divide_random_streams(runtime)
    return model, sharded


@contextlib.contextmanager
def _under(runtime: Runtime, config: ParallelConfig) -> Iterator[None]:
    """Have the runtime do what `config` says instead of its own configuration."""
    before, runtime.config = runtime.config, config
    try:
        yield
    finally:
        runtime.config = before


def _make_parallel(
    runtime: Runtime,
    model: nn.Module,
    resolved: _ResolvedPlan,
    originals: _Originals,
    weights: Any = None,
) -> ShardedModel:
    """Divide what `model` computes and holds; `weights` fill one of `init_on_meta`."""
    config = runtime.config
    guard = _change_modules(runtime, model, resolved)
    divided = None
    if config.optimizer.zero and runtime.layout.size(DATA_AXIS) > 1:
        divided = _divide_parameters(runtime, model, resolved)
    if weights is not None:
        is_offloaded = divided is not None and config.optimizer.offload
        on_host = set(model.parameters()) - divided.whole if divided and is_offloaded else set()
        _late("msrun.parallel.deferred.fill").fill(model, weights, runtime.device, on_host)
    if guard:
        _late("msrun.parallel.tensor.hooks").watch(model)
    snapshot = _snapshot(runtime, model, divided)
    reductions = _reduce(runtime, model, resolved, divided, snapshot.check)
    return ShardedModel(
        model,
        originals.references(),
        reductions,
        guard.active_with_loss if guard else contextlib.nullcontext,
        microbatches=config.accumulate,
        is_pipeline=config.pipeline is not None,
        excluded=resolved.excluded,
        snapshot=snapshot if runtime.world_size > 1 else None,
        order=divided.order if divided else None,
    )


def _snapshot(runtime: Runtime, model: nn.Module, divided: _Divided | None) -> ParameterSnapshot:
    whole = None if divided is None else divided.whole
    named = model.named_parameters(remove_duplicate=False)
    gathered = {name for name, param in named if whole is not None and param not in whole}
    has_plan = bool(runtime.config.plan or runtime.config.pipeline)
    return ParameterSnapshot(model, gathered, can_thaw=not has_plan)


class _Originals:
    """The parameters of a model before anything is done to it.

    Args:
        model: The model.
        is_strong: Its parameters have no memory yet, and torch gives them some only while
            nothing refers to them weakly.
    """

    def __init__(self, model: nn.Module, *, is_strong: bool) -> None:
        self._strong = list(model.parameters()) if is_strong else []
        self._weak = [] if is_strong else [weakref.ref(param) for param in model.parameters()]

    def references(self) -> list[weakref.ref[Parameter]]:
        """Return weak references to all of them."""
        return self._weak or [weakref.ref(param) for param in self._strong]


def _is_on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _change_modules(runtime: Runtime, model: nn.Module, resolved: _ResolvedPlan) -> Guard | None:
    """Apply what stays within modules: operator plan, batch norms, recomputation."""
    config = runtime.config
    own = {name for name, _ in model.named_modules()}
    plans = {name: plan for name, plan in resolved.plans.items() if name in own}
    guard = _divide_operators(runtime, model, plans)
    if runtime.layout.size(DATA_AXIS) > 1 and config.batch_norm == "sync":
        batch_norm.synchronize(model, runtime.group(DATA_AXIS))
    inside: list[Context] = [guard.active] if guard else []
    if _is_dropout_exact(runtime):
        exact = _late("msrun.parallel.layers.dropout").ExactDropout(runtime)
        inside.insert(0, exact.active)
        if guard:
            guard.draw = exact.draw
        exact.apply(model)
    if config.recompute:
        recomputed = [name for name in resolved.recomputed if name in own]
        recompute.apply(model, recomputed, config.recompute.save, partial(_all_of, inside))
        if config.pipeline:
            model.keeps_results = bool(config.recompute.save)  # type: ignore[assignment]
    return guard


def _is_dropout_exact(runtime: Runtime) -> bool:
    return runtime.config.dropout == "exact" and runtime.layout.size(DATA_AXIS) > 1


@contextlib.contextmanager
def _all_of(contexts: Sequence[Context]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def _divide_operators(
    runtime: Runtime, model: nn.Module, plans: Mapping[str, ModulePlan]
) -> Guard | None:
    """Apply the operator plan; return what guards the model, None where nothing is divided."""
    axes = plan_axes(runtime.layout)
    if not plans or math.prod(map(runtime.layout.size, axes)) == 1:
        return None
    guard: Guard = _late("msrun.parallel.tensor.hooks").apply(model, plans, runtime.root_mesh[axes])
    return guard


class _Divided(msgspec.Struct, frozen=True):
    """What optimizer parallel did.

    Args:
        model: The model, which is a module of `fully_shard` now.
        whole: Parameters that it left whole.
        order: In which ranks gather the others.
    """

    model: Any
    whole: set[Parameter]
    order: CollectiveOrder


def _divide_parameters(runtime: Runtime, model: nn.Module, resolved: _ResolvedPlan) -> _Divided:
    zero = _late("msrun.parallel.data_parallel.zero")
    whole = _whole(runtime, model, resolved.excluded)
    units = zero.units(runtime.config, model, resolved.plans)
    module = zero.apply(runtime, model, units, whole)
    watch = _late("msrun.parallel.data_parallel.collective_order").CollectiveOrder
    level = runtime.config.optimizer.zero
    order = watch(module, runtime.group(DATA_AXIS), runtime.device, level=level)
    divided = _Divided(module, whole, order)
    if runtime.config.pipeline:
        model.reduces_once = runtime.config.optimizer.zero == 1  # type: ignore[assignment]
    return divided


def _reduce(
    runtime: Runtime,
    model: nn.Module,
    resolved: _ResolvedPlan,
    divided: _Divided | None,
    check: Callable[[], None],
) -> list[Reduction]:
    """See to the sum of gradients over data-parallel ranks."""
    if runtime.layout.size(DATA_AXIS) == 1:
        return []
    config, group = runtime.config, runtime.group(DATA_AXIS)
    params = [
        (name, param)
        for name, param in model.named_parameters()
        if param.requires_grad and name not in resolved.excluded
    ]
    reductions: list[Reduction] = []
    if divided is not None:
        zero, level = _late("msrun.parallel.data_parallel.zero"), config.optimizer.zero
        reductions.append(
            Reduction(
                partial(zero.paused, divided.model, level),
                partial(zero.reduce, divided.model, level),
            )
        )
        params = [(name, param) for name, param in params if param in divided.whole]
    if params:
        dtype = None if config.reduce.dtype is None else getattr(torch, config.reduce.dtype)
        buckets = fill_buckets(params, config.reduce.fuse, dtype, sparse_embedding.sparse(model))
        scale = 1.0 if config.reduce.op == "sum" else 1.0 / group.size()
        reducer = GradientReducer(buckets, group, scale=scale, check=check)
        reductions.append(Reduction(reducer.paused, reducer.reduce, reducer.completed))
    return reductions


def _late(name: str) -> Any:
    """Return a module that imports `torch.distributed.tensor`, which takes a second."""
    return importlib.import_module(name)


@torch.no_grad()
def _equalize(model: nn.Module, excluded: set[str]) -> None:
    """Give every rank the parameters and buffers of rank 0, but the `excluded` parameters."""
    params = [param for name, param in model.named_parameters() if name not in excluded]
    tensors = [tensor for tensor in (*params, *model.buffers()) if not tensor.is_meta]
    for run in _runs(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in run])
        dist.broadcast(flat, src=0)
        parts = flat.split([tensor.numel() for tensor in run])
        for tensor, part in zip(run, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _runs(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `tensors` in runs of one type that are worth one message."""
    run: list[Tensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda t: str(t.dtype)):
        if run and (tensor.dtype != run[0].dtype or size + tensor.nbytes > _BROADCAST_BYTES):
            yield run
            run, size = [], 0
        run.append(tensor)
        size += tensor.nbytes
    if run:
        yield run


def _divide_random_streams(runtime: Runtime) -> None:
    """Let ranks that see the same samples in the same layers draw the same numbers, others others.

    The first goes on with the stream of rank 0, as one process would.
    """
    own = [torch.get_rng_state(), torch.tensor([torch.initial_seed()], dtype=torch.uint64)]
    states = own if runtime.device.type == "cpu" else [*own, _device_state(runtime)]
    for state in states:
        there = state.view(torch.uint8).to(runtime.device)
        dist.broadcast(there, src=0)
        state.view(torch.uint8).copy_(there)
    if runtime.stream:
        torch.manual_seed((int(states[1].item()) + runtime.stream * _GOLDEN) % 2**63)
    else:
        torch.set_rng_state(states[0])
        if runtime.device.type != "cpu":
            getattr(torch, runtime.device.type).set_rng_state(states[2])


def _device_state(runtime: Runtime) -> Tensor:
    state: Tensor = getattr(torch, runtime.device.type).get_rng_state()
    return state
