"""What experts on ranks cannot be combined with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from msrun.errors import ModelError
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.tensor.plan import ModulePlan


def check(
    config: ParallelConfig,
    model: nn.Module,
    plans: Mapping[str, ModulePlan],
    excluded: Collection[str],
    *,
    has_parts: bool = False,
) -> None:
    """Refuse other features that know no experts, or none of a list.

    Args:
        config: The configuration.
        model: The model, before it is divided.
        plans: Module -> its plan.
        excluded: Parameters whose gradients are not reduced.
        has_parts: Whether ranks have parts of sequences.

    Raises:
        ModelError: One of them is given.
    """
    for name, plan in plans.items():
        if not plan.is_routed:
            continue
        params = dict(model.get_submodule(name).named_parameters(name))
        # Gradients that stay on each rank are of other experts on each.
        if own := params.keys() & set(excluded):
            raise ModelError(
                f"{ROOT}.reduce.exclude: {min(own)} is of experts that ranks share, so no rank has "
                "its own (leave it out)"
            )
        if not plan.params:
            _check_list(config, name, plan, plans, has_parts=has_parts)


def _check_list(
    config: ParallelConfig,
    name: str,
    plan: ModulePlan,
    plans: Mapping[str, ModulePlan],
    *,
    has_parts: bool,
) -> None:
    """Refuse what knows no experts of a list, which one rank has and others have without a row."""
    inside = next((other for other in plans if other.startswith(f"{name}.")), "")
    settings = config.optimizer
    others = {
        "verify: one process has no part of": bool(config.verify),
        "optimizer.dtype: casts what is gathered, and not": settings.dtype is not None,
        "optimizer.offload: keeps on the host what is gathered, and not": bool(settings.offload),
        "dropout: exact draws masks of samples, and not of": config.dropout == "exact",
        "float8: replaces weights, and not those of": config.float8 is not None,
        "plan: style context does not follow tokens to": has_parts,
        f"plan: {inside} has a rule of its own, inside of": bool(inside),
        "pipeline: a stage has no forward of its own to pick rows for": config.pipeline is not None
        and "." not in name,
    }
    for sentence, is_so in others.items():
        if is_so:
            raise ModelError(
                f"{ROOT}.{sentence} the experts of the list {name} ({plan.key})",
                hint="leave out one of the two",
            )
