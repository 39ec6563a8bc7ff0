"""Which mesh: pipeline stages, axes, micro-batches and recomputation, with the best plan of each.

Every way to lay a job out has a bound that costs nothing: its arithmetic, divided among all ranks,
and the idle time of the pipeline.  Layouts are looked at by that bound, and those that cannot be
better than the best so far never are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from msrun.parallel.search.cost.cost import RedistributionCosts
from msrun.parallel.search.mesh.job_layout import Bounds, Job, JobLayout, groups, layouts
from msrun.parallel.search.mesh.layout_solver import LayoutSolver, Outcome
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.problem import Setting, StrategyNode, work

_PRICES_MAX = 14
_TOLERANCE = 2e-3
_PROHIBITIVE = 1e-3
_RUNNERS_UP = 5


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a search has come.

    Args:
        best: The best so far; None before any fits.
        seen: Layouts that were looked at.
        pruned: Layouts that were not, since they cannot be better.
        too_large: Layouts that do not fit into memory.
        total: All layouts.
        least: Bytes on a rank of the smallest plan of the layouts that do not fit; None before.
    """

    best: Outcome | None = None
    seen: int = 0
    pruned: int = 0
    too_large: int = 0
    total: int = 0
    least: float | None = None
    runners_up: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Take note of a plan that fits."""
        if self.best is None or outcome.seconds < self.best.seconds:
            self.best = outcome
        ranked = sorted([*self.runners_up, outcome], key=lambda one: one.seconds)
        self.runners_up = ranked[:_RUNNERS_UP]


def explore(job: Job) -> Iterator[Progress]:
    """Yield how far the search is, after every layout that was looked at.

    The last one yielded is the answer, and its best plan the best of all layouts but for what
    memory leaves of its gap.  It may be left at any time.
    """
    search = _Search(job)
    found = groups(job)
    progress = Progress(total=sum(len(layouts(job, *group)) for group in found))
    for group in sorted(found, key=search.order):
        for _ in search.group(group, progress):
            yield progress
    yield progress


class _Search:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._prices = RedistributionCosts(())
        self._work = self._least_work()

    def _least_work(self) -> tuple[float, float]:
        """Return the seconds of a whole batch, divided among all ranks, and of blocks' forward."""
        job = self._job
        setting = Setting(sizes=(1,), topology=job.topology)
        alone = Setting(sizes=(1,), topology=job.topology, training=False)
        program = job.programs.at(job.batch)
        inside = job.blocks.block_of(program)
        problem = build(program, setting, cuts=job.blocks.cuts, block_of=inside)
        found = [0.0, 0.0]
        for node in problem.nodes:
            if node.kind != "op":
                continue
            times = job.count - 1 if inside.get(node.name) == 1 else 1
            found[0] += times * _pure(node, setting)
            found[1] += times * _pure(node, alone) * (node.name in inside)
        return found[0] / job.world, found[1] / job.world

    def order(self, group: tuple[int, tuple[int, ...]]) -> tuple[int, float]:
        """Return who is looked at first: few axes, and an inner one that fills a node."""
        stages, sizes = group
        job = self._job
        most = max((one.microbatches for one in layouts(job, stages, sizes)), default=1)
        idle = (most + stages - 1) / most
        return max(2, len(sizes)), idle * (1 + abs(math.log2(sizes[-1] / job.topology.per_node)))

    def group(
        self, group: tuple[int, tuple[int, ...]], progress: Progress
    ) -> Iterator[Outcome | None]:
        """Yield the plan of each layout of one group, or None where there is none that is better.

        Once there is a plan, all are bounded first, the largest micro-batches first, since these
        bound the others.
        """
        found = layouts(self._job, *group)
        bounds = Bounds(*self._work)
        seen: set[JobLayout] = set()
        if progress.best:
            for layout in self._narrow(found, bounds, progress.best.seconds):
                seen.add(layout)
                yield None
        # Numbers of micro-batches with which nothing fits, with and without recomputation: nor
        # does anything with larger ones that these are parts of.
        full: dict[bool, list[int]] = {False: [], True: []}
        for layout in sorted(found, key=bounds.of):
            best = progress.best.seconds if progress.best else math.inf
            if bounds.of(layout) >= best:
                progress.seen += layout in seen
                progress.pruned += layout not in seen
                continue
            if any(number % layout.microbatches == 0 for number in full[layout.recompute]):
                progress.too_large += 1
                continue
            outcome = self.look(layout, best, bounds)
            if isinstance(outcome, float):
                progress.too_large += 1
                full[layout.recompute].append(layout.microbatches)
                progress.least = min(progress.least or math.inf, outcome)
                yield None
                continue
            progress.seen += 1
            if outcome is not None:
                progress.add(outcome)
            yield outcome

    def _narrow(
        self, found: Sequence[JobLayout], bounds: Bounds, best: float
    ) -> Iterator[JobLayout]:
        """Find bounds of all layouts that may be better than `best`, and yield whose they are.

        What divides the numbers of micro-batches of all that are left bounds them all.
        """
        while left := [one for one in found if not bounds.is_known(one) and bounds.of(one) < best]:
            numbers = [one.microbatches for one in left]
            for number in (math.gcd(*numbers), min(numbers)):
                layout = msgspec.structs.replace(left[0], microbatches=number, recompute=False)
                if not bounds.is_known(layout):
                    bounds.add(layout, self._stages(layout).least(best))
                    yield layout
                    break

    def look(
        self, layout: JobLayout, best: float, bounds: Bounds | None = None
    ) -> Outcome | float | None:
        """Return the best plan; the least memory if it is too much; None if it is not below `best`.

        One price of memory holds in all stages.

        Args:
            layout: Where to look.
            best: Seconds that are to be undercut.
            bounds: Takes note of what is found.
        """
        stages = self._stages(layout)
        limit = self._job.limit
        least = stages.least(best)
        if bounds:
            bounds.add(layout, least)
        if least >= best:
            return None
        free = stages.solve(0.0, limit)
        if free.memory <= limit:
            return free
        fits = stages.solve(_PROHIBITIVE, limit)
        if fits.memory > limit:
            return fits.memory
        return self._priced(stages, free, fits, best)

    def _priced(
        self, stages: LayoutSolver, exceeds: Outcome, fits: Outcome, best: float
    ) -> Outcome | None:
        """Return the best plan between one that fits and one that does not.

        The next price is where both cost the same, as in `memory.bounded`.
        """
        limit, bound = self._job.limit, exceeds.bound
        found = fits
        for _ in range(_PRICES_MAX):
            saved, taken = fits.seconds - exceeds.seconds, exceeds.memory - fits.memory
            is_near = found.seconds - bound <= _TOLERANCE * found.seconds
            if is_near or bound >= best or saved <= 0 or taken <= 0:
                break
            made = stages.solve(saved / taken, limit)
            bound = max(bound, made.bound)
            if made.memory <= limit:
                found = min(found, made, key=lambda one: one.seconds)
            ends = fits, exceeds
            if made.memory <= limit:
                fits = made
            else:
                exceeds = made
            if any(made.memory == end.memory and made.seconds == end.seconds for end in ends):
                break
        if bound >= best or found.seconds >= best:
            return None
        return Outcome(
            layout=found.layout,
            seconds=found.seconds,
            memory=found.memory,
            bound=bound,
            stages=found.stages,
        )

    def _stages(self, layout: JobLayout) -> LayoutSolver:
        """Return the stages of a layout; prices are kept for its mesh alone."""
        if layout.sizes != self._prices.sizes:
            self._prices = RedistributionCosts(self._job.topology.wires(layout.sizes))
        return LayoutSolver(self._job, layout, self._prices)


def _pure(node: StrategyNode, setting: Setting) -> float:
    """Return the seconds of computation of a node on one rank, without starting anything."""
    topology = msgspec.structs.replace(setting.topology, launch=0.0)
    alone = msgspec.structs.replace(setting, topology=topology)
    rows = np.zeros((1, 1), dtype=np.int64)
    return float(work(node.rule, rows, alone, again=False)[0])
