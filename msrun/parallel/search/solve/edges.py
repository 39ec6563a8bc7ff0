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
_BASE = 16


class Item(NamedTuple):
    """One collective that a plan needs.

    Args:
        kind: What it is.
        axis: Over which axis.
        is_back: Whether it moves a gradient.
        seconds: It takes in one step of training.
    """

    kind: MoveKind
    axis: int
    is_back: bool
    seconds: float


def exchange_seconds(
    prices: RedistributionCosts, made: IntArray, wanted: IntArray, moved: Exchange
) -> FloatArray:
    """Return the seconds between every strategy that makes a tensor and every one that reads it.

    Args:
        prices: Costs of redistribution.
        made: IntArray of the tensor, (strategies, axes).
        wanted: IntArray in which it is read, in the dims of the reader's view.
        moved: The tensor.
    """
    sources, source_of = _distinct(made)
    targets, target_of = _distinct(wanted)
    root, seen = base_codes(prices.sizes, targets, moved.view)
    table = moved.ahead * prices.seconds(
        value_placement(sources), value_placement(root), moved.nbytes
    )
    if moved.back:
        returned = prices.seconds(
            gradient_placement(root), gradient_placement(sources), moved.nbytes
        )
        table = table + moved.back * returned.T
    if seen is not None and moved.back:
        # What a view cannot pass on is taken behind it, and its gradient gathered there.
        extra = prices.seconds(gradient_placement(targets), gradient_placement(seen), moved.nbytes)
        table = table + moved.back * np.diagonal(extra)
    found: FloatArray = table[source_of][:, target_of]
    return found


def copied_bytes(
    sizes: Sequence[int], made: IntArray, wanted: IntArray, moved: Exchange
) -> FloatArray:
    """Return the bytes on one rank of what is read, where it is not what was made.

    Args:
        sizes: Of the mesh axes.
        made: As of `exchange_seconds`.
        wanted: As of `exchange_seconds`.
        moved: The tensor.
    """
    sources, source_of = _distinct(made)
    targets, target_of = _distinct(wanted)
    root, seen = base_codes(sizes, targets, moved.view)
    # What is whole but for its state is stored in parts.
    lies = np.where(sources == RZ, RZ, value_placement(sources))
    is_other = (lies[:, None] != value_placement(root)[None]).any(axis=2)
    if seen is not None:
        is_other = is_other | (seen != targets).any(axis=1)
    table = np.where(is_other, moved.nbytes / parts(is_sharded(targets), sizes), 0.0)
    found: FloatArray = table[source_of][:, target_of]
    return found


def itemize(
    prices: RedistributionCosts, made: IntArray, wanted: IntArray, moved: Exchange
) -> Iterator[Item]:
    """Yield the collectives of one pair of strategies; they add up to `exchange_seconds`."""
    root, seen = base_codes(prices.sizes, wanted, moved.view)
    trips = [
        (False, moved.ahead, value_placement(made), value_placement(root)),
        (True, moved.back, gradient_placement(root), gradient_placement(made)),
    ]
    if seen is not None:
        trips.append((True, moved.back, gradient_placement(wanted), gradient_placement(seen)))
    for is_back, times, source, target in trips:
        for move in moves(source, target, prices.sizes):
            start, rate = collective(move.kind, prices.wires[move.axis])
            seconds = times * (start + rate * moved.nbytes / float(move.parts[0, 0]))
            if seconds:
                yield Item(move.kind, move.axis, is_back, seconds)


def base_codes(
    sizes: Sequence[int], codes: IntArray, view: DimMap | None
) -> tuple[IntArray, IntArray | None]:
    """Return the codes of a tensor where its view has `codes`.

    Returns:
        They, and the view's codes without what it cannot pass on; None if it passes all.
    """
    if view is None:
        return codes, None
    root, seen = codes.copy(), codes.copy()
    for dim in range(SHARD_CODES):
        cut = codes == dim
        if not cut.any():
            continue
        source, limit = view.dims.get(dim, (RR, 1))
        passes = (limit % parts(cut, sizes) == 0) & (source != RR)
        root[cut] = np.broadcast_to(np.where(passes, source, RR)[:, None], cut.shape)[cut]
        seen[cut] = np.broadcast_to(np.where(passes, dim, RR)[:, None], cut.shape)[cut]
    return root, None if (seen == codes).all() else seen


def _distinct(codes: IntArray) -> tuple[IntArray, IntArray]:
    """Return the distinct rows, and the number of each row among them."""
    packed = codes @ (_BASE ** np.arange(codes.shape[1]))
    _, index, inverse = np.unique(packed, return_index=True, return_inverse=True)
    return codes[index], inverse
