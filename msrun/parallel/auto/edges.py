"""What it costs that a tensor is made in one layout and read in another."""

from __future__ import annotations

import numpy as np

from msrun.parallel.auto.codes import RR, SHARDS, Array, Codes, forward, gradient
from msrun.parallel.auto.cost import Prices
from msrun.parallel.auto.problem import parts
from msrun.parallel.auto.views import Renaming


def exchange(
    prices: Prices,
    made: Codes,
    wanted: Codes,
    *,
    view: Renaming | None,
    nbytes: int,
    traffic: tuple[float, float],
) -> Array:
    """Return the seconds between every strategy that makes a tensor and every one that reads it.

    Args:
        prices: Costs of redistribution.
        made: Codes of the tensor, (strategies, axes).
        wanted: Codes in which it is read, in the dims of `view`.
        view: How the reader names the dims; None as the tensor does.
        nbytes: Of the whole tensor.
        traffic: How often a step moves the tensor forward, and its gradient back.
    """
    ahead, back = traffic
    sources, source_of = _distinct(made)
    targets, target_of = _distinct(wanted)
    behind, seen = _behind(prices, targets, view)
    table = ahead * prices.seconds(forward(sources), forward(behind), nbytes)
    if back:
        returned = prices.seconds(gradient(behind), gradient(sources), nbytes)
        table = table + back * returned.T
    if seen is not None and back:
        # What a view cannot pass on is taken behind it, and its gradient gathered there.
        extra = [
            prices.seconds(gradient(targets[i : i + 1]), gradient(seen[i : i + 1]), nbytes)
            for i in range(len(targets))
        ]
        table = table + back * np.array([cell[0, 0] for cell in extra])
    found: Array = table[source_of][:, target_of]
    return found


def _behind(prices: Prices, codes: Codes, view: Renaming | None) -> tuple[Codes, Codes | None]:
    """Return the codes of a tensor where its view has `codes`.

    Returns:
        They, and the view's codes without what it cannot pass on; None if it passes all.
    """
    if view is None:
        return codes, None
    behind, seen = codes.copy(), codes.copy()
    for dim in range(SHARDS):
        cut = codes == dim
        if not cut.any():
            continue
        source, limit = view.dims.get(dim, (RR, 1))
        passes = (limit % parts(cut, prices.sizes) == 0) & (source != RR)
        behind[cut] = np.broadcast_to(np.where(passes, source, RR)[:, None], cut.shape)[cut]
        seen[cut] = np.broadcast_to(np.where(passes, dim, RR)[:, None], cut.shape)[cut]
    return behind, None if (seen == codes).all() else seen


def _distinct(codes: Codes) -> tuple[Codes, Codes]:
    """Return the distinct rows, and the number of each row among them."""
    found, inverse = np.unique(codes, axis=0, return_inverse=True)
    return found, inverse.ravel()
