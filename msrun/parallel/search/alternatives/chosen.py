"""The choice between the plan of a search and the alternatives to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from msrun.parallel.config import DATA_AXIS
from msrun.parallel.search.alternatives.data_parallel import is_data_parallel
from msrun.parallel.search.alternatives.grid_shapes import grids, meshes
from msrun.parallel.search.alternatives.grids import grid_alternatives
from msrun.parallel.search.alternatives.images import image_alternatives, image_meshes
from msrun.parallel.search.alternatives.one_rank import Alternative, Findings, OneRank
from msrun.parallel.search.cost.topology import Topology
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.mesh.job_layout import divisors
from msrun.parallel.search.plan.lowering import Modules
from msrun.parallel.search.solve.memory import OutOfMemoryError
from msrun.parallel.search.solve.problem import Setting


class _TimedPlan(Protocol):
    """A plan."""

    @property
    def seconds(self) -> float:
        """Of a step."""


# Ranks up to which grids are looked at on every mesh: each takes a walk through the model.
_RANKS_MAX = 64

PlanT = TypeVar("PlanT", bound=_TimedPlan)


class AlternativeJob(msgspec.Struct, frozen=True, kw_only=True):
    """What alternatives are looked for on.

    Args:
        topology: What it runs on.
        world: Ranks.
        batch: Samples of a step.
        limit: Bytes that a rank has; None is any.
        mesh: Axis -> size; empty to find it too.
        microbatches: Of a step; None finds them.
    """

    topology: Topology
    world: int
    batch: int
    limit: float | None = None
    mesh: dict[str, int] = {}
    microbatches: int | None = None


class Chosen(NamedTuple):
    """What was chosen.

    Args:
        alternative: It; None for the plan.
        notes: Sentences for the report.
    """

    alternative: Alternative | None
    notes: list[str]


class Alternatives:
    """Looks at the alternatives for a model.

    Args:
        job: What it is to run on.
        look: Returns the modules of the model, and why it has none, empty if it may have some.
        program: Returns its program for a number of samples.
    """

    def __init__(
        self,
        job: AlternativeJob,
        look: Callable[[], tuple[Modules, str]],
        program: Callable[[int], Program],
    ) -> None:
        self._job, self._look_at, self._program = job, look, program
        self._alone_of: dict[tuple[int, int], OneRank] = {}

    def fastest(self, plan: Callable[[], PlanT]) -> PlanT | Alternative:
        """Return what `beside` does, without the report."""
        found, chosen = self.beside(plan)
        if chosen.alternative is not None:
            return chosen.alternative
        if found is None:
            raise ValueError("neither a plan nor an alternative was found")
        return found

    def beside(self, plan: Callable[[], PlanT]) -> tuple[PlanT | None, Chosen]:
        """Return the plan that `plan` finds, or an alternative that is faster or fits alone.

        Raises:
            OutOfMemoryError: Nothing fits.
        """
        try:
            found = plan()
        except OutOfMemoryError as error:
            chosen, least = self._look(None)
            if chosen.alternative is None:
                small = [error.least, *([] if least is None else [least])]
                raise OutOfMemoryError(min(small)) from None
            return None, chosen
        chosen, _ = self._look(found.seconds)
        return (None if chosen.alternative else found), chosen

    def _look(self, seconds: float | None) -> tuple[Chosen, float | None]:
        """Return the fastest alternative below `seconds`, and the least bytes of all.

        Args:
            seconds: Of the plan; None where none fits.
        """
        if seconds is not None and (problem := self._has_no_grids()):
            # Who names other axes asks for no grid.
            return Chosen(None, [] if self._job.mesh else [f"grids: {problem}"]), None
        self._modules, refused = self._look_at()
        if refused:
            return Chosen(None, [f"grids and parts of images: {refused}"]), None
        found, notes, least = self._grids()
        if seconds is None:
            images = self._images()
            notes += images.notes
            found += [images.fastest] if images.fastest else []
            least = min([x for x in (least, images.least) if x is not None], default=None)
        for one in sorted(found, key=lambda one: one.seconds):
            if seconds is not None and one.seconds >= seconds:
                notes.append(f"{_shown(one)}: {one.seconds:.4g} s, the plan takes less")
                break
            if self._is_data_parallel(one):
                return Chosen(one, notes), least
            notes.append(f"{_shown(one)}: samples of one rank alone give other results")
        return Chosen(None, list(dict.fromkeys(notes))), least

    def _has_no_grids(self) -> str:
        job = self._job
        if not job.mesh and job.world > _RANKS_MAX:
            return f"on more than {_RANKS_MAX} ranks they need a named mesh"
        if job.mesh and not any(True for _ in grids(job.mesh)):
            return "the mesh has no two or three axes beside dp"
        return ""

    def _grids(self) -> tuple[list[Alternative], list[str], float | None]:
        found, notes, least = [], list[str](), list[float]()
        if problem := self._has_no_grids():
            return [], [f"grids: {problem}"], None
        for number in self._numbers():
            for mesh in self._meshes(meshes, number):
                seen = grid_alternatives(
                    self._alone(mesh, number), self._modules, mesh, self._job.limit
                )
                notes += seen.notes
                found += [seen.fastest] if seen.fastest else []
                least += [seen.least] if seen.least is not None else []
            if found or not least:
                break
        if number > 1 and not self._job.microbatches:
            more = {"accumulate": number}
            found = [msgspec.structs.replace(x, config=x.config | more) for x in found]
        found = [msgspec.structs.replace(x, microbatches=number) for x in found]
        return found, notes, min(least, default=None)

    def _images(self) -> Findings:
        job = self._job
        found, notes, least = [], list[str](), list[float]()
        for mesh in self._meshes(image_meshes, 1):
            seen = image_alternatives(self._alone(mesh, 1), mesh, job.limit)
            notes += seen.notes
            found += [seen.fastest] if seen.fastest else []
            least += [seen.least] if seen.least is not None else []
        fastest = min(found, key=lambda one: one.seconds, default=None)
        return Findings(fastest, [] if found else notes, min(least, default=None))

    def _numbers(self) -> list[int]:
        """Return numbers of micro-batches, of which fewer take less time."""
        job = self._job
        if job.microbatches is not None:
            return [job.microbatches]
        is_whole = self._program(job.batch).of_whole_batch
        return [1] if is_whole else list(divisors(job.batch))

    def _meshes(
        self, make: Callable[[int, int], Iterator[dict[str, int]]], number: int
    ) -> Iterator[dict[str, int]]:
        job = self._job
        if job.mesh:
            yield job.mesh
        else:
            yield from make(job.world, job.batch // number)

    def _alone(self, mesh: Mapping[str, int], number: int) -> OneRank:
        local = self._job.batch // number // mesh.get(DATA_AXIS, 1)
        key = local, number
        if key not in self._alone_of:
            self._alone_of[key] = OneRank(self._program(local), self._setting(number))
        return self._alone_of[key]

    def _setting(self, number: int) -> Setting:
        return Setting(sizes=(1,), topology=self._job.topology, rounds=number)

    def _is_data_parallel(self, one: Alternative) -> bool:
        """Return whether ranks with samples of their own compute what one process does."""
        ranks = one.mesh.get(DATA_AXIS, 1)
        part = self._job.batch // one.microbatches
        setting = msgspec.structs.replace(self._setting(one.microbatches), batch=part)
        return is_data_parallel(
            self._program(part),
            lambda: self._program(part // ranks),
            self._modules,
            setting,
            ranks,
        )


def _shown(one: Alternative) -> str:
    return f"{one.name} on {' x '.join(f'{name} {size}' for name, size in one.mesh.items())}"
