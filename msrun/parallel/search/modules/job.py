"""What a search for techniques of whole modules is asked, and what it answers.

Plans of a strategy search place single operators.  Two techniques divide whole modules instead:
experts over the axis `ep`, and sequences over the axis `cp`.  Their seconds come from the same
topology and formulas as those of plans, so the two compare.  What they take needs torch: whoever
starts a search hands it a `ModuleSearch` (`advise.module_search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from msrun.parallel.search.cost.topology import Topology
from msrun.parallel.search.graph.program import Program


class ModuleJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job that techniques are compared for.

    Args:
        program: Returns the program of a batch of some size.
        topology: What it runs on.
        world: Ranks.
        batch: Samples of a step.
        limit: Bytes that a rank has; None is any.
        mesh: The mesh that the user has named; empty for any.
        seconds: Of a step of the best plan that places operators; infinite without one.
    """

    program: Callable[[int], Program]
    topology: Topology
    world: int
    batch: int
    limit: float | None
    mesh: dict[str, int] = {}
    seconds: float = math.inf


class SharedModules(msgspec.Struct, frozen=True, kw_only=True):
    """A technique that is faster than the best plan of operators, and fits.

    Args:
        name: Of the technique.
        mesh: Axis -> size.
        config: Configuration of the runtime that runs it: `mesh`, `plan` and what is beside.
        recompute: Whether blocks recompute.
        seconds: Predicted, of a step.
        costs: What they are made up of.
        memory: Bytes of a rank.
    """

    name: str
    mesh: dict[str, int]
    config: dict[str, Any]
    recompute: bool
    seconds: float
    costs: dict[str, float]
    memory: float


class ModuleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a search for techniques.

    Args:
        best: The fastest that fits; None where plans of operators are faster, or none fits.
        least: Bytes of the smallest that was looked at; None if none was.
        lines: For the report: of each technique what it would take, or why it is not for the model.
    """

    best: SharedModules | None = None
    least: float | None = None
    lines: tuple[str, ...] = ()


class ModuleSearch(Protocol):
    """Compares techniques that divide whole modules, for one model."""

    def find(self, job: ModuleJob) -> ModuleAnswer:
        """Return the fastest technique that fits, if it is faster than `job.seconds`."""
