"""Rules of the configuration as wishes that every plan of a search keeps.

A rule fixes the placement of parameters, and with `in`, `out`, a strategy, a layout, or the styles
`sequence` and `vocab` also those of a module's input and output:

- `in` is how each operator of the module reads the value that it gets from outside.
- `out` is the layout in which the value that it makes is handed to all that read it.  The operator
  itself may make another one, such as a pending sum, which is redistributed first.

Over `dp`, which divides the batch, parameters are free; inputs and outputs are where the rule names
`dp`, and where a strategy or a layout says how all devices divide them.  Other styles fix
parameters alone: which layouts fit them best is for the search to find.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from msrun.errors import ConfigError
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, ParallelConfig
from msrun.parallel.config_file import load_yaml, read_config
from msrun.parallel.layout import resolve, rules_of
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.search.graph.axis_placement import RR
from msrun.parallel.search.graph.module_io import ModuleIO
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.solve.build import Pin
from msrun.parallel.search.solve.problem import layout_node
from msrun.parallel.settings.plan_rules import UNSHARDED_DIMS, Dim, Dims, PlanRule, one_tensor
from msrun.parallel.tensor.describe import describe_modules
from msrun.parallel.tensor.plan import ModulePlan, plan_modules

# Styles that say how inputs and outputs are sharded, and not only what fits their parameters.
_OF_INPUTS = ("sequence",)
_OF_OUTPUTS = ("sequence", "vocab")


def pins_of(
    config: ParallelConfig, layout: MeshLayout, model: nn.Module, program: Program
) -> list[Pin]:
    """Return what the rules of the configuration fix.

    Raises:
        ConfigError: A rule does not fit the model, or names an input or output that is not one.
    """
    rules = [rule for rule in rules_of(config) if isinstance(rule, PlanRule)]  # names are refused
    if not rules:
        return []
    plans = plan_modules(rules, layout, describe_modules(model))
    by_key = {f"{ROOT}.plan[{index}]": rule for index, rule in enumerate(rules)}
    return _Wishes(layout, program).pins(plans, by_key)


def pins_of_file(path: str, mesh: dict[str, int], model: nn.Module, program: Program) -> list[Pin]:
    """Return what the rules in a YAML file fix: a list of them, or a configuration with `plan`.

    Raises:
        ConfigError: It cannot be read, has no rules, or they do not fit the model or the mesh.
    """
    tree = load_yaml(Path(path))
    rules = read_config({"plan": tree} if isinstance(tree, list) else _mapping(tree)).plan
    if not rules or isinstance(rules, str):
        raise ConfigError(f"{path} has no rules (choose such as - {{match: up, style: colwise}})")
    config = ParallelConfig(mode="auto", mesh=mesh, plan=rules)
    return pins_of(config, resolve(config, math.prod(mesh.values())), model, program)


def _mapping(tree: object) -> dict[str, Any]:
    return tree if isinstance(tree, dict) else {}


class _Wishes:
    """Makes pins of the plans of modules.

    Args:
        layout: The mesh.
        program: The forward pass.
    """

    def __init__(self, layout: MeshLayout, program: Program) -> None:
        names = [name for name in layout.axes if name != PIPELINE_AXIS]
        self._at = {name: at for at, name in enumerate(names)}
        self._sizes = {at: layout.size(name) for name, at in self._at.items()}
        self._program, self._io = program, ModuleIO(program)

    def pins(self, plans: Mapping[str, ModulePlan], rules: Mapping[str, PlanRule]) -> list[Pin]:
        values = {full: value for value, full in self._program.params.items()}
        pins = []
        for module, plan in plans.items():
            rule = rules[plan.key]
            _check(plan)
            for param, dims in plan.params.items():
                full = f"{module}.{param}" if module else param
                if full in values:
                    codes = self._codes(dims, len(dims), has_batch=False)
                    key = f"{plan.key}.params.{param}"
                    pins.append(Pin(node=values[full], codes=codes, key=key))
            if plan.inputs is not None and rule.style in (None, *_OF_INPUTS):
                pins += self._of_input(
                    module, plan, has_batch=_has_batch(rule, one_tensor(rule.inputs))
                )
            if plan.out is not None and rule.style in (None, *_OF_OUTPUTS):
                pins += self._of_output(
                    module, plan, has_batch=_has_batch(rule, one_tensor(rule.out))
                )
        return pins

    def _codes(self, dims: Dims, count: int, *, has_batch: bool) -> dict[int, int]:
        """Return axis -> code of a tensor of `count` dims."""
        codes = {at: RR for name, at in self._at.items() if name != DATA_AXIS}
        if has_batch and DATA_AXIS in self._at:
            codes[self._at[DATA_AXIS]] = 0
        for dim, entry in enumerate(_expanded(dims, count)):
            codes |= {self._at[axis]: dim for axis in _named(entry)}
        return codes

    def _of_input(self, module: str, plan: ModulePlan, *, has_batch: bool) -> list[Pin]:
        key = f"{plan.key}.in"
        value = self._only(self._io.inputs(module), key, module, "reads", "input")
        codes = self._checked(value, plan.inputs or [], key, module, has_batch=has_batch)
        return self._at_reads(value, module, codes, key)

    def _of_output(self, module: str, plan: ModulePlan, *, has_batch: bool) -> list[Pin]:
        key = f"{plan.key}.out"
        value = self._only(self._io.outputs(module), key, module, "makes", "output")
        codes = self._checked(value, plan.out or [], key, module, has_batch=has_batch)
        if value in self._program.outputs:
            others = [at for at, code in codes.items() if code != RR and self._sizes[at] > 1]
            names = [name for name, at in self._at.items() if at in others and name != DATA_AXIS]
            if names:
                raise ConfigError(
                    f"{key}: {module or 'the model'} makes an output of the model, which its "
                    f"caller gets whole over {names[0]}"
                )
        base, view = self._io.base(value)
        if self._io.is_constant(base):
            raise ConfigError(f"{key}: {module} computes from no parameter, and has one layout")
        if view is not None:
            passed = {at: self._before(view.dims.get(code), code, at) for at, code in codes.items()}
            lost = [at for at, code in passed.items() if code is None]
            if lost:
                raise self._ended(key, lost[0], module)
            codes = {at: code for at, code in passed.items() if code is not None}
        return [Pin(node=layout_node(base), codes=codes, key=key)]

    def _before(self, source: tuple[int, int] | None, code: int, at: int) -> int | None:
        """Return the code of a base where its view has `code`; None where the view ends it."""
        if code == RR or self._sizes[at] == 1:
            return RR
        return source[0] if source and source[1] % self._sizes[at] == 0 else None

    def _at_reads(self, value: str, module: str, codes: dict[int, int], key: str) -> list[Pin]:
        pins = []
        for read in self._io.reads(value, module):
            own = {}
            for at, code in codes.items():
                parts = math.prod(self._sizes[axis] for axis, c in codes.items() if c == code)
                found = RR if code == RR else read.code(code, parts)
                if found is None:
                    raise self._ended(key, at, module)
                own[at] = found
            pins.append(Pin(node=read.step.name, port=read.port, codes=own, key=key))
        if not pins:
            raise ConfigError(
                f"{key}: no operator of {module or 'the model'} that a plan places reads its input"
            )
        return pins

    def _only(self, values: list[str], key: str, module: str, verb: str, end: str) -> str:
        if len(values) == 1:
            return values[0]
        count = f"{len(values)} tensors" if values else "no tensor"
        raise ConfigError(
            f"{key}: {module or 'the model'} {verb} {count}, and mode auto keeps such a wish for "
            f"modules of one {end}",
            hint="give rules to the modules inside it, or leave the key out",
        )

    def _checked(
        self, value: str, dims: Dims, key: str, module: str, *, has_batch: bool
    ) -> dict[int, int]:
        """Return the codes of `dims` for a value, if they fit its shape."""
        shape = self._program.values[value].shape
        named = [entry for entry in dims if entry != UNSHARDED_DIMS]
        if len(named) > len(shape) or (len(named) == len(dims) != len(shape)):
            raise ConfigError(
                f"{key}: {len(named)} entries for the {len(shape)} dims of {module}, {list(shape)}"
            )
        codes = self._codes(dims, len(shape), has_batch=has_batch)
        for dim, size in enumerate(shape):
            parts = math.prod(self._sizes[at] for at, code in codes.items() if code == dim)
            if size % parts:
                raise ConfigError(
                    f"{key}: dim {dim} of {module}, {list(shape)}, can not be split in {parts} "
                    "parts"
                )
        return codes

    def _ended(self, key: str, at: int, module: str) -> ConfigError:
        name = next(name for name, axis in self._at.items() if axis == at)
        return ConfigError(
            f"{key}: {module or 'the model'} reshapes the dim that {name} shards, and mode auto "
            "cannot keep its shards",
            hint="shard another dim, or leave the key out",
        )


def _check(plan: ModulePlan) -> None:
    """Refuse what says more than how tensors are sharded."""
    if plan.is_routed:
        raise ConfigError(
            f"{plan.key}.style: mode auto sends no tokens to experts over an axis "
            "(choose semi_auto)"
        )
    if plan.each_input or plan.each_out:
        key = "in" if plan.each_input else "out"
        raise ConfigError(
            f"{plan.key}.{key}: names several tensors, and mode auto takes wishes for one (choose "
            "one list of axes, or semi_auto)"
        )
    if plan.copies > 1:
        raise ConfigError(
            f"{plan.key}.layout: interleaved_parallel says how a module computes, and mode auto "
            "takes wishes for layouts (leave the alias out, or choose semi_auto)"
        )


def _has_batch(rule: PlanRule, dims: Dims | None) -> bool:
    """Return whether a rule says that `dp` divides the batch."""
    if rule.strategy is not None or rule.layout is not None:
        return True
    return bool(dims) and DATA_AXIS in _named((dims or [None])[0])


def _expanded(dims: Dims, count: int) -> Dims:
    """Return `dims` with the entry for all other dims written out."""
    if UNSHARDED_DIMS not in dims:
        return dims
    at = dims.index(UNSHARDED_DIMS)
    return [*dims[:at], *[None] * (count - len(dims) + 1), *dims[at + 1 :]]


def _named(entry: Dim) -> list[str]:
    return [entry] if isinstance(entry, str) else entry or []
