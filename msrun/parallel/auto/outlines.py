"""The search for a model whose experts are a list, of which no trace can follow the loop.

No plan of operators is found for it, since an executor would need the trace.  What needs none is
compared: data parallelism, ZeRO, and experts on ranks of their own.  The runtime runs them around
the forward as it is.  Their seconds and bytes come from an outline of the model
(`experts.outline`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import ConfigError, ModelError
from msrun.parallel.auto.agreed import PlanBroadcast, agreed
from msrun.parallel.auto.modules import mesh_of, only
from msrun.parallel.auto.named_modules import topology_of
from msrun.parallel.auto.offline_model import SIZES, resized
from msrun.parallel.auto.plan_file import read_saved
from msrun.parallel.auto.tracing.structure import mapped
from msrun.parallel.auto.tracing.trace import Traced, trace
from msrun.parallel.config import PIPELINE_AXIS, ROOT, ParallelConfig
from msrun.parallel.experts.outline import listed_experts, outlined
from msrun.parallel.rank_context import Rank, RankContext
from msrun.parallel.search.modules.job import ModuleJob, ModuleSearch
from msrun.parallel.search.solve.modes import MODES


def outline_of(model: nn.Module, sample: Sequence[Any]) -> nn.Module | None:
    """Return a copy of `model` that can be followed, if the model itself cannot for its experts.

    Args:
        model: With values or without.
        sample: Inputs of any batch.
    """
    net = outlined(model, resized(sample, SIZES[0]))
    if net is None:
        return None
    try:
        trace(model, resized(sample, SIZES[0]))
    except ModelError:
        return net
    return None


def trace_outline(net: nn.Module, sample: Sequence[Any]) -> Traced:
    """Return the forward pass of an outline on a batch such as `sample`."""
    with torch.device("meta"):
        return trace(net, mapped(list(sample), _on_meta))


def _on_meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf


def find_technique(
    config: ParallelConfig,
    rank: Rank,
    net: nn.Module,
    sample: Sequence[Any],
    *,
    modules: ModuleSearch,
    batch: int,
) -> PlanBroadcast:
    """Return the technique for a model of which `net` is an outline, on every rank.

    Args:
        config: `mode: auto`.
        rank: This rank; a `RankContext` unless `mesh: auto`.
        net: The outline.
        sample: Inputs of any batch.
        modules: Techniques of the outline.
        batch: Samples of a step.

    Raises:
        ConfigError: None is found or fits, or the configuration asks for a plan of operators.
    """
    find: Callable[[], PlanBroadcast]
    find = partial(_fastest, config, rank, net, sample, modules=modules, batch=batch)
    if isinstance(config.plan, str):
        small = resized(sample, SIZES[0])
        program = lambda: trace_outline(net, small).program  # noqa: E731 - called by one rank
        find = partial(read_saved, config, rank, config.plan, program, batch=batch)
    answer = agreed(find, rank)
    if not answer.modules:
        raise refused(f"{ROOT}.plan", net)
    return answer


def _fastest(
    config: ParallelConfig,
    rank: Rank,
    net: nn.Module,
    sample: Sequence[Any],
    *,
    modules: ModuleSearch,
    batch: int,
) -> PlanBroadcast:
    """Return the fastest technique that fits; as of `find_technique`."""
    mesh = mesh_of(rank.layout) if isinstance(rank, RankContext) else {}
    others = {
        f"mesh.{PIPELINE_AXIS}": mesh.get(PIPELINE_AXIS, 1) > 1,
        "pipeline": config.pipeline is not None,
        "plan": bool(config.plan),
        "search": MODES[config.search or "exact"] == "propagation",
    }
    if other := next((key for key, is_given in others.items() if is_given), ""):
        raise refused(f"{ROOT}.{other}", net)
    job = ModuleJob(
        program=lambda samples: trace_outline(net, resized(sample, samples)).program,
        topology=topology_of(config, rank),
        world=rank.world_size,
        batch=batch,
        limit=None if config.memory is None else float(config.memory),
        mesh=mesh,
    )
    best, lines = only(modules, job)
    rank.print("\n".join(f"{ROOT}.mode: auto: {line}" for line in lines))
    return PlanBroadcast(modules=best.config, name=best.name)


def refused(key: str, net: nn.Module) -> ConfigError:
    """Return the error of a key that asks for a plan of operators, of which an outline has none."""
    return ConfigError(
        f"{key}: the experts {next(iter(listed_experts(net)))} are a list, and the search places "
        "no operators around a loop that picks rows by their values",
        hint=f"leave {key.rpartition('.')[2].lstrip('-')} out, or choose semi_auto, with a rule of "
        "style experts",
    )
