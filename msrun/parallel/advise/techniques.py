"""Bytes of a rank under each technique, from what one pass takes and what parameters take.

The runtime's own behaviour stands in these sums:

- Data parallel sends gradients from flat buffers.  On a host the buffers of the last step are kept
  for the next one, next to its gradients; elsewhere a few buckets are in flight.
- Tables on the host, and parameters of an offloaded optimizer with their gradients and state, take
  nothing of a device but the units that compute.
- ZeRO stores a share of parameters, gradients and optimizer state.  Levels 1 and 2 gather all
  parameters until the backward pass, level 3 the unit that computes, the next one, and what no unit
  has.  Beside it there are the buffers in which units are gathered and reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import msgspec

from msrun.parallel.advise.simulate import Peaks
from msrun.parallel.advise.stages import StageBytes

# Two buckets of the default size: one is sent, the next is filled.
_BUCKETS = 2 * 25 * 2**20
# Buffers of a unit at a time: gathered, its copies, the next one's, gradients, those sent.
_UNITS_WHOLE, _UNITS_SHARDED = 3, 5
# Tensors that Adam makes in between of each parameter that it updates alone.
_UPDATED = 2
# Level of ZeRO that shards parameters between forward and backward too.
SHARDED_PARAMETERS = 3
# Ranks that share a model at most, and micro-batches for each stage: more would wait too little to
# be worth smaller operators.
_SHARED_MAX, _MICROBATCHES_MAX = 64, 4


# What is in the memory of the host, and the time that it costs: rows of a batch travel, saved
# activations, or all parameters, which the host also updates.
PLACE, ACTIVATIONS, OPTIMIZER = "place", "offload activations", "offload optimizer"
_ON_HOST = {PLACE: 0.3, ACTIVATIONS: 1.1, OPTIMIZER: 1.5}
# How alternatives of the search are named.
IMAGES, GRIDS, DEEP_GRID = "parts of images", ("grid 2d", "grid 2.5d", "grid 3d"), "grid 2.5d"
# Where grids and parts of images come among what ranks share, by the time that they take.
_WHOLE = dict.fromkeys(GRIDS, 2.1) | {IMAGES: 1.7}


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
        experts: Bytes of trained parameters that are of experts on ranks of their own.
        copies: Ranks that have the same experts.
        is_list: Whether these are lists, which ZeRO leaves whole on each of the copies.
    """

    params: int
    fixed: int
    state: int
    largest: int
    unit: int
    root: int
    padding: int
    experts: int = 0
    copies: int = 1
    is_list: bool = False

    def share(self, world: int) -> float:
        """Return the bytes of parameters of a rank, if each is sharded over `world` ranks."""
        return (self.params - self.experts) / world + self.experts / self.copies

    def stored(self, world: int) -> float:
        """Return the bytes of parameters of a rank that ZeRO leaves it, of `world` ranks."""
        copies = 1 if self.is_list else self.copies
        return (self.params - self.experts) / world + self.experts / copies


class Technique(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train.

    Args:
        zero: Level of ZeRO.
        recompute: Whether blocks recompute.
        accumulate: Micro-batches of a step.
        tp: Ranks that share operators.
        pp: Stages of a pipeline.
        microbatches: Of the pipeline.
        ep: Ranks that share experts, among those of data parallel.
        cp: Ranks that share sequences.
        kind: How they share attention, of `attention.KINDS`; empty is what sends less.
        whole: What divides the whole model, one of `GRIDS` or `IMAGES`; empty if nothing does.
        axes: Its axes and their sizes.
        on_host: What is in the memory of the host, of `PLACE`, `ACTIVATIONS` and `OPTIMIZER`.
        copies: Slices of a batch that take turns.
    """

    zero: int = 0
    recompute: bool = False
    accumulate: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    ep: int = 1
    cp: int = 1
    kind: str = ""
    whole: str = ""
    axes: tuple[tuple[str, int], ...] = ()
    on_host: tuple[str, ...] = ()
    copies: int = 1

    @property
    def name(self) -> str:
        """How reports name it."""
        shared = {"ep": self.ep, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        how = {"cp": f" by {self.kind}"} if self.kind else {}
        parts = [f"{axis} {size}{how.get(axis, '')}" for axis, size in shared.items() if size > 1]
        parts += [self.on_axes] if self.whole else []
        parts += [f"zero {self.zero}"] if self.zero else []
        parts = parts or ["data parallel"]
        parts += ["recompute"] if self.recompute else []
        parts += [*self.on_host]
        parts += [f"copies {self.copies}"] if self.copies > 1 else []
        parts += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        return " + ".join(parts)

    @property
    def on_axes(self) -> str:
        """What divides the whole model, with its axes; empty if nothing does."""
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.axes)
        return f"{self.whole} {sizes}" if self.whole else ""

    @property
    def apart(self) -> int:
        """Ranks that have the same samples."""
        return self.tp * self.pp * self.cp * math.prod(size for _, size in self.axes)

    @property
    def averaging(self) -> int:
        """Of the ranks that have the same samples, those that average gradients."""
        if self.whole == IMAGES:
            return math.prod(size for _, size in self.axes)
        # The first axis of this grid divides the samples.
        return self.axes[0][1] if self.whole == DEEP_GRID else 1

    @property
    def is_combined(self) -> bool:
        """Whether it divides operators, and experts or sequences beside them."""
        return self.tp > 1 and self.ep * self.cp > 1

    @property
    def is_plain(self) -> bool:
        """Whether it divides the batch alone, and has nothing on the host."""
        return self.apart * self.ep == 1 and not self.on_host


def techniques(microbatches: int, *, can_recompute: bool, world: int) -> Iterator[Technique]:
    """Yield what to try that divides the batch alone, the cheapest in time first.

    Args:
        microbatches: The most that a local batch divides into; 1 if it must not.
        can_recompute: Whether the model has blocks.
        world: Ranks.
    """
    levels = (0, 1, 2, SHARDED_PARAMETERS) if world > 1 else (0,)
    again = (False, True) if can_recompute else (False,)
    numbers = [1] if microbatches == 1 else [1, microbatches]
    found = [
        Technique(zero=zero, recompute=recompute, accumulate=number)
        for number in numbers
        for recompute in again
        for zero in levels
        # Level 2 differs from 1 where gradients wait for further micro-batches.
        if zero not in (1, 2) or (zero == 1) == (number == 1)
    ]
    yield from sorted(found, key=rank)


def on_host(
    kinds: Sequence[str], microbatches: int, *, can_recompute: bool, world: int
) -> Iterator[Technique]:
    """Yield what to try that has something in the memory of the host, by its time.

    Args:
        kinds: What may be there, of `PLACE`, `ACTIVATIONS` and `OPTIMIZER`.
        microbatches: As of `techniques`.
        can_recompute: Whether the model has blocks.
        world: Ranks.
    """
    plain = [
        *techniques(microbatches, can_recompute=can_recompute, world=world),
        # On one rank the host has all of the optimizer.
        *(
            Technique(zero=SHARDED_PARAMETERS, recompute=again)
            for again in ((False, True) if can_recompute else (False,))
            if world == 1
        ),
    ]
    found = [
        msgspec.structs.replace(one, on_host=chosen)
        for count in range(1, len(kinds) + 1)
        for chosen in combinations(kinds, count)
        for one in plain
        if not (one.recompute and ACTIVATIONS in chosen)
        if one.zero == SHARDED_PARAMETERS or OPTIMIZER not in chosen
        if world > 1 or not one.zero or OPTIMIZER in chosen
    ]
    yield from sorted(found, key=rank)


class Divisible(msgspec.Struct, frozen=True, kw_only=True):
    """What a model can be divided by.

    Args:
        world: Ranks.
        per_node: Ranks of a node, within which operators are divided.
        batch: Samples of a step.
        experts: Of its modules of experts; 0 without.
        tokens: Of a sequence; 0 if it is too short to be worth it.
        can_recompute: Whether the model has blocks.
        can_cut: Whether a batch may be cut into micro-batches.
    """

    world: int
    per_node: int
    batch: int
    experts: int
    tokens: int
    can_recompute: bool
    can_cut: bool


def divided(model: Divisible) -> Iterator[Technique]:
    """Yield what to try that divides experts, sequences, operators or layers, by its time."""
    again = (False, True) if model.can_recompute else (False,)
    found: list[Technique] = []
    for size in _divisors(model.world):
        rest = model.world // size
        if model.experts and model.experts % size == 0 and model.batch % model.world == 0:
            found += [Technique(ep=size, recompute=r, zero=z) for r in again for z in (0, 1)]
        if model.batch % rest:
            continue
        levels = (0, 1) if rest > 1 else (0,)
        local = model.batch // rest
        if model.tokens and model.tokens % (2 * size) == 0:
            found += [Technique(cp=size, recompute=r, zero=z) for r in again for z in (0, 1)]
        if size <= model.per_node:
            found += [Technique(tp=size, recompute=r, zero=z) for r in again for z in levels]
        number = _microbatches(local, size) if model.can_cut else 1
        if number > 1:
            found += [Technique(pp=size, microbatches=number, recompute=r) for r in again]
    yield from sorted(found, key=rank)


def _divisors(world: int) -> list[int]:
    return [size for size in range(2, min(world, _SHARED_MAX) + 1) if world % size == 0]


def _microbatches(local: int, stages: int) -> int:
    """Return the number of micro-batches in which ranks wait little, of those that divide."""
    most = min(local, _MICROBATCHES_MAX * stages)
    return max(number for number in range(1, most + 1) if local % number == 0)


def rank(one: Technique) -> float:
    """Return a number that grows with the time that `one` takes.

    ZeRO 3 sends half as much again, recomputation computes a third more, small micro-batches leave
    devices idle, ranks that share operators wait for each other in each block, and stages wait at
    both ends of a step.
    """
    shared = {"ep": (one.ep, 0.6), "cp": (one.cp, 1.6), "tp": (one.tp, 2.0), "pp": (one.pp, 2.4)}
    return (
        0.1 * (one.zero in (1, 2))
        + 0.5 * (one.zero == SHARDED_PARAMETERS)
        + one.recompute
        + 1.2 * (one.accumulate > 1)
        + sum(_ON_HOST[kind] for kind in one.on_host)
        + 0.01 * (one.copies > 1)
        + sum(start + 0.1 * math.log2(size) for size, start in shared.values() if size > 1)
        + _WHOLE.get(one.whole, 0.0)
        + 0.1 * math.log2(math.prod(size for _, size in one.axes))
    )


def bubble(one: Technique) -> float:
    """Return the share of a step in which stages wait, (S - 1) / (M + S - 1)."""
    return (one.pp - 1) / (one.microbatches + one.pp - 1)


def rank_bytes(
    one: Technique,
    model: ModelBytes,
    peaks: Peaks,
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
        world: Ranks of data parallel.
        is_host: Whether it trains on a host; elsewhere the optimizer updates all at once.
    """
    total, activations, normed, *_ = peaks
    common = model.fixed + batch + (normed if world > 1 else 0)
    if not one.zero:
        update = model.params + (_UPDATED * model.largest if is_host else model.params)
        passes = total if one.accumulate == 1 else activations + model.params
        sent = 0
        if world > 1:
            sent = model.params if is_host else min(model.params, _BUCKETS)
        return common + model.params + model.state + sent + max(passes, update)
    times = 2 + (model.state / model.params if model.params else 0)
    shares = math.ceil(times * model.stored(world)) + 4 * model.padding
    gathered = model.params + _UNITS_WHOLE * model.unit + model.root
    if one.zero == SHARDED_PARAMETERS:
        gathered = 2 * model.root + _UNITS_SHARDED * model.unit
    if OPTIMIZER in one.on_host:
        # The shards of the unit that is gathered or reduced come and go.
        return common + activations + gathered + math.ceil(2 * model.unit / world)
    if one.zero == 1 and one.accumulate > 1:
        gathered += model.params
    update = math.ceil((_UPDATED * model.largest if is_host else model.params) / world)
    return common + shares + max(activations + gathered, update)


def stage_bytes(
    one: Technique,
    stage: StageBytes,
    position: int,
    *,
    states: int,
    batch: int,
    world: int,
    is_host: bool,
) -> int:
    """Return the most bytes that a rank of a stage has.

    Args:
        one: How it trains.
        stage: What one pass of the stage takes.
        position: Number of the stage.
        states: Tensors of the optimizer beside each parameter.
        batch: Bytes of the local batch.
        world: Ranks of data parallel.
        is_host: As of `rank_bytes`.
    """
    live = min(one.pp - position, one.microbatches)
    passes = stage.params + (live - 1) * stage.saved + stage.activations
    update = stage.params + (_UPDATED * stage.largest if is_host else stage.params)
    buffers = one.microbatches * (stage.received + stage.sent)
    sent = 0
    if world > 1:
        sent = stage.params if is_host else min(stage.params, _BUCKETS)
    common = stage.fixed + batch + buffers + sent
    return common + (1 + states) * stage.params + max(passes, update)


def to_host(one: Technique, model: ModelBytes, peaks: Peaks, world: int) -> float:
    """Return the bytes that travel to the host and back in a step.

    Each unit of an offloaded optimizer comes for the forward and for the backward pass of a
    micro-batch, and its gradients go.
    """
    units = 3 * one.accumulate * model.share(world) if OPTIMIZER in one.on_host else 0
    return units + peaks.moved * one.accumulate


def traffic(one: Technique, model: ModelBytes, world: int) -> float:
    """Return the bytes of parameters and gradients that a rank sends in a step.

    An all-reduce sends 2 (n - 1) / n of the bytes, a gather and a reduce-scatter half of that each
    (Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005).
    """
    # For each micro-batch level 2 scatters, and level 3 also gathers.
    rounds = {2: 1 + one.accumulate, SHARDED_PARAMETERS: 3 * one.accumulate}.get(one.zero, 2)
    return rounds * (model.params - model.share(world))
