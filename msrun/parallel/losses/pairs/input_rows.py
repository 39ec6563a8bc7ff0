"""Compares over steps which inputs micro-batches cut.

A tensor is cut if it has as many rows as the batch has samples.  A tensor of samples has that in
every step.  One of other rows may have it in some steps alone, such as in a last batch with fewer
samples, and would be whole in the others.
"""

from __future__ import annotations

from torch import nn

from msrun.errors import ModelError
from msrun.parallel.losses.batch import StepBatch, batch_size, check_target, named_inputs
from msrun.parallel.losses.pairs.input_pairs import CUT_HINT


class InputRows:
    """Which inputs of a model had as many rows as the batch had samples."""

    def __init__(self) -> None:
        self._were_cut: dict[str, bool] = {}

    def check(self, model: nn.Module, batch: StepBatch, parts: int, known: int = 0) -> None:
        """Refuse a batch that `parts` micro-batches would cut otherwise than those before.

        Args:
            model: The model.
            batch: Of this rank.
            parts: Micro-batches.
            known: Samples in it, as a loader says; 0 if none does.

        Raises:
            ModelError: As in `check_target`; or an input was cut and would not be, or now is.
        """
        check_target(batch, parts, known)
        if parts == 1:
            return
        samples = batch_size(batch)
        for name, tensor in named_inputs(model, batch):
            rows = len(tensor) if tensor.dim() else 1
            is_cut = rows == samples
            if rows > 1 and self._were_cut.setdefault(name, is_cut) is not is_cut:
                before, now = ("was not cut", "would be") if is_cut else ("was cut", "is not")
                raise ModelError(
                    f"`{name}` has {rows} rows and the batch {samples} samples: it {before} into "
                    f"micro-batches in an earlier step, and {now} in this one",
                    hint=CUT_HINT,
                )
