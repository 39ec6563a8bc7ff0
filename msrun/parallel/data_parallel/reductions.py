"""Which parameters are sharded over data-parallel ranks, and which gradients are reduced where.

Parameters are of three kinds.  ZeRO shards most, and `fully_shard` reduces their gradients.
Replicated ones are reduced over `dp`.  Experts of `style: experts` over `ep` are in `dp` / `ep`
copies: their gradients have the tokens of all ranks of `ep` already, and only copies are reduced,
by ZeRO or as replicated ones.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from msrun.parallel import torch_compat
from msrun.parallel.config import DATA_AXIS, ParallelConfig
from msrun.parallel.data_parallel import sparse_embedding
from msrun.parallel.data_parallel.reducer import GradientReducer, fill_buckets
from msrun.parallel.layout import EXPERT_COPIES
from msrun.parallel.local import takes_gradients
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.rank_context import RankContext
from msrun.parallel.tensor.plan import ModulePlan
from msrun.parallel.uneven_rows.rows import rows_of

# `torch.distributed.fsdp` takes a second to import: only where the configuration needs it.
if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from msrun.parallel.data_parallel.collective_order import CollectiveOrder

_Named = list[tuple[str, Parameter]]


Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Reduction(msgspec.Struct, frozen=True):
    """One way to reduce gradients over data-parallel ranks.

    Args:
        paused: Context in which gradients accumulate on this rank instead.
        reduce: Reduces gradients that accumulated while paused.
        completed: Context of one backward pass; gradients are reduced at its end, even if the
            backward pass reached no parameter of this rank.
        forget_raised: Forgets a backward pass that raised; called before each forward pass.
    """

    paused: Context
    reduce: Callable[[], None]
    completed: Context = contextlib.nullcontext
    forget_raised: Callable[[], None] = lambda: None


class Zero(NamedTuple):
    """A model under optimizer parallel.

    Args:
        model: The model, which `fully_shard` has made an `FSDPModule`.
        replicated: Parameters that it does not shard.
        order: Compares the order in which ranks gather the other parameters.
    """

    model: FSDPModule
    replicated: set[Parameter]
    order: CollectiveOrder


class Checks(NamedTuple):
    """What a reduction calls.

    Args:
        model: Raises if the model has other parameters by now.
        hooks: Raises if hooks of the script see gradients before they are reduced.
    """

    model: Callable[[], None]
    hooks: Callable[[], None]


def is_sharding(config: ParallelConfig, layout: MeshLayout) -> bool:
    """Return whether optimizer parallel shards: over ranks, or for its type or the host on one."""
    settings, degree = config.optimizer, layout.size(DATA_AXIS)
    has_use = bool(settings.offload) or settings.dtype is not None
    is_for_one = DATA_AXIS in layout.axes and has_use
    return settings.zero > 0 and (degree > 1 or is_for_one)


def small_or_excluded(
    config: ParallelConfig, model: nn.Module, excluded: Collection[str]
) -> set[Parameter]:
    """Return the parameters of `model` that optimizer parallel leaves replicated in any case."""
    from msrun.parallel.data_parallel.zero import small_parameters

    named = model.named_parameters()
    return small_parameters(config, model) | {param for name, param in named if name in excluded}


def shard_parameters(
    config: ParallelConfig,
    context: RankContext,
    model: nn.Module,
    plans: Mapping[str, ModulePlan],
    *,
    excluded: Collection[str],
    experts: Sequence[nn.Module],
    on_host: Collection[Parameter] = (),
) -> Zero:
    """Shard the parameters of `model` over the data-parallel ranks.

    Args:
        config: The configuration.
        context: This rank.
        model: The model, or this rank's stage of it.
        plans: Module -> its operator plan, of all modules of the model.
        excluded: Names of parameters that are not reduced.
        experts: Modules whose experts ranks share.
        on_host: Parameters that stay whole, on the host.
    """
    from msrun.parallel.data_parallel import zero, zero_errors
    from msrun.parallel.data_parallel.collective_order import CollectiveOrder
    from msrun.parallel.data_parallel.gathered.parts_alone import gather_for_parts

    replicated = small_or_excluded(config, model, excluded)
    units = zero.units(config, model, plans)
    modules = dict(model.named_modules())
    own = {name: plan for name, plan in plans.items() if name in modules}
    replicated |= zero.packed_parameters(config, model, own)
    replicated |= {param for param in model.parameters() if rows_of(param)} | {*on_host}
    of_experts = _parameters_of(experts)
    replicated |= zero.rare_types(config, model, units, replicated | of_experts)
    if _copies(context) == 1:
        replicated |= of_experts
        experts = ()
    module = zero.apply(config, context, model, units, replicated, experts=experts)
    level = config.optimizer.zero
    zero_errors.name_errors_of(model, level)
    order = CollectiveOrder(module, context.group(DATA_AXIS), context.device, level=level)
    if config.pipeline:
        model.reduces_once = level == 1  # type: ignore[assignment]
        order.fills = model.joined_inputs  # type: ignore[assignment]
        torch_compat.watch_joined_inputs(module, order.fills.watch)
    else:
        torch_compat.watch_joined_inputs(module, order.joins.watch)
        if not config.compile:
            gather_for_parts(model)
    return Zero(module, replicated, order)


def find(
    config: ParallelConfig,
    context: RankContext,
    model: nn.Module,
    zero: Zero | None,
    checks: Checks,
    *,
    excluded: Collection[str],
    experts: Sequence[nn.Module],
) -> list[Reduction]:
    """Return the reductions over data-parallel ranks: of ZeRO, of replicated ones, of experts."""
    if context.layout.size(DATA_AXIS) == 1 and zero is None:
        return []
    params = [
        (name, param)
        for name, param in model.named_parameters()
        if takes_gradients(param) and name not in excluded
    ]
    found: list[Reduction] = []
    if zero is not None:
        found.append(_of_zero(zero.model, model, config.optimizer.zero))
        params = [(name, param) for name, param in params if param in zero.replicated]
    if context.layout.size(DATA_AXIS) == 1:
        return found
    of_experts = _parameters_of(experts)
    shared = [(name, param) for name, param in params if param in of_experts]
    params = [(name, param) for name, param in params if param not in of_experts]
    reduction = partial(
        _reduction, config, context.device, checks=checks, tables=sparse_embedding.sparse(model)
    )
    if params:
        found.append(reduction(params, context.group(DATA_AXIS)))
    if shared and _copies(context) > 1:
        found.append(reduction(shared, context.root_mesh.get_group(EXPERT_COPIES)))
    return found


def _of_zero(sharded: FSDPModule, model: nn.Module, level: int) -> Reduction:
    """Return the reduction of ZeRO, which does not keep its model alive.

    The runtime maps the model to what has this reduction.
    """
    from msrun.parallel.data_parallel.zero import forget_raised, paused, reduce

    own, whole = weakref.ref(sharded), weakref.ref(model)
    return Reduction(
        lambda: paused(cast("FSDPModule", own()), level),
        lambda: reduce(cast("nn.Module", whole()), level),
        forget_raised=lambda: forget_raised(cast("FSDPModule", own())),
    )


def _reduction(
    config: ParallelConfig,
    device: torch.device,
    params: _Named,
    group: dist.ProcessGroup,
    *,
    checks: Checks,
    tables: Collection[Tensor],
) -> Reduction:
    dtype = None if config.reduce.dtype is None else getattr(torch, config.reduce.dtype)
    reducer = GradientReducer(
        params,
        partial(fill_buckets, fuse=config.reduce.fuse, dtype=dtype, tables=tables),
        group,
        device,
        scale=1.0 if config.reduce.op == "sum" else 1.0 / group.size(),
        check=checks.model,
        check_hooks=checks.hooks,
    )
    return Reduction(reducer.paused, reducer.reduce, reducer.completed, reducer.forget_raised)


def _parameters_of(experts: Sequence[nn.Module]) -> set[Parameter]:
    return {param for module in experts for param in module.parameters(recurse=False)}


def _copies(context: RankContext) -> int:
    """Return how many ranks have the same experts; all data-parallel ranks without an axis."""
    return context.layout.size(DATA_AXIS) // max(context.layout.ep, 1)
