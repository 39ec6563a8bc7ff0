"""A saved plan in a job: read on the first rank, if it is for the job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msrun.errors import ConfigError, UsageError
from msrun.parallel.auto.agreed import PlanBroadcast
from msrun.parallel.auto.modules import mesh_of
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.rank_context import Rank, RankContext
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.plan.plan import read_plan
from msrun.parallel.search.plan.plan_io import check_fit, check_model

_PLAN = f"{ROOT}.plan"


def microbatches_of(config: ParallelConfig) -> int:
    """Return into how many micro-batches a step divides a local batch."""
    return config.pipeline.microbatches if config.pipeline else config.accumulate


def read_saved(
    config: ParallelConfig, rank: Rank, path: str, program: Callable[[], Program], *, batch: int
) -> PlanBroadcast:
    """Return a saved plan, if it is for this job."""
    try:
        plan = read_plan(Path(path))
        mesh = mesh_of(rank.layout) if isinstance(rank, RankContext) else plan.axes()
        world, ranks = rank.world_size, config.rank_list
        check_fit(plan, path, world=world, mesh=mesh, batch=batch, ranks=ranks)
    except UsageError as error:
        raise ConfigError(f"{_PLAN}: {error.message}", hint=error.hint) from None
    if plan.config:
        check_model(plan, f"{_PLAN}: {path}", program())
        return PlanBroadcast(modules=plan.config | {"mesh": mesh}, name=plan.runs_on)
    if microbatches_of(config) not in (1, plan.microbatches):
        key = "pipeline.microbatches" if config.pipeline else "accumulate"
        raise ConfigError(
            f"{_PLAN}: {path} is for {plan.microbatches} micro-batches, "
            f"and {ROOT}.{key} is {microbatches_of(config)}"
        )
    return PlanBroadcast(
        mesh=mesh, microbatches=plan.microbatches, recompute=plan.recompute, plan=plan
    )
