"""The plan of a named mesh with pipeline stages: where the program is cut, and all placements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.graph.repeat import find_blocks
from msrun.parallel.search.graph.rules import ShardingRule
from msrun.parallel.search.mesh.stages import Pace, cut_evenly, divide, largest_stage_memory
from msrun.parallel.search.solve.build import Pin, build
from msrun.parallel.search.solve.memory import OutOfMemoryError
from msrun.parallel.search.solve.modes import SearchResult, indices
from msrun.parallel.search.solve.problem import Setting, layout_nodes
from msrun.parallel.search.solve.uses import Uses

# A little less than what should fit is tried, and a little more than what is known to fit.
_LESS, _MORE = 0.97, 1.001


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with stages.

    Args:
        result: The plan of a micro-batch, of all stages together.
        starts: The first step of each stage.
        memory: Bytes on a rank of the largest stage.
    """

    result: SearchResult
    starts: list[int]
    memory: float


def search_stages(
    program: Program,
    setting: Setting,
    rules: Mapping[str, ShardingRule],
    find: Callable[[float | None], SearchResult],
    *,
    pace: Sequence[Pace],
    pins: Sequence[Pin] = (),
    limit: float | None = None,
    allowed: Collection[int] | None = None,
) -> PipelinePlan:
    """Return the plan that is fastest over all stages together, cut where they take equally long.

    Where memory is short, smaller plans are searched until the largest stage fits.

    Args:
        program: The forward pass of a micro-batch.
        setting: Of the mesh of one stage.
        rules: Of each step.
        find: Returns the fastest plan of all stages together within so many bytes; None is any.
        pace: How the schedule runs each part; there is one for each.
        pins: Placements that the user has fixed, which `find` knows.
        limit: Bytes that a rank has; None is any.
        allowed: As of `cut_evenly`.

    Raises:
        ConfigError: No strategy has a placement that the user has fixed, or there are too few
            places to cut at.
        OutOfMemoryError: No plan fits.
    """
    uses = Uses(program, setting, rules)
    blocks = find_blocks(program) if setting.recompute else None
    inside = blocks.block_of(program) if blocks else {}

    def attempt(total: float | None) -> PipelinePlan:
        result = find(total)
        cuts = blocks.cuts if blocks else layout_nodes(result.chosen)
        problem = build(program, setting, cuts=cuts, block_of=inside, pins=pins)
        chosen = indices(problem, result.chosen)
        seconds = {
            node.name: float(node.seconds[at]) / setting.rounds
            for node, at in zip(problem.nodes, chosen, strict=True)
        }
        stages = [one.stage for one in pace]
        starts = cut_evenly(program, uses, seconds, setting, stages, allowed=allowed)
        parts = divide(program, uses, starts)
        memory = largest_stage_memory(problem, chosen, parts, pace, inside)
        return PipelinePlan(result=result, starts=starts, memory=memory)

    plan = attempt(None)
    while limit is not None and plan.memory > limit:
        try:
            plan = attempt(plan.result.memory * limit / plan.memory * _LESS)
        except OutOfMemoryError as error:
            plan = attempt(error.least * _MORE)
            if plan.memory > limit:
                raise OutOfMemoryError(plan.memory) from None
    return plan
