"""What backward finds kept, on two ranks: bytes counted by hand."""

from __future__ import annotations

import numpy as np
import programs
import pytest
from programs import TINY

from msrun.parallel.search.graph.axis_placement import RR, RZ
from msrun.parallel.search.graph.repeat import find_blocks
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.problem import Setting, stored_parts

STATE = 12
# A (8, 32) tensor of activations, and a (32, 32) parameter, in bytes.
TENSOR, WEIGHT = 8 * 32 * 4, 32 * 32 * 4
# Parameter, gradient and what the optimizer keeps of it.
OWNED = 32 * 32 * (4 + 4 + STATE)


def two_layers():
    d = programs.Draft()
    x = d.input(8, 32)
    return d.done(d.loss(d.linear(d.gelu(d.linear(x, 32, bias=False)), 32, bias=False)))


def shared_input():
    """Two layers that read one tensor."""
    d = programs.Draft()
    x = d.linear(d.input(8, 32), 32, bias=False)
    a, b = (d.linear(x, 32, bias=False) for _ in range(2))
    return d.done(d.loss(d.add(a, b)))


def problem_of(program, **options):
    setting = Setting(sizes=(2,), topology=TINY, state_bytes=STATE, **options)
    return build(program, setting)


def memory(problem, **wanted):
    """Return the bytes of a plan that chooses what is named, and the first choice elsewhere."""
    chosen = []
    for node in problem.nodes:
        name = wanted.get(node.name.replace(":", "_"), node.rule.choices[0].name)
        names = [node.rule.choices[row[0]].name for row in node.rows]
        chosen.append(names.index(name) if name in names else 0)
    return problem.memory(chosen)


def test_a_parameter_that_is_read_as_it_is_stored_is_kept_once():
    problem = problem_of(two_layers())
    # What gelu, the second layer and the loss are given.
    assert memory(problem) == 2 * OWNED + 3 * TENSOR
    assert memory(problem, w1="d0", linear_2="n") == 1.5 * OWNED + 3 * TENSOR


def test_a_parameter_that_is_read_whole_is_kept_whole_beside_its_part():
    problem = problem_of(two_layers())
    whole = memory(problem)
    assert memory(problem, w1="d0") == whole - OWNED / 2 + WEIGHT


def test_a_parameter_whose_state_is_cut_is_stored_in_parts_and_kept_whole_by_its_reader():
    problem = problem_of(two_layers())
    assert memory(problem, w1="Z") == memory(problem, w1="d0")


def test_a_consumer_in_another_layout_than_the_layout_node_saves_a_copy():
    problem = problem_of(shared_input())
    whole = memory(problem)
    assert memory(problem, linear_1="b0") == whole + TENSOR / 2
    assert memory(problem, layout_linear_0="d0", linear_1="b0", linear_2="b0") == whole - TENSOR / 2


def test_micro_batches_on_their_way_have_copies_of_their_own_but_not_of_parameters():
    one = problem_of(shared_input())
    both = one.in_flight(2)
    own = memory(both) - memory(one)
    copied = memory(both, linear_1="b0") - memory(one, linear_1="b0")
    assert copied == own + TENSOR / 2
    assert memory(both, w1="d0") - memory(one, w1="d0") == own


def test_blocks_that_are_recomputed_have_copies_of_one_at_a_time():
    program = programs.perceptron(4)
    blocks = find_blocks(program)
    names = [name for name, value in program.values.items() if value.shape == (32, 32)]
    cut = dict.fromkeys(names, "d0")
    inside = {"cuts": blocks.cuts, "block_of": blocks.block_of(program)}
    found = []
    for recompute in (False, True):
        setting = Setting(sizes=(2,), topology=TINY, state_bytes=STATE, recompute=recompute)
        problem = build(program, setting, **inside)
        found.append(memory(problem, **cut) - memory(problem))
    outside = len(names) - blocks.count
    copies = (len(names), outside + 1)
    assert found == [-len(names) * OWNED / 2 + number * WEIGHT for number in copies]


def test_no_copies_are_kept_without_a_backward_pass():
    problem = problem_of(two_layers(), training=False)
    assert memory(problem, w1="d0") == 1.5 * WEIGHT


@pytest.mark.parametrize(
    ("shape", "codes", "parts"),
    [
        ((32, 32), (RR, RR), 1),
        ((32, 32), (0, RZ), 8),
        ((32, 32), (RZ, RZ), 8),
        ((32, 3), (0, RZ), 2),
        ((3, 3), (RZ, RZ), 1),
        ((6, 4), (RZ, RZ), 8),
        ((), (RR, RR), 1),
    ],
)
def test_a_parameter_whose_state_is_cut_is_cut_by_the_first_dim_that_is_free(shape, codes, parts):
    assert stored_parts(shape, np.array([codes]), (2, 4)).tolist() == [parts]
