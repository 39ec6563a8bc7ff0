"""Which mesh: pipeline stages, axes, micro-batches and recomputation, with the best plan of each.

Every way to lay a job out has a bound that costs nothing: its arithmetic, divided among all ranks,
and the idle time of the pipeline.  Layouts are looked at by that bound, and those that cannot be
better than the best so far never are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from msrun.parallel.search.cost.cost import Prices
from msrun.parallel.search.cost.topology import Topology
from msrun.parallel.search.graph.batches import Batches
from msrun.parallel.search.graph.codes import Array, is_cut
from msrun.parallel.search.graph.repeat import Blocks
from msrun.parallel.search.mesh.bounds import Bounds, JobLayout
from msrun.parallel.search.mesh.mesh_shapes import data_shapes, divisors, shapes
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.chain import Chain, ChainPlan, Tables, flat, shortest, through
from msrun.parallel.search.solve.eliminate import CELLS_MAX
from msrun.parallel.search.solve.problem import OperatorNode, Setting, parts, work

_ACCUMULATE_MAX = 64
_PRICES_MAX = 14
_TOLERANCE = 2e-3
_PROHIBITIVE = 1e-3
_RUNNERS_UP = 5


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be laid out.

    Args:
        programs: The model with two repeated blocks, for any batch.
        blocks: The two blocks.
        count: Blocks of the whole model.
        topology: What it runs on.
        world: Ranks.
        batch: Samples of a step.
        limit: Bytes that a rank has.
        state_bytes: Of the optimizer, for each element of a parameter.
        is_training: Whether it is laid out for `rt.shard`: in stages, and with ranks of the first
            axis handed different samples.
        named: Stages and mesh of a stage, where they are given.
        data_axes: Axes of these whose ranks are handed different samples.
    """

    programs: Batches
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

    def data(self) -> frozenset[int]:
        """Return the axes whose ranks are handed different samples."""
        return frozenset({0}) if self.is_training else self.data_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The plan of one kind of pipeline stage.

    Args:
        name: `all`, `first`, `middle` or `last`.
        seconds: Of a step.
        memory: Bytes on one rank.
        chain: Whose nodes the plan names.
        plan: Its strategies.
        entry: Strategy of the value it is given; 0 for the first stage.
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
        stages: Its stages.
    """

    layout: JobLayout
    seconds: float
    memory: float
    bound: float
    stages: tuple[Stage, ...]


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


def groups(job: Job) -> list[tuple[int, tuple[int, ...]]]:
    """Return every number of stages with every mesh of a stage."""
    if job.named:
        return [job.named]
    return [
        (stages, sizes)
        for stages in divisors(math.gcd(job.count, job.world))[job.is_training :]
        if stages <= job.batch
        for sizes in (shapes, data_shapes)[job.is_training](job.world // stages)
    ]


def layouts(job: Job, stages: int, sizes: tuple[int, ...]) -> list[JobLayout]:
    """Return the layouts of one group, the largest micro-batches first."""
    most = job.batch if stages > 1 else min(job.batch, _ACCUMULATE_MAX)
    ranks = math.prod(sizes[axis] for axis in job.data())
    return [
        JobLayout(stages=stages, sizes=sizes, microbatches=number, recompute=recompute)
        for number in divisors(job.batch)
        if stages <= number <= most and job.batch // number % ranks == 0
        for recompute in (False, True)
    ]


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
        self._prices = Prices(())
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
        self, stages: _Stages, exceeds: Outcome, fits: Outcome, best: float
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

    def _stages(self, layout: JobLayout) -> _Stages:
        """Return the stages of a layout; prices are kept for its mesh alone."""
        if layout.sizes != self._prices.sizes:
            self._prices = Prices(self._job.topology.wires(layout.sizes))
        return _Stages(self._job, layout, self._prices)


def _pure(node: OperatorNode, setting: Setting) -> float:
    """Return the seconds of computation of a node on one rank, without starting anything."""
    topology = msgspec.structs.replace(setting.topology, launch=0.0)
    alone = msgspec.structs.replace(setting, topology=topology)
    rows = np.zeros((1, 1), dtype=np.int64)
    return float(work(node.rule, rows, alone, again=False)[0])


class _Stages:
    """All stages of one layout.

    What passes between stages lies in the same way at every border.  A stage holds as many
    micro-batches as there are stages from it to the last (1F1B).
    """

    def __init__(self, job: Job, layout: JobLayout, prices: Prices) -> None:
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
        )
        problem = build(program, setting, cuts=job.blocks.cuts, block_of=inside, prices=prices)
        chain = Chain(problem, inside, job.blocks.cuts, CELLS_MAX)
        most = min(layout.stages, layout.microbatches)
        kinds = {"first": most, "middle": most - 1, "last": 1}
        if layout.stages < len(kinds):
            kinds = {"all": 1} if layout.stages == 1 else {"first": most, "last": 1}
        self._chains = {name: chain.in_flight(held) for name, held in kinds.items()}
        self._free: dict[str, Tables] = {}
        hub = chain.problem.nodes[chain.hubs[0]]
        shares = parts(is_cut(hub.outs()), layout.sizes)
        across = job.topology.across
        nbytes = program.values[job.blocks.cuts[0]].nbytes
        self._sent: Array = (
            2 * layout.rounds * (nbytes / shares / across.bandwidth + across.latency)
        )

    def least(self, best: float) -> float:
        """Return the seconds that no plan undercuts, whatever its memory; fewer from `best` on."""
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
        """Return the best plan with bytes of memory at `weight` seconds each."""
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
        found = [
            self._stage(name, *self._path(name, tables[name], cut, tie), weight, entry=cut)
            for name in tables
        ]
        return self._outcome(found, float(max(bounds)) - (weight * limit if weight else 0.0))

    def _tables(self, weight: float) -> dict[str, Tables]:
        if weight:
            return {name: chain.tables(weight) for name, chain in self._chains.items()}
        if not self._free:
            # Without a price of memory all stages have the same.
            tables = next(iter(self._chains.values())).tables()
            self._free = {n: replace(tables, chain=chain) for n, chain in self._chains.items()}
        return self._free

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

    # Seconds of a stage for each layout at its borders, and of what is tied.

    def _first(self, tables: Tables) -> Array:
        value = flat(tables.head.value)
        for _ in range(self._per_stage - 1):
            value = through(tables.middle.value.T, value)
        return value + self._sent[:, None]

    def _last(self, tables: Tables) -> Array:
        value = flat(tables.tail.value)
        for _ in range(self._per_stage):
            value = through(tables.middle.value, value)
        return value

    def _middle(self, tables: Tables) -> Array:
        """Return the seconds of a stage that is given and hands on one layout."""
        one, power = tables.middle.value, self._per_stage
        value: Array | None = None
        while power:
            if power % 2:
                value = one if value is None else through(value, one)
            power //= 2
            if power:
                one = through(one, one)
        if value is None:
            raise ValueError("a stage has blocks")
        return np.diagonal(value) + self._sent

    def _path(self, name: str, tables: Tables, cut: int, tie: int) -> tuple[float, ChainPlan]:
        """Return the best plan of one stage between borders that lie as `cut` says."""
        size = len(tables.middle.value)
        border: Array = np.where(np.arange(size) == cut, 0.0, np.inf)
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
