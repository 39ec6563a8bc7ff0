"""Plan rules in MindSpore's notations: their meaning for a module, and checks without a model.

A rule that fits no model is refused with the configuration; one that fits no mesh even before the
number of ranks is known.

MindSpore's strategies divide the batch like any other dim.  Here `dp` divides it, and a rank has
its part of every batch before a rule sees it.  So a notation that needs more devices than the axes
of the plan have is read over those and `dp`, and then `dp` is taken out of the batch dim again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from msrun.errors import ConfigError, UsageError
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.notation.device_matrix import INTERLEAVED, Layout, TensorLayout
from msrun.parallel.notation.dims import ModuleDims, check_strategy, dim_of, module_dims
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.settings.plan_rules import Dims, LayoutRule, PlanRule

_ReadT = TypeVar("_ReadT")


class RuleAxes(msgspec.Struct, frozen=True):
    """The axes that a rule in MindSpore's notation may mean.

    Args:
        plan: Axes of the plan -> size, in mesh order; None leaves the mesh out.
        batch: The same and `dp`.
        mesh: The mesh, whose ranks a `rank_list` names; None without one.
    """

    plan: dict[str, int] | None
    batch: dict[str, int]
    mesh: MeshLayout | None = None

    def of_devices(self, count: int) -> dict[str, int] | None:
        """Return those that a device matrix of `count` devices is."""
        is_all = self.plan is not None and count == math.prod(self.batch.values())
        return self.batch if is_all and count > math.prod((self.plan or {}).values()) else self.plan


_NO_MESH = RuleAxes(None, {})


def notation_dims(rule: PlanRule, key: str, kind: str, axes: RuleAxes) -> ModuleDims:
    """Return how a strategy or a layout shards a module.

    Args:
        rule: Has one of the two.
        key: Its path in the configuration, for messages.
        kind: Name of the module's class.
        axes: Axes that it may name.

    Raises:
        ConfigError: It does not fit the module or the mesh.
    """
    if rule.layout is not None:
        return _of_layout(rule.layout, f"{key}.layout", axes)
    if rule.strategy is None:
        raise ConfigError(f"{key}: is empty")
    find = partial(module_dims, kind, rule.strategy, out_strategy=rule.out_strategy)
    return _without_batch(_narrowest(find, axes, key), f"{key}.strategy")


def check_notation(rule: PlanRule, key: str, axes: RuleAxes = _NO_MESH) -> None:
    """Refuse a strategy or a layout that fits no module.

    Args:
        rule: May have neither.
        key: As of `notation_dims`.
        axes: As of `notation_dims`.

    Raises:
        ConfigError: No model can make it right.
    """
    if rule.layout is not None:
        _of_layout(rule.layout, f"{key}.layout", axes)
    if rule.strategy is not None:
        check = partial(check_strategy, rule.strategy, out_strategy=rule.out_strategy)
        _narrowest(check, axes, key)


def batch_free(dims: Dims, key: str) -> Dims:
    """Return `dims` of an input or output without `dp`, which may shard dim 0: it is the batch.

    Raises:
        ConfigError: `dp` shards another dim.
    """
    found: Dims = []
    for dim, entry in enumerate(dims):
        axes = [entry] if isinstance(entry, str) else entry or []
        if DATA_AXIS in axes and dim:
            raise ConfigError(
                f"{key}: {DATA_AXIS} divides the batch, which is dim 0, and not dim {dim}",
                hint="leave it out there: each rank has its part of the batch already",
            )
        left = [axis for axis in axes if axis != DATA_AXIS]
        found.append(dim_of(left))
    return found


def _narrowest(read: Callable[[Any], _ReadT], axes: RuleAxes, key: str) -> _ReadT:
    """Return what `read` makes of the axes of the plan or, if they do not do, of `dp` as well.

    Raises:
        ConfigError: The strategy fits neither.
    """
    try:
        return read(axes.plan)
    except UsageError as error:
        if DATA_AXIS in axes.batch:
            with contextlib.suppress(UsageError):
                return read(axes.batch)
        raise ConfigError(f"{key}.{error.message}", hint=error.hint) from None


def _without_batch(dims: ModuleDims, key: str) -> ModuleDims:
    """Return `dims` without `dp`.

    Raises:
        ConfigError: `dp` shards something else than the batch.
    """
    for name, param in dims.params.items():
        for entry in param:
            if entry is not None and DATA_AXIS in ([entry] if isinstance(entry, str) else entry):
                raise ConfigError(
                    f"{key}: {name} would be sharded over {DATA_AXIS}, which divides the batch",
                    hint="give the parts of weights axes of their own in the mesh, behind "
                    f"{DATA_AXIS}; optimizer.zero shards weights over {DATA_AXIS}",
                )
    return msgspec.structs.replace(
        dims,
        inputs=None if dims.inputs is None else batch_free(dims.inputs, f"{key}, input"),
        out=None if dims.out is None else batch_free(dims.out, f"{key}, output"),
    )


def _of_layout(rule: LayoutRule, key: str, axes: RuleAxes) -> ModuleDims:
    """Return the dims of `rule`, by the axes of the mesh or, without one, by its own aliases."""
    try:
        cut = Layout(tuple(rule.device_matrix), tuple(rule.alias_name), rule.rank_list)
        own = axes.of_devices(cut.devices)
        if own is not None:
            cut().on_mesh(own, axes.mesh)
    except UsageError as error:
        raise ConfigError(f"{key}.{error.message}", hint=error.hint) from None

    def tensor(entries: Dims, name: str) -> TensorLayout:
        try:
            return cut(*entries)
        except UsageError as error:
            raise ConfigError(f"{key}.{name}: {error.message}", hint=error.hint) from None

    def dims(entries: Dims, name: str) -> Dims:
        placed = tensor(entries, name)
        return placed.dims if own is None else placed.on_mesh(own, axes.mesh)

    copied_dim = _copied_dim(
        {
            f"{key}.params.{name}": tensor(entries, f"params.{name}")
            for name, entries in rule.params.items()
        },
        None if rule.inputs is None else tensor(rule.inputs, "in"),
        None if rule.out is None else tensor(rule.out, "out"),
        key,
    )
    found = ModuleDims(
        params={name: dims(entries, f"params.{name}") for name, entries in rule.params.items()},
        inputs=None if rule.inputs is None else dims(rule.inputs, "in"),
        out=None if rule.out is None else dims(rule.out, "out"),
        copies=1 if copied_dim is None else cut.copies,
        copied_dim=copied_dim or 0,
    )
    return found if own is None else _without_batch(found, key)


def _copied_dim(
    params: Mapping[str, TensorLayout],
    inputs: TensorLayout | None,
    out: TensorLayout | None,
    key: str,
) -> int | None:
    """Return the dim that `interleaved_parallel` cuts; None without one.

    Raises:
        ConfigError: It cuts a parameter, or other dims of input and output.
    """
    for name, placed in params.items():
        if placed.interleaved_dim is not None:
            raise ConfigError(f"{name}: {INTERLEAVED} cuts inputs and outputs, not parameters")
    before = None if inputs is None else inputs.interleaved_dim
    after = None if out is None else out.interleaved_dim
    if after is not None and after != before:
        raise ConfigError(
            f"{key}.out: {INTERLEAVED} cuts dim {after}, and of `in` "
            f"{'none' if before is None else f'dim {before}'}",
            hint="name it in the same dim of `in` and `out`",
        )
    return before
