"""Repeated blocks of a program, such as the layers of a transformer, so that one stands for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from msrun.parallel.search.graph.program import Program, Step
from msrun.parallel.search.graph.rules import Site
from msrun.parallel.search.graph.views import dim_map

_COPIES_MIN = 3
_FAR = 64


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """Equal blocks, each of which passes exactly one value to the next.

    Args:
        first: Index of the first step of the first block.
        period: Steps of a block.
        count: Number of blocks.
        cuts: The value that each block passes on.
    """

    first: int
    period: int
    count: int
    cuts: tuple[str, ...]

    def block_of(self, program: Program) -> dict[str, int]:
        """Return step -> number of its block, for the steps of a block."""
        steps = program.steps[self.first : self.first + self.period * self.count]
        return {step.name: at // self.period for at, step in enumerate(steps)}


def find_blocks(program: Program) -> Blocks | None:
    """Return the blocks that cover most steps; None if fewer than three are equal.

    Blocks may share with each other, and with what comes before and behind them, only values that
    depend on no parameter; anything may follow the last one.
    """
    kinds = _step_kinds(program)
    for first, period, count in _runs(kinds):
        for shift in range(period):
            blocks = _cut(program, first + shift, period, count - bool(shift))
            if blocks is not None:
                return blocks
    return None


def shortened(program: Program, blocks: Blocks) -> tuple[Program, Blocks]:
    """Return `program` with the first two blocks alone, and what comes before and behind.

    What follows the last block reads the value that the second passes on.
    """
    keep = blocks.first + 2 * blocks.period
    end = blocks.first + blocks.count * blocks.period
    last, second = blocks.cuts[-1], blocks.cuts[1]

    def renamed(step: Step) -> Step:
        inputs = {slot: second if name == last else name for slot, name in step.inputs.items()}
        return msgspec.structs.replace(step, inputs=inputs)

    steps = (*program.steps[:keep], *map(renamed, program.steps[end:]))
    made = {name for step in program.steps for name in step.outputs}
    made_here = {name for step in steps for name in step.outputs}
    used = {name for step in steps for name in step.inputs.values()}
    outputs = tuple(second if name == last else name for name in program.outputs)
    used.update(outputs)
    values = {
        name: value
        for name, value in program.values.items()
        if name in made_here or (name not in made and name in used)
    }
    short = msgspec.structs.replace(
        program,
        values=values,
        params={name: full for name, full in program.params.items() if name in values},
        inputs=tuple(name for name in program.inputs if name in values),
        steps=steps,
        outputs=outputs,
    )
    return short, msgspec.structs.replace(blocks, count=2, cuts=blocks.cuts[:2])


def _step_kinds(program: Program) -> list[int]:
    """Return a number for each step; equal steps have equal ones."""
    numbers: dict[object, int] = {}
    made = {name: at for at, step in enumerate(program.steps) for name in step.outputs}
    origins = _origins(program)
    kinds = []
    for at, step in enumerate(program.steps):
        # How far back a step reads distinguishes blocks from parts of blocks; beyond `_FAR` steps
        # all distances count as one.  Of what blocks share, such as a mask that is made before the
        # first one, it would tell equal blocks apart: that is told by how it is made.
        reads = tuple(
            (
                slot,
                program.values[name],
                name in program.params,
                origins.get(name) or min(at - made.get(name, at), _FAR),
            )
            for slot, name in step.inputs.items()
        )
        makes = tuple(program.values[name] for name in step.outputs)
        key = (step.target, reads, makes, repr(step.attrs), step.is_detached)
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def _origins(program: Program) -> dict[str, str]:
    """Return for each value that depends on no parameter how it is made; equal ones are equal."""
    constants = program.constants()
    numbers: dict[object, int] = {}
    origins = {name: name for name in program.inputs}
    for step in program.steps:
        if constants.issuperset(step.outputs):
            reads = tuple((slot, origins.get(name)) for slot, name in step.inputs.items())
            key = (step.target, repr(step.attrs), reads)
            number = numbers.setdefault(key, len(numbers))
            origins |= {name: f"{number}.{at}" for at, name in enumerate(step.outputs)}
    return origins


def _runs(kinds: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (first, period, count) of repetitions, those that cover most steps first."""
    places: dict[int, list[int]] = {}
    for at, kind in enumerate(kinds):
        places.setdefault(kind, []).append(at)
    periods = {later - at for equal in places.values() for at, later in pairwise(equal)}
    runs = []
    for period in sorted(periods):
        start, length = 0, 0
        for at in range(period, len(kinds) + 1):
            if at < len(kinds) and kinds[at] == kinds[at - period]:
                if not length:
                    start = at - period
                length += 1
                continue
            count = (length + period) // period if length else 0
            if count >= _COPIES_MIN:
                runs.append((start, period, count))
            length = 0
    return sorted(runs, key=lambda run: (-run[1] * run[2], run[1]))


def _cut(program: Program, first: int, period: int, count: int) -> Blocks | None:
    """Return the blocks if each passes one value on, and nothing else crosses."""
    if count < _COPIES_MIN:
        return None
    end = first + period * count
    made = {name: at for at, step in enumerate(program.steps) for name in step.outputs}
    crossing = _crossing(program, made, range(first, end), period)
    if crossing is None or any(len(values) != 1 for values in crossing):
        return None
    cuts = tuple(values.pop() for values in crossing)
    places = {
        ((made[cut] - first) % period, program.steps[made[cut]].outputs.index(cut)) for cut in cuts
    }
    inside = {name for step in program.steps[first:end] for name in step.outputs}
    # A view has no layout of its own, which blocks would hand on.
    maker = program.steps[made[cuts[0]]]
    if dim_map(Site(maker, program)) is not None:
        return None
    if len(places) > 1 or not inside.isdisjoint(set(program.outputs) - {cuts[-1]}):
        return None
    return Blocks(first=first, period=period, count=count, cuts=cuts)


def _crossing(
    program: Program, made: Mapping[str, int], steps: range, period: int
) -> list[set[str]] | None:
    """Return what each block passes to the next; None if anything else crosses.

    What comes before counts to the first block.  Parameters belong to the block that reads them
    first, and no other may read those of a block after the first.
    """
    count = len(steps) // period
    constants = program.constants()
    crossing: list[set[str]] = [set() for _ in range(count)]
    owner: dict[str, int] = {}
    for at, step in enumerate(program.steps):
        here = _block(at, steps, period)
        for name in step.inputs.values():
            if name in constants:
                continue
            is_made = name in made
            there = _block(made[name], steps, period) if is_made else owner.setdefault(name, here)
            is_tied = not is_made and (there, here) == (0, count)
            if there == here or is_tied:
                continue
            if not is_made or here - there != 1:
                return None
            crossing[there].add(name)
    return crossing


def _block(at: int, steps: range, period: int) -> int:
    return max(0, min(at, steps.stop) - steps.start) // period
