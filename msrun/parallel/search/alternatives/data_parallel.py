"""Whether a model computes the same with the samples of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from msrun.parallel.config import DATA_AXIS
from msrun.parallel.search.graph.operators import rules_of_steps
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.plan.cost_breakdown import rules_of
from msrun.parallel.search.plan.lowering import Modules, Planned, lower
from msrun.parallel.search.plan.runtime_plans import search_runtime
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.problem import DataParallelKeys, Setting, layout_nodes


def is_data_parallel(
    program: Program,
    local: Callable[[], Program],
    modules: Modules,
    setting: Setting,
    ranks: int,
) -> bool:
    """Return whether ranks with samples of their own compute what one process does.

    Args:
        program: For the samples of all ranks.
        local: Returns the program for the samples of one rank.
        modules: Of the model.
        setting: How a step is run; its mesh does not count.
        ranks: Of data parallel.
    """
    if ranks == 1:
        return True
    whole = msgspec.structs.replace(
        setting,
        sizes=(ranks,),
        data_axes=frozenset({0}),
        decided=DataParallelKeys(sharded_from=math.inf),
    )
    axes = (DATA_AXIS,)
    plan = search_runtime(program, whole, modules, axes=axes)
    if plan is None:
        return False
    nodes = build(program, whole, cuts=layout_nodes(plan.chosen)).nodes
    rules = rules_of_steps(program) | rules_of(nodes)
    planned = Planned(program, whole, axes, rules, plan.chosen)
    return lower(planned, modules, local) is not None
