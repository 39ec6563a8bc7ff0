"""Grids of ranks and parts of images for `msrun advise`, as the strategy search finds them.

`search.alternatives` says which a model can take, what their steps cost and what they send.  Of
each style the fastest on any mesh of all ranks is shown.  The bytes of a rank come from a pass of
one rank (`ranks`), like those of other techniques: plans of the search leave out what operators
need for a moment, so they are below what a rank takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from msrun.errors import UsageError
from msrun.parallel.advise.techniques import GRIDS, IMAGES, Technique
from msrun.parallel.auto.offline_model import SIZES, resized
from msrun.parallel.auto.tracing.calls import positional
from msrun.parallel.auto.tracing.trace import Traced, trace
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.search.alternatives.grid_shapes import meshes
from msrun.parallel.search.alternatives.grids import grids_on
from msrun.parallel.search.alternatives.images import image_alternatives, image_meshes
from msrun.parallel.search.alternatives.one_rank import Alternative, OneRank
from msrun.parallel.search.cost.topology import Topology
from msrun.parallel.search.graph.program import ProgramByBatch
from msrun.parallel.search.solve.problem import Setting

# Ranks up to which every mesh is looked at: each takes a walk through the model.
_RANKS_MAX = 64


class WholeModels(NamedTuple):
    """What was found.

    Args:
        found: Techniques, each with what the search knows of it.
        refused: Technique -> why it is not for the model.
    """

    found: list[tuple[Technique, Alternative]]
    refused: dict[str, str]


def whole_models(
    model: nn.Module, sample: Sequence[Any], *, batch: int, world: int, topology: Topology
) -> WholeModels:
    """Return the fastest grid of each style, and the fastest division of images.

    Args:
        model: On the device `meta`.
        sample: Inputs of any batch.
        batch: Samples of a step.
        world: Ranks.
        topology: What they run on.
    """
    if world > _RANKS_MAX:
        reason = f"advise looks at meshes of up to {_RANKS_MAX} ranks, and there are {world}"
        return WholeModels([], {"grids": reason, IMAGES: reason})
    looked = _AllMeshes(model, sample, batch, world, topology)
    try:
        every = [*looked.grids(), *looked.images()]
    except UsageError as error:
        return WholeModels([], {"grids": error.message, IMAGES: error.message})
    best: dict[str, Alternative] = {}
    for one in every:
        if one.name not in best or one.seconds < best[one.name].seconds:
            best[one.name] = one
    refused = {}
    if not best.keys() & {*GRIDS}:
        missing = f"no mesh of {world} ranks has two axes or three"
        refused["grids"] = _reason(looked.notes_of_grids, missing)
    if IMAGES not in best:
        missing = f"no mesh of {world} ranks has axes beside dp"
        refused[IMAGES] = _reason(looked.notes_of_images, missing)
    return WholeModels([(_technique(one), one) for one in best.values()], refused)


def _technique(one: Alternative) -> Technique:
    axes = tuple((name, size) for name, size in one.mesh.items() if name != DATA_AXIS)
    return Technique(whole=one.name, axes=axes)


def _reason(notes: Sequence[str], missing: str) -> str:
    """Return why there is none: of the first mesh, or `missing` without any."""
    return notes[0].partition(": ")[2] if notes else missing


class _AllMeshes:
    """Looks at every mesh of all ranks."""

    def __init__(
        self, model: nn.Module, sample: Sequence[Any], batch: int, world: int, topology: Topology
    ) -> None:
        self._model, self._batch, self._world = model, batch, world
        self._sample = sample
        self._setting = Setting(sizes=(1,), topology=topology)
        self._alone_of: dict[int, OneRank] = {}
        self.notes_of_grids: list[str] = []
        self.notes_of_images: list[str] = []

    def grids(self) -> Iterator[Alternative]:
        """Yield every grid."""
        for mesh in meshes(self._world, self._batch):
            found, notes = grids_on(self._alone(mesh), self._traced[0].modules, mesh)
            self.notes_of_grids += notes
            yield from found

    def images(self) -> Iterator[Alternative]:
        """Yield every division of images."""
        for mesh in image_meshes(self._world, self._batch):
            seen = image_alternatives(self._alone(mesh), mesh, None)
            self.notes_of_images += seen.notes
            yield from [seen.fastest] if seen.fastest else []

    @cached_property
    def _traced(self) -> list[Traced]:
        sample = list(self._sample)
        if len(sample) == 1 and isinstance(sample[0], Mapping):
            sample = [*positional(self._model, sample[0])]
        return [trace(self._model, resized(sample, size)) for size in SIZES]

    @cached_property
    def _programs(self) -> ProgramByBatch:
        small, large = (one.program for one in self._traced)
        return ProgramByBatch(small, large, SIZES)

    def _alone(self, mesh: Mapping[str, int]) -> OneRank:
        local = self._batch // mesh.get(DATA_AXIS, 1)
        if local not in self._alone_of:
            self._alone_of[local] = OneRank(self._programs.at(local), self._setting)
        return self._alone_of[local]
