"""What in a model whole techniques could divide beside a plan: experts, and long sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from msrun.parallel.auto.tracing.structure import leaf_tensors
from msrun.parallel.experts.outline import listed_experts
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS
from msrun.parallel.settings.plan_rules import CONTEXT_AXIS

# Tokens from which sharing a sequence is worth the exchange, and dims of vectors of tokens.
LONG, _VECTORS = 1024, 3
_EXPERT_DIMS = 3
# Axis -> what a model that it cannot divide does not have.
MISSING = {
    EXPERT_AXIS: "no module has the weights of all experts in dim 0 of its parameters",
    CONTEXT_AXIS: f"no sequences of {LONG} tokens or more",
}


def has_modules(model: nn.Module, sample: Sequence[Any]) -> bool:
    """Return whether ranks could share experts or sequences of a model."""
    return bool(expert_modules(model)) or long_sequences(sample) > 0


def expert_modules(model: nn.Module) -> dict[str, int]:
    """Return the modules whose experts ranks can share, with their number of experts.

    Of lists those that `model` has outlines of.
    """
    found = listed_experts(model)
    for name, module in model.named_modules():
        shapes = [param.shape for param in module.parameters(recurse=False)]
        is_of_experts = (
            any(len(shape) == _EXPERT_DIMS for shape in shapes)
            and all(len(shape) > 1 for shape in shapes)
            and len({shape[0] for shape in shapes}) == 1
        )
        if name and is_of_experts:
            found[name] = shapes[0][0]
    return found


def long_sequences(sample: Sequence[Any], least: int = LONG) -> int:
    """Return the tokens of each sequence of a sample; 0 if fewer than `least`, or there are none.

    Ids are (samples, tokens), and vectors of tokens (samples, tokens, width).
    """
    tensors = leaf_tensors(list(sample))
    if any(x.dim() > _VECTORS for x in tensors):
        return 0  # images
    found = [x.shape[1] for x in tensors if x.dim() == (_VECTORS if x.is_floating_point() else 2)]
    return found[0] if found and found[0] >= least else 0
