"""Resolves an operator plan: which rule applies to which module, and the axes of each tensor.

Modules are given as descriptions, so that a plan is checked without torch or a process group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

from msrun.errors import ConfigError
from msrun.parallel.config import ROOT, UNSHARDED_DIMS, Dims, PlanRule
from msrun.parallel.layout import MeshLayout, plan_axes, style_axis
from msrun.parallel.match import matching
from msrun.parallel.notation.rules import notation_dims


class ModuleShape(msgspec.Struct, frozen=True, kw_only=True):
    """Kind and parameters of one module.

    Args:
        kind: Name of its class.
        params: Name of each parameter of the module itself -> its shape.
        shared: Parameter -> its further names in the model, if it has several.
    """

    kind: str
    params: dict[str, tuple[int, ...]]
    shared: dict[str, tuple[str, ...]] = {}


class ModulePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Axes that shard the tensors of one module.

    Args:
        key: Path of its rule in the configuration, for messages.
        params: Parameter -> axis names of each dim.
        inputs: Axis names of each dim of the first input; None leaves it as it comes.
        out: Axis names of each dim of the output; None leaves it as it comes.
    """

    key: str
    params: dict[str, Dims]
    inputs: Dims | None
    out: Dims | None


def plan_modules(
    rules: Sequence[PlanRule],
    layout: MeshLayout,
    modules: Mapping[str, ModuleShape],
    source: str | None = None,
) -> dict[str, ModulePlan]:
    """Return the plan of each module that a rule matches.

    Args:
        rules: Rules, of which the first that matches a module applies.
        layout: The mesh.
        modules: All modules, by name.
        source: File that the rules come from, for messages; None is the configuration.

    Raises:
        ConfigError: A rule matches nothing, does not fit its module, or does not divide it evenly.
    """
    keys = [
        f"{source}: {rule.match}" if source else f"{ROOT}.plan[{index}]"
        for index, rule in enumerate(rules)
    ]
    for index, rule in enumerate(rules):
        matching([rule.match], list(modules), f"plan[{index}].match")
    plans: dict[str, ModulePlan] = {}
    for name, module in modules.items():
        for key, rule in zip(keys, rules, strict=True):
            if fnmatchcase(name, rule.match):
                plans[name] = _plan(key, rule, layout, name, module)
                _check_even(plans[name], layout, name, module)
                break
    _check_shared(plans, modules)
    return plans


def _plan(
    key: str, rule: PlanRule, layout: MeshLayout, name: str, module: ModuleShape
) -> ModulePlan:
    if rule.style:
        axis = style_axis(rule, layout)
        return _styled(key, rule.style, axis, f"{name or 'the model'} ({module.kind})", module)
    if rule.strategy or rule.layout:
        return _from_mindspore_notation(key, rule, layout, module)
    for param in rule.params:
        if param not in module.params:
            choices = ", ".join(module.params) or "it has none"
            raise ConfigError(f"{key}.params.{param}: {name} has no such parameter ({choices})")
    return ModulePlan(key=key, params=rule.params, inputs=rule.inputs, out=rule.out)


def _from_mindspore_notation(
    key: str, rule: PlanRule, layout: MeshLayout, module: ModuleShape
) -> ModulePlan:
    axes = {name: layout.axes[name] for name in plan_axes(layout)}
    notated = notation_dims(rule, key, module.kind, axes)
    params = notated.params
    # A strategy names no parameters: it gives those that this kind of module can have, such as a
    # bias that is absent here.
    if rule.layout is None:
        params = {name: dims for name, dims in params.items() if name in module.params}
    return ModulePlan(key=key, params=params, inputs=notated.inputs, out=notated.out)


def _styled(key: str, style: str, axis: str, module_name: str, module: ModuleShape) -> ModulePlan:
    """Return the plan that `style` stands for, for a module of this kind.

    A linear weight is (out, in), that of an embedding (rows, width).
    """
    unsharded: Dims = [UNSHARDED_DIMS]
    last_sharded: Dims = [UNSHARDED_DIMS, axis]
    styles: dict[tuple[str, str], tuple[dict[str, Dims], Dims, Dims]] = {
        ("colwise", "Linear"): ({"weight": [axis, None], "bias": [axis]}, unsharded, last_sharded),
        ("vocab", "Linear"): ({"weight": [axis, None], "bias": [axis]}, unsharded, last_sharded),
        ("rowwise", "Linear"): ({"weight": [None, axis], "bias": [None]}, last_sharded, unsharded),
        ("colwise", "Embedding"): ({"weight": [None, axis]}, unsharded, last_sharded),
        ("rowwise", "Embedding"): ({"weight": [axis, None]}, unsharded, unsharded),
        ("embedding", "Embedding"): ({"weight": [axis, None]}, unsharded, unsharded),
    }
    if style == "sequence":
        # Shape (batch, sequence, ...): every rank has a part of each sequence.
        sequence: Dims = [None, axis, UNSHARDED_DIMS]
        return ModulePlan(key=key, params={}, inputs=sequence, out=sequence)
    if (style, module.kind) not in styles:
        kinds = " or ".join(kind for known, kind in styles if known == style)
        raise ConfigError(f"{key}.style: {style} is for {kinds}, not {module_name}")
    params, inputs, out = styles[style, module.kind]
    own = {name: dims for name, dims in params.items() if name in module.params}
    return ModulePlan(key=key, params=own, inputs=inputs, out=out)


def _check_even(plan: ModulePlan, layout: MeshLayout, name: str, module: ModuleShape) -> None:
    """Refuse a parameter with a dim that does not split in equal parts; MindSpore's rule too."""
    for param, dims in plan.params.items():
        shape = module.params[param]
        if len(dims) != len(shape):
            raise ConfigError(
                f"{plan.key}.params.{param}: {len(dims)} entries for the {len(shape)} dims of "
                f"{name}.{param} {list(shape)}"
            )
        for dim, (size, entry) in enumerate(zip(shape, dims, strict=True)):
            axes = [entry] if isinstance(entry, str) else entry or []
            parts = math.prod(layout.size(axis) for axis in axes)
            if size % parts:
                raise ConfigError(
                    f"{plan.key}: {name}.{param} {list(shape)} can not be split by strategy: "
                    f"dim {dim} of {size} in {parts} parts ({' x '.join(axes)})"
                )


def _check_shared(plans: Mapping[str, ModulePlan], modules: Mapping[str, ModuleShape]) -> None:
    """Refuse a shared parameter unless all of its modules shard it alike."""
    for name, plan in plans.items():
        for param, dims in plan.params.items():
            for other in modules[name].shared.get(param, ()):
                owner, _, other_param = other.rpartition(".")
                theirs = plans[owner].params.get(other_param) if owner in plans else None
                if theirs != dims:
                    raise ConfigError(
                        f"{plan.key}: {name}.{param} and {other} are one parameter, and the plan "
                        "shards them differently",
                        hint=f"give {owner} a rule that shards it like {name}",
                    )
