"""Numbers that a loss function hands out of a step, such as how many samples were right.

A step calls the loss function once a micro-batch, with the samples of one rank, and in a pipeline
on the last stage alone.  So a number is noted as a sum and a count, without waiting for the device,
and `read` adds them over micro-batches and ranks.  Ranks that compute the same, such as those of
`tp`, leave the quotient as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msrun.errors import ModelError
from msrun.parallel.exchange import messages
from msrun.parallel.local import full_tensor
from msrun.parallel.losses.terms import count_type
from msrun.parallel.rank_context import RankContext
from msrun.parallel.torch_compat import is_fake


class StepMetrics:
    """Sums and counts by name, since they were read last."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, context: RankContext, name: str, total: Any, count: Any) -> None:
        """Add a sum and its count.

        Raises:
            ModelError: One of them is not one number.
        """
        if context.batch.is_whole:
            return  # one process computes again what the ranks compute, to verify it
        pair = [self._number(context, name, value) for value in (total, count)]
        before = self._sums.get(name)
        own = torch.stack(pair)
        self._sums[name] = own if before is None else before + own

    def _number(self, context: RankContext, name: str, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            if is_fake(value):
                raise ModelError(
                    f"rt.metric({name!r}, ...) is in a part of forward that stages divide",
                    hint="call it in the loss function",
                )
            value = full_tensor(value.detach())
            if value.numel() != 1:
                raise ModelError(
                    f"rt.metric({name!r}, ...) has shape {tuple(value.shape)}, and must be a sum "
                    "and a count, one number each",
                    hint=f"rt.metric({name!r}, values.sum(), values.numel())",
                )
        kind = count_type(context.device)
        return torch.as_tensor(value, dtype=kind, device=context.device).reshape(())

    def read(self, context: RankContext) -> dict[str, float]:
        """Return sum / count of all ranks by name, and begin anew; all ranks call it."""
        own = {name: pair.tolist() for name, pair in self._sums.items()}
        self._sums = {}
        of_ranks = messages.gather_all(own, dict[str, list[float]], None, context.device)
        found: dict[str, float] = {}
        for name in dict.fromkeys(name for sums in of_ranks for name in sums):
            pairs = [sums[name] for sums in of_ranks if name in sums]
            total, count = (sum(column) for column in zip(*pairs, strict=True))
            found[name] = total / count if count else float("nan")
        return found
