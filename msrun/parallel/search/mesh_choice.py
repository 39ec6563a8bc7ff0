"""The best mesh for a job that `rt.shard` runs: all that it can run, each with its best plan."""

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
from msrun.parallel.search.mesh.job_layout import Job, data_shapes, divisors
from msrun.parallel.search.mesh.mesh_search import explore
from msrun.parallel.search.plan.cost_breakdown import axis_names, expanded
from msrun.parallel.search.solve.eliminate import TooWideError
from msrun.parallel.search.solve.memory import OutOfMemoryError
from msrun.parallel.search.solve.modes import BlockNodes, Mode, search
from msrun.parallel.search.solve.problem import Setting

# Of the search for stages, which is long for many ranks: the likely layouts come first.
_STAGES_SECONDS = 30.0
# Ranks up to which meshes of three axes are looked at: each takes most of a second.
_THIRD_AXIS_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenMesh:
    """A mesh, and the best plan on it.

    Args:
        mesh: Axis -> size; stages of the pipeline first, where there are some.
        microbatches: Of a step.
        recompute: Whether repeated blocks keep only what they are given.
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

    Ranks of the first axis, `dp`, are handed different samples; it may have one rank.
    """
    most = 3 if world <= _THIRD_AXIS_RANKS else 2
    for sizes in data_shapes(world):
        if len(sizes) <= most and batch % sizes[0] == 0:
            yield dict(zip(axis_names(sizes, batch), sizes, strict=True))


class MeshRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a mesh is for.

    Args:
        programs: The model, for any batch.
        topology: What it runs on.
        world: Ranks.
        batch: Samples of a step.
        mode: As of `search`.
        limit: Bytes that a rank has; None is any.
    """

    programs: ProgramByBatch
    topology: Topology
    world: int
    batch: int
    mode: Mode = "exact"
    limit: float | None = None


def choose_mesh(wanted: MeshRequest, clock: Callable[[], float]) -> ChosenMesh:
    """Return the fastest mesh and plan.

    Args:
        wanted: What it is for.
        clock: Seconds that have passed; the search for stages ends after 30 of them.

    Raises:
        OutOfMemoryError: No plan fits; it says what the smallest takes.
    """
    found = [*_plain(wanted), *_with_stages(wanted, clock)]
    fitting = [one for one in found if isinstance(one, ChosenMesh)]
    if not fitting:
        raise OutOfMemoryError(min(one for one in found if isinstance(one, float)))
    return min(fitting, key=lambda one: one.seconds)


def _plain(wanted: MeshRequest) -> Iterator[ChosenMesh | float]:
    """Yield the best plan of every mesh without stages, or its least bytes where none fits.

    A micro-batch never takes less time for a sample than the whole batch at once, so there are
    more of them only where fewer fit no mesh, unless their blocks are recomputed.
    """
    for number in divisors(wanted.batch):
        part = wanted.batch // number
        program = wanted.programs.at(part)
        again = (False, True) if find_blocks(program) else (False,)
        is_enough = False
        for mesh, recompute in product(candidates(wanted.world, part), again):
            setting = Setting(
                sizes=tuple(mesh.values()),
                topology=wanted.topology,
                data_axes=frozenset({0}),
                batch=part,
                rounds=number,
                recompute=recompute,
            )
            try:
                found = search(program, setting, mode=wanted.mode, limit=wanted.limit)
            except OutOfMemoryError as error:
                yield error.least
                continue
            is_enough |= not recompute
            yield ChosenMesh(
                mesh=mesh,
                microbatches=number,
                recompute=recompute,
                chosen=found.chosen,
                seconds=found.seconds,
                memory=found.memory,
            )
        if is_enough:
            break


def _with_stages(wanted: MeshRequest, clock: Callable[[], float]) -> Iterator[ChosenMesh | float]:
    """Yield the fastest layout with stages of equally many blocks, or the least bytes of all."""
    small, large, sizes = wanted.programs.ends
    blocks = find_blocks(small)
    if blocks is None:
        return
    short, two = shortened(small, blocks)
    job = Job(
        programs=ProgramByBatch(short, shortened(large, blocks)[0], sizes),
        blocks=two,
        count=blocks.count,
        topology=wanted.topology,
        world=wanted.world,
        batch=wanted.batch,
        limit=math.inf if wanted.limit is None else wanted.limit,
        is_training=True,
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
    names = axis_names(layout.sizes, wanted.batch // layout.microbatches)
    yield ChosenMesh(
        mesh={PIPELINE_AXIS: layout.stages} | dict(zip(names, layout.sizes, strict=True)),
        microbatches=layout.microbatches,
        recompute=layout.recompute,
        chosen=expanded(best, BlockNodes(small, short, blocks)),
        seconds=best.seconds,
        memory=best.memory,
    )
