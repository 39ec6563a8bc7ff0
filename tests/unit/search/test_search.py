from __future__ import annotations

from functools import cache
from itertools import pairwise

import msgspec
import numpy as np
import programs
import pytest
from bench import highs
from programs import TINY

from msrun.errors import UsageError
from msrun.parallel.search.cost.topology import NetworkLevel
from msrun.parallel.search.graph.axis_placement import RR, value_placement
from msrun.parallel.search.graph.repeat import find_blocks, shortened
from msrun.parallel.search.solve.build import Pin, build
from msrun.parallel.search.solve.eliminate import solve
from msrun.parallel.search.solve.memory import OutOfMemoryError
from msrun.parallel.search.solve.modes import indices, search
from msrun.parallel.search.solve.problem import Setting
from msrun.parallel.search.solve.propagate import data_parallel


def setting(*sizes, topology=TINY, **options):
    return Setting(sizes=sizes, topology=topology, **options)


def len_of(value):
    return str(value) if isinstance(value, tuple) else f"{len(value.steps)} steps"


@cache
def layers(count):
    return programs.transformer(count)


def whole(program, how, found):
    """Return the problem of the whole program, and the strategies that were found."""
    blocks = find_blocks(program)
    given = {"cuts": blocks.cuts, "block_of": blocks.block_of(program)} if blocks else {}
    problem = build(program, how, **given)
    return problem, indices(problem, found.chosen)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sizes", [(4,), (2, 4)], ids=str)
def test_a_chain_of_blocks_costs_what_the_whole_graph_does(sizes, recompute):
    how = setting(*sizes, recompute=recompute, rounds=2)
    found = search(layers(5), how)
    problem, chosen = whole(layers(5), how, found)
    assert found.seconds == pytest.approx(solve(problem)[0], rel=1e-12)
    assert found.seconds == pytest.approx(problem.seconds(chosen), rel=1e-12)
    assert found.memory == pytest.approx(problem.memory(chosen), rel=1e-12)
    assert found.gap == 0.0


def test_blocks_are_found_where_one_value_crosses():
    blocks = find_blocks(layers(5))
    assert (blocks.period, blocks.count, len(blocks.cuts)) == (20, 5, 5)
    short, two = shortened(layers(5), blocks)
    assert (len(short.steps), two.count) == (len(layers(2).steps), 2)
    assert find_blocks(layers(2)) is None
    assert find_blocks(programs.convolutions()) is None


def test_blocks_that_end_with_a_view_hand_on_another_value():
    """A view has no layout of its own: the search ended with an error of ours."""
    d = programs.Draft()
    x = d.linear(d.input(8, 16, 32), 32)
    for _ in range(5):
        x = d.op("reshape", (8, 16, 32), self=d.linear(d.norm(x), 32))
    program = d.done(d.loss(x))
    blocks = find_blocks(program)
    assert not [
        step
        for step in program.steps
        if step.packet == "reshape" and step.outputs[0] in blocks.cuts
    ]
    assert search(program, setting(2, 2)).seconds > 0


def masked(layers, masks):
    """Layers that add the masks in turn, which are made right before the first layer."""
    d = programs.Draft()
    x, given = d.input(8, 16, 32), [d.input(8, 16, 32) for _ in range(masks)]
    made = [d.gelu(d.add(x, mask)) for mask in given]
    h = d.linear(d.linear(x, 32), 32)
    for layer in range(layers):
        h = d.add(h, d.linear(d.add(d.norm(h), made[layer % masks]), 32))
    return d.done(d.loss(h))


def test_blocks_may_share_a_mask_made_right_before_them():
    blocks = find_blocks(masked(3, masks=1))
    assert (blocks.period, blocks.count) == (4, 3)


def test_layers_with_masks_in_turn_are_blocks_of_several_layers():
    blocks = find_blocks(masked(8, masks=2))
    assert (blocks.period, blocks.count) == (8, 4)
    assert find_blocks(masked(3, masks=3)) is None


def test_a_weight_of_first_and_last_step_is_one_choice():
    d = programs.Draft()
    table = d.param(64, 32)
    tokens = d.input(8, 16, is_float=False)
    x = d.op("embedding", (8, 16, 32), weight=table, indices=tokens)
    for _ in range(4):
        x = d.add(x, d.gelu(d.linear(d.norm(x), 32)))
    logits = d.op("linear", (8, 16, 64), input=x, weight=table)
    program, how = d.done(d.loss(logits)), setting(2, 2)
    found = search(program, how)
    problem, chosen = whole(program, how, found)
    assert find_blocks(program).count == 4
    assert found.seconds == pytest.approx(problem.seconds(chosen), rel=1e-12)
    assert found.seconds == pytest.approx(solve(problem)[0], rel=1e-12)


@pytest.mark.parametrize("share", [0.1, 0.6])
@pytest.mark.parametrize("program", [layers(3), programs.convolutions()], ids=len_of)
@pytest.mark.few(2)
def test_with_little_memory_plans_are_near_the_best_and_never_below_the_bound(program, share):
    how = setting(4)
    free = search(program, how)
    limit = least(program, how) * (1 - share) + free.memory * share
    found = search(program, how, limit=limit)
    problem, chosen = whole(program, how, found)
    best, _ = highs.solve(problem, memory=limit)
    assert found.memory <= limit
    assert found.memory == pytest.approx(problem.memory(chosen), rel=1e-12)
    assert found.bound <= best * (1 + 1e-6)
    assert best * (1 - 1e-6) <= found.seconds <= best * 1.02
    assert found.gap >= found.seconds / best - 1 - 1e-6


def least(program, how):
    with pytest.raises(OutOfMemoryError) as caught:
        search(program, how, limit=1.0)
    return caught.value.least


def test_the_least_memory_named_is_enough_and_less_is_not():
    how = setting(2, 2)
    needed = least(layers(4), how)
    assert search(layers(4), how, limit=needed * 1.001).memory <= needed * 1.001
    with pytest.raises(OutOfMemoryError):
        search(layers(4), how, limit=needed * 0.999)


def test_more_memory_or_bandwidth_never_makes_a_plan_slower():
    how = setting(4)
    low, high = least(layers(4), how), search(layers(4), how).memory
    limits = [low + (high - low) * part / 4 for part in range(1, 5)]
    found = [search(layers(4), how, limit=limit) for limit in limits]
    bounds = [one.bound for one in found]
    assert bounds == sorted(bounds, reverse=True)
    assert all(a.seconds >= b.bound for a, b in pairwise(found))
    seconds = []
    for factor in (1, 4, 16):
        link = NetworkLevel(bandwidth=1e8 * factor, latency=1e-7)
        fast = msgspec.structs.replace(TINY, inside=link)
        seconds.append(search(layers(4), setting(2, 2, topology=fast)).seconds)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("program", [layers(4), programs.perceptron(3)], ids=len_of)
def test_no_plan_of_the_textbook_is_faster(program):
    how = setting(2, 2)
    best = search(program, how).seconds
    problem = build(program, how)
    for prefer in (("b0", "d0", "b"), ("n", "h", "d2"), ("b0", "d1", "k")):
        allowed = {}
        for at, node in enumerate(problem.nodes):
            names = [choice.name for choice in node.rule.choices]
            wanted = [names.index(name) for name in prefer if name in names]
            if node.kind == "op" and wanted:
                keeps = (node.rows == wanted[0]).all(axis=1)
                if keeps.any():
                    allowed[at] = keeps.nonzero()[0]
        assert allowed
        assert best <= solve(problem.restricted(allowed))[0] * (1 + 1e-12)


@pytest.mark.parametrize(
    ("program", "sizes"), [(layers(4), (2, 2)), (programs.perceptron(2), (2, 2, 2))], ids=len_of
)
def test_search_by_axes_is_near_the_best(program, sizes):
    how = setting(*sizes)
    exact = search(program, how).seconds
    found = search(program, how, mode="recursive")
    problem, chosen = whole(program, how, found)
    assert found.seconds == pytest.approx(problem.seconds(chosen), rel=1e-12)
    assert exact * (1 - 1e-12) <= found.seconds <= exact * 1.02
    assert found.bound is None


def test_meshes_of_more_than_three_axes_are_searched_by_axes():
    found = search(programs.perceptron(1), setting(2, 2, 2, 2))
    three = search(programs.perceptron(1), setting(2, 2, 4))
    assert found.bound is None
    assert found.seconds < three.seconds * 1.5


def test_what_the_user_wishes_is_kept_and_the_rest_is_the_best_for_it():
    program, how = layers(4), setting(2, 2)
    blocks = find_blocks(program)
    step = program.steps[blocks.first + 1]
    pin = Pin(node=step.inputs["weight"], codes={0: RR, 1: 1}, key="parallel.plan[0]")
    found = search(program, how, pins=[pin])
    problem = build(program, how, pins=[pin])
    assert found.seconds == pytest.approx(solve(problem)[0], rel=1e-12)
    assert found.seconds > search(program, how).seconds
    others = [search(program, how, mode=mode, pins=[pin]) for mode in ("recursive", "propagation")]
    for one in (found, *others):
        assert found.seconds <= one.seconds * (1 + 1e-12)
        node = next(n for n in problem.nodes if n.name == pin.node)
        row = one.chosen[pin.node]
        assert node.rule.choices[row[1]].outs == (1,)
        assert node.rule.choices[row[0]].name in ("R", "Z")


@pytest.mark.parametrize("program", [layers(4), programs.perceptron(3)], ids=len_of)
@pytest.mark.parametrize("sizes", [(4, 2), (2, 2, 2)])
@pytest.mark.parametrize("share", [None, 0.6])
def test_propagation_is_no_worse_than_data_parallel(program, sizes, share):
    batch = program.values[program.inputs[0]].shape[0]
    how = setting(*sizes, data_axes=frozenset({0}), batch=batch)
    weights = [name for name, value in program.values.items() if name in program.params]
    wide = [name for name in weights if len(program.values[name].shape) == 2]
    codes = dict.fromkeys(range(1, len(sizes)), RR) | {1: 0}
    pins = [Pin(node=wide[1], codes=codes, key="plan[0]")]
    problem = build(program, how, pins=pins)
    default = data_parallel(problem, how, {pins[0].node})
    best = search(program, how, pins=pins)
    limit = None if share is None else share * best.memory
    try:
        exact = search(program, how, pins=pins, limit=limit)
    except OutOfMemoryError:
        with pytest.raises(OutOfMemoryError):
            search(program, how, pins=pins, limit=limit, mode="propagation")
        return
    found = search(program, how, pins=pins, limit=limit, mode="propagation")
    assert found.seconds >= exact.seconds * (1 - 1e-9) or exact.gap > 0
    assert found.seconds <= 1.25 * exact.seconds
    if limit is None:
        assert found.seconds <= problem.seconds(default)
    else:
        assert found.memory <= limit
    row = found.chosen[wide[1]]
    node = next(n for n in problem.nodes if n.name == wide[1])
    placed = [node.rule.choices[at].outs[0] for at in row[1:]]
    assert (value_placement(np.array(placed)) == value_placement(np.array([*codes.values()]))).all()


def test_overlap_hides_the_traffic_of_parameters_and_no_other():
    half = msgspec.structs.replace(TINY, overlap=0.5)
    shown, hidden = (build(layers(2), setting(4, topology=one)) for one in (TINY, half))
    assert solve(hidden)[0] < solve(shown)[0]
    for one, other in zip(shown.edges, hidden.edges, strict=True):
        share = 0.5 if shown.nodes[one.source].kind == "param" else 1.0
        assert other.seconds == pytest.approx(share * one.seconds, rel=1e-12)


def test_a_wish_that_no_strategy_meets_is_refused():
    pin = Pin(node="w0", codes={0: 5}, key="parallel.plan[0].params.weight")
    with pytest.raises(
        UsageError, match=r"parallel.plan\[0\].params.weight: w0 cannot be placed like that"
    ):
        search(programs.perceptron(), setting(2), pins=[pin])


def test_batches_that_come_divided_are_read_as_they_come():
    how = setting(4, data_axes=frozenset({0}), batch=64)
    found = search(programs.perceptron(2, batch=64, width=8), how)
    assert found.chosen["linear_0"] == (1,)
    assert found.chosen["mse_loss_4"][0] > 0


def test_operators_without_a_rule_run_whole_and_are_named():
    d = programs.Draft()
    x = d.op("mystery", (16, 32), input=d.linear(d.input(16, 32), 32))
    found = search(d.done(d.loss(x)), setting(4))
    assert found.unknown == ("aten.mystery.default",)
    assert found.chosen["mystery_1"] == (0,)


@pytest.mark.parametrize("seed", range(8))
def test_propagation_over_random_graphs_is_no_worse_than_the_default(seed):
    rng = np.random.default_rng(seed)
    program = programs.drawn(rng, steps=5)
    sizes = ((4,), (2, 2), (2, 4))[seed % 3]
    how = setting(*sizes, data_axes=frozenset({0}) if seed % 2 else frozenset(), batch=8)
    names = [name for name in program.params if len(program.values[name].shape) == 2]
    chosen = [name for name in names if rng.integers(2)]
    last = len(sizes) - 1
    pins = [
        Pin(node=name, codes={last: int(rng.integers(2))}, key=f"plan[{at}]")
        for at, name in enumerate(chosen)
        if not (seed % 2 and last == 0)
    ]
    problem = build(program, how, pins=pins)
    default = data_parallel(problem, how, {pin.node for pin in pins})
    found = search(program, how, pins=pins, mode="propagation")
    assert found.seconds <= problem.seconds(default) * (1 + 1e-12)
    assert found.seconds >= search(program, how, pins=pins).seconds * (1 - 1e-12)
    for pin in pins:
        node = next(node for node in problem.nodes if node.name == pin.node)
        outs = node.rule.choices[found.chosen[pin.node][last]].outs
        assert outs == (pin.codes[last],)
