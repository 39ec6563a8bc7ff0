"""The order of the ranks on the mesh: which rank has which position.

MindSpore's `Layout` lists the ranks of its device matrix in any order.  A rule can take the axes of
the mesh in another order, but not its ranks: all that a job divides follows one mesh.  So a list
that no order of the axes gives is the order of the whole mesh.  It stands in the configuration
itself or, where rules alone have lists of all ranks, the first that needs it gives it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from msrun.errors import ConfigError
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.notation.device_matrix import in_order
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.settings.plan_rules import PlanRule

_KEY = f"{ROOT}.rank_list"


def with_ranks(layout: MeshLayout, config: ParallelConfig) -> MeshLayout:
    """Return `layout` with its ranks in the order that `config` gives.

    Raises:
        ConfigError: The list has not each rank once, or a rule contradicts it or another rule.
    """
    check_list(config, layout.world_size)
    everyone, given = list(range(layout.world_size)), config.rank_list
    lists = {path: ranks for path, ranks in _lists(config).items() if sorted(ranks) == everyone}
    odd = [] if given else [path for path, ranks in lists.items() if not _fits(ranks, layout)]
    source = odd[0] if odd else _KEY
    order = lists[source] if odd else given or everyone
    _check_first(config, source, order)
    placed = msgspec.structs.replace(layout, ranks=() if order == everyone else tuple(order))
    for path, ranks in lists.items():
        if not _fits(ranks, placed):
            raise ConfigError(
                f"{path}: {ranks} is no order of the axes of a mesh whose ranks {source} puts in "
                f"the order {order}",
                hint="a mesh has its ranks in one order: leave out one of the two lists",
            )
    return placed


def check_list(config: ParallelConfig, world_size: int) -> None:
    """Check the list of `config` itself, which needs no axes: `mesh: auto` chooses them later.

    Raises:
        ConfigError: The list has not each of `world_size` ranks once, or cannot be verified.
    """
    given = config.rank_list
    if given and sorted(given) != [*range(world_size)]:
        raise ConfigError(f"{_KEY}: {given} has not each of the {world_size} ranks once")
    _check_first(config, _KEY, given or [0])


def _check_first(config: ParallelConfig, source: str, order: Sequence[int]) -> None:
    if config.verify and order[0] != 0:
        raise ConfigError(
            f"{ROOT}.verify: rank 0 computes the step of one process, and {source} begins with "
            f"rank {order[0]} (let it begin with 0)"
        )


def _lists(config: ParallelConfig) -> dict[str, list[int]]:
    """Return path of a rule in `config` -> its list of ranks."""
    rules = [] if isinstance(config.plan, str) else config.plan
    return {
        f"{ROOT}.plan[{index}].layout.rank_list": rule.layout.rank_list
        for index, rule in enumerate(rules)
        if isinstance(rule, PlanRule) and rule.layout and rule.layout.rank_list
    }


def _fits(ranks: Sequence[int], layout: MeshLayout) -> bool:
    try:
        in_order(layout.axes, ranks, layout)
    except ConfigError:
        return False
    return True
