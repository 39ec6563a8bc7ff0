"""Checks, in the first call, that experts may see tokens apart from each other.

`routed` gives the forward of a module other rows than the model does: each token by itself, once
for each of its experts, in another company.  That is right for a weighted sum of experts.  A module
that normalises the weights of a token, or drops tokens of an expert that has too many, computes
something else, and nothing would fail.  So the first call with a result other than 0 is tried on a
few tokens: all at once, and each token with each expert by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from msrun.errors import ModelError

_ROWS = 4
# Of the largest element.  What it looks for differs as much as the values; rounding in bfloat16
# does not.
_GAP_MAX = 0.05
_FACTORS = (0.25, 0.5)


class Probe:
    """Tries the forward of one module of experts once.

    Args:
        name: Of the module.
        module: The module.

    Attributes:
        name: Of the module.
        is_done: Whether it was tried.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.is_done = False
        self._module = module

    @torch.no_grad()
    def run(
        self,
        call: Callable[[Tensor, Tensor, Tensor], Tensor],
        tokens: Tensor,
        index: Tensor,
        weights: Tensor,
        experts: int,
    ) -> None:
        """Try `call`, which takes tokens, their experts and the weights of these.

        Args:
            call: The forward on the experts of this rank.
            tokens: Of which a few are tried.
            index: As the module gets it.
            weights: As the module gets it.
            experts: Of this rank.

        Raises:
            ModelError: Results depend on other tokens, or on other experts of a token.
        """
        rows = tokens.detach()[torch.arange(_ROWS, device=tokens.device) % len(tokens)]
        chosen = [0, experts - 1][: index[:1].numel()]
        of_rows = index.new_tensor(chosen).expand(_ROWS, -1)
        factors = weights.new_tensor(_FACTORS[: len(chosen)]).expand(_ROWS, -1)
        with evaluating(self._module), torch.random.fork_rng(devices=[]):
            together = call(rows, *_like(index, of_rows, factors))
            apart = torch.zeros_like(together)
            for i, factor in zip(of_rows.split(1, 1), factors.split(1, 1), strict=True):
                singles = zip(rows.split(1), i.split(1), factor.split(1), strict=True)
                apart += torch.cat([call(row, *_like(index, *other)) for row, *other in singles])
        largest = together.abs().max()
        if not bool((largest > 0) & largest.isfinite()):
            return  # it shows nothing: the next call is tried
        self.is_done = True
        if not bool((together - apart).abs().max() <= largest * _GAP_MAX):
            raise ModelError(
                f"{self.name} of style experts over ep: what it computes of a token depends on "
                "other tokens, or on its other experts, which are on other ranks",
                hint="weights of a token, and which tokens an expert takes, are for the router: "
                "the module of experts is to return the weighted sum of theirs",
            )


@torch.no_grad()
def check_rows_apart(name: str, expert: Callable[..., Tensor], rows: Sequence[Tensor]) -> bool:
    """Refuse an expert that computes something else of rows together than of each by itself.

    Args:
        name: Of the experts, for messages.
        expert: Of this rank, which draws no dropout.
        rows: What it is called with.

    Returns:
        Whether it showed anything.
    """
    few = [x.detach()[:_ROWS] for x in rows]
    with torch.random.fork_rng(devices=[]):
        together = expert(*few)
        apart = torch.cat([expert(*row) for row in zip(*(x.split(1) for x in few), strict=True)])
    largest = together.abs().max()
    if not bool((largest > 0) & largest.isfinite()):
        return False
    if not bool((together - apart).abs().max() <= largest * _GAP_MAX):
        raise ModelError(
            f"{name}: what an expert computes of a row depends on other rows, some of which come "
            "from other ranks"
        )
    return True


def _like(index: Tensor, *values: Tensor) -> list[Tensor]:
    """Return `values` of (rows, 1) as (rows,), if the module gets its `index` so."""
    return [value.flatten() if index.dim() == 1 else value for value in values]


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Have `module` draw no dropout inside."""
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, was in modes:
            part.training = was
