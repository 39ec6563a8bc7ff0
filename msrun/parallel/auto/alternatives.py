"""Divisions of the whole model in `mode: auto`: found beside a plan, and run by the runtime.

`search.alternatives` says which there are and what they cost.  The runtime runs one by its
configuration, as if the user had written it, so nothing here computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from msrun.errors import ModelError
from msrun.parallel.auto.tracing.trace import Traced
from msrun.parallel.config import ParallelConfig
from msrun.parallel.search.alternatives.chosen import AlternativeJob, Alternatives, Chosen
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.graph.unsupported_ops import check
from msrun.parallel.search.mesh_choice import MeshRequest
from msrun.parallel.search.plan.lowering import Modules
from msrun.parallel.search.plan.plan import MODULES_VERSION, SavedPlan
from msrun.parallel.search.plan.plan_io import identity
from msrun.parallel.search.solve.problem import Setting


def in_mesh(
    config: ParallelConfig,
    axes: dict[str, int],
    traced: Traced,
    setting: Setting,
    local: Callable[[], Program],
) -> Alternatives:
    """Return what looks at alternatives on a mesh that is named.

    Args:
        config: `mode: auto`.
        axes: Of the mesh.
        traced: The model with the samples of all ranks.
        setting: What the plan is for.
        local: Returns its program for the samples of one rank.
    """
    number = max(1, round(setting.rounds))
    job = AlternativeJob(
        topology=setting.topology,
        world=math.prod(axes.values()),
        batch=setting.batch * number,
        limit=None if config.memory is None else float(config.memory),
        mesh=axes,
        microbatches=number,
    )

    def program(samples: int) -> Program:
        return traced.program if samples == setting.batch else local()

    return alternatives_to(config, job, lambda: traced, program)


def in_any_mesh(config: ParallelConfig, request: MeshRequest, traced: Traced) -> Alternatives:
    """Return what looks at alternatives on every mesh of all ranks; see `in_mesh`."""
    job = AlternativeJob(
        topology=request.topology, world=request.world, batch=request.batch, limit=request.limit
    )
    return alternatives_to(config, job, lambda: traced, request.programs.at)


def alternatives_to(
    config: ParallelConfig | None,
    job: AlternativeJob,
    traced: Callable[[], Traced],
    program: Callable[[int], Program],
) -> Alternatives:
    """Return what looks at the alternatives to the plan of a model.

    Args:
        config: `mode: auto`; None outside of a job.
        job: What the model is for.
        traced: Returns the model.
        program: Returns its program for a number of samples.
    """

    def look() -> tuple[Modules, str]:
        refused = ""
        if config is not None and config.decided:
            refused = f"{config.decided[0]} of the user is kept by plans alone"
        try:
            check(traced().program)
        except ModelError as error:
            refused = error.message
        return traced().modules, refused

    return Alternatives(job, look, program)


def saved_beside(
    find: Callable[[], SavedPlan],
    target: str,
    job: AlternativeJob,
    traced: Callable[[], Traced],
    program: Callable[[int], Program],
) -> SavedPlan:
    """Return the plan of `msrun search`, or a division of the whole model that is better.

    Args:
        find: Returns the plan.
        target: The model.
        job: What both are for.
        traced: Returns the model.
        program: Returns its program for a number of samples.

    Raises:
        OutOfMemoryError: Nothing fits.
    """
    plan, other = alternatives_to(None, job, traced, program).beside(find)
    if plan is None:
        return _saved(program(job.batch), other, target, job)
    return msgspec.structs.replace(plan, rejected=[*other.notes, *plan.rejected])


def _saved(program: Program, other: Chosen, target: str, job: AlternativeJob) -> SavedPlan:
    """Return an alternative as a plan is saved."""
    one = other.alternative
    if one is None:
        raise ValueError("there is no alternative to save")
    whole = ["R"] * len(one.mesh)
    return SavedPlan(
        version=MODULES_VERSION,
        model=target,
        program=identity(program),
        topology=job.topology.name,
        world=math.prod(one.mesh.values()),
        mesh=one.mesh,
        stages=1,
        microbatches=one.microbatches,
        batch=job.batch,
        recompute=False,
        seconds=one.seconds,
        costs=one.costs,
        memory=one.memory,
        gap=None,
        limit=job.limit,
        params={full: one.params.get(full, whole) for full in program.params.values()},
        operators={},
        runs_on=one.name,
        config=one.config,
        rejected=other.notes,
    )
