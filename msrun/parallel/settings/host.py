"""The key `offload`: activations in the memory of the host between forward and backward."""

from __future__ import annotations

from typing import Any

import msgspec

from msrun.parallel.settings.section import ConfigSection, at_least, size


class Offload(ConfigSection, frozen=True, kw_only=True):
    """Activations that wait in the memory of the host for the backward pass.

    Args:
        activations: Patterns of modules whose saved tensors go there; of several that lie inside
            each other the outermost is taken.
        prefetch: Modules whose tensors come back ahead of the backward pass, at least 0: while it
            is in one module, those of so many before it are on their way.
        threshold: Tensors of fewer bytes stay on the device, as a number or text such as `64KiB`.
    """

    activations: list[str]
    prefetch: int = 1
    threshold: int | str = "1KiB"

    def __post_init__(self) -> None:
        if not self.activations:
            raise ValueError("activations: is empty (name modules, such as 'layers.*')")
        at_least(self, "prefetch", 0)
        msgspec.structs.force_setattr(self, "threshold", size(self, "threshold"))


def offload_problem(config: Any) -> str | None:
    """Return why `offload` of `config` would have no effect or be wrong; None if it is right.

    Args:
        config: A `ParallelConfig`, which this module does not know.
    """
    problems = {
        "mode auto runs operators, and no modules (choose semi_auto)": config.mode == "auto",
        "data has ranks share images, whose parts stay on the device (leave out one)": bool(
            config.data
        ),
    }
    return next((sentence for sentence, is_so in problems.items() if is_so), None)


def overlap_problem(config: Any) -> str | None:
    """Return why steps of `config` cannot overlap the next forward; None if they can.

    Args:
        config: A `ParallelConfig`, which this module does not know.
    """
    problems = {
        "mode auto has no step on the host (choose semi_auto)": config.mode == "auto",
        "a pipeline has no forward of the whole model to overlap (choose true)": config.pipeline,
        "compiled modules read parameters unseen (choose true, or leave out compile)": (
            config.compile
        ),
        "servers take their gradients in the step (choose true)": config.servers,
        "verify compares weights after each step (choose true)": config.verify,
    }
    return next((sentence for sentence, is_so in problems.items() if is_so), None)
