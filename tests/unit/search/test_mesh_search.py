from __future__ import annotations

import math
import re
from functools import cache

import msgspec
import programs
import pytest
from programs import TINY

from msrun.errors import UsageError
from msrun.parallel.search.graph.operators import rule_of
from msrun.parallel.search.graph.program import ProgramByBatch
from msrun.parallel.search.graph.repeat import find_blocks, shortened
from msrun.parallel.search.graph.rules import Site
from msrun.parallel.search.mesh import mesh_search
from msrun.parallel.search.mesh.job_layout import Bounds, JobLayout, SearchedJob, groups, layouts
from msrun.parallel.search.mesh.layout_solver import Outcome
from msrun.parallel.search.mesh.mesh_search import explore
from msrun.parallel.search.mesh.stages import Pace, cut_between_blocks, divide, largest_stage_memory
from msrun.parallel.search.plan.cost_breakdown import expanded
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.modes import BlockNodes, Setting, indices, search
from msrun.parallel.search.solve.uses import Uses


def whole(batch):
    return programs.transformer(4, batch=batch, length=4, width=8, heads=2)


@cache
def job(limit=math.inf, world=4, batch=4):
    small, large = whole(2), whole(6)
    blocks = find_blocks(small)
    short, two = shortened(small, blocks)
    other, _ = shortened(large, find_blocks(large))
    return SearchedJob(
        programs=ProgramByBatch(short, other, (2, 6)),
        blocks=two,
        count=4,
        topology=TINY,
        world=world,
        batch=batch,
        limit=limit,
    )


def everything(found):
    """Return what a look at every layout finds, none of them left out."""
    search = mesh_search._Search(found)
    return {
        layout: search.look(layout, math.inf)
        for group in groups(found)
        for layout in layouts(found, *group)
    }


def test_the_best_of_all_layouts_is_found_and_bounds_are_below_it():
    outcomes = everything(job())
    *_, last = explore(job())
    best = min(one.seconds for one in outcomes.values())
    assert last.best.seconds == pytest.approx(best, rel=1e-12)
    assert last.seen + last.pruned == last.total == len(outcomes)
    assert last.pruned > 0
    assert all(one.bound <= one.seconds * (1 + 1e-9) for one in outcomes.values())


def test_what_one_layout_takes_bounds_others_of_its_mesh():
    found = job()
    search, raised = mesh_search._Search(found), 0
    for group in groups(found):
        outcomes = {one: search.look(one, math.inf) for one in layouts(found, *group)}
        for known, first in outcomes.items():
            bounds = Bounds(*search._work)
            before = {one: bounds.of(one) for one in outcomes}
            bounds.add(known, first.bound)
            raised += sum(bounds.of(one) > before[one] for one in outcomes if one != known)
            for one, outcome in outcomes.items():
                assert bounds.of(one) <= outcome.seconds * (1 + 1e-12)
    assert raised > len(outcomes)


def test_with_little_memory_the_best_that_fits_is_found():
    *_, none = explore(job(1.0, world=2, batch=2))
    limit = none.least * 1.1
    fitting = [
        one for one in everything(job(limit, world=2, batch=2)).values() if isinstance(one, Outcome)
    ]
    *_, last = explore(job(limit, world=2, batch=2))
    assert last.best.memory <= limit
    assert last.best.seconds == pytest.approx(min(one.seconds for one in fitting), rel=1e-12)


def test_when_nothing_fits_the_least_memory_that_would_is_known():
    *_, last = explore(job(1.0, world=2, batch=2))
    assert last.best is None
    *_, enough = explore(job(last.least * 1.001, world=2, batch=2))
    assert enough.best.memory <= last.least * 1.001


def test_values_between_stages_are_sent_over_the_links_of_their_nodes():
    layout = JobLayout(stages=2, sizes=(1,), microbatches=2, recompute=False)

    def seconds(per_node):
        topology = msgspec.structs.replace(TINY, per_node=per_node)
        found = msgspec.structs.replace(job(world=2), topology=topology)
        return mesh_search._Search(found).look(layout, math.inf).seconds

    # Of two samples 4 x 8 numbers of 4 bytes, there and back in 2 micro-batches and an idle one.
    rounds = 2 * 3
    slower = 256 / 2e7 + 1e-6 - (256 / 1e8 + 1e-7)
    assert seconds(per_node=1) - seconds(per_node=2) == pytest.approx(rounds * slower)


def test_one_stage_costs_what_the_whole_program_does():
    program = programs.transformer(4, batch=2, length=4, width=8, heads=2)
    found = search(program, Setting(sizes=(2, 2), topology=TINY, rounds=2))
    layout = JobLayout(stages=1, sizes=(2, 2), microbatches=2, recompute=False)
    outcome = mesh_search._Search(job()).look(layout, math.inf)
    assert outcome.seconds == pytest.approx(found.seconds, rel=1e-12)
    assert outcome.memory == pytest.approx(found.memory, rel=1e-12)


def test_stages_hold_all_blocks_and_hand_on_one_layout():
    layout = JobLayout(stages=4, sizes=(1,), microbatches=4, recompute=True)
    outcome = mesh_search._Search(job()).look(layout, math.inf)
    assert [stage.name for stage in outcome.stages] == ["first", "middle", "last"]
    first, middle, last = outcome.stages
    assert len(first.plan.blocks) == 0
    assert len(last.plan.blocks) == len(middle.plan.blocks) == 1
    assert outcome.seconds == max(stage.seconds for stage in outcome.stages)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("spare", [1.01, 1.2, math.inf])
def test_memory_of_stages_is_that_of_the_whole_program_cut_into_them(spare, recompute):
    layout = JobLayout(stages=2, sizes=(2,), microbatches=2, recompute=recompute)
    least = mesh_search._Search(job(1.0)).look(layout, math.inf)
    outcome = mesh_search._Search(job(spare * least)).look(layout, math.inf)
    assert outcome.memory <= spare * least

    small, blocks = whole(2), find_blocks(whole(2))
    names = BlockNodes(small, job().programs.ends[0], blocks)
    program = ProgramByBatch(small, whole(6), (2, 6)).at(2)
    setting = Setting(sizes=(2,), topology=TINY, rounds=layout.rounds, recompute=recompute)
    inside = blocks.block_of(program)
    problem = build(program, setting, cuts=blocks.cuts, block_of=inside)
    chosen = indices(problem, expanded(outcome, names))
    rules = {step.name: rule_of(Site(step, program)) for step in program.steps}
    starts = cut_between_blocks(blocks, 2, "key")
    parts = divide(program, Uses(program, setting, rules), starts)
    pace = [Pace(stage=0, live=2), Pace(stage=1, live=1)]

    assert largest_stage_memory(problem, chosen, parts, pace) == pytest.approx(
        outcome.memory, rel=1e-9
    )


def test_numbers_grow_with_the_batch():
    small, large = (programs.transformer(1, batch=b) for b in (2, 6))
    assert ProgramByBatch(small, large, (2, 6)).at(10) == programs.transformer(1, batch=10)


def test_a_program_that_changes_with_the_batch_is_refused_with_what_differs():
    small, large = (programs.transformer(1, batch=b) for b in (2, 6))
    with pytest.raises(UsageError) as caught:
        ProgramByBatch(small, programs.transformer(2, batch=6), (2, 6))
    assert re.fullmatch(
        r"search: the model runs other operators with 2 samples than with 6 "
        r"\((\w+) and (?!\1)\w+\), and one plan cannot have both",
        caught.value.message,
    )
    first, *others = large.steps
    divided = msgspec.structs.replace(first, outputs=(*first.outputs, "more"))
    with pytest.raises(UsageError) as caught:
        ProgramByBatch(small, msgspec.structs.replace(large, steps=[divided, *others]), (2, 6))
    assert caught.value.message == (
        f"search: the tensors that {first.packet} makes are 1 with 2 samples and 2 with 6, "
        "and one plan cannot have both"
    )
