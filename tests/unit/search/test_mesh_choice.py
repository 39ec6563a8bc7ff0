"""Which meshes are looked at for a job, and which is taken."""

from __future__ import annotations

import itertools
import math

import msgspec
import programs
import pytest
from programs import TINY

from msrun.parallel.search.cost.topology import ordered
from msrun.parallel.search.graph.program import ProgramByBatch
from msrun.parallel.search.mesh_choice import MeshRequest, candidates, choose_mesh
from msrun.parallel.search.solve.memory import OutOfMemoryError
from msrun.parallel.search.solve.modes import search
from msrun.parallel.search.solve.problem import DataParallelKeys, Setting


def made(batch, layers=3):
    return programs.transformer(layers, batch=batch, length=4, width=8, heads=2)


# Three blocks, which four ranks do not divide; and four, which they may.
PROGRAMS = ProgramByBatch(made(2), made(6), (2, 6))
FOUR = ProgramByBatch(made(2, layers=4), made(6, layers=4), (2, 6))

ONCE, EACH = (DataParallelKeys(sharded_from=0.0, level=level) for level in (1, 3))


def everything(limit, number=1):
    """Return seconds and bytes of every mesh of four ranks, with so many micro-batches."""
    part = 8 // number
    found = {}
    for sizes in ((4,), (1, 4), (2, 2)):
        if part % sizes[0] == 0:
            setting = Setting(
                sizes=sizes, topology=TINY, data_axes=frozenset({0}), batch=part, rounds=number
            )
            try:
                plan = search(made(part), setting, limit=limit)
                found[sizes] = plan.seconds, plan.memory
            except OutOfMemoryError as error:
                found[sizes] = math.inf, error.least
    return found


def chosen(**wanted):
    return choose_mesh(MeshRequest(topology=TINY, **wanted), lambda: 0.0)


def best(limit):
    return chosen(programs=PROGRAMS, world=4, batch=8, limit=limit)


def test_the_data_axis_comes_first_and_divides_the_batch():
    assert list(candidates(1, 3)) == [{"dp": 1}]
    assert list(candidates(4, 8)) == [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}]
    assert list(candidates(4, 2)) == [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}]
    assert list(candidates(4, 1)) == [{"dp": 1, "tp": 4}]
    assert {"dp": 2, "mp": 2, "tp": 2} in candidates(8, 8)
    assert all(len(mesh) < 3 for mesh in candidates(128, 128))


def test_the_fastest_mesh_is_taken():
    found, seconds = best(None), everything(None)
    sizes = tuple(found.mesh.values())
    assert found.microbatches == 1
    assert found.seconds == seconds[sizes][0] == min(time for time, _ in seconds.values())


def test_a_batch_is_cut_only_where_it_does_not_fit_at_once():
    least = min(memory for _, memory in everything(1.0).values())
    assert best(least * 1.01).microbatches == 1
    found = best(least * 0.99)
    assert found.microbatches == 2
    assert found.memory <= least * 0.99
    times = everything(least * 0.99, number=2)
    assert found.seconds == min(time for time, _ in times.values())


def test_blocks_are_recomputed_where_a_batch_is_one_sample():
    def one(limit):
        return chosen(programs=PROGRAMS, world=1, batch=1, limit=limit)

    whole = one(None)
    assert not whole.recompute
    found = one(whole.memory * 0.995)
    assert found.recompute
    assert found.seconds > whole.seconds


def test_when_nothing_fits_the_least_memory_that_would_is_known():
    with pytest.raises(OutOfMemoryError) as caught:
        best(1.0)
    assert best(caught.value.least * 1.01).memory <= caught.value.least * 1.01
    with pytest.raises(OutOfMemoryError):
        best(caught.value.least * 0.99)


def test_stages_are_taken_where_they_are_faster():
    found = chosen(programs=FOUR, world=4, batch=8)
    assert (found.mesh, found.microbatches) == ({"pp": 4, "dp": 1}, 8)
    alone = min(
        search(
            made(8, layers=4),
            Setting(sizes=sizes, topology=TINY, data_axes=frozenset({0}), batch=8),
        ).seconds
        for sizes in ((4,), (1, 4), (2, 2))
    )
    assert found.seconds < alone
    assert chosen(programs=FOUR, world=1, batch=8).mesh == {"dp": 1}
    # A batch of one sample has no micro-batches for stages to share.
    assert "pp" not in chosen(programs=FOUR, world=4, batch=1).mesh


def test_stages_are_limited_to_those_that_can_run_and_keep_what_is_decided():
    asked = {"programs": FOUR, "world": 4, "batch": 8}
    only = chosen(**asked, stages=lambda: frozenset({2}))
    assert only.mesh["pp"] == 2
    assert "pp" not in chosen(**asked, stages=frozenset).mesh
    for recompute in (False, True):
        found = chosen(**asked, recompute=recompute, limit=only.memory * 2)
        assert found.recompute == recompute
        assert "pp" in found.mesh
    # Gathering in every pass makes more ranks with other samples dearer.
    each = chosen(**asked, stages=lambda: frozenset({2}), decided=EACH)
    assert each.seconds > chosen(**asked, stages=lambda: frozenset({2}), decided=ONCE).seconds


def test_a_mesh_of_stages_divides_the_samples_of_a_micro_batch():
    least = chosen(programs=FOUR, world=8, batch=8).memory
    for limit in (None, least * 0.9, least * 0.8):
        found = chosen(programs=FOUR, world=8, batch=8, limit=limit)
        assert 8 % (found.microbatches * found.mesh["dp"]) == 0
        assert limit is None or found.memory <= limit


def test_the_search_for_stages_ends_with_its_time_and_what_it_has():
    clock = itertools.count(step=60).__next__
    hurried = choose_mesh(MeshRequest(topology=TINY, programs=FOUR, world=4, batch=8), clock)

    assert clock() == 120  # it looked at the clock when it began and when it had one
    assert hurried.seconds >= chosen(programs=FOUR, world=4, batch=8).seconds


def test_the_links_of_a_list_of_ranks_count():
    """With four ranks on two nodes, in turns: what goes over the last axis crosses the nodes."""
    two, costs = msgspec.structs.replace(TINY, per_node=2), []
    program = made(8)

    def seconds(topology, *sizes):
        setting = Setting(sizes=sizes, topology=topology, batch=8)
        return search(program, setting).seconds

    turns = ordered(two, [0, 2, 1, 3])
    assert seconds(turns, 2, 2) == pytest.approx(seconds(two, 2, 2))
    # Ranks of the first axis have other samples than its neighbours, so the axes are not alike.
    wanted = {"programs": PROGRAMS, "world": 4, "batch": 8, "limit": None}
    for one in (two, turns):
        found = [
            search(program, Setting(sizes=sizes, topology=one, data_axes=frozenset({0}), batch=8))
            for sizes in ((4,), (1, 4), (2, 2))
        ]
        least = min(plan.seconds for plan in found)
        best = choose_mesh(MeshRequest(topology=one, **wanted), lambda: 0.0)
        assert best.seconds == pytest.approx(least)
        costs.append(found[-1].seconds)
    assert costs[0] > 1.03 * costs[1]
