"""What it costs that a tensor is made in one layout and read in another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from msrun.parallel.search.cost.cost import RedistributionCosts, collective
from msrun.parallel.search.cost.redistribution import MoveKind, moves
from msrun.parallel.search.graph.axis_placement import (
    RR,
    RZ,
    SHARD_CODES,
    FloatArray,
    IntArray,
    gradient_placement,
    is_sharded,
    value_placement,
)
from msrun.parallel.search.graph.views import DimMap
from msrun.parallel.search.solve.problem import Exchange, parts

# More than there are codes.
_CODE_BASE = 16


class CollectiveCost(NamedTuple):
    """One collective that a plan needs.

    Args:
        kind: What it is.
        axis: Over which axis.
        is_gradient: Whether it moves a gradient.
        seconds: It takes in one step of training.
    """

    kind: MoveKind
    axis: int
    is_gradient: bool
    seconds: float


def exchange_seconds(
    redistribution: RedistributionCosts, made: IntArray, wanted: IntArray, exchange: Exchange
) -> FloatArray:
    """Return the seconds between every strategy that makes a tensor and every one that reads it.

    Args:
        redistribution: Costs of redistribution.
        made: Codes of the tensor, (strategies, axes).
        wanted: Codes in which it is read, in the dims of the consumer's view.
        exchange: The tensor.
    """
    # Many strategies of an operator agree on one tensor: each pair of layouts is priced once.
    sources, source_of = _distinct(made)
    targets, target_of = _distinct(wanted)
    base, at_view = base_codes(redistribution.sizes, targets, exchange.view)
    nbytes, backward = exchange.nbytes, exchange.backward_times
    table = exchange.forward_times * redistribution.seconds(
        value_placement(sources), value_placement(base), nbytes
    )
    if backward:
        returned = redistribution.seconds(
            gradient_placement(base), gradient_placement(sources), nbytes
        )
        table = table + backward * returned.T
    if at_view is not None and backward:
        # What the view cannot pass on is sharded behind it, and its gradient gathered there.
        extra = redistribution.seconds(
            gradient_placement(targets), gradient_placement(at_view), nbytes
        )
        table = table + backward * np.diagonal(extra)
    seconds: FloatArray = table[source_of][:, target_of]
    return seconds


def copied_bytes(
    sizes: Sequence[int], made: IntArray, wanted: IntArray, exchange: Exchange
) -> FloatArray:
    """Return the bytes on one rank of what is read, where it is not what was made.

    Args:
        sizes: Of the mesh axes.
        made: As of `exchange_seconds`.
        wanted: As of `exchange_seconds`.
        exchange: The tensor.
    """
    sources, source_of = _distinct(made)
    targets, target_of = _distinct(wanted)
    base, at_view = base_codes(sizes, targets, exchange.view)
    # A parameter whose state is sharded is stored in shards too, so reading it replicated copies.
    stored = np.where(sources == RZ, RZ, value_placement(sources))
    is_other = (stored[:, None] != value_placement(base)[None]).any(axis=2)
    if at_view is not None:
        is_other = is_other | (at_view != targets).any(axis=1)
    table = np.where(is_other, exchange.nbytes / parts(is_sharded(targets), sizes), 0.0)
    nbytes: FloatArray = table[source_of][:, target_of]
    return nbytes


def itemize(
    redistribution: RedistributionCosts, made: IntArray, wanted: IntArray, exchange: Exchange
) -> Iterator[CollectiveCost]:
    """Yield the collectives of one pair of strategies; they add up to `exchange_seconds`."""
    base, at_view = base_codes(redistribution.sizes, wanted, exchange.view)
    backward = exchange.backward_times
    trips = [
        (False, exchange.forward_times, value_placement(made), value_placement(base)),
        (True, backward, gradient_placement(base), gradient_placement(made)),
    ]
    if at_view is not None:
        trips.append((True, backward, gradient_placement(wanted), gradient_placement(at_view)))
    for is_gradient, times, source, target in trips:
        for move in moves(source, target, redistribution.sizes):
            start, rate = collective(move.kind, redistribution.wires[move.axis])
            seconds = times * (start + rate * exchange.nbytes / float(move.parts[0, 0]))
            if seconds:
                yield CollectiveCost(move.kind, move.axis, is_gradient, seconds)


def base_codes(
    sizes: Sequence[int], codes: IntArray, view: DimMap | None
) -> tuple[IntArray, IntArray | None]:
    """Return the codes of a tensor where its view has `codes`.

    Returns:
        They, and the view's codes without those shards that the view cannot pass on; None if it
        passes all.
    """
    if view is None:
        return codes, None
    base, passed = codes.copy(), codes.copy()
    for dim in range(SHARD_CODES):
        here = codes == dim
        if not here.any():
            continue
        source, limit = view.dims.get(dim, (RR, 1))
        passes = (limit % parts(here, sizes) == 0) & (source != RR)
        base[here] = np.broadcast_to(np.where(passes, source, RR)[:, None], here.shape)[here]
        passed[here] = np.broadcast_to(np.where(passes, dim, RR)[:, None], here.shape)[here]
    return base, None if (passed == codes).all() else passed


def _distinct(codes: IntArray) -> tuple[IntArray, IntArray]:
    """Return the distinct rows, and the number of each row among them."""
    packed = codes @ (_CODE_BASE ** np.arange(codes.shape[1]))
    _, index, inverse = np.unique(packed, return_index=True, return_inverse=True)
    return codes[index], inverse
