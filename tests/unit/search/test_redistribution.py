"""Redistribution is carried out on arrays, one for each rank, and compared with what is wanted."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from msgspec import structs

from msrun.parallel.search.cost.cost import RedistributionCosts, collective, estimate
from msrun.parallel.search.cost.redistribution import MoveKind, impossible, moves, route
from msrun.parallel.search.cost.topology import PRESETS, Measured, Wire, ordered
from msrun.parallel.search.graph.axis_placement import PARTIAL, REPLICATED

MESHES = [(2, 3), (3, 2), (2, 2, 3), (2, 1, 2)]


def ranks(sizes):
    return list(itertools.product(*map(range, sizes)))


def part(whole, placed, rank, sizes):
    """Return the part of `whole` that `rank` holds: earlier axes cut first."""
    for axis, dim in enumerate(placed):
        if dim >= 0:
            whole = np.split(whole, sizes[axis], axis=dim)[rank[axis]]
    return whole


def spread(whole, placed, sizes, rng):
    """Return rank -> its part; of a pending sum, parts that add up."""
    found = {rank: part(whole, placed, rank, sizes) for rank in ranks(sizes)}
    for axis, dim in enumerate(placed):
        if dim == PARTIAL:
            for rank in [rank for rank in found if rank[axis] == 0]:
                group = [(*rank[:axis], i, *rank[axis + 1 :]) for i in range(sizes[axis])]
                shares = [rng.integers(-9, 9, found[rank].shape) for _ in group[1:]]
                total = found[rank]
                found |= dict(zip(group[1:], shares, strict=True))
                found[rank] = total - sum(shares, np.zeros_like(total))
    return found


def chunk(x, dim, room, count, index):
    """Return one of `count` parts of `dim`, behind `room` parts that stay."""
    shape = (*x.shape[:dim], room, count, -1, *x.shape[dim + 1 :])
    taken = np.take(x.reshape(shape), index, axis=dim + 1)
    return taken.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def joined(pieces, dim, room):
    """Return parts of `dim` as one, behind `room` parts that are there already."""
    split = [p.reshape(*p.shape[:dim], room, 1, -1, *p.shape[dim + 1 :]) for p in pieces]
    whole = np.concatenate(split, axis=dim + 1)
    first = pieces[0].shape
    return whole.reshape(*first[:dim], -1, *first[dim + 1 :])


def follow(parts, hop, sizes):
    """Return the parts after one step."""
    n, axis = sizes[hop.axis], hop.axis
    after = {}
    for rank, own in parts.items():
        group = [parts[(*rank[:axis], i, *rank[axis + 1 :])] for i in range(n)]
        match hop.kind:
            case MoveKind.TAKE:
                after[rank] = chunk(own, hop.dim, hop.room, n, rank[axis])
            case MoveKind.SCATTER:
                after[rank] = chunk(sum(group), hop.dim, hop.room, n, rank[axis])
            case MoveKind.REDUCE:
                after[rank] = sum(group)
            case MoveKind.GATHER:
                after[rank] = joined(group, hop.dim, hop.room)
            case MoveKind.MOVE:
                pieces = [chunk(x, hop.to, 1, n, rank[axis]) for x in group]
                after[rank] = joined(pieces, hop.dim, 1)
            case MoveKind.TO_SUM:
                after[rank] = own if rank[axis] == 0 else np.zeros_like(own)
    return after


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_route_ends_with_the_parts_wanted(sizes):
    rng = np.random.default_rng(0)
    unit = math.prod(sizes)
    whole = rng.integers(-9, 9, (unit, unit))
    every = list(itertools.product((0, 1, REPLICATED, PARTIAL), repeat=len(sizes)))
    pairs = [(a, b) for a in every for b in every if not impossible(*map(one, (a, b))).item()]
    for at in rng.permutation(len(pairs))[:120]:
        source, target = pairs[at]
        parts = spread(whole, source, sizes, rng)
        for hop in route(source, target, sizes):
            parts = follow(parts, hop, sizes)
        assert sums(parts, target, sizes, whole), (source, target, route(source, target, sizes))


def one(placed):
    return np.array([placed])


def sums(parts, placed, sizes, whole):
    """Return whether the parts are those of `whole`, pending sums taken."""
    for axis, dim in enumerate(placed):
        if dim == PARTIAL:
            parts = {
                rank: sum(parts[(*rank[:axis], i, *rank[axis + 1 :])] for i in range(sizes[axis]))
                for rank in parts
            }
    return all(np.array_equal(part(whole, placed, rank, sizes), parts[rank]) for rank in parts)


def test_many_pairs_at_once_are_each_pair_alone():
    sizes = (2, 3, 2)
    every = np.array(list(itertools.product((0, 1, REPLICATED, PARTIAL), repeat=3)))
    together = {
        (i, j, at): (move.kind, move.axis, float(move.parts[i, j]))
        for at, move in enumerate(moves(every, every, sizes))
        for i, j in zip(*np.nonzero(move.where), strict=True)
    }
    by_pair = {}
    for (i, j, _), step in sorted(together.items()):
        by_pair.setdefault((int(i), int(j)), []).append(step)
    for i, j in itertools.product(range(0, 64, 5), range(0, 64, 3)):
        alone = moves(every[i : i + 1], every[j : j + 1], sizes)
        assert by_pair.get((i, j), []) == [(m.kind, m.axis, m.parts.item()) for m in alone]


def test_what_stays_costs_nothing_and_parts_never_become_sums():
    prices = RedistributionCosts([wire(4), wire(2)])
    every = np.array(list(itertools.product((0, 1, REPLICATED, PARTIAL), repeat=2)))
    seconds = prices.seconds(every, every, 1e6)
    assert (np.diag(seconds) == 0).all()
    assert np.isinf(seconds[0, -1])
    assert seconds[-1, 0] < seconds[-1, 10]  # scattering sums is cheaper than having them whole


def wire(size):
    return Wire(size=size, bandwidth=1e9, start=1e-5, hop=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (MoveKind.GATHER, (1.2e-5, 0.75e-9)),
        (MoveKind.SCATTER, (1.2e-5, 0.75e-9)),
        (MoveKind.REDUCE, (2.4e-5, 1.5e-9)),
        (MoveKind.MOVE, (1.15e-5, 0.1875e-9)),
        (MoveKind.TAKE, (0.0, 0.0)),
    ],
)
def test_seconds_of_one_collective(kind, expected):
    assert collective(kind, wire(4)) == pytest.approx(expected)


def test_sums_over_two_axes_are_reduced_on_parts():
    fast, slow = wire(2), Wire(size=4, bandwidth=1e8, start=0.0, hop=0.0)
    prices = RedistributionCosts([slow, fast])
    both = prices.seconds(one((PARTIAL, PARTIAL)), one((REPLICATED, REPLICATED)), 1e6).item()
    slow_part = collective(MoveKind.REDUCE, slow)[1] * 1e6 / 2
    fast_part = collective(MoveKind.REDUCE, fast)[0] + collective(MoveKind.REDUCE, fast)[1] * 1e6
    assert both == pytest.approx(slow_part + fast_part)


def test_what_was_measured_goes_before_bandwidth_and_latency():
    def measured(kind, ranks, start, per_byte):
        return Measured(kind=kind, ranks=ranks, start=start, per_byte=per_byte)

    known = (measured("gather", 2, 1e-3, 1e-9), measured("gather", 8, 4e-3, 2e-9))
    two, four, eight = (structs.replace(wire(n), measured=known) for n in (2, 4, 8))

    assert collective(MoveKind.GATHER, two) == (1e-3, 1e-9)
    assert collective(MoveKind.GATHER, eight) == (4e-3, 2e-9)
    assert collective(MoveKind.REDUCE, eight) == estimate(MoveKind.REDUCE, wire(8))
    # Between two sizes as the formula grows from one of them: 3/4 of the bytes instead of 1/2.
    start, per_byte = collective(MoveKind.GATHER, four)
    assert per_byte == pytest.approx(1e-9 * (3 / 4) / (1 / 2))
    growth = estimate(MoveKind.GATHER, wire(4))[0] / estimate(MoveKind.GATHER, wire(2))[0]
    assert start == pytest.approx(1e-3 * growth)


def test_what_was_measured_holds_for_links_like_it():
    inside = Measured(kind="reduce", ranks=2, start=1e-3, per_byte=1e-9)
    across = Measured(kind="reduce", ranks=2, across=True, start=2e-3, per_byte=2e-9)
    found = structs.replace(PRESETS["cpu"], per_node=4, measured=(inside, across))

    nodes, mixed, neighbours = found.wires((2, 8, 2))

    assert nodes.measured == (across,)
    assert mixed.measured == ()
    assert neighbours.measured == (inside,)


def test_an_order_of_ranks_says_which_axis_leaves_a_node():
    found = structs.replace(PRESETS["a100"], per_node=4)
    inside, across = found.inside, found.across
    assert ordered(found, range(8)) is found

    def links(order, *sizes):
        return [(wire.bandwidth, wire.hop) for wire in ordered(found, order).wires(sizes)]

    within, alone = (inside.bandwidth, inside.latency), (across.bandwidth, across.latency)
    both = (2 * across.bandwidth, across.latency)
    # Neighbours on the mesh are on different nodes, and strides of two on one.
    crossed = [0, 4, 1, 5, 2, 6, 3, 7]
    assert links(crossed, 4, 2) == [within, alone]
    assert links(crossed, 8) == [(4 * across.bandwidth, across.latency)]
    assert links(crossed, 2, 2, 2) == [within, within, alone]
    # Of the first axis two ranks of each group share a node, of the last none.
    assert links([0, 4, 5, 1, 2, 6, 7, 3], 4, 2) == [both, alone]
    # One group that leaves its node makes all of them wait.
    assert links([0, 1, 2, 4, 3, 5, 6, 7], 4, 2) == [alone, alone]
    # The mesh of a stage: on one axis the first stage leaves its nodes, on the other the second.
    assert links([0, 1, 4, 5, 2, 6, 3, 7], 2, 2) == [alone, alone]


def test_a_list_of_the_same_order_has_the_same_links():
    for sizes in [(16,), (2, 8), (8, 2), (4, 2, 2)]:
        for name in ("a100", "cpu"):
            found = structs.replace(PRESETS[name], per_node=4)
            # Two nodes change places, and so do no links.
            order = [4, 5, 6, 7, 0, 1, 2, 3, *range(8, 16)]
            assert ordered(found, order).wires(sizes) == found.wires(sizes)
