"""Bytes of a rank under each technique, from what one pass takes and what parameters take.

The runtime's own behaviour stands in these sums:

- Data parallel sends gradients from flat buffers.  On a host the buffers of the last step are kept
  for the next one, next to its gradients; elsewhere a few buckets are in flight.
- ZeRO stores a share of parameters, gradients and optimizer state.  Levels 1 and 2 gather all
  parameters until the backward pass, level 3 the unit that computes, the next one, and what no unit
  has.  Beside it there are the buffers in which units are gathered and reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

# Two buckets of the default size: one is sent, the next is filled.
_BUCKETS = 2 * 25 * 2**20
# Buffers of a unit at a time: gathered, its copies, the next one's, gradients, those sent.
_UNITS_WHOLE, _UNITS_SHARDED = 3, 5
# Level of ZeRO that shards parameters between forward and backward too.
SHARDED_PARAMETERS = 3


class ModelBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes whatever runs it.

    Args:
        params: Bytes of its trained parameters.
        fixed: Of other parameters, and buffers.
        state: Of the optimizer's state.
        largest: Of its largest parameter.
        unit: Of the parameters of the largest unit of ZeRO.
        root: Of the parameters in no unit.
        padding: That shards of uneven parameters add on a rank.
    """

    params: int
    fixed: int
    state: int
    largest: int
    unit: int
    root: int
    padding: int


class Technique(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train.

    Args:
        zero: Level of ZeRO.
        recompute: Whether blocks recompute.
        accumulate: Micro-batches of a step.
    """

    zero: int = 0
    recompute: bool = False
    accumulate: int = 1

    @property
    def name(self) -> str:
        """How reports name it."""
        parts = [f"zero {self.zero}" if self.zero else "data parallel"]
        parts += ["recompute"] if self.recompute else []
        parts += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        return " + ".join(parts)


def techniques(microbatches: int, *, can_recompute: bool, world: int) -> Iterator[Technique]:
    """Yield what to try, the cheapest in time first.

    Args:
        microbatches: The most that a local batch divides into; 1 if it must not.
        can_recompute: Whether the model has blocks.
        world: Ranks.
    """
    levels = (0, 1, SHARDED_PARAMETERS) if world > 1 else (0,)
    again = (False, True) if can_recompute else (False,)
    numbers = [1] if microbatches == 1 else [1, microbatches]
    found = [
        Technique(zero=zero, recompute=recompute, accumulate=number)
        for number in numbers
        for recompute in again
        for zero in levels
        if zero != 1 or number == 1
    ]
    yield from sorted(found, key=_rank)


def _rank(one: Technique) -> float:
    # ZeRO 3 sends half as much again, recomputation computes a third more, and small micro-batches
    # leave devices idle.
    return (
        0.1 * (one.zero == 1)
        + 0.5 * (one.zero == SHARDED_PARAMETERS)
        + one.recompute
        + 1.2 * (one.accumulate > 1)
    )


def rank_bytes(
    one: Technique,
    model: ModelBytes,
    peaks: tuple[int, int, int],
    batch: int,
    *,
    world: int,
    is_host: bool,
) -> int:
    """Return the most bytes that a rank has.

    Args:
        one: How it trains.
        model: What it trains.
        peaks: Of one pass of a micro-batch, as of `Peaks`.
        batch: Bytes of the local batch.
        world: Ranks that share the batch.
        is_host: Whether it trains on a host; elsewhere the optimizer updates all at once.
    """
    total, activations, normed = peaks
    common = model.fixed + batch + (normed if world > 1 else 0)
    if not one.zero:
        update = model.params + (model.largest if is_host else model.params)
        passes = total if one.accumulate == 1 else activations + model.params
        sent = 0
        if world > 1:
            sent = model.params if is_host else min(model.params, _BUCKETS)
        return common + model.params + model.state + sent + max(passes, update)
    shares = math.ceil((2 * model.params + model.state) / world) + 4 * model.padding
    gathered = model.params + _UNITS_WHOLE * model.unit + model.root
    if one.zero == SHARDED_PARAMETERS:
        gathered = 2 * model.root + _UNITS_SHARDED * model.unit
    if one.zero == 1 and one.accumulate > 1:
        gathered += model.params
    update = math.ceil((model.largest if is_host else model.params) / world)
    return common + shares + max(activations + gathered, update)


def traffic(one: Technique, model: ModelBytes, world: int) -> float:
    """Return the bytes that a rank sends in a step.

    An all-reduce sends 2 (n - 1) / n of the bytes, a gather and a reduce-scatter half of that each
    (Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005).
    """
    rounds = 3 if one.zero == SHARDED_PARAMETERS else 2
    times = one.accumulate if one.zero == SHARDED_PARAMETERS else 1
    return rounds * times * (world - 1) / world * model.params
