"""The plan of a mesh with pipeline stages: where the program is cut, and how each tensor lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.graph.rules import ShardingRule
from msrun.parallel.search.mesh.stages import Pace, cut_evenly, divide, largest_stage_memory
from msrun.parallel.search.solve.build import Pin, build
from msrun.parallel.search.solve.memory import OutOfMemoryError
from msrun.parallel.search.solve.modes import Found, Mode, indices, search
from msrun.parallel.search.solve.problem import Setting, is_layout_node, named_by
from msrun.parallel.search.solve.uses import Uses

# A little less than what should fit is asked for, and a little more than what is known to.
_LESS, _MORE = 0.97, 1.001


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with stages.

    Args:
        found: The plan of a micro-batch, of all stages together.
        starts: The first step of each stage.
        memory: Bytes on a rank of the largest stage.
    """

    found: Found
    starts: list[int]
    memory: float


def search_stages(
    program: Program,
    setting: Setting,
    rules: Mapping[str, ShardingRule],
    *,
    pace: Sequence[Pace],
    mode: Mode = "exact",
    pins: Sequence[Pin] = (),
    limit: float | None = None,
) -> PipelinePlan:
    """Return the plan that is fastest over all stages together, cut where they take equally long.

    Where memory is short, plans of less are asked for until the largest stage fits.

    Args:
        program: The forward pass of a micro-batch.
        setting: Of the mesh of one stage.
        rules: Of each step.
        pace: How each part is run that there shall be.
        mode: As of `search`.
        pins: The user's wishes.
        limit: Bytes that a rank has; None is any.

    Raises:
        UsageError: A wish cannot be met, or there are too few places to cut at.
        OutOfMemoryError: No plan fits.
    """
    uses = Uses(program, setting, rules)

    def attempt(whole: float | None) -> PipelinePlan:
        found = search(program, setting, mode=mode, pins=pins, limit=whole)
        problem = build(program, setting, cuts=layout_nodes(found.chosen), pins=pins)
        chosen = indices(problem, found.chosen)
        seconds = {
            node.name: float(node.seconds[at]) / setting.rounds
            for node, at in zip(problem.nodes, chosen, strict=True)
        }
        starts = cut_evenly(program, uses, seconds, setting, len(pace))
        parts = divide(program, uses, starts)
        return PipelinePlan(
            found=found, starts=starts, memory=largest_stage_memory(problem, chosen, parts, pace)
        )

    made = attempt(None)
    while limit is not None and made.memory > limit:
        try:
            made = attempt(made.found.memory * limit / made.memory * _LESS)
        except OutOfMemoryError as error:
            made = attempt(error.least * _MORE)
            if made.memory > limit:
                raise OutOfMemoryError(made.memory) from None
    return made


def layout_nodes(chosen: Mapping[str, object]) -> list[str]:
    """Return the tensors that a plan moves once for all who read them."""
    return [named_by(name) for name in chosen if is_layout_node(name)]
