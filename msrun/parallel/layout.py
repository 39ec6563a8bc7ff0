"""The mesh of a configuration: its axes and sizes, and all checks that need them.

The same mesh exists twice.  `MeshLayout` (see `notation.mesh_layout`) is arithmetic; torch's
`DeviceMesh` (see `rank_context`) has the process groups of one rank.  The arithmetic comes first,
since everything that can be refused is refused before a process group exists, and `msrun plan`
prints the groups of a job of any size without starting it.  This module imports no torch.

Axis names: `dp` shards the batch, `pp` the layers; every other axis is for operator plans or, with
`mode: manual`, for the script.  A name that is missing from the mesh counts as an axis of size 1.
Ranks of `ep`, over which `style: experts` shards, have samples of their own, too: in the layout
they are ranks of `dp`, whose size is the product of both, and groups of `ep` are parts of its
groups.

`resolve` turns a configuration and a number of ranks into a layout and makes every check that
depends on that number: sizes, the axes that rules name, the mode, pipeline, optimizer, dropout.
Checks that need the model follow in `rt.shard`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from msrun.errors import ConfigError
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, REST, ROOT, TENSOR_AXIS, ParallelConfig
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS, MeshLayout
from msrun.parallel.notation.rank_order import check_list, with_ranks
from msrun.parallel.notation.rules import RuleAxes, batch_free, check_notation
from msrun.parallel.settings.grids import GRID_AXES
from msrun.parallel.settings.images import image_axes, without_parts
from msrun.parallel.settings.plan_rules import (
    CONTEXT_AXIS,
    UNSHARDED_DIMS,
    PlanRule,
    placed_tensors,
)
from msrun.units import quoted

# Axes of a plan beside ZeRO: `fully_shard` shards parameters that a plan sharded over at most two.
_SHARDED_AXES_MAX = 2

# What is left of `dp` beside the axis of experts.
EXPERT_COPIES = "dp_copies_of_experts"
_EXPERT_STYLE = "experts"
# Axes that divide samples, tokens or layers, and no operators.
_OTHER_AXES = (DATA_AXIS, CONTEXT_AXIS, PIPELINE_AXIS)

# Modes in which an axis needs no rule in `plan`.
_FREE = ("manual", "auto")


def check_world(config: ParallelConfig, world_size: int) -> MeshLayout | None:
    """Return the mesh as `resolve` does; None with `mesh: auto`, which needs a model."""
    if config.mesh == "auto":
        check_list(config, world_size)
        return None
    return resolve(config, world_size)


def resolve(config: ParallelConfig, world_size: int) -> MeshLayout:
    """Return the mesh of `config` over `world_size` ranks, after all checks that depend on it.

    Raises:
        ConfigError: A size does not fit, or a key names an axis that the mesh does not have.
    """
    if config.mesh == "auto":
        raise ConfigError(f"{ROOT}.mesh: auto is chosen by rt.shard: call it first")
    layout = with_ranks(_with_experts(config, _fill(config.mesh, world_size)), config)
    tokens = "" if context_rule(config) is None else CONTEXT_AXIS
    layout = msgspec.structs.replace(layout, images=image_axes(config.data), tokens=tokens)
    _check_plan_file(config)
    for index, rule in enumerate(rules_of(config)):
        if isinstance(rule, str):
            named_axis(rule, layout)
        elif rule.style != "context":
            _check_rule(rule, layout, f"{ROOT}.plan[{index}]")
    _check_mode(config, layout)
    _check_pipeline(config, layout)
    _check_context(config, layout)
    _check_images(config, layout)
    _check_optimizer(config, tokens_as_data(layout))
    _check_experts(config, layout)
    _check_dropout(config, layout)
    return layout


def plan_axes(layout: MeshLayout) -> tuple[str, ...]:
    """Return the axes that the operator plan may name, in mesh order."""
    others = (*_OTHER_AXES, *layout.images)
    return tuple(name for name in layout.axes if name not in others)


def tokens_as_data(layout: MeshLayout) -> MeshLayout:
    """Return the mesh on which `dp` has the ranks of `cp` too, if a rule divides sequences.

    Ranks with other tokens of a sequence, or parts of an image, hold the same weights, as those
    with other samples.
    """
    inside = (*layout.images, layout.tokens)
    is_whole = all(layout.size(name) == 1 for name in inside)
    return layout if is_whole else layout.as_data(inside)


def context_rule(config: ParallelConfig) -> tuple[str, PlanRule] | None:
    """Return the path and the rule of style `context`; None without one."""
    for index, rule in enumerate(rules_of(config)):
        if isinstance(rule, PlanRule) and rule.style == "context":
            return f"{ROOT}.plan[{index}]", rule
    return None


def rule_axes(layout: MeshLayout) -> RuleAxes:
    """Return the axes that a rule in MindSpore's notation may mean."""
    plan = {name: layout.axes[name] for name in plan_axes(layout)}
    batch = {name: n for name, n in layout.axes.items() if name != PIPELINE_AXIS}
    return RuleAxes(plan, batch, layout)


def root_axes(config: ParallelConfig, layout: MeshLayout) -> dict[str, int]:
    """Return the axes of the mesh, with `dp` split in two if ZeRO keeps several copies.

    `dp_replicate` numbers the copies, `dp_shard` the ranks that share a copy.  With experts `dp` is
    split into `ep` and what is left of it.
    """
    size, degree = config.optimizer.shard_size, layout.size(DATA_AXIS)
    if layout.ep:
        parts = {EXPERT_COPIES: degree // layout.ep, EXPERT_AXIS: layout.ep}
    elif size in (REST, degree):
        return dict(layout.axes)
    else:
        parts = {"dp_replicate": degree // size, "dp_shard": size}
    axes: dict[str, int] = {}
    for name, axis_size in layout.axes.items():
        axes |= parts if name == DATA_AXIS else {name: axis_size}
    return axes


def _fill(mesh: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return `mesh` with the one -1 replaced by the number of ranks that are left."""
    for name, size in mesh.items():
        if size != REST and size < 1:
            raise ConfigError(f"{ROOT}.mesh.{name}: {size} must be -1 or at least 1")
    rests = [name for name, size in mesh.items() if size == REST]
    if len(rests) > 1:
        raise ConfigError(f"{ROOT}.mesh: only one axis can be -1, not {' and '.join(rests)}")
    given = math.prod(size for size in mesh.values() if size != REST)
    sizes = [f"{name} {size}" for name, size in mesh.items() if size != REST]
    written = f"{' x '.join(sizes)} = {given}" if len(sizes) > 1 else "".join(sizes) or "no axis"
    if rests and world_size % given:
        raise ConfigError(f"{ROOT}.mesh: {written} does not divide world_size {world_size}")
    if not rests and given != world_size:
        hint = f"change one size, or start {given} workers"
        raise ConfigError(f"{ROOT}.mesh: {written} is not world_size {world_size}", hint=hint)
    rest = world_size // given
    return {name: rest if size == REST else size for name, size in mesh.items()}


def _with_experts(config: ParallelConfig, axes: dict[str, int]) -> MeshLayout:
    """Return the mesh of `axes`, in which ranks of `ep` are ranks of `dp` too."""
    if EXPERT_AXIS not in axes or config.mode == "manual":
        return MeshLayout(axes)
    names = list(axes)
    if DATA_AXIS in axes and names.index(EXPERT_AXIS) != names.index(DATA_AXIS) + 1:
        raise ConfigError(
            f"{ROOT}.mesh.{EXPERT_AXIS}: its ranks are neighbours along {DATA_AXIS}, and "
            f"{', '.join(names)} is another order",
            hint=f"write {EXPERT_AXIS} right after {DATA_AXIS}",
        )
    degree = axes.get(DATA_AXIS, 1) * axes[EXPERT_AXIS]
    data = {DATA_AXIS: degree}
    joined: dict[str, int] = {}
    for name, size in axes.items():
        joined |= data if name in (DATA_AXIS, EXPERT_AXIS) else {name: size}
    return MeshLayout(joined, axes[EXPERT_AXIS])


def rules_of(config: ParallelConfig) -> list[PlanRule | str]:
    """Return the rules and names of plans in the configuration; none if `plan` names a file."""
    return [] if isinstance(config.plan, str) else config.plan


def _check_plan_file(config: ParallelConfig) -> None:
    written = config.checkpoint and config.checkpoint.strategy
    if written and written == config.plan:
        raise ConfigError(
            f"{ROOT}.checkpoint.strategy: {quoted(written)} is what {ROOT}.plan reads",
            hint="name another file, or leave it out: the plan is the file already",
        )


def _check_mode(config: ParallelConfig, layout: MeshLayout) -> None:
    if config.mode == "stand_alone" and layout.world_size > 1:
        raise ConfigError(
            f"{ROOT}.mode: stand_alone is for one worker, and world_size is {layout.world_size}"
        )
    others = {name: size for name, size in layout.axes.items() if size > 1 and name != DATA_AXIS}
    if config.mode == "data" and others:
        raise ConfigError(
            f"{ROOT}.mode: data has no axis {next(iter(others))} (choose {DATA_AXIS})"
        )
    named = {axis for rule in rules_of(config) for axis in _axes_of(rule, layout)}
    named |= set(layout.images)
    if isinstance(config.plan, str):
        named |= set(plan_axes(layout))  # the file is read in rt.shard, with the model
    for name in others:
        if name != PIPELINE_AXIS and name not in named and config.mode not in _FREE:
            hint = (
                "name it in a rule, or say `mode: manual` when the script itself divides its work"
            )
            raise ConfigError(
                f"{ROOT}.mesh.{name}: no rule of {ROOT}.plan uses this axis", hint=hint
            )


def _check_pipeline(config: ParallelConfig, layout: MeshLayout) -> None:
    degree, pipeline = layout.size(PIPELINE_AXIS), config.pipeline
    if pipeline is None:
        if degree > 1 and config.mode != "auto":
            raise ConfigError(f"{ROOT}.mesh.{PIPELINE_AXIS}: {degree} stages need {ROOT}.pipeline")
        return
    if PIPELINE_AXIS not in layout.axes:
        raise ConfigError(f"{ROOT}.pipeline: the mesh has no axis {PIPELINE_AXIS}")
    if config.accumulate > 1:
        raise ConfigError(
            f"{ROOT}.accumulate: {config.accumulate} with a pipeline: "
            f"raise {ROOT}.pipeline.microbatches instead"
        )
    if config.mode == "auto" and pipeline.stages != "auto":
        raise ConfigError(f"{ROOT}.pipeline.stages: mode auto cuts by itself (choose auto)")


def _check_context(config: ParallelConfig, layout: MeshLayout) -> None:
    """Check what the axis of sequences can be combined with."""
    found = context_rule(config)
    if found is None:
        return
    key, _ = found
    names = list(layout.axes)
    if CONTEXT_AXIS not in names:
        raise ConfigError(
            f"{key}.style: context divides sequences over the axis {CONTEXT_AXIS}, which is not in "
            f"mesh ({', '.join(names)})"
        )
    if layout.size(CONTEXT_AXIS) == 1:
        return
    if DATA_AXIS in names and names.index(CONTEXT_AXIS) != names.index(DATA_AXIS) + 1:
        raise ConfigError(
            f"{ROOT}.mesh.{CONTEXT_AXIS}: stands in ({', '.join(names)}), and must be the next "
            f"after {DATA_AXIS}"
        )
    others = {
        f"{ROOT}.dropout: exact": config.dropout == "exact",
        f"{ROOT}.verify": bool(config.verify),
        f"{ROOT}.reduce.op: sum": config.reduce.op == "sum",
        f"{ROOT}.reduce.exclude": bool(config.reduce.exclude),
        f"{ROOT}.servers": config.servers is not None,
    }
    for other, is_given in others.items():
        if is_given:
            raise ConfigError(f"{other} does not know parts of sequences, of {key}.style: context")


def _check_images(config: ParallelConfig, layout: MeshLayout) -> None:
    """Check the axes that divide images, and what they can be combined with."""
    names = list(layout.axes)
    for value, dims in config.data.items():
        for axis in dims:
            if isinstance(axis, str) and axis not in (*names, DATA_AXIS):
                raise ConfigError(
                    f"{ROOT}.data.{value}: axis {axis!r} is not in mesh ({', '.join(names)})"
                )
        if dims[0] is None and layout.size(DATA_AXIS) > 1:
            raise ConfigError(
                f"{ROOT}.data.{value}: dim 0 has the samples, which {DATA_AXIS} divides (write "
                f"{DATA_AXIS} for null)"
            )
    if all(layout.size(axis) == 1 for axis in layout.images):
        return
    inside = [name for name in names if name == DATA_AXIS or name in layout.images]
    first = names.index(inside[0])
    if names[first : first + len(inside)] != inside or DATA_AXIS in inside[1:]:
        raise ConfigError(
            f"{ROOT}.mesh: axes that divide images follow {DATA_AXIS}, and ({', '.join(names)}) "
            "is another order"
        )
    others = {
        **{
            f"{ROOT}.{rule}": is_given for rule, is_given in without_parts(rules_of(config)).items()
        },
        f"{ROOT}.mode: {config.mode}": config.mode in _FREE,
        f"{ROOT}.dropout: exact": config.dropout == "exact",
        f"{ROOT}.verify": bool(config.verify),
        f"{ROOT}.reduce.op: sum": config.reduce.op == "sum",
        f"{ROOT}.reduce.exclude": bool(config.reduce.exclude),
        f"{ROOT}.servers": config.servers is not None,
    }
    for other, is_given in others.items():
        if is_given:
            raise ConfigError(
                f"{other} does not know parts of images, of {ROOT}.data over "
                f"{', '.join(layout.images)}"
            )


def _check_optimizer(config: ParallelConfig, layout: MeshLayout) -> None:
    size, degree = config.optimizer.shard_size, layout.size(DATA_AXIS)
    if size != REST and degree % size:
        raise ConfigError(
            f"{ROOT}.optimizer.shard_size: {size} does not divide {DATA_AXIS} {degree}"
        )
    axes = plan_axes(layout)
    if config.optimizer.zero and degree > 1 and config.plan and len(axes) > _SHARDED_AXES_MAX:
        raise ConfigError(
            f"{ROOT}.optimizer.zero: {config.optimizer.zero} beside a plan over {len(axes)} axes "
            f"({', '.join(axes)}): zero can shard what a plan shards over at most "
            f"{_SHARDED_AXES_MAX}",
            hint="combine two axes in one, or choose zero 0",
        )
    _check_mixed_precision(config, degree)
    if degree == 1 and layout.world_size > 1:
        for key in ("dtype", "offload"):
            if getattr(config.optimizer, key):
                raise ConfigError(
                    f"{ROOT}.optimizer.{key}: needs several data-parallel ranks, "
                    f"and {DATA_AXIS} is 1"
                )


def _check_mixed_precision(config: ParallelConfig, degree: int) -> None:
    """Refuse `optimizer.dtype` with replicated parameters: `fully_shard` does not cast those."""
    dtype = config.optimizer.dtype
    replicating = {
        "optimizer.threshold": config.optimizer.threshold,
        "reduce.exclude": ", ".join(config.reduce.exclude),
    }
    for key, value in replicating.items():
        if dtype and value and degree > 1:
            raise ConfigError(
                f"{ROOT}.{key}: {value} leaves parameters replicated and in their own type, "
                f"and {ROOT}.optimizer.dtype computes in {dtype}",
                hint="leave out one of the two",
            )


def _check_experts(config: ParallelConfig, layout: MeshLayout) -> None:
    """Refuse an axis of experts without experts, and what they cannot be combined with."""
    if layout.ep <= 1:
        return
    named = {axis for rule in rules_of(config) for axis in _axes_of(rule, layout)}
    if EXPERT_AXIS not in named and config.mode != "auto":
        raise ConfigError(
            f"{ROOT}.mesh.{EXPERT_AXIS}: no rule of {ROOT}.plan has style {_EXPERT_STYLE} over it",
            hint=f"such as {{match: '*.experts', style: {_EXPERT_STYLE}, axis: {EXPERT_AXIS}}}",
        )
    degree, settings = tokens_as_data(layout).size(DATA_AXIS), config.optimizer
    if settings.shard_size not in (REST, degree):
        raise ConfigError(
            f"{ROOT}.optimizer.shard_size: {settings.shard_size} beside the axis {EXPERT_AXIS}, "
            f"which divides {DATA_AXIS} by itself (choose -1)"
        )
    for key in ("dtype", "offload"):
        value = getattr(settings, key)
        if value and degree == layout.ep:
            raise ConfigError(
                f"{ROOT}.optimizer.{key}: {str(value).lower()} is for parameters that are gathered,"
                f" and no other ranks have the experts of a rank ({EXPERT_AXIS} {layout.ep} of "
                f"{degree} data-parallel ranks)",
                hint=f"leave out {key}, or choose a smaller {EXPERT_AXIS}",
            )


def _check_dropout(config: ParallelConfig, layout: MeshLayout) -> None:
    if config.dropout != "exact":
        return
    if config.pipeline and layout.size(PIPELINE_AXIS) > 1:
        raise ConfigError(
            f"{ROOT}.dropout: exact with a pipeline, whose stages draw each for itself "
            "(choose local)"
        )
    microbatches = config.parts
    if layout.size(DATA_AXIS) > 1 and microbatches > 1:
        raise ConfigError(
            f"{ROOT}.dropout: exact with {microbatches} micro-batches, which hold other samples "
            "than those of one process (choose local)"
        )


def _check_rule(rule: PlanRule, layout: MeshLayout, where: str) -> None:
    allowed = plan_axes(layout)
    check_notation(rule, where, rule_axes(layout))
    for key, axes in _named(rule, layout):
        seen: set[str] = set()
        for axis in axes:
            if axis == EXPERT_AXIS and layout.ep:
                if rule.style != _EXPERT_STYLE:
                    raise ConfigError(
                        f"{where}.{key}: {axis} divides the batch and the experts, not this "
                        f"operator (choose style {_EXPERT_STYLE}, or another axis)"
                    )
                continue
            if axis not in layout.axes:
                raise ConfigError(
                    f"{where}.{key}: axis {axis!r} is not in mesh ({', '.join(layout.axes)})"
                )
            is_batch = axis == DATA_AXIS and key.startswith(("in", "out"))
            if axis not in allowed and not is_batch:
                raise ConfigError(
                    f"{where}.{key}: {axis} divides the batch or the layers, not an operator"
                    f" (choose {', '.join(allowed) or 'another axis in the mesh'})"
                )
            if axis in seen:
                raise ConfigError(f"{where}.{key}: axis {axis!r} stands there twice")
            seen.add(axis)
    for key, dims in placed_tensors(rule):
        batch_free(dims, f"{where}.{key}")
    _check_rows(rule, layout, where)


def _check_rows(rule: PlanRule, layout: MeshLayout, where: str) -> None:
    """Refuse runs of rows that are not one for each rank; one rank alone has all."""
    if rule.rows is None:
        return
    axis, rows = style_axis(rule, layout), rule.rows
    if len(rows) != layout.size(axis) > 1:
        raise ConfigError(
            f"{where}.rows: {rows} has {len(rows)} numbers, and {axis} has {layout.size(axis)} "
            "ranks (choose one number for each rank)"
        )


def style_axis(rule: PlanRule, layout: MeshLayout) -> str:
    """Return the mesh axis of a rule with a style or with rows.

    Raises:
        ConfigError: The rule names no axis, and the mesh does not have exactly one to choose.
    """
    if rule.axis:
        return rule.axis
    if rule.style == _EXPERT_STYLE and layout.ep:
        return EXPERT_AXIS
    choices = plan_axes(layout)
    if len(choices) == 1:
        return choices[0]
    what = f"style {rule.style}" if rule.style else "rows"
    raise ConfigError(
        f"{ROOT}.plan: {what} of {rule.match!r} needs an axis "
        f"(choose {', '.join(choices) or 'one in the mesh besides dp and pp'})"
    )


def named_axis(name: str, layout: MeshLayout) -> str:
    """Return the mesh axis that the plan `name` of those that ship shards over.

    Raises:
        ConfigError: The mesh has several to choose from, and none is called `tp`.
    """
    choices = plan_axes(layout)
    if len(choices) == 1:
        return choices[0]
    if TENSOR_AXIS in choices:
        return TENSOR_AXIS
    raise ConfigError(
        f"{ROOT}.plan: {name} shards over the axis {TENSOR_AXIS}, and the mesh has "
        f"{', '.join(layout.axes)}"
    )


def _axes_of(rule: PlanRule | str, layout: MeshLayout) -> set[str]:
    if isinstance(rule, str):
        return {named_axis(rule, layout)}
    if rule.strategy or rule.layout:
        # Numbers of parts become axes only in rt.shard, with the kind of the module.
        return set(plan_axes(layout))
    return {axis for _, axes in _named(rule, layout) for axis in axes}


def _named(rule: PlanRule, layout: MeshLayout) -> Iterator[tuple[str, list[str]]]:
    """Yield each key of `rule` that names axes, with its axes in order."""
    if rule.style == "context":
        yield "axis", [CONTEXT_AXIS]
    elif rule.style in GRID_AXES:
        yield "axes", rule.axes
    elif rule.style or rule.rows is not None:
        yield "axis", [style_axis(rule, layout)]
    for name, dims in rule.params.items():
        yield f"params.{name}", _flat(dims)
    for key, dims in placed_tensors(rule):
        yield key, _flat(dims)


def _flat(dims: list[str | list[str] | None]) -> list[str]:
    axes: list[str] = []
    for dim in dims:
        axes += [dim] if isinstance(dim, str) else dim or []
    return [axis for axis in axes if axis != UNSHARDED_DIMS]
