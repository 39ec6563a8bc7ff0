"""Resolves an operator plan: which rule applies to which module, and the axes of each tensor.

Modules are given as descriptions, so that a plan is checked without torch or a process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

from msrun.errors import ConfigError
from msrun.parallel.config import ROOT
from msrun.parallel.layout import rule_axes, style_axis
from msrun.parallel.match import matching
from msrun.parallel.notation.dims import ModuleDims
from msrun.parallel.notation.grids import MATRICES, GridDims, Product, grid_dims, grid_of_layout
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS, MeshLayout
from msrun.parallel.notation.rules import batch_free, notation_dims
from msrun.parallel.plans.module_shape import ModuleShape, NamedRules
from msrun.parallel.settings.grids import GRID_AXES
from msrun.parallel.settings.plan_rules import (
    UNSHARDED_DIMS,
    Dims,
    PlanRule,
    TensorAxes,
    one_tensor,
    several_tensors,
    tensor_path,
)

# Modules that compute each element for itself.
_ELEMENTWISE = (
    "ELU",
    "GELU",
    "Identity",
    "LeakyReLU",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Tanh",
)

_EXPERT_DIMS = 3


class ModulePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Axes that shard the tensors of one module.

    Args:
        key: Path of its rule in the configuration, for messages.
        params: Parameter -> axis names of each dim.
        computed: The same of what the module computes from other parameters, which stay whole.
        inputs: Axis names of each dim of the first input; None leaves it as it comes.
        out: Axis names of each dim of the output, of several the first tensor; None leaves it as
            it comes.
        each_input: In place of `inputs`: name of an argument, or its position in digits -> axis
            names of each dim, or None.
        each_out: In place of `out`: the same of outputs.
        has_each_out: Whether `each_out` names all outputs of a sequence, in order.
        packed: Parameter -> number of equal tensors that follow each other in its sharded dim.
        out_parts: The same for the last dim of the output.
        is_local: Whether the module computes on plain shards, and ranks add their outputs.
        copies: Pieces of this rank's part that the module computes one after the other, so that
            the collectives of one run while the next computes.
        copied_dim: Dim of input and output that they cut.
        is_routed: Whether ranks have experts of the module, and tokens travel to them.
        rows: Rows of a table that each rank of `axis` has.
        axis: Mesh axis of `rows`.
        product: How a product on a grid of axes is computed.
    """

    key: str
    params: dict[str, Dims]
    inputs: Dims | None
    out: Dims | None
    computed: dict[str, Dims] = {}
    each_input: dict[str, Dims | None] = {}
    each_out: dict[str, Dims | None] = {}
    has_each_out: bool = False
    packed: dict[str, int] = {}
    out_parts: int = 1
    is_local: bool = False
    copies: int = 1
    copied_dim: int = 0
    is_routed: bool = False
    rows: tuple[int, ...] = ()
    axis: str = ""
    product: Product | None = None


def plan_modules(
    rules: Sequence[PlanRule | NamedRules],
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
        f"{source}: {rule.match}"
        if source and isinstance(rule, PlanRule)
        else f"{ROOT}.plan[{index}]"
        for index, rule in enumerate(rules)
    ]
    for index, rule in enumerate(rules):
        if isinstance(rule, PlanRule):
            matching([rule.match], list(modules), f"plan[{index}].match")
    plans: dict[str, ModulePlan] = {}
    for name, module in modules.items():
        for key, rule in zip(keys, rules, strict=True):
            found = _rule_of(rule, name)
            if found is None:
                continue
            for part, part_rule in _parts(found, name, module):
                if part not in plans:
                    plans[part] = _plan(key, part_rule, layout, part, modules[part])
                    _check_even(plans[part], layout, part, modules[part])
            break
    _check_shared(plans, modules)
    return plans


def _rule_of(rule: PlanRule | NamedRules, name: str) -> PlanRule | None:
    """Return the rule for the module `name`, if `rule` has one."""
    if isinstance(rule, NamedRules):
        return rule.rules.get(name)
    if rule.style == "context":
        return None  # it shards no parameter, and other rules may match its modules
    return rule if fnmatchcase(name, rule.match) else None


def _parts(rule: PlanRule, name: str, module: ModuleShape) -> list[tuple[str, PlanRule]]:
    """Return the modules that `rule` is for: the module `name`, or those that a LoRA layer adds up.

    With columns sharded, the small `lora_A` stays whole and `lora_B` is sharded as the layer that
    it is added to; with rows sharded it is the other way round.
    """
    is_alone = rule.style == "sequence" or rule.style in GRID_AXES
    if not rule.style or is_alone or module.adapters is None:
        return [(name, rule)]
    base, first, second = module.adapters
    shared = first if rule.style == "rowwise" else second
    style = "colwise" if rule.style == "vocab" else rule.style
    alike = msgspec.structs.replace(rule, style=style)
    return [(f"{name}.{base}", rule), *((f"{name}.{part}", alike) for part in shared)]


def _plan(
    key: str, rule: PlanRule, layout: MeshLayout, name: str, module: ModuleShape
) -> ModulePlan:
    if rule.style in GRID_AXES:
        return _on_grid(key, str(rule.style), rule.axes, name, module)
    if rule.style:
        axis = style_axis(rule, layout)
        if axis == EXPERT_AXIS and layout.ep:
            return _routed(key, name, module, layout.ep)
        return _styled(key, rule, axis, f"{name or 'the model'} ({module.kind})", module)
    if rule.rows is not None:
        return _of_rows(key, rule, layout, name, module)
    if rule.layout:
        _check_names(f"{key}.layout.params", rule.layout.params, name, module)
    if rule.strategy or rule.layout:
        return _from_mindspore_notation(key, rule, layout, name, module)
    _check_names(f"{key}.params", rule.params, name, module)
    return ModulePlan(
        key=key,
        params=rule.params,
        inputs=_of_one(rule.inputs, f"{key}.in"),
        out=_of_one(rule.out, f"{key}.out"),
        each_input=_of_each(rule.inputs, f"{key}.in"),
        each_out=_of_each(rule.out, f"{key}.out"),
        has_each_out=not isinstance(rule.out, Mapping),
    )


def _of_one(axes: TensorAxes | None, key: str) -> Dims | None:
    """Return the dims of the one tensor that `axes` places, without `dp`; None of several."""
    dims = one_tensor(axes)
    return None if dims is None else batch_free(dims, key)


def _of_each(axes: TensorAxes | None, key: str) -> dict[str, Dims | None]:
    """Return the dims of each of several tensors that `axes` places, without `dp`."""
    return {
        name: None if dims is None else batch_free(dims, tensor_path(key, name))
        for name, dims in several_tensors(axes).items()
    }


def _of_rows(
    key: str, rule: PlanRule, layout: MeshLayout, name: str, module: ModuleShape
) -> ModulePlan:
    """Return the plan of a table whose rows ranks divide as `rule` says."""
    axis, rows = style_axis(rule, layout), tuple(rule.rows or ())
    weight, shown = module.params.get("weight", ()), f"{name or 'the model'} ({module.kind})"
    if module.base != "Embedding" and module.kind != "EmbeddingBag":
        raise ConfigError(f"{key}.rows: are for Embedding or EmbeddingBag, not {shown}")
    if module.computed:
        raise ConfigError(f"{key}.rows: {shown} computes its weight from other parameters")
    if sum(rows) != weight[0]:
        raise ConfigError(
            f"{key}.rows: {' + '.join(map(str, rows))} is {sum(rows)}, and {name}.weight has "
            f"{weight[0]} rows"
        )
    if others := module.shared.get("weight"):
        raise ConfigError(
            f"{key}.rows: {name}.weight is {others[0]} too, which needs the whole table",
            hint="make two parameters of them, or choose style embedding",
        )
    out = _of_one(rule.out, f"{key}.out")
    is_cut = layout.size(axis) > 1
    return ModulePlan(
        key=key, params={}, inputs=None, out=out, rows=rows if is_cut else (), axis=axis
    )


def _check_names(key: str, params: Iterable[str], name: str, module: ModuleShape) -> None:
    """Refuse names of parameters that the module does not have."""
    for param in params:
        if param not in module.params:
            choices = ", ".join(module.params) or "it has none"
            raise ConfigError(
                f"{key}.{param}: {name or 'the model'} has no such parameter ({choices})"
            )


def _from_mindspore_notation(
    key: str, rule: PlanRule, layout: MeshLayout, name: str, module: ModuleShape
) -> ModulePlan:
    kind = module.base if module.base in ("Linear", "Embedding") else module.kind
    notated = notation_dims(rule, key, kind, rule_axes(layout))
    params = notated.params
    if rule.layout is not None and rule.layout.enable_nd_tp:
        style, axes = grid_of_layout(notated, module.base, f"{key}.layout")
        return _on_grid(f"{key}.layout", style, axes, name, module)
    # A strategy names no parameters: it gives those that this kind of module can have, such as a
    # bias that is absent here.
    if rule.layout is None:
        params = {name: dims for name, dims in params.items() if name in module.params}
    if notated.copies > 1:
        _check_copied(f"{key}.layout.in", notated, module)
    return ModulePlan(
        key=key,
        params=params,
        inputs=notated.inputs,
        out=notated.out,
        copies=notated.copies,
        copied_dim=notated.copied_dim,
    )


def _check_copied(key: str, dims: ModuleDims, module: ModuleShape) -> None:
    """Refuse `interleaved_parallel` for what does not compute each index of that dim alone.

    Raises:
        ConfigError: Pieces would give something else than the whole.
    """
    normalized = len(module.params.get("weight", ()))
    inner = {"Linear": 1, "Conv1D": 1, "LayerNorm": normalized, "RMSNorm": normalized}
    alone = {**inner, "Embedding": 0, **dict.fromkeys(_ELEMENTWISE, 0)}
    kind = module.base if module.base in ("Linear", "Embedding", "Conv1D") else module.kind
    if kind not in alone or (kind in ("LayerNorm", "RMSNorm") and not normalized):
        raise ConfigError(
            f"{key}: interleaved_parallel is for {', '.join(alone)}, whose samples do not meet, "
            f"not {module.kind}"
        )
    if module.has_own_forward or module.computed:
        own = "has a forward of its own, which may compute over all of them"
        again = f"computes its {', '.join(module.computed)} again for each, which may change it"
        raise ConfigError(
            f"{key}: interleaved_parallel runs a module on pieces of its input, and {module.kind} "
            f"{again if module.computed else own}",
            hint="leave out interleaved_parallel, or divide a layer inside of it",
        )
    count = len(dims.inputs or ())
    if dims.copied_dim >= count - alone[kind]:
        raise ConfigError(
            f"{key}: interleaved_parallel cuts dim {dims.copied_dim} of {count}, over which "
            f"{module.kind} computes (choose an earlier one)"
        )


def _styled(
    key: str, rule: PlanRule, axis: str, module_name: str, module: ModuleShape
) -> ModulePlan:
    """Return the plan that the style of `rule` stands for, for a module of this kind.

    A linear weight is (out, in), or (in, out) in a `Conv1D` of transformers; that of an embedding
    is (rows, width).
    """
    style = rule.style
    unsharded: Dims = [UNSHARDED_DIMS]
    last_sharded: Dims = [UNSHARDED_DIMS, axis]
    columns: dict[str, Dims] = {"weight": [axis, None], "bias": [axis]}
    experts: dict[str, Dims] = {"gate_up_proj": [None, axis, None], "down_proj": [None, None, axis]}
    styles: dict[tuple[str, str], tuple[Mapping[str, Dims], Dims | None, Dims]] = {
        ("colwise", "Linear"): (columns, unsharded, last_sharded),
        ("vocab", "Linear"): (columns, unsharded, last_sharded),
        ("rowwise", "Linear"): ({"weight": [None, axis], "bias": [None]}, last_sharded, unsharded),
        ("colwise", "Embedding"): ({"weight": [None, axis]}, unsharded, last_sharded),
        ("rowwise", "Embedding"): ({"weight": [axis, None]}, unsharded, unsharded),
        ("embedding", "Embedding"): ({"weight": [axis, None]}, unsharded, unsharded),
        ("colwise", "Conv1D"): ({"weight": [None, axis], "bias": [axis]}, unsharded, last_sharded),
        ("rowwise", "Conv1D"): ({"weight": [axis, None], "bias": [None]}, last_sharded, unsharded),
        ("experts", "Experts"): (experts, unsharded, unsharded),
        **_convolutions(axis, len((module.params | module.computed).get("weight", ()))),
    }
    if style == "sequence":
        # Shape (batch, sequence, ...): every rank has a part of each sequence.
        sequence: Dims = [None, axis, UNSHARDED_DIMS]
        return ModulePlan(key=key, params={}, inputs=sequence, out=sequence)
    if module.computed and (
        [*module.computed.values()] != [module.computed.get("weight")]
        or not (module.computed["weight"] and rule.parts == 1)
    ):
        raise _computes(key, style, module_name, module)
    if (style, module.base) not in styles:
        kinds = " or ".join(kind for known, kind in styles if known == style)
        raise ConfigError(f"{key}.style: {style} is for {kinds}, not {module_name}")
    params, inputs, out = styles[str(style), module.base]
    own = {name: dims for name, dims in params.items() if name in module.params}
    packed = {"gate_up_proj": 2} if style == "experts" else {}
    if rule.parts > 1:
        packed = dict.fromkeys(own, rule.parts)
    return ModulePlan(
        key=key,
        params=own,
        computed={name: dims for name, dims in params.items() if name in module.computed},
        inputs=inputs,
        out=out,
        packed=packed,
        out_parts=rule.parts,
        is_local=style == "experts",
    )


def _computes(key: str, style: str | None, shown: str, module: ModuleShape) -> ConfigError:
    return ConfigError(
        f"{key}.style: {style} of {shown}, which computes its {next(iter(module.computed))} from "
        "other parameters",
        hint="remove the parametrization before rt.shard, or leave the module out of the plan",
    )


def _convolutions(
    axis: str, ndim: int
) -> dict[tuple[str, str], tuple[Mapping[str, Dims], Dims | None, Dims]]:
    """Return the styles of convolutions over channels, whose weights have `ndim` dims.

    The weight is (out, in, ...), or (in, out, ...) of a transposed one.  Groups keep the channels
    of their input, so that they take it as it comes.
    """
    sizes: Dims = [None] * max(ndim - 2, 0)
    first, second = [axis, None, *sizes], [None, axis, *sizes]
    whole: Dims = [UNSHARDED_DIMS]
    channels: Dims = [None, axis, UNSHARDED_DIMS]
    return {
        ("colwise", "Conv"): ({"weight": first, "bias": [axis]}, whole, channels),
        ("rowwise", "Conv"): ({"weight": second, "bias": [None]}, channels, whole),
        ("colwise", "ConvTranspose"): ({"weight": second, "bias": [axis]}, whole, channels),
        ("rowwise", "ConvTranspose"): ({"weight": first, "bias": [None]}, channels, whole),
        ("colwise", "GroupedConv"): ({"weight": first, "bias": [axis]}, None, channels),
    }


def _on_grid(
    key: str, style: str, axes: Sequence[str], name: str, module: ModuleShape
) -> ModulePlan:
    """Return the plan of a product on a grid, or of a module between two."""
    shown = f"{name or 'the model'} ({module.kind})"
    if module.computed:
        raise _computes(key, style, shown, module)
    if module.adapters:
        raise ConfigError(
            f"{key}.style: {style} is not for layers of LoRA such as {shown}",
            hint="choose colwise and rowwise, or leave the layer out of the plan",
        )
    is_product = module.base in MATRICES
    if is_product and module.has_own_forward:
        raise ConfigError(
            f"{key}.style: {style} is for products, and {shown} has a forward of its own",
            hint="choose colwise or rowwise, or name axes by params, in and out",
        )
    wide = [param for param, shape in module.params.items() if len(shape) != 1]
    if not is_product and wide:
        raise ConfigError(
            f"{key}.style: {style} is for {', '.join(MATRICES)} and norms over the last dim, and "
            f"{shown} has {wide[0]} {list(module.params[wide[0]])}"
        )
    found: GridDims = grid_dims(style, axes, module.base, list(module.params))
    return ModulePlan(
        key=key,
        params={param: dims for param, dims in found.params.items() if param in module.params},
        inputs=found.inputs,
        out=found.out,
        product=found.product,
    )


def _routed(key: str, name: str, module: ModuleShape, ranks: int) -> ModulePlan:
    """Return the plan of experts on ranks, which are dim 0 of each weight or members of a list."""
    if module.members >= ranks and not module.params:
        return ModulePlan(key=key, params={}, inputs=None, out=None, is_routed=True)
    if module.members and not module.params:
        raise ConfigError(
            f"{key}.style: {name} has {module.members} experts, fewer than the {ranks} ranks of "
            f"{EXPERT_AXIS} (choose {EXPERT_AXIS} {module.members} or less)"
        )
    shapes = list(module.params.values())
    is_of_experts = (
        any(len(shape) == _EXPERT_DIMS for shape in shapes)
        and all(len(shape) > 1 for shape in shapes)
        and len({shape[0] for shape in shapes}) == 1
    )
    if not is_of_experts:
        raise ConfigError(
            f"{key}.style: experts over {EXPERT_AXIS} is for a module that has the weights of all "
            f"experts in 3-D parameters, not {name or 'the model'} ({module.kind})",
            hint="keep the weights of all experts as (experts, ..., ...) in one module whose "
            "forward takes tokens, their experts and the weights of these, as transformers does",
        )
    params: dict[str, Dims] = {
        param: [EXPERT_AXIS, *[None] * (len(shape) - 1)] for param, shape in module.params.items()
    }
    return ModulePlan(key=key, params=params, inputs=None, out=None, is_routed=True)


def _check_even(plan: ModulePlan, layout: MeshLayout, name: str, module: ModuleShape) -> None:
    """Refuse a parameter with a dim that does not split in equal parts; MindSpore's rule too."""
    shapes = module.params | module.computed
    for param, dims in (plan.params | plan.computed).items():
        shape = shapes[param]
        if len(dims) != len(shape):
            raise ConfigError(
                f"{plan.key}.params.{param}: {len(dims)} entries for the {len(shape)} dims of "
                f"{name}.{param} {list(shape)}"
            )
        for dim, (size, entry) in enumerate(zip(shape, dims, strict=True)):
            axes = [entry] if isinstance(entry, str) else entry or []
            parts = math.prod(layout.size(axis) for axis in axes)
            packed = plan.packed.get(param, 1) if axes else 1
            if size % (parts * packed):
                if packed > 1:
                    raise ConfigError(
                        f"{plan.key}: {name}.{param} {list(shape)}: dim {dim} of {size} can not be "
                        f"split into {packed} projections of {parts} parts ({' x '.join(axes)})"
                    )
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
