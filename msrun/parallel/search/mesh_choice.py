"""The best mesh for `mesh: auto` in training: every mesh that `rt.shard` can run, each with a plan.

Meshes without stages are searched one after the other, with ZeRO, micro-batches and recomputation
where a local batch does not fit otherwise; for models of equal blocks also layouts with pipeline
stages (`mesh_search`), for a limited time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import msgspec

from msrun.parallel.config import PIPELINE_AXIS
from msrun.parallel.search.cost.topology import Topology
from msrun.parallel.search.graph.program import ProgramByBatch
from msrun.parallel.search.graph.repeat import find_blocks, shortened
from msrun.parallel.search.mesh.job_layout import SearchedJob, data_shapes, divisors
from msrun.parallel.search.mesh.mesh_search import explore
from msrun.parallel.search.modules.job import ModuleJob
from msrun.parallel.search.plan.cost_breakdown import axis_names, expanded
from msrun.parallel.search.solve.eliminate import TooWideError
from msrun.parallel.search.solve.memory import OutOfMemoryError
from msrun.parallel.search.solve.modes import BlockNodes, Mode, search
from msrun.parallel.search.solve.problem import DataParallelKeys, Setting

# For layouts with stages, which are many on many ranks: the likely ones come first.
_STAGES_SECONDS = 30.0
# Ranks up to which meshes of three axes are searched: each takes most of a second.
_THIRD_AXIS_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenMesh:
    """A mesh, and the best plan on it.

    Args:
        mesh: Axis -> size; stages of the pipeline first, where there are some.
        microbatches: Of a step.
        recompute: Whether repeated blocks save only their input.
        chosen: What every node of the program of a micro-batch chooses.
        seconds: Of a step.
        memory: Bytes on a rank.
    """

    mesh: dict[str, int]
    microbatches: int
    recompute: bool
    chosen: dict[str, tuple[int, ...]]
    seconds: float
    memory: float


def candidates(world: int, batch: int) -> Iterator[dict[str, int]]:
    """Yield the meshes over `world` ranks whose data axis divides `batch` samples evenly.

    Ranks of the first axis, `dp`, get different samples; it may have one rank.
    """
    most = 3 if world <= _THIRD_AXIS_RANKS else 2
    for sizes in data_shapes(world):
        if len(sizes) <= most and batch % sizes[0] == 0:
            yield dict(zip(axis_names(sizes, batch), sizes, strict=True))


class MeshRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a mesh is searched for.

    Args:
        programs: The model, for any batch.
        topology: What it runs on.
        world: Ranks.
        batch: Samples of a step.
        mode: As of `search`.
        limit: Bytes that a rank has; None is any.
        is_whole: Whether nothing may cut the batch or the model.
        decided: As of `Setting`.
        recompute: Whether repeated blocks are recomputed; None is for the search to decide.
        stages: Returns the numbers of pipeline stages that are looked at; None is any.
    """

    programs: ProgramByBatch
    topology: Topology
    world: int
    batch: int
    mode: Mode = "exact"
    limit: float | None = None
    is_whole: bool = False
    decided: DataParallelKeys = DataParallelKeys()
    recompute: bool | None = None
    stages: Callable[[], frozenset[int] | None] = lambda: None

    def of_modules(self) -> ModuleJob:
        """Return the same job, for techniques that divide whole modules."""
        return ModuleJob(
            program=self.programs.at,
            topology=self.topology,
            world=self.world,
            batch=self.batch,
            limit=self.limit,
        )


def choose_mesh(request: MeshRequest, clock: Callable[[], float]) -> ChosenMesh:
    """Return the fastest mesh and plan.

    Args:
        request: The job.
        clock: Seconds that have passed; the search for stages ends after 30 of them.

    Raises:
        OutOfMemoryError: No plan fits; it says what the smallest takes.
    """
    results = [*_without_stages(request)]
    if not request.is_whole:
        results += _with_stages(request, clock)
    fitting = [one for one in results if isinstance(one, ChosenMesh)]
    if not fitting:
        raise OutOfMemoryError(min(one for one in results if isinstance(one, float)))
    return min(fitting, key=lambda one: one.seconds)


def _without_stages(request: MeshRequest) -> Iterator[ChosenMesh | float]:
    """Yield the best plan of every mesh without stages, or its least bytes where none fits.

    A sample never takes less time in a micro-batch than in the batch at once, so more micro-batches
    are tried only while fewer fit no mesh without recomputation.
    """
    for number in [1] if request.is_whole else divisors(request.batch):
        part = request.batch // number
        program = request.programs.at(part)
        again = (False, True) if find_blocks(program) else (False,)
        if request.recompute is not None:
            again = (request.recompute,)
        is_enough = False
        for mesh, recompute in product(candidates(request.world, part), again):
            setting = Setting(
                sizes=tuple(mesh.values()),
                topology=request.topology,
                data_axes=frozenset({0}),
                batch=part,
                rounds=number,
                recompute=recompute,
                decided=request.decided,
            )
            try:
                result = search(program, setting, mode=request.mode, limit=request.limit)
            except OutOfMemoryError as error:
                yield error.least
                continue
            is_enough |= recompute in {False, request.recompute}
            yield ChosenMesh(
                mesh=mesh,
                microbatches=number,
                recompute=recompute,
                chosen=result.chosen,
                seconds=result.seconds,
                memory=result.memory,
            )
        if is_enough:
            break


def _with_stages(request: MeshRequest, clock: Callable[[], float]) -> Iterator[ChosenMesh | float]:
    """Yield the fastest layout with stages of equally many blocks, or the least bytes of all."""
    small, large, sizes = request.programs.ends
    blocks = find_blocks(small)
    if blocks is None:
        return
    short, two = shortened(small, blocks)
    job = SearchedJob(
        programs=ProgramByBatch(short, shortened(large, blocks)[0], sizes),
        blocks=two,
        count=blocks.count,
        topology=request.topology,
        world=request.world,
        batch=request.batch,
        limit=math.inf if request.limit is None else request.limit,
        is_training=True,
        decided=request.decided,
        recompute=request.recompute,
        stages=request.stages(),
    )
    start = clock()
    try:
        for progress in explore(job):
            if progress.best and clock() - start > _STAGES_SECONDS:
                break
    except TooWideError:  # such blocks can be searched for two axes at a time only
        return
    best = progress.best
    if best is None:
        if progress.least is not None:
            yield progress.least
        return
    layout = best.layout
    names = axis_names(layout.sizes, request.batch // layout.microbatches)
    yield ChosenMesh(
        mesh={PIPELINE_AXIS: layout.stages} | dict(zip(names, layout.sizes, strict=True)),
        microbatches=layout.microbatches,
        recompute=layout.recompute,
        chosen=expanded(best, BlockNodes(small, short, blocks)),
        seconds=best.seconds,
        memory=best.memory,
    )
