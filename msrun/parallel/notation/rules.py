"""Plan rules in MindSpore's notations: their meaning for a module, and checks without a model.

A rule that fits no model is refused with the configuration; one that fits no mesh even before the
number of ranks is known.
"""

from __future__ import annotations

from collections.abc import Mapping

from msrun.errors import ConfigError, UsageError
from msrun.parallel.config import Dims, LayoutRule, PlanRule
from msrun.parallel.notation.device_matrix import Layout
from msrun.parallel.notation.dims import ModuleDims, check_strategy, module_dims


def notation_dims(rule: PlanRule, key: str, kind: str, axes: Mapping[str, int]) -> ModuleDims:
    """Return how a strategy or a layout shards a module.

    Args:
        rule: Has one of the two.
        key: Its path in the configuration, for messages.
        kind: Name of the module's class.
        axes: Axes that a plan may name -> size, the slowest-varying first.

    Raises:
        ConfigError: It does not fit the module or the mesh.
    """
    if rule.layout is not None:
        return _of_layout(rule.layout, f"{key}.layout", axes)
    if rule.strategy is None:
        raise ConfigError(f"{key}: is empty")
    try:
        return module_dims(kind, rule.strategy, axes, out_strategy=rule.out_strategy)
    except UsageError as error:
        raise ConfigError(f"{key}.{error.message}", hint=error.hint) from None


def check_notation(rule: PlanRule, key: str, axes: Mapping[str, int] | None) -> None:
    """Refuse a strategy or a layout that fits no module.

    Args:
        rule: May have neither.
        key: As of `notation_dims`.
        axes: As of `notation_dims`; None leaves the mesh out.

    Raises:
        ConfigError: No model can make it right.
    """
    if rule.layout is not None:
        _of_layout(rule.layout, f"{key}.layout", axes)
    if rule.strategy is not None:
        try:
            check_strategy(rule.strategy, axes, out_strategy=rule.out_strategy)
        except UsageError as error:
            raise ConfigError(f"{key}.{error.message}", hint=error.hint) from None


def _of_layout(rule: LayoutRule, key: str, axes: Mapping[str, int] | None) -> ModuleDims:
    """Return the dims of `rule`, by the axes of the mesh or, without one, by its own aliases."""
    try:
        cut = Layout(tuple(rule.device_matrix), tuple(rule.alias_name), rule.rank_list)
        if axes is not None:
            cut().on_mesh(axes)
    except UsageError as error:
        raise ConfigError(f"{key}.{error.message}", hint=error.hint) from None

    def dims(entries: Dims, name: str) -> Dims:
        try:
            tensor = cut(*entries)
        except UsageError as error:
            raise ConfigError(f"{key}.{name}: {error.message}", hint=error.hint) from None
        return tensor.dims if axes is None else tensor.on_mesh(axes)

    return ModuleDims(
        params={name: dims(entries, f"params.{name}") for name, entries in rule.params.items()},
        inputs=None if rule.inputs is None else dims(rule.inputs, "in"),
        out=None if rule.out is None else dims(rule.out, "out"),
    )
