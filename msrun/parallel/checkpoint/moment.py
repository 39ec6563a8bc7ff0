"""State between two steps: what a save captures at once, and what a load returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """State that changes between two steps, captured right after the first of them.

    Args:
        step: Number of steps that are done.
        loader: State of the loader; None without a loader.
        random: Kind of generator -> state.
    """

    step: int
    loader: dict[str, Any] | None
    random: dict[str, torch.Tensor]


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a checkpoint that was loaded.

    Args:
        path: Directory of the checkpoint.
        step: Number of steps that were done.
        extra: Values that the script added.
    """

    path: Path
    step: int
    extra: dict[str, Any]
