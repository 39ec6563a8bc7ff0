"""The one table of how a tensor gets from one layout to another: for costs and for execution.

A tensor dim that several axes shard is always cut by the first of them first.  An axis can thus
take or leave a dim only while no later axis shards it, unless all of them move together.  Seven
phases keep to that:

1. gather what must leave a dim before another axis takes it,
2. take local shards of what is replicated,
3. reduce and scatter sums, the last (fastest) axis first,
4. move a shard from one dim to another (all-to-all),
5. all-reduce sums, each axis on the shard that the ones before it left,
6. gather, the first (slowest) axis first, while shards are still small,
7. take the shards that had to wait.

It works on many pairs at once: sources along the rows, targets along the columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from msrun.parallel.search.graph.axis_placement import (
    PARTIAL,
    REPLICATED,
    BoolArray,
    FloatArray,
    IntArray,
)

# Pairs of sets of layouts whose moves are cached: a model has some, the same on all meshes.
_CACHED_PAIRS = 256


class MoveKind(IntEnum):
    """What happens on one axis."""

    TAKE = 0
    GATHER = 1
    SCATTER = 2
    MOVE = 3
    REDUCE = 4
    TO_SUM = 5


class Move(NamedTuple):
    """A collective, or a local change, on one axis.

    Args:
        kind: What happens.
        axis: On which axis.
        where: For which pairs.
        parts: In how many parts the tensor is on the other axes at that time.
    """

    kind: MoveKind
    axis: int
    where: BoolArray
    parts: FloatArray


class _Pairs:
    """Which axis does what, for every pair."""

    def __init__(self, source: IntArray, target: IntArray) -> None:
        axes = range(source.shape[1])
        self.a = a = [source[:, m][:, None] for m in axes]
        self.b = b = [target[:, m][None, :] for m in axes]
        self.changed = [a[m] != b[m] for m in axes]
        self.scatter = [(a[m] == PARTIAL) & (b[m] >= 0) for m in axes]
        self.reduce = [(a[m] == PARTIAL) & (b[m] == REPLICATED) for m in axes]
        self.to_sum = [(a[m] == REPLICATED) & (b[m] == PARTIAL) for m in axes]
        self.impossible = np.logical_or.reduce([(a[m] >= 0) & (b[m] == PARTIAL) for m in axes])
        shift = [(a[m] >= 0) & (b[m] >= 0) & self.changed[m] for m in axes]
        self.move = [shift[m] & ~self._meets(m) for m in axes]
        # SavedTensor on both sides, but an axis before it takes or leaves the same dim.
        blocked = [self._is_blocked(m) for m in axes]
        returning = [blocked[m] | (shift[m] & ~self.move[m]) for m in axes]
        self.gather = [((a[m] >= 0) & (b[m] == REPLICATED)) | returning[m] for m in axes]
        self.early = [self.gather[m] & (blocked[m] | self._is_taken(m)) for m in axes]
        take = [(a[m] == REPLICATED) & (b[m] >= 0) for m in axes]
        self.late = [returning[m] | (take[m] & self._is_left(m)) for m in axes]
        self.take = [take[m] & ~self.late[m] for m in axes]

    def _any(self, masks: list[BoolArray]) -> BoolArray:
        nothing = np.zeros((self.a[0].shape[0], self.b[0].shape[1]), bool)
        mask: BoolArray = np.logical_or.reduce([nothing, *masks])
        return mask

    def _meets(self, m: int) -> BoolArray:
        """Return where another axis shards a dim that `m` leaves or takes."""
        a, b = self.a, self.b
        masks = []
        for q in range(len(a)):
            if q != m:
                touches = (a[q] == a[m]) | (a[q] == b[m]) | (b[q] == a[m]) | (b[q] == b[m])
                masks.append(touches & (self.changed[q] | (q > m)))
        return self._any(masks)

    def _is_blocked(self, q: int) -> BoolArray:
        a, b = self.a, self.b
        touched = [self.changed[m] & ((a[m] == a[q]) | (b[m] == a[q])) for m in range(q)]
        blocked: BoolArray = self._any(touched) & ~self.changed[q] & (a[q] >= 0)
        return blocked

    def _is_taken(self, m: int) -> BoolArray:
        others = [q for q in range(len(self.a)) if q != m]
        return self._any([self.scatter[q] & (self.b[q] == self.a[m]) for q in others])

    def _is_left(self, m: int) -> BoolArray:
        others = [q for q in range(len(self.a)) if q != m]
        return self._any([self.gather[q] & (self.a[q] == self.b[m]) for q in others])


def moves(source: IntArray, target: IntArray, sizes: Sequence[int]) -> Iterator[Move]:
    """Yield the moves from each row of `source` to each row of `target`, in order.

    Args:
        source: Placements, (sources, axes).
        target: Placements, (targets, axes).
        sizes: Of the axes.
    """
    live = tuple(size > 1 for size in sizes)
    products = np.ones(1)
    for size in sizes:
        products = np.concatenate([products, products * size])
    for kind, axis, where, cut, reduced in _steps(source.tobytes(), target.tobytes(), live):
        yield Move(kind, axis, where, products[cut] * products[reduced])


class _Step(NamedTuple):
    """A move on meshes of any sizes.

    Args:
        kind: As of `Move`.
        axis: As of `Move`.
        where: As of `Move`.
        cut: The other axes that shard the tensor at that time, one bit each.
        reduced: Those that have reduced a sum and hold a shard of it.
    """

    kind: MoveKind
    axis: int
    where: BoolArray
    cut: IntArray
    reduced: IntArray


@lru_cache(maxsize=_CACHED_PAIRS)
def _steps(source: bytes, target: bytes, live: tuple[bool, ...]) -> tuple[_Step, ...]:
    """Return the moves for all meshes of which the same axes have several ranks."""
    a, b = (
        np.frombuffer(codes, dtype=np.int64).reshape(-1, len(live)) for codes in (source, target)
    )
    pairs, axes = _Pairs(a, b), range(len(live))
    shape = (len(a), len(b))
    now = [np.where(np.broadcast_to(pairs.a[m] >= 0, shape), 1 << m, 0) for m in axes]
    nothing = np.zeros(shape, dtype=np.int64)
    reduced, small = nothing, np.min_scalar_type((1 << len(live)) - 1)
    late_gather = [pairs.gather[m] & ~pairs.early[m] for m in axes]
    phases = (
        (MoveKind.GATHER, axes, pairs.early),
        (MoveKind.TAKE, axes, pairs.take),
        (MoveKind.SCATTER, axes[::-1], pairs.scatter),
        (MoveKind.MOVE, axes, pairs.move),
        (MoveKind.REDUCE, axes[::-1], pairs.reduce),
        (MoveKind.GATHER, axes, late_gather),
        (MoveKind.TAKE, axes, pairs.late),
        (MoveKind.TO_SUM, axes, pairs.to_sum),
    )
    steps = []
    for kind, order, masks in phases:
        for m in order:
            where = np.broadcast_to(masks[m], shape)
            if not live[m] or not where.any():
                continue
            cut = sum((now[q] for q in axes if q != m), nothing).astype(small)
            if kind is MoveKind.REDUCE:
                steps.append(_Step(kind, m, where, cut, reduced.astype(small)))
                reduced = np.where(where, reduced + (1 << m), reduced)
            else:
                steps.append(_Step(kind, m, where, cut, nothing[:1, :1].astype(small)))
            if kind in (MoveKind.TAKE, MoveKind.SCATTER):
                now[m] = np.where(where, 1 << m, now[m])
            elif kind is MoveKind.GATHER:
                now[m] = np.where(where, 0, now[m])
    return tuple(steps)


def impossible(source: IntArray, target: IntArray) -> BoolArray:
    """Return the pairs that cannot be redistributed: from a shard to a partial sum."""
    mask: BoolArray = np.logical_or.reduce(
        [
            (source[:, m][:, None] >= 0) & (target[:, m][None, :] == PARTIAL)
            for m in range(source.shape[1])
        ]
    )
    return mask


class Hop(NamedTuple):
    """One step of one redistribution, with all that a rank must know to take it.

    Args:
        kind: What happens.
        axis: On which axis.
        dim: Which dim is sharded, scattered, gathered or left; `REPLICATED` for sums alone.
        to: Which dim an all-to-all shards instead.
        room: Shards of `dim` along earlier axes that are all on this rank for the moment: those
            axes take theirs later, or have gathered theirs before.
    """

    kind: MoveKind
    axis: int
    dim: int
    to: int
    room: int


def route(source: Sequence[int], target: Sequence[int], sizes: Sequence[int]) -> list[Hop]:
    """Return the steps from one placement to another, in order.

    Args:
        source: Placement on each axis.
        target: Placement on each axis; not `impossible`.
        sizes: Of the axes.
    """
    steps = list(moves(np.array([source]), np.array([target]), sizes))
    taken = [move for move in steps if move.kind in (MoveKind.TAKE, MoveKind.SCATTER)]
    gathered: list[tuple[int, int]] = []
    hops = []
    for move in steps:
        axis, room = move.axis, 1
        dim = target[axis] if move.kind in (MoveKind.TAKE, MoveKind.SCATTER) else source[axis]
        if move.kind in (MoveKind.TAKE, MoveKind.SCATTER):
            taken.remove(move)
            later = [m.axis for m in taken if m.axis < axis and target[m.axis] == dim]
            room = math.prod(sizes[m] for m in later)
        elif move.kind is MoveKind.GATHER:
            room = math.prod(sizes[m] for m, left in gathered if m < axis and left == dim)
            gathered.append((axis, dim))
        to = target[axis] if move.kind is MoveKind.MOVE else REPLICATED
        hops.append(Hop(move.kind, axis, dim, to, room))
    return hops
