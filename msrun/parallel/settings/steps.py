"""Sections of the configuration about steps as a whole: checkpoints and comparison."""

from __future__ import annotations

from typing import Literal

import msgspec

from msrun.parallel.settings.section import ConfigSection, at_least, size


class Checkpoint(ConfigSection, frozen=True, kw_only=True):
    """Checkpoints of `rt.save` and `rt.resume`.

    Args:
        dir: Directory that holds all checkpoints of the job, on a file system that all nodes share.
        every: Steps between two automatic checkpoints; 0 writes none automatically.
        keep: Number of newest checkpoints to keep, at least 0; 0 keeps all.
        is_async: Key `async`: whether files are written in the background while training
            continues.
        strategy: File to which the first save writes the layout of every parameter; None writes
            none.
    """

    dir: str
    every: int = 0
    keep: int = 5
    is_async: bool = msgspec.field(default=False, name="async")
    strategy: str | None = None

    def __post_init__(self) -> None:
        at_least(self, "every", 0)
        at_least(self, "keep", 0)


class Verify(ConfigSection, frozen=True, kw_only=True):
    """What of the first steps is compared with one process.

    Args:
        steps: Number of first steps, at least 1; `first_step` is 1.
        memory: Bytes that a comparison may take, as a number or text such as `20GiB`; None allows
            half of what is free on rank 0 before `rt.shard`.  A larger model is compared by layers.
        modules: Patterns of the layers; empty takes first and last of each kind, of larger models.
    """

    steps: int | Literal["first_step"] = 1
    memory: int | str | None = None
    modules: list[str] = []

    def __post_init__(self) -> None:
        if self.steps == "first_step":
            msgspec.structs.force_setattr(self, "steps", 1)
        at_least(self, "steps", 1)
        if self.memory is not None:
            msgspec.structs.force_setattr(self, "memory", size(self, "memory"))
