"""The key `float8`: matrix products of chosen modules in eight bits, by torchao."""

from __future__ import annotations

from typing import Any, Literal

from msrun.parallel.settings.section import ConfigSection


class Float8(ConfigSection, frozen=True, kw_only=True):
    """Matrix products in float8, forward and backward, by torchao.

    Args:
        modules: Patterns of modules, of which every `nn.Linear` inside multiplies in float8.
        recipe: What of a matrix shares a scale, as torchao names it: all of it, or a row; with
            `rowwise_with_gw_hp` gradients of weights are computed in the type of the model.
    """

    modules: list[str]
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"

    def __post_init__(self) -> None:
        if not self.modules:
            raise ValueError("modules: is empty (name modules, such as 'layers.*')")


def float8_problem(config: Any) -> str | None:
    """Return what `float8` of `config` cannot be combined with; None if there is nothing.

    Args:
        config: A `ParallelConfig`, which this module does not know.
    """
    problems = {
        "verify compares with one process, whose scales are those of whole batches": config.verify,
        "precision fp16 scales the loss, and float8 each gradient (choose bf16)": (
            config.precision == "fp16"
        ),
    }
    return next((sentence for sentence, is_so in problems.items() if is_so), None)
