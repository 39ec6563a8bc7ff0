"""What the first rank decides, on every rank: a plan, or the error with which all of them end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from msrun.errors import ConfigError, ModelError, UsageError
from msrun.parallel.config import ROOT
from msrun.parallel.rank_context import Rank
from msrun.parallel.search.plan.plan import SavedPlan
from msrun.parallel.search.solve.memory import OutOfMemoryError

_ERRORS = {kind.__name__: kind for kind in (ConfigError, ModelError)}
_GIB = 2**30

Row = tuple[int, ...]


class PlanBroadcast(msgspec.Struct, frozen=True):
    """What the first rank tells the others.

    Args:
        mesh: Axis -> size.
        microbatches: Into how many a step divides a local batch.
        recompute: Whether repeated blocks keep only what they are given.
        chosen: Node -> its choice on every axis; empty before the search.
        starts: First step of each chunk of a pipeline; empty before the search.
        plan: One that was saved.
        modules: Configuration of a technique that divides whole modules; empty for a plan.
        name: Of that technique, if the report has not named it.
        seconds: Of a step, as a search predicted it.
        error: Why there is no plan; empty if there is one.
        hint: What to do about it; may be empty.
        kind: Name of the error's class.
    """

    mesh: dict[str, int] = {}
    microbatches: int = 1
    recompute: bool = False
    chosen: dict[str, Row] = {}
    starts: list[int] = []
    plan: SavedPlan | None = None
    modules: dict[str, Any] = {}
    name: str = ""
    seconds: float = 0.0
    error: str = ""
    hint: str = ""
    kind: str = ""


@contextlib.contextmanager
def _told_memory() -> Iterator[None]:
    """Have a plan that does not fit be told with the key."""
    try:
        yield
    except OutOfMemoryError as error:
        needed = f"{error.least / _GIB:.3g} GiB"
        raise ConfigError(
            f"{ROOT}.memory: no plan fits; the smallest takes {needed} on a rank"
        ) from None


def agreed(decide: Callable[[], PlanBroadcast], rank: Rank) -> PlanBroadcast:
    """Return the decision of the first rank on every rank.

    Raises:
        ConfigError: The first rank could not decide; then every rank raises what it did.
    """
    causes: list[Exception] = []
    content = msgspec.json.encode(_tried(decide, causes)) if rank.rank == 0 else b""
    answer = msgspec.json.decode(rank.broadcast(content), type=PlanBroadcast)
    if answer.error:
        kind = _ERRORS.get(answer.kind, UsageError)
        raise kind(answer.error, hint=answer.hint or None) from next(iter(causes), None)
    return answer


def _tried(decide: Callable[[], PlanBroadcast], causes: list[Exception]) -> PlanBroadcast:
    """Return a decision, or why there is none; `causes` gets an error that is none of ours."""
    try:
        with _told_memory():
            return decide()
    except UsageError as error:
        kind = next((name for name, own in _ERRORS.items() if isinstance(error, own)), "")
        return PlanBroadcast(error=error.message, hint=error.hint or "", kind=kind)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer
        causes.append(error)
        said = str(error).strip().partition("\n")[0]
        return PlanBroadcast(
            error=f"{ROOT}.mode: auto: the search on rank 0 failed: {type(error).__name__}: {said}",
            hint="rank 0 shows where; choose a configuration without mode: auto",
            kind=ModelError.__name__,
        )
