"""Applies style `context` to a model: the first look at the rule, its modules, and its refusals."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from torch import nn

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.context.sequences import Sequences
from msrun.parallel.match import matching
from msrun.parallel.rank_context import SequenceRanks
from msrun.parallel.settings.plan_rules import PlanRule
from msrun.parallel.sharded_model import refuse_copies
from msrun.parallel.torch_compat import is_compiled, is_compiled_in_place

if TYPE_CHECKING:
    from msrun.parallel.pipeline.split_model import SplitModel


def divide(
    key: str, rule: PlanRule, ranks: SequenceRanks, model: nn.Module, *, is_pipeline: bool = False
) -> Sequences:
    """Have the modules of `model` compute on the tokens of this rank, in place.

    Args:
        key: Path of the rule in the configuration, for messages.
        rule: Of style `context`.
        ranks: Ranks of its axis.
        model: The model, before anything else changed its modules.
        is_pipeline: Whether it is a stage.

    Raises:
        ModelError: It has a module that is compiled.
    """
    for name, module in model.named_modules():
        if is_compiled(module) or is_compiled_in_place(module):
            raise ModelError(
                f"{key}.style: context replaces attention while the model runs, and "
                f"{name or type(module).__name__} is compiled",
                hint="give rt.shard the model before torch.compile",
            )
    refuse_copies(model, f"{key}.style: context")
    names = partial(matching, [rule.match], key=f"{key.removeprefix(ROOT)[1:]}.match")
    if not is_pipeline:
        found = names([name for name, _ in model.named_modules()])
        return Sequences(key, ranks, model, found, rule.kind)
    from msrun.parallel.context.stages import StageSequences

    stage = cast("SplitModel", model)
    found = names([name for name, _ in stage.whole.named_modules()])
    sequences = StageSequences(key, ranks, stage, found, rule.kind)
    sequences.follow(stage)
    return sequences
