"""What no plan of a layout can undercut, known before the layout is looked at."""

from __future__ import annotations

import msgspec


class JobLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How a job is laid out before any tensor is placed.

    Args:
        stages: Of the pipeline.
        sizes: Of the mesh axes of a stage.
        microbatches: In which a batch is cut.
        recompute: Whether blocks keep only what they are given.
    """

    stages: int
    sizes: tuple[int, ...]
    microbatches: int
    recompute: bool

    @property
    def rounds(self) -> int:
        """Micro-batches that a step takes the time of: a pipeline idles for all stages but one.

        Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
        Using Megatron-LM", SC 2021, section 2.2.1.
        """
        return self.microbatches + self.stages - 1


class Bounds:
    """Bounds of layouts with the same stages and mesh; what is found of one may raise the others'.

    Seconds are those of the whole batch, without idle rounds.

    Args:
        whole: Of its arithmetic, divided among all ranks.
        again: Of the forward pass of the blocks alone.
    """

    def __init__(self, whole: float, again: float) -> None:
        self._whole, self._again = whole, again
        self._found: dict[int, float] = {}

    def add(self, layout: JobLayout, seconds: float) -> None:
        """Take note of what a step of `layout`, which does not recompute, takes at least."""
        if not layout.recompute:
            self._found[layout.microbatches] = seconds * layout.microbatches / layout.rounds

    def is_known(self, layout: JobLayout) -> bool:
        """Return whether what `layout` takes has been found, but for computing again."""
        return layout.microbatches in self._found

    def of(self, layout: JobLayout) -> float:
        """Return the seconds that a step of `layout` takes at least.

        A micro-batch that is a part of another has no strategy that the other has not, and costs
        a fixed time and one that grows with it at most as fast: a sample is never cheaper in it.
        """
        found = [
            seconds for number, seconds in self._found.items() if layout.microbatches % number == 0
        ]
        whole = max([self._whole, *found]) + self._again * layout.recompute
        return whole * layout.rounds / layout.microbatches
