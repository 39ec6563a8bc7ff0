"""Where a program is cut into stages, and what each is handed."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import msgspec
import programs
import pytest
from programs import TINY, Draft

from msrun.errors import UsageError
from msrun.parallel.pipeline.chunks import Chunks
from msrun.parallel.search.cost.topology import ordered
from msrun.parallel.search.graph.axis_placement import RR
from msrun.parallel.search.graph.operators import rule_of
from msrun.parallel.search.graph.repeat import find_blocks
from msrun.parallel.search.graph.rules import Site
from msrun.parallel.search.mesh.schedules import paces, rounds
from msrun.parallel.search.mesh.stage_search import search_stages
from msrun.parallel.search.mesh.stages import (
    Pace,
    cut_between_blocks,
    cut_evenly,
    divide,
    largest_stage_memory,
)
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.memory import OutOfMemoryError
from msrun.parallel.search.solve.modes import indices, search
from msrun.parallel.search.solve.problem import Setting, layout_node
from msrun.parallel.search.solve.uses import Uses

SETTING = Setting(sizes=(2,), topology=TINY, data_axes=frozenset({0}), batch=4)


def read(program):
    """Return the rules and the readings of `program`."""
    rules = {step.name: rule_of(Site(step, program)) for step in program.steps}
    return rules, Uses(program, SETTING, rules)


def skip(depth=6):
    """Return linear layers, the first of which is read by the last addition too, and a tie."""
    draft = Draft()
    x = draft.input(4, 8)
    weight = draft.param(8, 8)
    first = y = draft.op("linear", (4, 8), input=x, weight=weight)
    for _ in range(depth):
        y = draft.gelu(draft.linear(y, 8, bias=False))
    y = draft.op("linear", (4, 8), input=draft.add(y, first), weight=weight)
    return draft.done(draft.op("mse_loss", (), self=y, target=draft.input(4, 8)))


def test_what_skips_stages_is_handed_through_and_tied_weights_are_in_both():
    program = skip()
    parts = divide(program, read(program)[1], [0, 5, 9])
    names = [step.name for step in program.steps]
    first = names[0]
    assert [part.received for part in parts] == [(), (first, names[4]), (first, names[8])]
    assert [part.sent for part in parts] == [(first, names[4]), (first, names[8]), None]
    assert [step.name for part in parts for step in part.steps] == names
    assert [len(part.params) for part in parts] == [3, 2, 3]
    assert parts[0].params & parts[2].params == {"w0"}
    assert [sorted(part.given) for part in parts] == [["x0"], [], ["x1"]]


def test_what_no_parameter_has_a_part_in_is_run_by_all_who_read_it():
    draft = Draft()
    mask = draft.gelu(draft.input(4, 8))
    unread = draft.param(8)
    y = draft.linear(draft.input(4, 8), 8)
    for _ in range(2):
        y = draft.add(draft.linear(y, 8), mask)
    program = draft.done(y)
    parts = divide(program, read(program)[1], [0, 4])
    assert [part.steps[0].name for part in parts] == [mask, mask]
    assert [sorted(part.given) for part in parts] == [["x0", "x1"], ["x0"]]
    assert parts[0].sent == parts[1].received == (program.steps[3].outputs[0],)
    assert unread in parts[0].params


def test_the_slowest_stage_is_as_fast_as_it_can_be_and_little_is_handed_on():
    program = skip(depth=12)
    _, uses = read(program)
    seconds = {step.name: float(step.target.startswith("aten.linear")) for step in program.steps}
    starts = cut_evenly(program, uses, seconds, SETTING, range(3))
    work = [seconds[step.name] for step in program.steps]
    assert max(sum(work[a:b]) for a, b in pairwise([*starts, len(work)])) == 5
    # Between two layers, where the first one's value and one more are handed on.
    parts = divide(program, uses, starts)
    assert [len(part.received) for part in parts] == [0, 2, 2]
    with pytest.raises(UsageError) as caught:
        cut_evenly(program, uses, seconds, SETTING, range(99))
    assert caught.value.message == (
        "parallel.mesh.pp: 99 stages, and the model has fewer places to cut at"
    )


def test_the_links_between_two_stages_are_those_of_their_slowest_pair():
    two = msgspec.structs.replace(TINY, per_node=2)
    inside, across = two.inside, two.across
    assert [TINY.between(0, 1, 2), TINY.between(1, 2, 2)] == [inside, across]
    # Ranks 0 and 2 send to 1 and 3, each on its node.
    assert ordered(two, [0, 2, 1, 3]).between(0, 1, 2) is inside
    assert ordered(two, [0, 2, 3, 1]).between(0, 1, 2) is across
    # Of three stages the last two are on one node.
    turned = ordered(two, [0, 2, 3, 1])
    assert [turned.between(at, at + 1, 1) for at in range(3)] == [across, inside, across]


def test_a_wide_value_is_handed_on_where_the_links_are_fast():
    draft = Draft()
    wide = draft.linear(draft.input(4, 8), 64, bias=False)
    y = draft.linear(wide, 8, bias=False)
    program = draft.done(draft.op("mse_loss", (), self=y, target=draft.input(4, 8)))
    seconds = dict(zip((step.name for step in program.steps), (60e-6, 60e-6, 20e-6), strict=True))
    two = msgspec.structs.replace(TINY, per_node=2)

    def starts(topology, stages):
        setting = msgspec.structs.replace(SETTING, topology=topology)
        return cut_evenly(program, read(program)[1], seconds, setting, stages)

    # Of 1024 or 128 bytes a rank sends half, and gets as much back: on links between nodes in
    # 53.2 or 8.4 us, so the slowest stage takes 80 + 53.2 or 120 + 8.4; inside of one in 10.44 or
    # 1.48 us, 80 + 10.44 or 120 + 1.48.
    assert starts(two, [0, 1]) == [0, 2]
    assert starts(ordered(two, [0, 2, 1, 3]), [0, 1]) == [0, 1]
    assert starts(two, [0, 0]) == [0, 1]


def test_equal_blocks_are_divided_equally_or_not_at_all():
    program = programs.transformer(4, batch=4, length=4, width=8, heads=2)
    blocks = find_blocks(program)
    starts = cut_between_blocks(blocks, 2, "key")
    assert starts == [0, blocks.first + 2 * blocks.period]
    parts = divide(program, read(program)[1], starts)
    assert parts[0].sent == (blocks.cuts[1],)
    for found, count in ((blocks, 4), (None, 0)):
        with pytest.raises(UsageError) as caught:
            cut_between_blocks(found, 3, "key")
        assert caught.value.message == (
            f"key: 3 stages do not divide the {count} equal blocks of the model"
        )


PACE = [Pace(stage=0, live=2), Pace(stage=1, live=1)]


def fastest(program, limit):
    return search(program, SETTING, limit=limit)


def test_a_stage_of_several_parts_takes_what_they_do_together():
    program = programs.transformer(4, batch=4, length=4, width=8, heads=2)
    rules, _ = read(program)
    find = partial(fastest, program)
    two = search_stages(program, SETTING, rules, find, pace=PACE)
    one = search_stages(program, SETTING, rules, find, pace=[Pace(stage=0, live=1)] * 2)
    assert one.memory == pytest.approx(one.result.memory)
    assert two.memory < one.memory


@pytest.mark.parametrize(
    ("schedule", "segments", "taken", "live"),
    [
        ("gpipe", 1, 10.0, [8, 8, 8]),
        ("1f1b", 1, 10.0, [3, 2, 1]),
        ("interleaved", 2, 9.0, [6, 6, 6, 3, 3, 3]),
        ("looped_bfs", 2, 9.0, [8] * 6),
        ("interleaved_zb", 2, 8 + 1 / 3, [6, 6, 6, 3, 3, 3]),
        ("zbv", 2, 8 + 1 / 3, [6, 5, 4, 3, 2, 1]),
        ("dualpipev", 2, 8 + 1 / 3, [6, 5, 4, 3, 2, 1]),
    ],
)
def test_what_a_schedule_waits_and_keeps(schedule, segments, taken, live):
    chunks = Chunks(schedule=schedule, stages=3, segments=segments)
    assert rounds(chunks, 8) == pytest.approx(taken)
    assert [pace.live for pace in paces(chunks, 8)] == live
    assert max(pace.live for pace in paces(chunks, 2)) == 2
    stages = [0, 1, 2, 2, 1, 0] if schedule in ("zbv", "dualpipev") else [0, 1, 2] * segments
    assert [pace.stage for pace in paces(chunks, 8)] == stages


def test_the_largest_stage_fits_or_its_bytes_are_told():
    program = programs.transformer(4, batch=4, length=4, width=8, heads=2)
    rules, _ = read(program)

    def found(limit):
        find = partial(fastest, program)
        return search_stages(program, SETTING, rules, find, pace=PACE, limit=limit)

    free = found(None)
    assert len(free.starts) == 2
    assert free.memory < free.result.memory
    less = found(free.memory * 0.9)
    assert less.memory <= free.memory * 0.9
    assert less.result.seconds >= free.result.seconds
    with pytest.raises(OutOfMemoryError) as caught:
        found(1.0)
    assert found(caught.value.least).memory <= caught.value.least


def test_copies_lie_where_they_are_read_as_often_as_micro_batches_are_alive_there():
    draft = Draft()
    h = draft.linear(draft.input(4, 8), 8, bias=False)
    y = draft.linear(h, 8, bias=False)
    program = draft.done(draft.op("mm", (4, 64), self=h, mat2=draft.param(8, 64)), y)
    problem = build(program, SETTING)
    rows = {"w0": "R", "w1": "Z", "w2": "d0", h: "b0", layout_node(h): "d0", y: "k", "mm_2": "R"}
    chosen = indices(
        problem,
        {
            node.name: ([c.name for c in node.rule.choices].index(rows.get(node.name, "b")),)
            for node in problem.nodes
        },
    )
    parts = divide(program, read(program)[1], [0, 2])

    def found(*live):
        pace = [Pace(stage=at, live=number) for at, number in enumerate(live)]
        return largest_stage_memory(problem, chosen, parts, pace)

    # The half of `w2` that is stored, all of it where it is read, and all of `h`.
    assert found(3, 2) == 5120 + 2048 + 2 * 128
    # `w0`, half of `w1` twice, and half of `h` as it lies and as it is read.
    assert found(300, 2) == 1280 + 640 + 128 + 300 * (64 + 64)
    together = largest_stage_memory(problem, chosen, parts, [Pace(stage=0, live=3)] * 2)
    assert together == problem.in_flight(3).memory(chosen)


def test_stages_begin_where_they_may():
    program = programs.transformer(4, batch=4, length=4, width=8, heads=2)
    rules, _ = read(program)
    find = partial(fastest, program)
    (_, free) = search_stages(program, SETTING, rules, find, pace=PACE).starts
    allowed = {at for at in range(len(program.steps)) if abs(at - free) > 1}
    (_, other) = search_stages(program, SETTING, rules, find, pace=PACE, allowed=allowed).starts
    assert other in allowed
    with pytest.raises(UsageError, match="fewer places to cut at"):
        search_stages(program, SETTING, rules, find, pace=PACE, allowed=())


def test_each_stage_has_the_inside_of_a_recomputed_block():
    program = programs.transformer(4, batch=4, length=4, width=8, heads=2)
    again = msgspec.structs.replace(SETTING, recompute=True)
    blocks = find_blocks(program)
    own = blocks.block_of(program)
    # One block stands for all of them, whichever it is.
    other = {name: (number + 2) % 4 for name, number in own.items()}
    chosen = search(program, again).chosen
    parts = divide(program, read(program)[1], cut_between_blocks(blocks, 2, "key"))

    def second(block_of, counted):
        problem = build(program, again, cuts=blocks.cuts, block_of=block_of)
        pace = [Pace(stage=0, live=1), Pace(stage=1, live=50)]
        return largest_stage_memory(problem, indices(problem, chosen), parts, pace, counted)

    exact = second(other, None)
    assert second(other, other) == exact
    # The first block also saves its input, which others get from the block before.
    assert exact <= second(own, own) <= exact + program.values[blocks.cuts[0]].nbytes
    assert second(own, None) < 0.99 * exact


def test_what_is_made_of_samples_alone_stays_sharded_by_them():
    """A buffer that all ranks have may be broadcast to it; statistics of a norm are of all."""
    draft = Draft()
    x, scale = draft.input(4, 8), draft.input(8)
    scaled = draft.op("mul", (4, 8), self=x, other=scale)
    norm = draft.op("batch_norm", (4, 8), input=x, running_mean=scale, attrs={"training": True})
    program = draft.done(draft.linear(draft.add(scaled, norm), 8))
    layouts = read(program)[1].layouts
    found = {name: layouts[name].tolist() for name in (x, scale, scaled, norm)}
    assert found == {x: [[0]], scale: [[RR]], scaled: [[0]], norm: [[RR]]}
