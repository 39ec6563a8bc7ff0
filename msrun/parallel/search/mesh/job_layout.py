"""Layouts of a job: stages, mesh, micro-batches, recomputation, and what each takes at least.

A layout is all that is decided before any tensor is placed.  `groups` and `layouts` list those a
job may have; `Bounds` says without a search, or from what other layouts of the group took, what no
plan of a layout can undercut.
"""

from __future__ import annotations

import math

import msgspec

from msrun.parallel.search.cost.topology import Topology
from msrun.parallel.search.graph.program import ProgramByBatch
from msrun.parallel.search.graph.repeat import Blocks
from msrun.parallel.search.solve.problem import DataParallelKeys

_AXIS_MAX = 64
_THIRD_AXIS_MAX = 16
_ACCUMULATE_MAX = 64


class SearchedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A training job whose layout is searched.

    Args:
        programs: The model with two repeated blocks, for any batch.
        blocks: The two blocks.
        count: Blocks of the whole model.
        topology: What it runs on.
        world: Ranks.
        batch: Samples of a step.
        limit: Bytes that a rank has.
        state_bytes: Of the optimizer, for each element of a parameter.
        is_training: Whether the layout is for `rt.shard`: in two stages or more, and ranks of the
            first axis get different samples.
        named: Stages and mesh of a stage, where they are given.
        data_axes: Axes of these whose ranks get different samples.
        is_whole: Whether nothing may cut the batch or the model: see `Program.of_whole_batch`.
        decided: As of `Setting`.
        recompute: Whether blocks save only their input; None is for the search to decide.
        stages: Numbers of stages that are looked at; None is any.
    """

    programs: ProgramByBatch
    blocks: Blocks
    count: int
    topology: Topology
    world: int
    batch: int
    limit: float
    state_bytes: int = 12
    is_training: bool = False
    named: tuple[int, tuple[int, ...]] | None = None
    data_axes: frozenset[int] = frozenset()
    is_whole: bool = False
    decided: DataParallelKeys = DataParallelKeys()
    recompute: bool | None = None
    stages: frozenset[int] | None = None

    def data(self) -> frozenset[int]:
        """Return the axes whose ranks get different samples."""
        return frozenset({0}) if self.is_training else self.data_axes


class JobLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a job, before any tensor is placed.

    Args:
        stages: Of the pipeline.
        sizes: Of the mesh axes of a stage.
        microbatches: Into which a batch is cut.
        recompute: Whether blocks save only their input.
    """

    stages: int
    sizes: tuple[int, ...]
    microbatches: int
    recompute: bool

    @property
    def rounds(self) -> int:
        """Micro-batches that a step takes the time of: a pipeline idles for all stages but one.

        Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
        Using Megatron-LM", SC 2021, section 2.2.1.
        """
        return self.microbatches + self.stages - 1


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def shapes(ranks: int) -> list[tuple[int, ...]]:
    """Return the meshes of one to three axes; the inner axes are not too long."""
    meshes: list[tuple[int, ...]] = [(ranks,)]
    inner = [n for n in divisors(ranks) if 1 < n <= min(_AXIS_MAX, ranks - 1)]
    meshes += [(ranks // n, n) for n in inner]
    for n in inner:
        for m in (m for m in inner if m <= _THIRD_AXIS_MAX):
            if ranks % (n * m) == 0 and ranks > n * m:
                meshes.append((ranks // (n * m), m, n))
    return meshes


def data_shapes(ranks: int) -> list[tuple[int, ...]]:
    """Return the meshes whose first axis, perhaps of one rank, gets different samples."""
    return shapes(ranks) + ([(1, ranks)] if ranks > 1 else [])


def groups(job: SearchedJob) -> list[tuple[int, tuple[int, ...]]]:
    """Return every number of stages with every mesh of a stage."""
    if job.named:
        return [job.named]
    return [
        (stages, sizes)
        for stages in divisors(math.gcd(job.count, job.world))[job.is_training :]
        if stages <= job.batch and (stages == 1 or not job.is_whole)
        if job.stages is None or stages in job.stages
        for sizes in (shapes, data_shapes)[job.is_training](job.world // stages)
    ]


def layouts(job: SearchedJob, stages: int, sizes: tuple[int, ...]) -> list[JobLayout]:
    """Return the layouts of one group, the largest micro-batches first."""
    most = job.batch if stages > 1 else min(job.batch, _ACCUMULATE_MAX)
    if job.is_whole:
        most = 1
    ranks = math.prod(sizes[axis] for axis in job.data())
    return [
        JobLayout(stages=stages, sizes=sizes, microbatches=number, recompute=recompute)
        for number in divisors(job.batch)
        if stages <= number <= most and job.batch // number % ranks == 0
        for recompute in ((False, True) if job.recompute is None else (job.recompute,))
    ]


class Bounds:
    """Bounds of layouts with the same stages and mesh; a bound of one may raise the others'.

    Seconds are those of the global batch, without idle rounds.

    Args:
        computation: Of its arithmetic, divided among all ranks.
        recomputation: Of the forward pass of the blocks alone, divided likewise.
    """

    def __init__(self, computation: float, recomputation: float) -> None:
        self._computation, self._recomputation = computation, recomputation
        # Micro-batches -> seconds that no plan undercuts, whatever its memory.
        self._least: dict[int, float] = {}

    def add(self, layout: JobLayout, seconds: float) -> None:
        """Note what a step of `layout` takes at least; with recomputation it bounds no other."""
        if not layout.recompute:
            self._least[layout.microbatches] = seconds * layout.microbatches / layout.rounds

    def is_known(self, layout: JobLayout) -> bool:
        """Return whether the least seconds of `layout` are known, but for recomputation."""
        return layout.microbatches in self._least

    def of(self, layout: JobLayout) -> float:
        """Return the seconds that a step of `layout` takes at least.

        A micro-batch that is a part of another has no strategy that the other has not, and costs
        a fixed time and one that grows with it at most as fast: a sample is never cheaper in it.
        """
        known = [
            seconds for number, seconds in self._least.items() if layout.microbatches % number == 0
        ]
        least = max([self._computation, *known]) + self._recomputation * layout.recompute
        return least * layout.rounds / layout.microbatches
