"""What ZeRO and a type of the reduction that the user has chosen cost in a search."""

from __future__ import annotations

import pytest
from programs import TINY, Draft

from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.problem import DataParallelKeys, Setting

WIDTH, MICROBATCHES, STATE = 64, 4, 12
ELEMENTS = WIDTH * WIDTH


def built(decided, *, rounds=MICROBATCHES, recompute=False):
    """Return the node of a weight, and the edge to the only operator that reads it."""
    draft = Draft()
    y = draft.linear(draft.input(8, WIDTH), WIDTH, bias=False)
    program = draft.done(draft.loss(y))
    setting = Setting(
        sizes=(2,),
        topology=TINY,
        data_axes=frozenset({0}),
        batch=8,
        rounds=rounds,
        recompute=recompute,
        decided=decided,
    )
    block_of = {program.steps[0].name: 1} if recompute else {}
    problem = build(program, setting, block_of=block_of)
    (at, node), *_ = [(i, n) for i, n in enumerate(problem.nodes) if n.kind == "param"]
    (edge,) = [edge for edge in problem.edges if edge.source == at]
    return node, edge


def level(number, **others):
    return built(DataParallelKeys(sharded_from=0.0, level=number), **others)


@pytest.mark.parametrize(
    ("number", "rounds", "gradient"),
    [(1, MICROBATCHES, 4), (1, 1, 2), (2, MICROBATCHES, 2), (3, MICROBATCHES, 2)],
)
def test_gradients_of_several_micro_batches_are_whole_in_level_1(number, rounds, gradient):
    node, _ = level(number, rounds=rounds)
    assert node.memory.tolist() == [ELEMENTS * (gradient + (4 + STATE) / 2)]


def test_level_3_gathers_in_every_pass_and_the_others_once_a_step():
    (once, _), (twice, _), (each, _) = level(1), level(2), level(3)
    update = ELEMENTS * 2 * (4 + STATE) / 2 / TINY.memory_bandwidth
    gather = float(once.seconds[0]) - update
    assert gather > 0
    assert twice.seconds == pytest.approx(once.seconds)
    assert float(each.seconds[0]) == pytest.approx(update + 2 * MICROBATCHES * gather)


@pytest.mark.parametrize(("number", "times"), [(1, 1), (2, MICROBATCHES), (3, MICROBATCHES)])
def test_from_level_2_on_each_micro_batch_reduces_its_gradients(number, times):
    _, edge = level(number)
    assert edge.exchange.backward_times == times * (1 - TINY.overlap)
    none, below = built(DataParallelKeys(sharded_from=1e9, level=number))
    assert none.memory.tolist() == [ELEMENTS * (8 + STATE)]
    assert below.exchange.backward_times == 1 - TINY.overlap


def test_a_type_of_the_reduction_changes_its_bytes():
    _, edge = built(DataParallelKeys(reduce_itemsize=2))
    assert edge.exchange.backward_times == 0.5 * (1 - TINY.overlap)


def test_what_level_1_and_2_have_gathered_stays_where_a_block_is_recomputed():
    """Level 3 releases it: one block at a time has it, which another one stands for here."""
    found = [float(level(number, recompute=True)[1].memory.max()) for number in (1, 2)]
    assert found == [4 * ELEMENTS] * 2
    assert level(3, recompute=True)[1].memory is None
