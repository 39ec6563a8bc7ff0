"""What verification came to, for `msrun verify` and at the end of a script."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path

from msrun.parallel.config import ROOT
from msrun.parallel.verify.verifier import Verifier


def end_if_verified(report: str, verifiers: Collection[Verifier], rank: int) -> None:
    """End the script if no model is left to verify; rank 0 writes the file `report` before.

    Raises:
        SystemExit: Every model has taken its verified steps.
    """
    if not all(verifier.is_done for verifier in verifiers):
        return
    if rank == 0:
        word = "equal" if all(verifier.verified for verifier in verifiers) else "nothing"
        sentence = "; ".join(verifier.outcome for verifier in verifiers)
        Path(report).write_text(f"{word}\n{sentence}", encoding="utf-8", errors="backslashreplace")
    raise SystemExit(0)


def warn_of_nothing(verifiers: Collection[Verifier]) -> None:
    """Warn if a script ends and no step was verified, unless a warning said why."""
    if verifiers and not any(verifier.verified or verifier.has_told for verifier in verifiers):
        warnings.warn(
            f"msrun: {ROOT}.verify: nothing was verified: no step trained a model, by rt.step or "
            "by an optimizer of rt.optimizer",
            stacklevel=3,
        )
