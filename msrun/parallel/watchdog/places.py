"""Where the script of each rank is, and the sentence on ranks that are not in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from msrun.cluster.bounds import RankSet

Kind = Literal["between", "step", "training", "evaluation", "ended"]

HINT = (
    "call the model on all ranks, also to evaluate, and stop or skip a step on all of them: decide "
    "by a number that all have, such as rt.mean_over_data(metric)"
)


_PLURAL = {"is": "are", "has": "have"}


class ScriptPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where the script of one rank is.

    Attributes:
        kind: What it does; `training` from a call of the model in a plain loop to the next event.
        steps: Calls of `rt.step` that have begun.
        trainings: Calls of models in training that have begun, outside of steps.
        evaluations: The same of other calls.
        scope: Ranks of one scope must call models equally often; -1 for none.
        model: Class of the model that was called last.
        waits_in: Function of torch that waits for other ranks, and for what.
    """

    kind: Kind = "between"
    steps: int = 0
    trainings: int = 0
    evaluations: int = 0
    scope: int = -1
    model: str = ""
    waits_in: str = ""

    def progress(self) -> str:
        """Return what is behind this rank."""
        if self.steps:
            return f"step {self.steps}"
        return f"training call {self.trainings}" if self.trainings else "no step"


def disagreement(places: Sequence[ScriptPlace]) -> str | None:
    """Return a sentence on ranks that wait for each other in different places; None if all agree.

    Args:
        places: Of all ranks, each of which waits for others or has ended.
    """
    if not _differ(places):
        return None
    tells_calls = len({place.evaluations for place in places if place.scope >= 0}) > 1
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(_words(place, tells_calls=tells_calls), []).append(rank)
    parts = [_named(members, words) for words, members in ranks.items()]
    return f"ranks do not run the same calls: {'; '.join(parts)}"


def _differ(places: Sequence[ScriptPlace]) -> bool:
    of_job = {(place.kind == "ended", place.kind == "step", place.steps) for place in places}
    scopes: dict[int, set[tuple[str, int, int]]] = {}
    for place in places:
        if place.scope >= 0:
            calls = (place.kind, place.trainings, place.evaluations)
            scopes.setdefault(place.scope, set()).add(calls)
    return len(of_job) > 1 or any(len(calls) > 1 for calls in scopes.values())


def _words(place: ScriptPlace, *, tells_calls: bool) -> str:
    """Return the words that follow "rank 0".

    Args:
        place: Of the rank.
        tells_calls: Whether ranks have evaluated unequally often.
    """
    calls = f"{place.evaluations or 'no'} evaluation call{'s' * (place.evaluations > 1)}"
    after, progress = f" after {calls}" if tells_calls else "", place.progress()
    where = {
        "step": f"is in step {place.steps}{after}",
        "training": f"is at training call {place.trainings} of {place.model}{after}",
        "evaluation": (
            f"is in evaluation call {place.evaluations} of {place.model} after {progress}"
        ),
        "between": f"is between calls after {progress}",
        "ended": f"has ended after {progress}",
    }[place.kind]
    if tells_calls and place.kind in ("between", "ended"):
        where += f" and {calls}"
    return where + (f", in {place.waits_in}" if place.waits_in else "")


def _named(ranks: Sequence[int], words: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {words}"
    verb, _, rest = words.partition(" ")
    return f"ranks {RankSet.of(ranks)} {_PLURAL[verb]} {rest}"
