"""A traced program cut into pipeline stages: what each runs, owns, receives and sends.

The executor runs a slice of the traced graph as one stage.  A cut may be between any two steps:

- A value that a later part reads is sent through all parts in between, in the layout in which its
  consumers find it, so each rank sends its own shard to its peer in the next stage.
- What depends on no parameter (masks, positions) is computed again by every part that needs it.
- A parameter that several parts read is in each of them; one that none reads stays in the first.

`cut_between_blocks` gives each stage the same number of equal blocks; `cut_evenly` looks for the
cut whose slowest stage takes least, and of cuts that are nearly as good (`_SLACK`) takes the one
that sends least.  Both passes of it are shortest paths over the places where a cut is possible.

Every placement belongs to one plan of the whole program, so memory is counted afterwards, stage by
stage: nodes where their part runs, a copy where its consumer does.  Those copies were left out at
first, and plans that gather parameters were then reported as fitting although they did not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import msgspec
import numpy as np

from msrun.errors import ConfigError
from msrun.parallel.search.cost.topology import NetworkLevel
from msrun.parallel.search.graph.axis_placement import FloatArray
from msrun.parallel.search.graph.program import Program, Step
from msrun.parallel.search.graph.repeat import Blocks
from msrun.parallel.search.solve.problem import Problem, Setting, StrategyNode, named_by
from msrun.parallel.search.solve.uses import Uses

# Places to cut that are tried: those where least is sent.
_PLACES_MAX = 512
# How much longer than in the best cut the slowest stage may take, where less is sent then.
_SLACK = 1.05


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage runs.

    Args:
        steps: In their order, but first those that depend on no parameter: every stage that needs
            them runs them.
        given: Inputs and buffers of the program that they read.
        params: Parameters that they read.
        received: Values that the stage before sends.
        sent: Values that it sends itself; None in the last, which has the outputs.
    """

    steps: tuple[Step, ...]
    given: frozenset[str]
    params: frozenset[str]
    received: tuple[str, ...] = ()
    sent: tuple[str, ...] | None = None


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How a schedule runs one part.

    Args:
        stage: That runs it.
        live: Micro-batches whose activations it keeps at once, at most.
    """

    stage: int
    live: int


def divide(program: Program, uses: Uses, starts: Sequence[int]) -> list[Part]:
    """Return the parts of `program` that begin at the steps numbered `starts`, the first at 0.

    A value that a later part reads is sent through all parts in between.  Parameters that no step
    reads are the first part's.
    """
    parts = [_PartUses(program, uses) for _ in starts]
    stage_of: dict[str, int] = {}
    for at, step in enumerate(program.steps):
        stage = bisect_right(starts, at) - 1
        stage_of |= dict.fromkeys(step.outputs, stage)
        parts[stage].add(step)
    parts[-1].read((*program.outputs, *program.kept))
    read = set[str]().union(*(one.params for one in parts))
    parts[0].params |= set(program.params) - read
    borders = [
        tuple(
            name
            for name, made in stage_of.items()
            if made <= at and any(name in later.made for later in parts[at + 1 :])
        )
        for at in range(len(starts) - 1)
    ]
    ends: list[tuple[str, ...] | None] = [*borders, None]
    return [
        one.part(received, sent)
        for one, received, sent in zip(parts, [(), *borders], ends, strict=True)
    ]


class _PartUses:
    """What the steps of one part read."""

    def __init__(self, program: Program, uses: Uses) -> None:
        self._program, self._uses = program, uses
        self._producers = {name: step for step in program.steps for name in step.outputs}
        self._own: list[Step] = []
        self._constants: set[str] = set()
        self.given: set[str] = set()
        self.params: set[str] = set()
        self.made: set[str] = set()

    def add(self, step: Step) -> None:
        """Add a step, unless it is a constant or a view, which run with their consumers."""
        if runs(step, self._uses):
            self._own.append(step)
            self.read(step.inputs.values())

    def read(self, names: Collection[str]) -> None:
        """Add what is read, and all that constants among it are computed from."""
        pending = list(names)
        while pending:
            name = pending.pop()
            producer = self._producers.get(name)
            if name not in self._uses.constants:
                base, _ = self._uses.base_of(name)
                (self.params if base in self._program.params else self.made).add(base)
            elif producer is None:
                self.given.add(name)
            elif producer.name not in self._constants:
                self._constants.add(producer.name)
                pending += producer.inputs.values()

    def part(self, received: tuple[str, ...], sent: tuple[str, ...] | None) -> Part:
        """Return the part."""
        constants = (step for step in self._program.steps if step.name in self._constants)
        return Part(
            steps=(*constants, *self._own),
            given=frozenset(self.given),
            params=frozenset(self.params),
            received=received,
            sent=sent,
        )


def runs(step: Step, uses: Uses) -> bool:
    """Return whether a step runs in one part alone: it is no constant, and no view."""
    is_constant = uses.constants.issuperset(step.outputs)
    return not is_constant and step.outputs[0] not in uses.views


# Where to cut.


def cut_between_blocks(blocks: Blocks | None, stages: int, key: str) -> list[int]:
    """Return the first step of each stage where all have the same number of blocks.

    Args:
        blocks: Of the program; None if it has none.
        stages: Of the pipeline.
        key: Where the number of stages stands, for messages.

    Raises:
        ConfigError: The blocks do not divide.
    """
    count = blocks.count if blocks else 0
    if blocks is None or count % stages:
        raise ConfigError(
            f"{key}: {stages} stages do not divide the {count} equal blocks of the model"
        )
    steps = blocks.period * (count // stages)
    return [0, *(blocks.first + steps * stage for stage in range(1, stages))]


def cut_evenly(
    program: Program,
    uses: Uses,
    seconds: Mapping[str, float],
    setting: Setting,
    stages: Sequence[int],
    *,
    allowed: Collection[int] | None = None,
) -> list[int]:
    """Return the first step of each part where the slowest takes least, within `_SLACK`.

    Of such cuts it is the one that sends least.

    Args:
        program: What is cut.
        uses: Of the program.
        seconds: Step -> seconds of one micro-batch.
        setting: Of the mesh of one stage, whose ranks share what is sent.
        stages: That of each part; there are at least 2 parts.
        allowed: Steps that a part may begin with; None is any.

    Raises:
        ConfigError: There are too few steps to cut between.
    """
    crossing = _crossing(program, uses)
    steps = program.steps
    done = np.cumsum([0.0, *(seconds.get(step.name, 0.0) for step in steps)])
    count = np.cumsum([0, *(runs(step, uses) for step in steps)])
    every = range(1, len(steps))
    inner = [at for at in every if crossing[at] and (allowed is None or at in allowed)]
    inner = sorted(sorted(inner, key=lambda at: crossing[at])[:_PLACES_MAX])
    places = np.array([0, *inner, len(steps)])
    ranks = math.prod(setting.sizes)
    links = [
        None if one == two else setting.topology.between(one, two, ranks)
        for one, two in pairwise(stages)
    ]
    shares = np.array([crossing[at] / ranks for at in places])
    sent = {link: _seconds_to_send(shares, link) for link in {*links, None}}
    within = done[places] - done[places][:, None]
    # A part needs a step of its own, not only constants and views.
    within[count[places] <= count[places][:, None]] = np.inf
    sides = list(pairwise([None, *links, None]))
    kinds = {(a, b): within + sent[a][:, None] + sent[b] for a, b in sides}
    costs = [kinds[side] for side in sides]
    slowest = _shortest(costs, np.maximum)
    if slowest is None:
        raise ConfigError(
            f"parallel.mesh.pp: {len(stages)} stages, and the model has fewer places to cut at"
        )
    limit = max(table[hop] for table, hop in zip(costs, pairwise(slowest), strict=True)) * _SLACK
    handed_on = [
        np.where(table <= limit, sent[link], np.inf)
        for table, link in zip(costs, [*links, None], strict=True)
    ]
    return [int(places[at]) for at in (_shortest(handed_on, np.add) or slowest)[:-1]]


def _seconds_to_send(nbytes: FloatArray, link: NetworkLevel | None) -> FloatArray:
    """Return the seconds that values take to the next part, and gradients back; None is no way."""
    if link is None:
        return np.zeros(len(nbytes))
    seconds: FloatArray = 2 * (nbytes / link.bandwidth + link.latency)
    return seconds


def _shortest(costs: Sequence[FloatArray], joined: np.ufunc) -> list[int] | None:
    """Return the best path from the first place to the last; None if there is none.

    Args:
        costs: Of each hop from and to each place, (from, to).
        joined: What makes one cost of the costs of two hops: their sum, or the larger.
    """
    value = np.where(np.arange(len(costs[0])) == 0, 0.0, np.inf)
    back = []
    for cost in costs:
        table = joined(value[:, None], cost)
        back.append(table.argmin(axis=0))
        value = table.min(axis=0)
    if np.isinf(value[-1]):
        return None
    path = [len(value) - 1]
    for before in reversed(back):
        path.append(int(before[path[-1]]))
    return path[::-1]


def _crossing(program: Program, uses: Uses) -> list[int]:
    """Return for each step the bytes that a stage which begins with it receives."""
    made = {name: at for at, step in enumerate(program.steps) for name in step.outputs}
    last: dict[str, int] = {}
    for at, step in enumerate(program.steps):
        if runs(step, uses):
            last |= {uses.base_of(name)[0]: at for name in step.inputs.values()}
    last |= {uses.base_of(name)[0]: len(program.steps) for name in program.outputs}
    change = [0] * (len(program.steps) + 2)
    for name, until in last.items():
        if name in made and name not in uses.constants:
            change[made[name] + 1] += program.values[name].nbytes
            change[until + 1] -= program.values[name].nbytes
    return list(accumulate(change))


# Memory.


def largest_stage_memory(
    problem: Problem,
    chosen: Sequence[int],
    parts: Sequence[Part],
    pace: Sequence[Pace],
    block_of: Mapping[str, int] | None = None,
) -> float:
    """Return the bytes on a rank of the largest stage.

    A copy that a consumer saves is in the consumer's stage.  The inside of one recomputed block,
    which the first block has for all of them, is in every stage that runs steps of blocks.

    Args:
        problem: Of the whole program.
        chosen: Strategy of each node.
        parts: Of the program.
        pace: Of each part.
        block_of: Step -> number of its block, where blocks are recomputed.
    """
    memory = dict.fromkeys((one.stage for one in pace), 0.0)
    inside = 0.0
    first = {name for name, number in (block_of or {}).items() if number == 0}
    places = _places(parts)
    lives = [_live(places.get(_name(node), {len(parts) - 1}), pace) for node in problem.nodes]
    for node, strategy, live in zip(problem.nodes, chosen, lives, strict=True):
        for stage, batches in live.items():
            more = (batches - 1) * float(node.microbatch_memory[strategy])
            memory[stage] += float(node.memory[strategy]) + more
        if _name(node) in first:
            inside += float(node.memory[strategy] - node.microbatch_memory[strategy])
    for edge in problem.edges:
        if edge.memory is not None:
            nbytes = float(edge.memory[chosen[edge.source], chosen[edge.target]])
            for stage, batches in lives[edge.target].items():
                memory[stage] += nbytes * (batches if edge.is_per_microbatch else 1)
            if _name(problem.nodes[edge.target]) in first and not edge.is_per_microbatch:
                inside += nbytes
    has_blocks, has_first = (
        {one.stage for one, part in zip(pace, parts, strict=True) if names & _runs_of(part)}
        for names in (set(block_of or ()), first)
    )
    for stage in has_blocks - has_first:
        memory[stage] += inside
    return max(memory.values())


def _runs_of(part: Part) -> set[str]:
    return {step.name for step in part.steps}


def _places(parts: Sequence[Part]) -> dict[str, set[int]]:
    """Return parameter, step or value -> the numbers of the parts that have it."""
    places = {name: {at} for at, part in enumerate(parts) for name in _names(part)}
    for at, part in enumerate(parts):
        for name in part.params:
            places.setdefault(name, set()).add(at)
    return places


def _live(places: Collection[int], pace: Sequence[Pace]) -> dict[int, int]:
    """Return the stages of some parts, and the micro-batches in flight in each."""
    live: dict[int, int] = {}
    for at in places:
        live[pace[at].stage] = max(live.get(pace[at].stage, 1), pace[at].live)
    return live


def _names(part: Part) -> Iterator[str]:
    for step in part.steps:
        yield step.name
        yield from step.outputs


def _name(node: StrategyNode) -> str:
    return named_by(node.name)
