"""Which rank keeps others waiting, by the collectives that each rank has entered.

Ranks of a process group enter its collectives in one order, so those that have entered fewer of
them than others are missed there.  A rank may be behind in one group because it waits in another:
whoever is behind and waits for nobody is the cause.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

from msrun.cluster.bounds import RankSet

GROUPS_MAX = 64
# Of which every rank is a member, as torch names it, and that with NCCL's own numbers.
_WORLD = ("0", "0 (nccl)")
_Name = Annotated[str, msgspec.Meta(max_length=200)]


class Collective(msgspec.Struct, frozen=True):
    """The latest collective of one process group that a rank has entered.

    Args:
        group: Name of the group.
        number: How many of its collectives the rank has entered, this one included.
        name: What it was, such as `all_reduce`.
    """

    group: _Name
    number: Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
    name: _Name


class MissedCollective(msgspec.Struct, frozen=True):
    """A collective that some ranks of a group have entered and others have not.

    Args:
        collective: The latest one of the group.
        there: Ranks that have entered it.
        missing: Ranks that have not.
    """

    collective: Collective
    there: frozenset[int]
    missing: frozenset[int]

    def sentence(self) -> str:
        """Return who is missing where, and who is there."""
        latest = self.collective
        where = "" if latest.group in _WORLD else f" of group {latest.group}"
        return (
            f"{_ranks(self.missing)} never entered {latest.name} #{latest.number}{where}, "
            f"which {_ranks(self.there)} did"
        )


def missed(entered: Mapping[int, Sequence[Collective]]) -> list[MissedCollective]:
    """Return the collectives that are not complete.

    Args:
        entered: Rank -> the latest collective of each of its groups; a rank of which nothing is
            known is left out.
    """
    groups: dict[str, dict[int, Collective]] = {}
    for rank, collectives in entered.items():
        for collective in collectives:
            groups.setdefault(collective.group, {})[rank] = collective
    found = []
    for name, latest in sorted(groups.items()):
        members = entered.keys() if name in _WORLD else latest.keys()
        top = max(latest.values(), key=lambda collective: collective.number)
        there = {rank for rank, each in latest.items() if each.number == top.number}
        if missing := members - there:
            found.append(MissedCollective(top, frozenset(there), frozenset(missing)))
    return found


def causes(found: Iterable[MissedCollective]) -> set[int]:
    """Return the ranks that are missing somewhere and wait in no incomplete collective."""
    found = list(found)
    waiting = {rank for each in found for rank in each.there}
    return {rank for each in found for rank in each.missing} - waiting


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {RankSet.of(ranks)}"
