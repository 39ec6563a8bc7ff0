"""A plan as it is saved: every parameter's and every operator's placement, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from msrun.bounded_file import read_bounded
from msrun.errors import ConfigError
from msrun.parallel.config import PIPELINE_AXIS
from msrun.units import quoted

VERSION = 2
# Of plans with a configuration, which earlier versions cannot run.
MODULES_VERSION = 3
_SHOWN_MAX = 8


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """How one operator runs.

    Args:
        module: Module that runs it; empty for the model itself.
        op: Its name, such as `linear`.
        divided: What each axis divides: a loop of the operator, `R` for nothing, `P` where pending
            sums pass through.
        ins: Placement of each input on each axis.
        outs: Placement of each output on each axis.
    """

    module: str
    op: str
    divided: list[str]
    ins: list[list[str]]
    outs: list[list[str]]


class SavedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, with all it was made for.

    Args:
        version: Of this form.
        model: What was searched.
        program: Identity of the model; see `plan_io.identity`.
        topology: Name of the machine it is for.
        world: Ranks.
        mesh: Axis -> size, stages of the pipeline excluded.
        stages: Of the pipeline.
        microbatches: Of a step.
        batch: Samples of a step.
        recompute: Whether repeated blocks save only their input.
        seconds: Predicted, of a step.
        costs: What they are made up of, in the slowest stage.
        memory: Bytes, predicted, of the largest rank.
        limit: Bytes that a rank has; None if it was no limit.
        stage_memory: Kind of stage -> bytes of its ranks; empty without stages.
        gap: By how much a better plan for this mesh could be faster at most; None if not known.
        params: Parameter -> its placement on each axis.
        operators: Step of the graph -> how it runs.
        shared: Tensor with several consumers -> its layout for all of them, on each axis.
        runs_on: What runs it: `data parallel` and `styles` of the runtime, or the `executor`; the
            name of a technique that divides whole modules.
        config: Configuration of the runtime for such a technique; empty for plans of operators.
        rank_list: The rank at each position of the mesh; empty if they are in their own order.
        unknown: Operators without a rule, which run replicated.
        rejected: Other layouts and why they were not chosen.
    """

    version: int
    model: str
    program: str
    topology: str
    world: int
    mesh: dict[str, int]
    stages: int
    microbatches: int
    batch: int
    recompute: bool
    seconds: float
    costs: dict[str, float]
    memory: float
    gap: float | None
    limit: float | None = None
    stage_memory: dict[str, float] = {}
    params: dict[str, list[str]]
    operators: dict[str, Operator]
    shared: dict[str, list[str]] = {}
    runs_on: str = "executor"
    config: dict[str, Any] = {}
    rank_list: list[int] = []
    unknown: list[str] = []
    rejected: list[str] = []

    def axes(self) -> dict[str, int]:
        """Return the axes of the whole job: stages of the pipeline first, where there are some."""
        return {PIPELINE_AXIS: self.stages, **self.mesh} if self.stages > 1 else self.mesh


def write_plan(plan: SavedPlan, path: Path) -> None:
    """Write `plan` as JSON.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(plan)) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def read_plan(path: Path) -> SavedPlan:
    """Return the plan in a file.

    Raises:
        ConfigError: It cannot be read, or holds no plan.
    """
    content = read_bounded(path, str(path), mebibytes=64)
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
        if version not in (VERSION, MODULES_VERSION):
            raise ConfigError(f"{path} has version {version} (this msrun reads {VERSION})")
        return msgspec.json.decode(content, type=SavedPlan)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no plan of msrun search: {error}") from None


class _Versioned(msgspec.Struct, frozen=True):
    """What every version has."""

    version: int


def explain(plan: SavedPlan, pattern: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield name, split loops, style, inputs and outputs of what `pattern` names.

    Args:
        plan: The plan.
        pattern: Of names of parameters, modules or steps; `*` also crosses dots.

    Raises:
        ConfigError: Nothing has such a name.
    """
    is_known = False
    for name, placed in plan.params.items():
        if fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern):
            is_known = True
            yield name, "", "", "", written(placed)
    for name, operator in plan.operators.items():
        if fnmatchcase(name, pattern) or fnmatchcase(operator.module, pattern):
            is_known = True
            ins, outs = ("; ".join(map(written, side)) for side in (operator.ins, operator.outs))
            known = written(styles(plan, operator))
            yield f"{name} ({operator.op})", " ".join(operator.divided), known, ins, outs
    if not is_known:
        modules = sorted({one.module for one in plan.operators.values() if one.module})
        shown = ", ".join(modules[:_SHOWN_MAX])
        raise ConfigError(f"--explain {quoted(pattern)}: nothing has this name (choose {shown})")


# Operator and the loop that is split -> style of the runtime's rules, and placement of the weight.
_STYLES = {
    ("linear", "n"): ("colwise", "S(0)"),
    ("linear", "k"): ("rowwise", "S(1)"),
    ("embedding", "h"): ("colwise", "S(1)"),
    ("embedding", "v"): ("embedding", "S(0)"),
}
# Placement of the weight -> style, where samples or another dim of the input are sharded.
_DIVIDED = {"R": "data", "R, state cut": "zero 1"}


def styles(plan: SavedPlan, operator: Operator) -> list[str]:
    """Return the parallel style of an operator with a weight, on each axis.

    They are the styles of `plan:` rules; `data` and `zero` where samples are sharded, `sequence`
    where another dim of the input is; `whole` for replicated work, `other` where no name fits.
    Empty without a weight.
    """
    weight = plan.params.get(f"{operator.module}.weight".lstrip("."))
    if weight is None or operator.op not in ("linear", "embedding", "layer_norm", "rms_norm"):
        return []
    return [_style(operator.op, *one) for one in zip(operator.divided, weight, strict=True)]


def _style(op: str, divided: str, weight: str) -> str:
    style, cut = _STYLES.get((op, divided), ("", ""))
    if style:
        return style if weight == cut else "other"
    if divided == "R":
        return "whole" if weight == "R" else _DIVIDED.get(weight, "zero 3")
    if divided in ("b1", "d1"):
        return "sequence" if weight == "R" else "other"
    return _DIVIDED.get(weight, "zero 3") if divided in ("b0", "d0", "b") else "other"


def written(placed: list[str]) -> str:
    """Return placements on all axes as one text."""
    return " x ".join(placed)


def differences(one: SavedPlan, other: SavedPlan) -> list[tuple[str, str, str]]:
    """Return what differs between two plans: its name, and both values."""
    rows = []
    for key in (
        "model",
        "topology",
        "world",
        "batch",
        "stages",
        "microbatches",
        "recompute",
        "runs_on",
        "rank_list",
    ):
        a, b = getattr(one, key), getattr(other, key)
        rows.append((key, str(a), str(b)))
    rows.append(("mesh", _mesh(one.mesh), _mesh(other.mesh)))
    rows.append(("step", f"{one.seconds:.6g} s", f"{other.seconds:.6g} s"))
    rows.append(("memory", f"{one.memory:.4g} B", f"{other.memory:.4g} B"))
    rows += _merged(one.params, other.params)
    return [row for row in rows if row[1] != row[2]]


def _merged(
    one: Mapping[str, list[str]], other: Mapping[str, list[str]]
) -> Iterator[tuple[str, str, str]]:
    for name in dict.fromkeys([*one, *other]):
        a, b = one.get(name), other.get(name)
        yield name, written(a) if a else "-", written(b) if b else "-"


def _mesh(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in mesh.items())


def families(params: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """Return parameters and placements, equal ones of numbered blocks on one line.

    Example: `blocks.0.up.weight` and `blocks.1.up.weight` alike -> `blocks.0-1.up.weight`.
    """
    rows: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for name, placed in params.items():
        parts = name.split(".")
        form = ".".join("#" if part.isdigit() else part for part in parts)
        numbers = tuple(int(part) for part in parts if part.isdigit())
        rows.setdefault((form, written(placed)), []).append(numbers)
    return [(_filled(form, numbers), placed) for (form, placed), numbers in rows.items()]


def _filled(form: str, numbers: list[tuple[int, ...]]) -> str:
    for column in zip(*numbers, strict=True):
        form = form.replace("#", _ranges(sorted(set(column))), 1)
    return form


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
