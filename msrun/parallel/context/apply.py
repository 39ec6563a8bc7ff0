"""Applies style `context` to a model: the first look at the rule, its modules, and its refusals."""

from __future__ import annotations

from torch import nn

from msrun.errors import ModelError
from msrun.parallel.context.sequences import Sequences
from msrun.parallel.match import matching
from msrun.parallel.rank_context import SequenceRanks
from msrun.parallel.settings.plan_rules import PlanRule
from msrun.parallel.sharded_model import refuse_copies
from msrun.parallel.torch_compat import is_compiled, is_compiled_in_place


def divide(key: str, rule: PlanRule, ranks: SequenceRanks, model: nn.Module) -> Sequences:
    """Have the modules of `model` compute on the tokens of this rank, in place.

    Args:
        key: Path of the rule in the configuration, for messages.
        rule: Of style `context`.
        ranks: Ranks of its axis.
        model: The model, before anything else changed its modules.

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
    names = [name for name, _ in model.named_modules()]
    sequences = Sequences(
        key, ranks, model, matching([rule.match], names, f"{key}.match"), rule.kind
    )
    refuse_copies(model, f"{key}.style: context")
    return sequences
