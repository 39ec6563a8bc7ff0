"""What a table whose rows ranks divide cannot be combined with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msrun.errors import ModelError
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.layout import context_rule
from msrun.parallel.tensor.plan import ModulePlan


def check(
    config: ParallelConfig, plans: Mapping[str, ModulePlan], excluded: Collection[str]
) -> None:
    """Refuse other features that know no part of a table.

    Args:
        config: The configuration.
        plans: Module -> its plan.
        excluded: Parameters whose gradients are not reduced.

    Raises:
        ModelError: One of them is given.
    """
    for name, plan in plans.items():
        if not plan.rows:
            continue
        others = {
            "checkpoint.strategy: a strategy file has no words for": config.checkpoint is not None
            and config.checkpoint.strategy is not None,
            "verify: one process has no part of": bool(config.verify),
            "optimizer.dtype: casts what is gathered, and not": config.optimizer.dtype is not None,
            "reduce.exclude: each rank has others of": f"{name}.weight" in excluded,
            "plan: style context divides fields like tokens, and not": context_rule(config)
            is not None,
        }
        for sentence, is_so in others.items():
            if is_so:
                raise ModelError(
                    f"{ROOT}.{sentence} the rows of {name} ({plan.key}.rows)",
                    hint="leave out one of the two",
                )
