"""`msrun search`: from a file that makes a model to a plan for any cluster, on one laptop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from torch import nn

from msrun.errors import ModelError, UsageError
from msrun.parallel.auto.alternatives import saved_beside
from msrun.parallel.auto.offline.modules import with_modules
from msrun.parallel.auto.offline_model import SIZES, batch_of, make, resized
from msrun.parallel.auto.outlines import outline_of, refused, trace_outline
from msrun.parallel.auto.tracing.calls import positional
from msrun.parallel.auto.tracing.trace import Traced, trace
from msrun.parallel.auto.wishes import pins_of_file
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS
from msrun.parallel.search.alternatives.chosen import AlternativeJob
from msrun.parallel.search.cost.topology import Topology
from msrun.parallel.search.graph.operators import rules_of_steps
from msrun.parallel.search.graph.program import Program, ProgramByBatch
from msrun.parallel.search.graph.repeat import Blocks, find_blocks, shortened
from msrun.parallel.search.graph.unsupported_ops import check
from msrun.parallel.search.mesh.job_layout import JobLayout, SearchedJob, layouts
from msrun.parallel.search.mesh.layout_solver import Outcome
from msrun.parallel.search.mesh.mesh_search import Progress, explore
from msrun.parallel.search.modules.job import ModuleJob, ModuleSearch
from msrun.parallel.search.plan.cost_breakdown import (
    CostBreakdown,
    axis_names,
    expanded,
    operators,
    parameters,
    rules_of,
    sorted_costs,
    stage_costs,
)
from msrun.parallel.search.plan.lowering import EXECUTOR, Modules, Planned, runs_on
from msrun.parallel.search.plan.plan import VERSION, SavedPlan
from msrun.parallel.search.plan.plan_io import identity, shared
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.memory import OutOfMemoryError
from msrun.parallel.search.solve.modes import (
    EXACT_AXES_MAX,
    BlockNodes,
    Mode,
    SearchResult,
    indices,
    search,
)
from msrun.parallel.search.solve.problem import Setting, layout_node, layout_nodes

_GIB = 2**30


class SearchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The model, cluster and constraints that `msrun search` is given.

    Args:
        target: `FILE:FUNCTION` or `MODULE:FUNCTION`, which returns a model and a sample of inputs.
        world: Ranks.
        batch: Samples of a step; None takes those of the model's sample.
        memory: Bytes of a rank; None takes the topology's.
        topology: What it runs on.
        mesh: Axis -> size, in order; empty to find it too.
        mode: How plans are searched.
        budget: Seconds after which the best so far is taken, if there is one.
        rules: YAML file with the rules that a plan keeps; None has none.
    """

    target: str
    world: int
    batch: int | None
    memory: float | None
    topology: Topology
    mesh: dict[str, int] = {}
    mode: Mode = "exact"
    budget: float = 30.0
    rules: str | None = None


class _Traced(NamedTuple):
    """The program of a model for any batch, its blocks, the names of their nodes, its modules.

    Also what must not be cut, if there is something.
    """

    programs: ProgramByBatch
    blocks: Blocks
    names: BlockNodes
    modules: Modules
    of_whole: str


def search_model(
    request: SearchRequest,
    *,
    clock: Callable[[], float],
    report: Callable[[str], None],
    modules: Callable[[nn.Module, Sequence[Any]], ModuleSearch] | None = None,
) -> SavedPlan:
    """Return the best plan for a request.

    Args:
        request: The model, the cluster and the constraints.
        clock: Returns seconds.
        report: Called with a line of progress at each better plan.
        modules: Returns what compares techniques that divide whole modules; None compares none.

    Raises:
        UsageError: The model cannot be made or traced, or no plan fits.
    """
    model, sample = make(request.target)
    batch = request.batch or batch_of(sample)
    _check_mesh(request)
    if len(sample) == 1 and isinstance(sample[0], Mapping):
        sample = [*positional(model, sample[0])]
    net = outline_of(model, sample) if modules else None
    if net is not None:
        _check_of_lists(request, net)
    model, follow = (net, trace_outline) if net else (model, trace)
    traced = functools.cache(lambda: [follow(model, resized(sample, n)) for n in SIZES])
    limit = request.memory or request.topology.memory

    def find_plan() -> SavedPlan:
        if request.mesh and request.mesh.get(PIPELINE_AXIS, 1) == 1:
            return _on_mesh(request, model, sample, batch)
        return _on_any_mesh(request, traced(), batch, clock=clock, report=report)

    find = partial(_beside, request, batch, traced, find_plan)

    job = ModuleJob(
        program=lambda samples: _by_batch(traced()).at(samples),
        topology=request.topology,
        world=request.world,
        batch=batch,
        limit=limit,
        mesh=request.mesh,
    )
    try:
        return (
            find()
            if modules is None
            else with_modules(None if net else find, request.target, modules(model, sample), job)
        )
    except OutOfMemoryError as error:
        raise _too_little(limit, error.least, request.world) from None


def _check_of_lists(request: SearchRequest, net: nn.Module) -> None:
    """Refuse what asks for a plan of operators, where an outline of the model is all there is."""
    others = {
        f"--mesh {PIPELINE_AXIS}": request.mesh.get(PIPELINE_AXIS, 1) > 1,
        "--rules": request.rules is not None,
        "--mode": request.mode != "exact",
    }
    if other := next((key for key, is_given in others.items() if is_given), ""):
        raise refused(other, net)


def _beside(
    request: SearchRequest,
    batch: int,
    traced: Callable[[], Sequence[Traced]],
    find: Callable[[], SavedPlan],
) -> SavedPlan:
    """Return the plan that `find` finds, or a division of the whole model that is better."""
    if request.rules or request.mesh.get(PIPELINE_AXIS, 1) > 1:
        return find()
    job = AlternativeJob(
        topology=request.topology,
        world=request.world,
        batch=batch,
        limit=request.memory or request.topology.memory,
        mesh=_axes(request),
        microbatches=1 if request.mesh else None,
    )
    programs = functools.cache(lambda: _by_batch(traced()))
    return saved_beside(
        find, request.target, job, lambda: traced()[0], lambda samples: programs().at(samples)
    )


def _by_batch(traced: Sequence[Traced]) -> ProgramByBatch:
    small, large = (one.program for one in traced)
    return ProgramByBatch(small, large, SIZES)


def _on_any_mesh(
    request: SearchRequest,
    traced: Sequence[Traced],
    batch: int,
    *,
    clock: Callable[[], float],
    report: Callable[[str], None],
) -> SavedPlan:
    """Return the best plan on any mesh, or on one with stages."""
    stages = request.mesh.get(PIPELINE_AXIS, 1)
    small, large = (one.program for one in traced)
    _check_runs(traced[0])
    if stages > 1 and traced[0].of_whole_batch:
        raise UsageError(
            f"--mesh {PIPELINE_AXIS}={stages}: the model has {traced[0].of_whole_batch}, of which "
            "micro-batches and stages would make another one than a whole batch",
            hint=f"leave {PIPELINE_AXIS} out of --mesh",
        )
    blocks = find_blocks(small)
    if blocks is None:
        raise UsageError(
            f"{request.target}: the model has no three equal blocks in a row, which "
            "a search for a mesh needs",
            hint="name a mesh without stages, such as --mesh dp=4,tp=2",
        )
    if blocks.count % stages:
        raise UsageError(
            f"--mesh {PIPELINE_AXIS}={stages} does not divide the {blocks.count} equal blocks of "
            "the model"
        )
    short, two = shortened(small, blocks)
    programs = ProgramByBatch(short, shortened(large, blocks)[0], SIZES)
    job = _job(request, programs, two, blocks.count, batch)
    job = msgspec.structs.replace(job, is_whole=bool(traced[0].of_whole_batch))
    progress = _within(explore(job), request.budget, clock, report)
    if progress.best is None:
        raise OutOfMemoryError(progress.least or math.inf)
    whole = _Traced(
        ProgramByBatch(small, large, SIZES),
        blocks,
        BlockNodes(small, short, blocks),
        traced[0].modules,
        traced[0].of_whole_batch,
    )
    return _saved(request, job, progress, whole)


def _job(
    request: SearchRequest, programs: ProgramByBatch, two: Blocks, count: int, batch: int
) -> SearchedJob:
    """Return the job whose layouts are searched.

    Raises:
        UsageError: The batch does not divide on the mesh that the request names.
    """
    axes, stages = _axes(request), request.mesh.get(PIPELINE_AXIS, 1)
    job = SearchedJob(
        programs=programs,
        blocks=two,
        count=count,
        topology=request.topology,
        world=request.world,
        batch=batch,
        limit=request.memory or request.topology.memory,
        named=(stages, tuple(axes.values())) if axes else None,
        data_axes=_data_axes(axes),
    )
    if job.named and not layouts(job, *job.named):
        raise UsageError(
            f"--batch {batch} has no {stages} or more equal micro-batches that axis {DATA_AXIS} "
            "divides"
        )
    return job


def _within(
    steps: Iterator[Progress],
    budget: float,
    clock: Callable[[], float],
    report: Callable[[str], None],
) -> Progress:
    """Run a search to its end; once there is a plan, until its budget is spent or an interrupt."""
    start = clock()
    progress = Progress()
    best: Outcome | None = None
    try:
        for progress in steps:
            if progress.best is not best and progress.best:
                best = progress.best
                report(f"{clock() - start:.1f} s: {best.seconds:.4g} s a step, {_layout(best)}")
            if progress.best and clock() - start > budget:
                report(f"the budget of {budget:g} s is spent: this is the best so far")
                break
    except KeyboardInterrupt:
        if progress.best is None:
            raise
        report("interrupted: this is the best so far")
    return progress


def _layout(outcome: Outcome) -> str:
    layout = outcome.layout
    mesh = " x ".join(map(str, layout.sizes))
    recompute = ", recompute" if layout.recompute else ""
    return f"{layout.stages} stages of {mesh}, {layout.microbatches} micro-batches{recompute}"


def _too_little(limit: float, least: float, world: int) -> UsageError:
    is_known = math.isfinite(least)
    needed = f"; the smallest plan takes {least / _GIB:.3g} GiB" if is_known else ""
    return UsageError(f"--memory {limit / _GIB:.3g}GiB: no plan on {world} ranks fits{needed}")


def _saved(
    request: SearchRequest,
    job: SearchedJob,
    progress: Progress,
    traced: _Traced,
) -> SavedPlan:
    best = progress.best
    if best is None:
        raise ValueError("there is no plan to save")
    layout, problem = best.layout, best.stages[0].chain.problem
    chosen = expanded(best, traced.names)
    # Of a micro-batch, since there is less to choose where a dim has one element.
    part, blocks = job.batch // layout.microbatches, traced.blocks
    program = traced.programs.at(part)
    names = tuple(_axes(request)) or axis_names(layout.sizes, part)
    setting = Setting(sizes=layout.sizes, topology=job.topology)
    whole = build(program, setting, cuts=blocks.cuts, block_of=blocks.block_of(program))
    rules = rules_of(whole.nodes)
    others = [
        f"{_layout(one)}: {one.seconds:.4g} s, {one.memory / _GIB:.3g} GiB"
        for one in progress.runners_up
        if one is not best
    ]
    if traced.of_whole:
        others.append(f"no stages and micro-batches, since the model has {traced.of_whole}")
    unseen = progress.total - progress.seen - progress.pruned - progress.too_large
    others.append(f"{progress.pruned} layouts cannot be faster")
    others.append(f"{progress.too_large} layouts do not fit into {job.limit / _GIB:.3g} GiB")
    if unseen > 0:
        others.append(f"{unseen} layouts were not looked at")
    return SavedPlan(
        version=VERSION,
        model=request.target,
        program=identity(program),
        topology=job.topology.name,
        world=job.world,
        mesh=dict(zip(names, layout.sizes, strict=True)),
        stages=layout.stages,
        microbatches=layout.microbatches,
        batch=job.batch,
        recompute=layout.recompute,
        seconds=best.seconds,
        costs=stage_costs(best, setting.redistribution_costs(), names),
        memory=best.memory,
        gap=max(0.0, best.seconds / best.bound - 1),
        limit=job.limit,
        stage_memory={one.name: one.memory for one in best.stages} if layout.stages > 1 else {},
        params=parameters(program, rules, chosen),
        operators=operators(program, rules, chosen),
        shared=shared(rules, chosen),
        runs_on=_runs_on(job, layout, names, chosen, traced),
        unknown=list(problem.unknown),
        rejected=others,
    )


def _runs_on(
    job: SearchedJob,
    layout: JobLayout,
    names: Sequence[str],
    chosen: Mapping[str, tuple[int, ...]],
    traced: _Traced,
) -> str:
    """Return what runs a plan in training, where ranks of the data axis have different samples."""
    if layout.stages > 1 or layout.recompute:
        return EXECUTOR
    part = job.batch // layout.microbatches
    program, data = traced.programs.at(part), _data_axes(names)
    setting = Setting(sizes=layout.sizes, topology=job.topology, data_axes=data, batch=part)
    nodes = build(program, setting, cuts=layout_nodes(chosen)).nodes
    outs = {node.name: tuple(node.rows[0].tolist()) for node in nodes if node.kind == "out"}
    rules = rules_of_steps(program) | rules_of(nodes)
    ranks = math.prod(layout.sizes[axis] for axis in data)
    return runs_on(
        Planned(program, setting, names, rules, {**chosen, **outs}),
        traced.modules,
        lambda: traced.programs.at(part // ranks),
    )


def _check_mesh(request: SearchRequest) -> None:
    """Refuse a mesh that is not of all ranks, or has stages where they cannot be.

    Raises:
        UsageError: The mesh is one of these.
    """
    mesh = request.mesh
    if mesh and math.prod(mesh.values()) != request.world:
        written = " x ".join(f"{name} {size}" for name, size in mesh.items())
        raise UsageError(f"--mesh: {written} is not --world {request.world}")
    if PIPELINE_AXIS not in mesh:
        return
    if next(iter(mesh)) != PIPELINE_AXIS or not 1 < len(mesh) <= 1 + EXACT_AXES_MAX:
        raise UsageError(
            f"--mesh: {PIPELINE_AXIS} comes first, followed by one to {EXACT_AXES_MAX} other axes"
        )
    if request.mode != "exact" and mesh[PIPELINE_AXIS] > 1:
        raise UsageError(f"--mode {request.mode}: stages are found by mode exact alone")
    if request.rules and mesh[PIPELINE_AXIS] > 1:
        raise UsageError(f"--rules: stages are found without rules (leave out {PIPELINE_AXIS})")


def _axes(request: SearchRequest) -> dict[str, int]:
    """Return the axes of a stage; none where the mesh is not named."""
    return {name: size for name, size in request.mesh.items() if name != PIPELINE_AXIS}


def _data_axes(axes: Iterable[str]) -> frozenset[int]:
    return frozenset(at for at, name in enumerate(axes) if name == DATA_AXIS)


def _check_runs(traced: Traced) -> None:
    """Refuse a model that no plan of mode auto would train.

    Raises:
        ModelError: There is something that only the model's own forward does.
    """
    if traced.refused:
        raise ModelError(
            f"search: mode auto cannot run a forward that {traced.refused}",
            hint="choose a configuration without mode: auto",
        )
    check(traced.program)


def _on_mesh(
    request: SearchRequest, model: nn.Module, sample: Sequence[Any], batch: int
) -> SavedPlan:
    """Return the best plan on a mesh that the request names."""
    axes = _axes(request)
    sizes = tuple(axes.values())
    if batch % axes.get(DATA_AXIS, 1):
        raise UsageError(f"--batch {batch} does not divide over {DATA_AXIS} {axes[DATA_AXIS]}")
    traced = trace(model, resized(sample, batch))
    program = traced.program
    _check_runs(traced)
    # As in training: ranks of the data axis are handed different samples.
    data = _data_axes(axes)
    setting = Setting(sizes=sizes, topology=request.topology, data_axes=data, batch=batch)
    limit = request.memory or request.topology.memory
    pins = pins_of_file(request.rules, request.mesh, model, program) if request.rules else []
    result = search(program, setting, mode=request.mode, pins=pins, limit=limit)
    part = resized(sample, batch // axes.get(DATA_AXIS, 1))
    return _saved_mesh(request, traced, setting, result, lambda: trace(model, part).program)


def _saved_mesh(
    request: SearchRequest,
    traced: Traced,
    setting: Setting,
    result: SearchResult,
    local: Callable[[], Program],
) -> SavedPlan:
    program, axes = traced.program, tuple(_axes(request))
    blocks = find_blocks(program)
    cuts = {*(blocks.cuts if blocks else ()), *layout_nodes(result.chosen)}
    # A plan of one operator after the other may have no node between blocks.
    if blocks and all(layout_node(cut) in result.chosen for cut in blocks.cuts):
        problem = build(program, setting, cuts=cuts, block_of=blocks.block_of(program))
    else:
        problem = build(program, setting, cuts=layout_nodes(result.chosen))
    breakdown = CostBreakdown(setting.redistribution_costs(), axes)
    breakdown.add(problem, dict(enumerate(indices(problem, result.chosen))))
    rules = rules_of(problem.nodes)
    return SavedPlan(
        version=VERSION,
        model=request.target,
        program=identity(program),
        topology=request.topology.name,
        world=request.world,
        mesh=_axes(request),
        stages=1,
        microbatches=1,
        batch=setting.batch,
        recompute=False,
        seconds=result.seconds,
        costs=sorted_costs(breakdown.costs),
        memory=result.memory,
        gap=result.gap,
        limit=request.memory or request.topology.memory,
        params=parameters(program, rules, result.chosen),
        operators=operators(program, rules, result.chosen),
        shared=shared(rules, result.chosen),
        runs_on=runs_on(
            Planned(program, setting, axes, traced.rules | rules, result.chosen),
            traced.modules,
            local,
        ),
        unknown=list(result.unknown),
    )
