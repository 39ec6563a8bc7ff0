"""The strategy file: the layout of each parameter on the mesh, as JSON that a person can edit.

    {"fc1.weight": {"shape": [32, 16], "dtype": "float32", "mesh": {"dp": 2, "tp": 2},
                    "dims": [["tp", "dp"], null], "stage": 0}}

`dims` names the axes that shard each dim, the most significant first, as in an operator plan.  Read
back, the file is an operator plan.  Axes of data parallelism are skipped then: plans do not name
them, and `parallel.optimizer` decides what they shard.
"""

from __future__ import annotations

import difflib
import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from torch import Tensor
from torch.nn import Parameter

from msrun.bounded_file import read_bounded
from msrun.errors import ConfigError
from msrun.parallel.checkpoint.state import Models, clean, each_model
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.layout import plan_axes
from msrun.parallel.local import is_sharded
from msrun.parallel.notation.dims import dim_of
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.settings.plan_rules import Dim, PlanRule
from msrun.units import quoted

_SHOWN_MAX = 8


class ParameterStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of one parameter on the mesh.

    Args:
        shape: Sizes of the whole parameter.
        dtype: Name of the type in torch, without `torch.`.
        mesh: Axis name -> size of the mesh that shards it; empty if it is a plain tensor.
        dims: Axis names of each dim, the most significant first.
        stage: Pipeline stage, from 0.
    """

    shape: list[int]
    dtype: str
    mesh: dict[str, int]
    dims: list[Dim]
    stage: int = 0


Strategy = dict[str, ParameterStrategy]


def describe(models: Models, stages: Sequence[int] = (0,)) -> Strategy:
    """Return the layout of each parameter of this rank, by name.

    Args:
        models: As in `Checkpoints.save`.
        stages: Pipeline stage of each model.
    """
    strategy: Strategy = {}
    for (prefix, model), stage in zip(each_model(models), stages, strict=True):
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, Parameter):
                strategy[prefix + clean(name)] = _describe(value, stage)
    return strategy


def _describe(tensor: Tensor, stage: int) -> ParameterStrategy:
    mesh: dict[str, int] = {}
    dims: list[Dim] = [None] * tensor.dim()
    if is_sharded(tensor):
        from msrun.parallel.tensor.placements import dims_of

        names = tensor.device_mesh.mesh_dim_names or ()
        mesh = {name: tensor.device_mesh.size(axis) for axis, name in enumerate(names)}
        dims = dims_of(tensor.placements, tensor.device_mesh, tensor.dim())
    return ParameterStrategy(
        shape=list(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        mesh=mesh,
        dims=dims,
        stage=stage,
    )


def merge(parts: Iterable[Strategy]) -> Strategy:
    """Return the strategy of a job from those of its ranks, in the order of stages."""
    merged: Strategy = {}
    for part in parts:
        merged = part | merged  # values of the lowest rank win
    return dict(sorted(merged.items(), key=lambda item: item[1].stage))


def write_strategy(path: str | Path, strategy: Strategy) -> None:
    """Write a strategy file, one parameter a line; an existing file is replaced.

    Raises:
        OSError: It cannot be written.
    """
    lines = [f"{json.dumps(name)}: {_line(value)}" for name, value in strategy.items()]
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _line(strategy: ParameterStrategy) -> str:
    return json.dumps(msgspec.to_builtins(strategy))


def read_strategy(
    path: str | Path, layout: MeshLayout, shapes: Mapping[str, Sequence[int]]
) -> list[PlanRule]:
    """Return the operator plan of a strategy file.

    Args:
        path: Path of the file.
        layout: Mesh whose axes the plan may name; sizes may differ from those in the file.
        shapes: Parameter of the model -> its sizes.

    Raises:
        ConfigError: It cannot be read, or does not fit the model or the mesh.
    """
    content = _read(Path(path))
    rules: dict[str, dict[str, list[Dim]]] = {}
    for name, strategy in content.items():
        where = f"{path}: {name}"
        if name not in shapes:
            raise ConfigError(f"{path}: {quoted(name)} is no parameter ({_choices(name, shapes)})")
        if list(shapes[name]) != strategy.shape:
            shape = list(shapes[name])
            raise ConfigError(f"{where}: shape {strategy.shape} is {shape} in the model")
        if len(strategy.dims) != len(strategy.shape):
            raise ConfigError(
                f"{where}: {len(strategy.dims)} dims for a shape of {len(strategy.shape)}"
            )
        dims = [_plan_dim(where, dim, layout) for dim in strategy.dims]
        axes = [axis for dim in strategy.dims for axis in _axes(dim)]
        if twice := [axis for axis in axes if axes.count(axis) > 1]:
            raise ConfigError(f"{where}: axis {twice[0]!r} stands there twice")
        if any(dims):
            module, _, param = name.rpartition(".")
            rules.setdefault(module, {})[param] = dims
    return [PlanRule(match=glob.escape(module), params=params) for module, params in rules.items()]


def _plan_dim(where: str, dim: Dim, layout: MeshLayout) -> Dim:
    """Return `dim` with only the axes that a plan may name."""
    axes = _axes(dim)
    known = plan_axes(layout)
    planned = [axis for axis in axes if axis in known]
    for axis in axes:
        is_data = axis in layout.axes or axis.startswith(DATA_AXIS)
        if axis not in known and not is_data:
            raise ConfigError(f"{where}: axis {axis!r} is not in mesh ({', '.join(layout.axes)})")
    return dim_of(planned)


def _axes(dim: Dim) -> list[str]:
    return [dim] if isinstance(dim, str) else dim or []


def _read(path: Path) -> Strategy:
    content = read_bounded(path, str(path), mebibytes=64)
    try:
        return msgspec.json.decode(content, type=Strategy)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        raise ConfigError(f"{path} is no strategy file: {text[:1].lower()}{text[1:]}") from None


def _choices(name: str, names: Iterable[str]) -> str:
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose such as {', '.join(known[:_SHOWN_MAX])}" if known else "there are none"
