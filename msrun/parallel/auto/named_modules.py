"""The search on a mesh that names an axis for experts or sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from torch import nn

from msrun.errors import ConfigError, UsageError
from msrun.parallel.auto.agreed import PlanBroadcast
from msrun.parallel.auto.modules import faster, mesh_of, only
from msrun.parallel.auto.offline_model import resized
from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.config import PIPELINE_AXIS, ROOT, ParallelConfig
from msrun.parallel.rank_context import Rank, RankContext
from msrun.parallel.search.cost.topology import Topology, find_topology, ordered
from msrun.parallel.search.modules.job import ModuleJob, ModuleSearch, SharedModules

_PRESETS = {"cuda": "a100", "npu": "ascend910", "cpu": "cpu"}


def topology_of(config: ParallelConfig, rank: Rank) -> Topology:
    """Return the configured topology, or the preset of this kind of device, for ranks in order."""
    try:
        found = find_topology(config.topology or _PRESETS.get(rank.device.type, "a100"))
    except UsageError as error:
        raise ConfigError(f"{ROOT}.{error.message}") from None
    return ordered(found, _by_stages(rank) if isinstance(rank, RankContext) else config.rank_list)


def _by_stages(context: RankContext) -> list[int]:
    """Return the ranks in the order of their positions, those of the first stage first.

    A plan is for the mesh of a stage, whose ranks are neighbours then.
    """
    layout = context.layout
    if not layout.ranks:
        return []
    by_number = msgspec.structs.replace(layout, ranks=())
    stages = [by_number.coordinate(at).get(PIPELINE_AXIS, 0) for at in range(layout.world_size)]
    return [layout.ranks[at] for at in sorted(range(layout.world_size), key=stages.__getitem__)]


def beside(
    config: ParallelConfig,
    context: RankContext,
    model: nn.Module,
    sample: Sequence[Any],
    find: Callable[[], PlanBroadcast],
    *,
    modules: Callable[[], ModuleSearch],
    batch: int,
) -> PlanBroadcast:
    """Return the faster of the plan of `find` and the techniques whose axis the mesh names."""
    job = ModuleJob(
        program=lambda samples: trace(model, resized(sample, samples)).program,
        topology=topology_of(config, context),
        world=context.world_size,
        batch=batch,
        limit=None if config.memory is None else float(config.memory),
        mesh=mesh_of(context.layout),
    )
    best: PlanBroadcast | SharedModules
    if context.layout.ep > 1:
        best, lines = only(modules(), job)
    else:
        best, lines = faster(find, modules(), job)
    context.print("\n".join(f"{ROOT}.mode: auto: {line}" for line in lines))
    return PlanBroadcast(modules=best.config) if isinstance(best, SharedModules) else best
