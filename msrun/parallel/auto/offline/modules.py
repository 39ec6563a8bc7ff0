"""A saved plan in place of which a technique of whole modules is faster, or that fits alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from msrun.parallel.auto.modules import faster, only
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS
from msrun.parallel.search.modules.job import ModuleJob, ModuleSearch, SharedModules
from msrun.parallel.search.plan.cost_breakdown import sorted_costs
from msrun.parallel.search.plan.plan import MODULES_VERSION, SavedPlan
from msrun.parallel.search.plan.plan_io import identity

_GIB = 2**30


def with_modules(
    find: Callable[[], SavedPlan] | None, target: str, modules: ModuleSearch, job: ModuleJob
) -> SavedPlan:
    """Return the plan of operators, or the technique that is faster or fits alone.

    Args:
        find: Returns the plan of operators; None where there is none.
        target: The model.
        modules: Techniques of the model.
        job: What both are for.

    Raises:
        OutOfMemoryError: Nothing fits.
        UsageError: The mesh names experts, and the model has none to share.
    """
    if find is None or job.mesh.get(EXPERT_AXIS, 1) > 1:
        return _saved(target, *only(modules, job), job)
    beside: list[str] = []

    def noted() -> SavedPlan:
        plan = find()
        mesh = " x ".join(f"{name} {size}" for name, size in plan.axes().items())
        beside.append(
            f"plan of operators on {mesh}: {plan.seconds:.4g} s, {plan.memory / _GIB:.3g} GiB"
        )
        return plan

    found, lines = faster(noted, modules, job)
    if isinstance(found, SavedPlan):
        return msgspec.structs.replace(found, rejected=[*lines, *found.rejected])
    return _saved(target, found, [*beside, *lines], job)


def _saved(target: str, found: SharedModules, lines: Sequence[str], job: ModuleJob) -> SavedPlan:
    rejected = [line for line in lines if not line.startswith(f"{found.name}:")]
    return SavedPlan(
        version=MODULES_VERSION,
        model=target,
        program=identity(job.program(job.batch)),
        topology=job.topology.name,
        world=job.world,
        mesh=found.mesh,
        stages=1,
        microbatches=1,
        batch=job.batch,
        recompute=found.recompute,
        seconds=found.seconds,
        costs=sorted_costs(found.costs),
        memory=found.memory,
        limit=job.limit,
        gap=None,
        params={},
        operators={},
        runs_on=found.name,
        config=found.config,
        rejected=rejected,
    )
