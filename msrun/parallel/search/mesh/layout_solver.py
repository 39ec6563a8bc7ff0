"""The best plan of one layout of a job: the plans of all its pipeline stages.

Stages have the same number of equal blocks, so there are at most three kinds: the first, which also
has what comes before the blocks, the last, which has what comes behind them, and those in the
middle, which are all equal.  The tables of one chain (`solve.chain`) price every kind.

A step takes as long as its slowest stage, and one choice joins the stages: the layout of the value
that passes between them, the same at every border, and of what the first and the last stage share.
For each such choice the best plan of each kind is independent of the others, so the optimum is the
least, over these choices, of the slowest kind.

A stage of the 1F1B schedule has as many micro-batches in flight as there are stages from it to the
last, so kinds differ in memory and, once memory has a price, in their tables.  The bound looks at
the last stage first: it has the head of the model and mostly takes longest, and where it alone is
slower than the best plan so far the other tables are never made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from msrun.parallel.search.cost.cost import RedistributionCosts
from msrun.parallel.search.graph.axis_placement import FloatArray, is_sharded
from msrun.parallel.search.mesh.job_layout import JobLayout, SearchedJob
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.chain import Chain, ChainPlan, ChainTables, flat, shortest, through
from msrun.parallel.search.solve.eliminate import CELLS_MAX
from msrun.parallel.search.solve.problem import Setting, parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The plan of one kind of pipeline stage.

    Args:
        name: `all`, `first`, `middle` or `last`.
        seconds: Of a step.
        memory: Bytes on one rank.
        chain: Whose nodes the plan names.
        plan: Its strategies.
        entry: Strategy of the cut node at which it begins; 0 for the first stage.
    """

    name: str
    seconds: float
    memory: float
    chain: Chain
    plan: ChainPlan
    entry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The best plan of one layout.

    Args:
        layout: The layout.
        seconds: Of a step: of its slowest stage.
        memory: Bytes on a rank of its largest stage.
        bound: Seconds that no plan of this layout can undercut.
        stages: Its kinds of stages.
    """

    layout: JobLayout
    seconds: float
    memory: float
    bound: float
    stages: tuple[Stage, ...]


class LayoutSolver:
    """Finds the best plan of one layout, at any price of memory.

    Args:
        job: The job.
        layout: Its stages, mesh and micro-batches.
        redistribution: Costs on that mesh.
    """

    def __init__(
        self, job: SearchedJob, layout: JobLayout, redistribution: RedistributionCosts
    ) -> None:
        self._job, self._layout = job, layout
        self._per_stage = job.count // layout.stages
        program = job.programs.at(job.batch // layout.microbatches)
        inside = job.blocks.block_of(program)
        setting = Setting(
            sizes=layout.sizes,
            topology=job.topology,
            rounds=layout.rounds,
            recompute=layout.recompute,
            state_bytes=job.state_bytes,
            data_axes=job.data(),
            batch=job.batch // layout.microbatches if job.is_training or job.named else 0,
            decided=job.decided,
        )
        problem = build(
            program, setting, cuts=job.blocks.cuts, block_of=inside, redistribution=redistribution
        )
        chain = Chain(problem, inside, job.blocks.cuts, CELLS_MAX)
        most = min(layout.stages, layout.microbatches)
        # Micro-batches in flight; of the middle stages the second has most.
        kinds = {"first": most, "middle": most - 1, "last": 1}
        if layout.stages < len(kinds):
            kinds = {"all": 1} if layout.stages == 1 else {"first": most, "last": 1}
        self._chains = {name: chain.in_flight(live) for name, live in kinds.items()}
        self._unpriced: dict[str, ChainTables] = {}
        border = chain.problem.nodes[chain.cut_nodes[0]]
        shares = parts(is_sharded(border.outs()), layout.sizes)
        ranks = math.prod(layout.sizes)
        links = [job.topology.between(at, at + 1, ranks) for at in range(layout.stages - 1)]
        slowest = min(links, key=lambda link: link.bandwidth, default=job.topology.inside)
        nbytes = program.values[job.blocks.cuts[0]].nbytes
        # Seconds to send the value, and its gradient back, in each of its layouts.
        self._sent: FloatArray = (
            2 * layout.rounds * (nbytes / shares / slowest.bandwidth + slowest.latency)
        )

    def least(self, best: float) -> float:
        """Return seconds that no plan undercuts, whatever its memory.

        From `best` on any bound will do, so it stops looking.
        """
        tables = self._tables(0.0)
        if self._layout.stages == 1:
            return tables["all"].least(self._job.count)
        bound = float(self._last(tables["last"]).min())
        if bound < best:
            bound = max(bound, float(self._first(tables["first"]).min()))
        if bound < best and "middle" in tables:
            bound = max(bound, float(self._middle(tables["middle"]).min()))
        return bound

    def solve(self, weight: float, limit: float) -> Outcome:
        """Return the best plan with memory at a price of `weight` seconds a byte.

        Its bound holds for plans within `limit` bytes (see `solve.memory`).
        """
        tables = self._tables(weight)
        if self._layout.stages == 1:
            value, plan = tables["all"].solve(self._job.count)
            stage = self._stage("all", value, plan, weight)
            return self._outcome([stage], value - (weight * limit if weight else 0.0))
        first, last = self._first(tables["first"]), self._last(tables["last"])
        total = np.maximum(first, last)
        middle = None
        if "middle" in tables:
            middle = self._middle(tables["middle"])
            total = np.maximum(total, middle[:, None])
        cut, tie = (int(at) for at in np.unravel_index(int(total.argmin()), total.shape))
        bounds = [first.min(), last.min()] + ([] if middle is None else [middle.min()])
        stages = [
            self._stage(name, *self._path(name, tables[name], cut, tie), weight, entry=cut)
            for name in tables
        ]
        return self._outcome(stages, float(max(bounds)) - (weight * limit if weight else 0.0))

    def _tables(self, weight: float) -> dict[str, ChainTables]:
        if weight:
            return {name: chain.tables(weight) for name, chain in self._chains.items()}
        if not self._unpriced:
            # Without a price of memory the tables of all stages are the same.
            tables = next(iter(self._chains.values())).tables()
            self._unpriced = {n: replace(tables, chain=chain) for n, chain in self._chains.items()}
        return self._unpriced

    def _outcome(self, stages: Sequence[Stage], bound: float) -> Outcome:
        return Outcome(
            layout=self._layout,
            seconds=max(stage.seconds for stage in stages),
            memory=max(stage.memory for stage in stages),
            bound=bound,
            stages=tuple(stages),
        )

    def _stage(
        self, name: str, value: float, plan: ChainPlan, weight: float, *, entry: int = 0
    ) -> Stage:
        chain = self._chains[name]
        memory = plan.memory(chain, entry)
        return Stage(
            name=name,
            seconds=value - weight * memory,
            memory=memory + plan.borrowed(chain),
            chain=chain,
            plan=plan,
            entry=entry,
        )

    # Seconds of a stage for each layout at its borders, and each strategy of what is tied.

    def _first(self, tables: ChainTables) -> FloatArray:
        value = flat(tables.head.value)
        for _ in range(self._per_stage - 1):
            value = through(tables.middle.value.T, value)
        return value + self._sent[:, None]

    def _last(self, tables: ChainTables) -> FloatArray:
        value = flat(tables.tail.value)
        for _ in range(self._per_stage):
            value = through(tables.middle.value, value)
        return value

    def _middle(self, tables: ChainTables) -> FloatArray:
        """Return the seconds of a stage that receives and sends in the same layout."""
        one, power = tables.middle.value, self._per_stage
        value: FloatArray | None = None
        while power:  # repeated squaring
            if power % 2:
                value = one if value is None else through(value, one)
            power //= 2
            if power:
                one = through(one, one)
        if value is None:
            raise ValueError("a stage has no blocks")
        # The same layout at both borders.
        return np.diagonal(value) + self._sent

    def _path(self, name: str, tables: ChainTables, cut: int, tie: int) -> tuple[float, ChainPlan]:
        """Return the best plan of one stage whose borders have the layout `cut`."""
        size = len(tables.middle.value)
        border: FloatArray = np.where(np.arange(size) == cut, 0.0, np.inf)
        chain = tables.chain
        shape = tables.head.value.shape[1:]
        ties = [int(at) for at in np.unravel_index(tie, shape)] if chain.tied else []
        head, tail = flat(tables.head.value)[:, tie], flat(tables.tail.value)[:, tie]
        count = self._per_stage
        if name == "first":
            value, path = shortest(head, tables.middle.value, border, count)
            full = tables.plan(path, ties)
            return value + float(self._sent[cut]), ChainPlan(
                head=full.head, blocks=full.blocks, tail={}
            )
        after = border if name == "middle" else tail
        value, path = shortest(border, tables.middle.value, after, count + 1)
        full = tables.plan(path, ties)
        if name == "middle":
            return value + float(self._sent[cut]), ChainPlan(head={}, blocks=full.blocks, tail={})
        tied = dict(zip(chain.tied, ties, strict=True))
        return value, ChainPlan(head=tied, blocks=full.blocks, tail=full.tail)
