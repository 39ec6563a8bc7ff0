"""Which ranks the console shows: `--tail`, or torchrun's `--tee` and `--local-ranks-filter`."""

from __future__ import annotations

from msrun.cli import options
from msrun.cli.parsers import RankChoice, span
from msrun.cli.settings import Given, Settings, strongest
from msrun.errors import UsageError


def choose_tail(settings: Settings, world_size: int) -> Given[frozenset[int] | None]:
    """Return the ranks to show; None leaves it to the launcher.  One node: ranks are local.

    Raises:
        UsageError: A rank is not there, or options contradict each other.
    """
    tail = _checked(settings.get(options.TAIL), world_size)
    tee = _checked(settings.get(options.TEE), world_size)
    if tee and not tee.value:
        tee = None  # `-t 0` is torchrun's default and says nothing.
    shown = strongest(tail, tee)
    only = _checked(settings.get(options.LOCAL_RANKS_FILTER), world_size)
    if only is None:
        return shown or Given(None)
    return Given(only.value if shown is None else only.value & shown.value, only.source, only.text)


def _checked(given: Given[RankChoice] | None, world_size: int) -> Given[frozenset[int]] | None:
    if given is None:
        return None
    everyone = frozenset(range(world_size))
    if beyond := sorted(given.value.ranks - everyone):
        where = f"(choose {span(world_size)})"
        msg = f"{given.cite()} names rank {beyond[0]}, which is not there {where}"
        raise UsageError(msg)
    chosen = everyone if given.value.every else given.value.ranks
    return Given(chosen, given.source, given.text)
