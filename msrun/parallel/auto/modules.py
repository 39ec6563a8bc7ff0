"""Techniques of whole modules beside plans of a search: the faster of both, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from msrun.errors import ConfigError
from msrun.parallel.config import DATA_AXIS, ROOT, ParallelConfig
from msrun.parallel.config_file import read_config
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS, MeshLayout
from msrun.parallel.search.modules.job import ModuleJob, ModuleSearch, SharedModules
from msrun.parallel.search.solve.eliminate import TooWideError
from msrun.parallel.search.solve.memory import OutOfMemoryError
from msrun.parallel.search.solve.modes import MODES
from msrun.parallel.settings.plan_rules import CONTEXT_AXIS

# Keys that a technique may set.
_KEYS = ("mesh", "plan", "optimizer", "recompute", "accumulate", "data")


class _Timed(Protocol):
    """A plan of operators."""

    @property
    def seconds(self) -> float:
        """Of a step."""


Found = TypeVar("Found", bound=_Timed)


def faster(
    find: Callable[[], Found], modules: ModuleSearch, job: ModuleJob
) -> tuple[Found | SharedModules, tuple[str, ...]]:
    """Return the faster of the best plan of operators and the best technique of whole modules.

    Args:
        find: Returns the plan.
        modules: Techniques of the model.
        job: What both are for.

    Returns:
        It, and what to say of techniques.

    Raises:
        OutOfMemoryError: Nothing fits.
        TooWideError: The search for plans ends without one, and no technique fits.
    """
    try:
        plan = find()
    except TooWideError:
        answer = modules.find(job)
        if answer.best is None:
            raise
        return answer.best, answer.lines
    except OutOfMemoryError as error:
        answer = modules.find(job)
        if answer.best is None:
            least = error.least if answer.least is None else min(error.least, answer.least)
            raise OutOfMemoryError(least) from None
        return answer.best, answer.lines
    answer = modules.find(msgspec.structs.replace(job, seconds=plan.seconds))
    return answer.best or plan, answer.lines


def only(modules: ModuleSearch, job: ModuleJob) -> tuple[SharedModules, tuple[str, ...]]:
    """Return the best technique where there is no plan of operators.

    That is on a mesh that names experts, and for models that no trace can follow.

    Raises:
        OutOfMemoryError: It does not fit.
        UsageError: The model has no such technique.
    """
    answer = modules.find(job)
    if answer.best is None and answer.least is not None:
        raise OutOfMemoryError(answer.least)
    if answer.best is None:
        why = [line for line in answer.lines if line.startswith(EXPERT_AXIS)]
        if EXPERT_AXIS in job.mesh and why:
            hint = "leave the axis out, or choose semi_auto"
            raise ConfigError(f"{ROOT}.mesh.{'; '.join(why)}", hint=hint)
        raise ConfigError(
            f"{ROOT}.mode: auto finds no technique: {'; '.join(answer.lines)}",
            hint="choose semi_auto",
        )
    return answer.best, answer.lines


def mesh_of(layout: MeshLayout) -> dict[str, int]:
    """Return the axes of a mesh as they are named: those of experts apart from `dp`."""
    if not layout.ep:
        return layout.axes
    mesh: dict[str, int] = {}
    for name, size in layout.axes.items():
        parts = {DATA_AXIS: size // layout.ep, EXPERT_AXIS: layout.ep}
        mesh |= parts if name == DATA_AXIS else {name: size}
    return mesh


def names_modules(config: ParallelConfig, layout: MeshLayout, stages: int) -> bool:
    """Return whether the mesh names an axis that divides modules, which a search is to look at.

    Rules of `plan` and mode propagation are for operators.

    Raises:
        ConfigError: It names experts beside what they cannot be searched with.
    """
    others = {
        "pipeline": stages > 1,
        "plan": bool(config.plan),
        "search": MODES[config.search or "exact"] == "propagation",
    }
    other = next((key for key, is_given in others.items() if is_given), None)
    if layout.ep > 1 and other:
        raise ConfigError(
            f"{ROOT}.{other}: mode auto finds no place for experts beside it, and the mesh has "
            f"{EXPERT_AXIS} {layout.ep}",
            hint="choose semi_auto, with a rule of style experts",
        )
    return other is None and (layout.ep > 1 or layout.size(CONTEXT_AXIS) > 1)


def run_by(config: ParallelConfig, chosen: Mapping[str, Any]) -> ParallelConfig:
    """Return the configuration with which the runtime runs a technique.

    Args:
        config: Of `mode: auto`, whose other keys stay.
        chosen: What the search has chosen: `mesh`, `plan`, and keys beside them.

    Raises:
        ConfigError: The configuration has a key that cannot be combined with it.
    """
    made = read_config(chosen)
    return msgspec.structs.replace(
        config,
        mode=None,
        search=None,
        memory=None,
        topology=None,
        **{key: getattr(made, key) for key in _KEYS if key in chosen or key == "plan"},
    )
