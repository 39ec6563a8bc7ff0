"""The best mesh for a job: pipeline stages, axes, micro-batches, recomputation, and the plan of it.

The problem.  A job of 1,024 devices has thousands of layouts: numbers of stages, meshes of up to
three axes in a stage, numbers of micro-batches, recomputation or not.  The best placement of every
tensor in one layout takes milliseconds to seconds (`layout_solver`), and under a memory limit
several times that, so solving all of them is out of the question.  The answer should still be the
best, with a proof, and there should be a usable plan at once.

The idea: branch and bound over layouts.

- Any layout has a bound that costs nothing: its arithmetic divided among all ranks, the forward
  pass of the blocks again with recomputation, and the idle rounds of its pipeline.
- Layouts bound each other.  A micro-batch that is a part of a larger one has no strategy that the
  larger one lacks, and a sample is never cheaper in it.  So what a step takes with some number of
  micro-batches bounds all multiples of that number, and recomputation only adds to it.  Within a
  group (stages, mesh) the search first bounds the number that divides all those left; mostly that
  rules out the whole group.
- Solving without a price of memory gives such a bound at the cost of one elimination; memory is
  looked at only where the bound is below the best plan so far.
- Memory: one price of memory holds in all stages; the next price is where the two nearest plans
  cost the same, as in `solve.memory`.  What does not fit with the smallest memory does not fit with
  larger micro-batches either.
- Order: groups of few axes first, and those whose inner axis fills a node and that idle little, so
  that a good plan is there early and prunes the rest.

Invariants.  A layout is left out only if its bound is not below the best plan, or if a part of its
micro-batch did not fit.  `explore` yields after every layout, and `Progress` is usable at any time:
a budget or an interrupt takes the best so far.  What may be missed is the gap of plans that memory
limits.

What was tried and lost.  Looking at three-axis meshes only near the best numbers of stages, and
taking micro-batches larger than some that did not fit as not fitting: fast, but not a proof.  With
bounds between layouts all are looked at, 307 of 3,922 layouts instead of 274 on 1,024 devices.
Bounding each layout by its own arithmetic alone: 104 s of CPU time where it takes 29 s with bounds
between layouts, cached sums and the costs of one mesh at a time.  Halving the price of memory up to
fourteen times: the crossing of two plans needs a few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from msrun.parallel.search.cost.cost import RedistributionCosts
from msrun.parallel.search.mesh.job_layout import Bounds, JobLayout, SearchedJob, groups, layouts
from msrun.parallel.search.mesh.layout_solver import LayoutSolver, Outcome
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.memory import PROHIBITIVE_PRICE
from msrun.parallel.search.solve.problem import Setting, StrategyNode, work

_PRICES_MAX = 14
_TOLERANCE = 2e-3
_RUNNERS_UP = 5


@dataclass(slots=True, kw_only=True)
class Progress:
    """The state of a search.

    Args:
        best: The best so far; None before any fits.
        seen: Layouts that were solved or bounded.
        pruned: Layouts that were not, since they cannot be better.
        too_large: Layouts that do not fit into memory.
        total: All layouts.
        least: Bytes on a rank of the smallest plan of those; None while all fit.
        runners_up: The best few layouts, for reports.
    """

    best: Outcome | None = None
    seen: int = 0
    pruned: int = 0
    too_large: int = 0
    total: int = 0
    least: float | None = None
    runners_up: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Note a plan that fits."""
        if self.best is None or outcome.seconds < self.best.seconds:
            self.best = outcome
        ranked = sorted([*self.runners_up, outcome], key=lambda one: one.seconds)
        self.runners_up = ranked[:_RUNNERS_UP]


def explore(job: SearchedJob) -> Iterator[Progress]:
    """Yield the state of the search after every layout.

    The last one has the best plan of all layouts, within the gap that a memory limit leaves.  The
    caller may stop at any time.
    """
    search = _Search(job)
    every = groups(job)
    progress = Progress(total=sum(len(layouts(job, *group)) for group in every))
    for group in sorted(every, key=search.order):
        for _ in search.group(group, progress):
            yield progress
    yield progress


class _Search:
    def __init__(self, job: SearchedJob) -> None:
        self._job = job
        self._redistribution = RedistributionCosts(())
        self._work = self._least_work()

    def _least_work(self) -> tuple[float, float]:
        """Return the seconds of computation of a batch, and of its blocks' forward alone."""
        job = self._job
        setting = Setting(sizes=(1,), topology=job.topology)
        forward_only = Setting(sizes=(1,), topology=job.topology, training=False)
        program = job.programs.at(job.batch)
        inside = job.blocks.block_of(program)
        problem = build(program, setting, cuts=job.blocks.cuts, block_of=inside)
        total = blocks_again = 0.0
        for node in problem.nodes:
            if node.kind != "op":
                continue
            times = job.count - 1 if inside.get(node.name) == 1 else 1
            total += times * _computation(node, setting)
            blocks_again += times * _computation(node, forward_only) * (node.name in inside)
        return total / job.world, blocks_again / job.world

    def order(self, group: tuple[int, tuple[int, ...]]) -> tuple[int, float]:
        """Return what groups are sorted by: few axes, little idling, an inner axis of a node."""
        stages, sizes = group
        job = self._job
        most = max((one.microbatches for one in layouts(job, stages, sizes)), default=1)
        idle = (most + stages - 1) / most
        return max(2, len(sizes)), idle * (1 + abs(math.log2(sizes[-1] / job.topology.per_node)))

    def group(
        self, group: tuple[int, tuple[int, ...]], progress: Progress
    ) -> Iterator[Outcome | None]:
        """Yield the plan of each layout of one group, or None where there is no better one.

        Once there is a plan, all are bounded first, the largest micro-batches first, since these
        bound the others.
        """
        every = layouts(self._job, *group)
        bounds = Bounds(*self._work)
        seen: set[JobLayout] = set()
        if progress.best:
            for layout in self._narrow(every, bounds, progress.best.seconds):
                seen.add(layout)
                yield None
        # Numbers of micro-batches that do not fit, without and with recomputation: a divisor of
        # one means larger micro-batches, which do not fit either.
        too_few: dict[bool, list[int]] = {False: [], True: []}
        for layout in sorted(every, key=bounds.of):
            best = progress.best.seconds if progress.best else math.inf
            if bounds.of(layout) >= best:
                progress.seen += layout in seen
                progress.pruned += layout not in seen
                continue
            if any(number % layout.microbatches == 0 for number in too_few[layout.recompute]):
                progress.too_large += 1
                continue
            outcome = self.look(layout, best, bounds)
            if isinstance(outcome, float):
                progress.too_large += 1
                too_few[layout.recompute].append(layout.microbatches)
                progress.least = min(progress.least or math.inf, outcome)
                yield None
                continue
            progress.seen += 1
            if outcome is not None:
                progress.add(outcome)
            yield outcome

    def _narrow(
        self, every: Sequence[JobLayout], bounds: Bounds, best: float
    ) -> Iterator[JobLayout]:
        """Bound layouts until none may be better than `best` unsolved; yield those it solved.

        What divides the numbers of micro-batches of all that are left bounds them all.
        """
        while left := [one for one in every if not bounds.is_known(one) and bounds.of(one) < best]:
            numbers = [one.microbatches for one in left]
            # The common divisor bounds all of them; once it is known, the smallest is next.
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
            layout: The layout.
            best: Seconds that are to be undercut.
            bounds: Notes the least seconds of the layout.
        """
        stages = self._stages(layout)
        limit = self._job.limit
        least = stages.least(best)
        if bounds:
            bounds.add(layout, least)
        if least >= best:
            return None
        # Only now is memory looked at: most layouts are ruled out before.
        free = stages.solve(0.0, limit)
        if free.memory <= limit:
            return free
        fits = stages.solve(PROHIBITIVE_PRICE, limit)
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
        fastest = fits
        for _ in range(_PRICES_MAX):
            saved, taken = fits.seconds - exceeds.seconds, exceeds.memory - fits.memory
            is_near = fastest.seconds - bound <= _TOLERANCE * fastest.seconds
            if is_near or bound >= best or saved <= 0 or taken <= 0:
                break
            plan = stages.solve(saved / taken, limit)
            bound = max(bound, plan.bound)
            if plan.memory <= limit:
                fastest = min(fastest, plan, key=lambda one: one.seconds)
            ends = fits, exceeds
            if plan.memory <= limit:
                fits = plan
            else:
                exceeds = plan
            # A plan that is one of the ends says that none lies between them.
            if any(plan.memory == end.memory and plan.seconds == end.seconds for end in ends):
                break
        if bound >= best or fastest.seconds >= best:
            return None
        return Outcome(
            layout=fastest.layout,
            seconds=fastest.seconds,
            memory=fastest.memory,
            bound=bound,
            stages=fastest.stages,
        )

    def _stages(self, layout: JobLayout) -> LayoutSolver:
        """Return the solver of a layout; costs of redistribution are cached for its mesh alone."""
        if layout.sizes != self._redistribution.sizes:
            self._redistribution = RedistributionCosts(self._job.topology.wires(layout.sizes))
        return LayoutSolver(self._job, layout, self._redistribution)


def _computation(node: StrategyNode, setting: Setting) -> float:
    """Return the seconds of computation of a node on one rank, without launches."""
    topology = msgspec.structs.replace(setting.topology, launch=0.0)
    free = msgspec.structs.replace(setting, topology=topology)
    rows = np.zeros((1, 1), dtype=np.int64)
    return float(work(node.rule, rows, free, recomputes=False)[0])
