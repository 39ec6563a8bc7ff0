"""Which ranks the console shows: `--tail`, or torchrun's `--tee` and `--local-ranks-filter`."""

from __future__ import annotations

from msrun.cli.job.formation import Size
from msrun.cli.options import catalog as options
from msrun.cli.options.parsers import RankChoice, span
from msrun.cli.options.settings import Given, Settings, strongest
from msrun.errors import UsageError
from msrun.job import EVERY_RANK

RanksGiven = Given[frozenset[int] | None]


def choose_tail(settings: Settings, size: Size) -> tuple[RanksGiven, RanksGiven]:
    """Return the ranks to show, and the local ranks to which that is limited.

    None leaves the first to the launcher and is no limit as the second.  On one node
    ranks are local, and the first says it all.

    Raises:
        UsageError: A rank is not there, or options contradict each other.
    """
    ranks, local = _choose(settings, size)
    if local.value is None or not size.is_alone:
        return ranks, local
    both = local.value if ranks.value is None else ranks.value & local.value
    return Given(both, local.source, local.text), Given(None)


def choose_streams(settings: Settings) -> Given[dict[int, int]] | None:
    """Return the streams that --tee chose; None where it was not given or --tail goes before."""
    tail, tee = settings.get(options.TAIL), settings.get(options.TEE)
    if tee is None or not any(tee.value.values()):
        return None
    # Where both are as strong, `choose_tail` has refused what contradicts.
    return None if tail and tail.source.level > tee.source.level else tee


def _choose(settings: Settings, size: Size) -> tuple[RanksGiven, RanksGiven]:
    here = size.workers.value
    tail = _checked(settings.get(options.TAIL), size.world_size)
    tee = _checked(_ranks_of(settings.get(options.TEE)), here)
    _checked(_ranks_of(settings.get(options.REDIRECTS)), here)
    if tee and tee.value == RankChoice():
        tee = None  # `-t 0` is torchrun's default and says nothing.
    only = _checked(settings.get(options.LOCAL_RANKS_FILTER), here)
    limit = Given(None) if only is None else _ranks(only, here)
    chosen = strongest(tail, tee)
    if chosen is None:
        return Given(None), limit
    if chosen is tail and not chosen.value.every:
        return Given(chosen.value.ranks, chosen.source, chosen.text), limit
    local = _ranks(chosen, here)
    if limit.value is None or local.value is None:
        return Given(None), local
    return Given(None), Given(local.value & limit.value, limit.source, limit.text)


def _ranks_of(given: Given[dict[int, int]] | None) -> Given[RankChoice] | None:
    """Return the local ranks for which streams were chosen."""
    if given is None:
        return None
    chosen = RankChoice(
        every=bool(given.value.get(EVERY_RANK)),
        ranks=frozenset(rank for rank, std in given.value.items() if std and rank != EVERY_RANK),
    )
    return Given(chosen, given.source, given.text)


def _checked(given: Given[RankChoice] | None, count: int | None) -> Given[RankChoice] | None:
    """Return `given` with `every` for all of `count` ranks, where their number is known."""
    if given is None or count is None:
        return given
    everyone = frozenset(range(count))
    if beyond := sorted(given.value.ranks - everyone):
        where = f"(choose {span(count)})"
        raise UsageError(f"{given.cite()} names rank {beyond[0]}, which does not exist {where}")
    is_every = given.value.every or given.value.ranks == everyone
    return Given(RankChoice(every=True) if is_every else given.value, given.source, given.text)


def _ranks(given: Given[RankChoice], count: int) -> RanksGiven:
    chosen = frozenset(range(count)) if given.value.every else given.value.ranks
    return Given(chosen, given.source, given.text)
