"""What verification came to, for `msrun verify` and at the end of a script."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path

from msrun.parallel.config import ROOT
from msrun.parallel.rank_context import RankContext
from msrun.parallel.verify.gather import any_rank
from msrun.parallel.verify.verifier import Verifier


def end_if_verified(report: str, verifiers: Collection[Verifier], context: RankContext) -> None:
    """End the script if no model is left to verify; rank 0 writes the file `report` before.

    All ranks call it after a step, and end together, although some may wait for a model that is
    frozen on others.

    Raises:
        SystemExit: Every model that trains has taken its verified steps.
    """
    is_over = all(verifier.is_over for verifier in verifiers)
    is_over &= any(verifier.is_done for verifier in verifiers)
    if any_rank(context, flag=not is_over):
        return
    if context.rank == 0:
        write_report(report, verifiers)
    raise SystemExit(0)


def write_report(report: str, verifiers: Collection[Verifier]) -> None:
    """Write what the steps came to, unless none trained a model; rank 0 calls it."""
    stepped = [verifier for verifier in verifiers if verifier.outcome]
    unverified = [verifier for verifier in stepped if not verifier.verified]
    if stepped:
        word = "nothing" if unverified else "equal"
        sentence = "; ".join(verifier.outcome for verifier in unverified or stepped)
        Path(report).write_text(f"{word}\n{sentence}", encoding="utf-8", errors="backslashreplace")


def warn_of_nothing(verifiers: Collection[Verifier]) -> None:
    """Warn if a script ends and no step was verified, unless a warning said why."""
    if verifiers and not any(verifier.verified or verifier.has_told for verifier in verifiers):
        warnings.warn(
            f"msrun: {ROOT}.verify: nothing was verified: no step trained a model, by rt.step or "
            "by an optimizer of rt.optimizer",
            stacklevel=3,
        )
