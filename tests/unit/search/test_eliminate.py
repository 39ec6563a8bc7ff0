from __future__ import annotations

import numpy as np
import programs
import pytest
from bench import highs
from programs import TINY

from msrun.parallel.search.graph.rules import ShardingRule
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.eliminate import TooWideError, costs, eliminate, solve
from msrun.parallel.search.solve.problem import Edge, Problem, Setting, StrategyNode


def setting(*sizes, **options):
    return Setting(sizes=sizes, topology=TINY, **options)


def everything(problem):
    """Return the least cost of all combinations, parameters apart, which have one reader each."""
    kept = [at for at, node in enumerate(problem.nodes) if node.kind != "param"]
    place = {at: axis for axis, at in enumerate(kept)}
    shape = [len(problem.nodes[at].rows) for at in kept]
    total = np.zeros(shape)
    own = {at: node.seconds for at, node in enumerate(problem.nodes)}
    for edge in problem.edges:
        if edge.source not in place:
            leaf = (own[edge.source][:, None] + edge.seconds).min(axis=0)
            own[edge.target] = own[edge.target] + leaf
    for at in kept:
        total += wide(own[at], [place[at]], len(kept))
    for edge in problem.edges:
        if edge.source in place:
            total += wide(edge.seconds, [place[edge.source], place[edge.target]], len(kept))
    return float(total.min())


def wide(table, axes, ndim):
    order = np.argsort(axes)
    shape = [1] * ndim
    for at in order:
        shape[axes[at]] = table.shape[at]
    return np.transpose(table, order).reshape(shape)


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_cost_what_the_best_of_all_combinations_does(seed):
    rng = np.random.default_rng(seed)
    program = programs.drawn(rng, steps=6 if seed % 2 else 4)
    problem = build(program, setting(8) if seed % 2 else setting(2, 4))
    found, chosen = solve(problem)
    assert found == pytest.approx(problem.seconds(chosen), rel=1e-12)
    if np.prod([len(n.rows) for n in problem.nodes if n.kind != "param"], dtype=float) < 2e7:
        assert found == pytest.approx(everything(problem), rel=1e-12)
    else:
        assert found == pytest.approx(highs.solve(problem)[0], rel=1e-6)


@pytest.mark.parametrize(
    ("program", "sizes"),
    [
        (programs.perceptron(2), (2, 2)),
        (programs.transformer(1), (4,)),
        (programs.convolutions(), (4,)),
    ],
    ids=["perceptron", "transformer", "u-net"],
)
def test_models_cost_what_an_integer_solver_finds(program, sizes):
    problem = build(program, setting(*sizes, rounds=2, recompute=False))
    found, chosen = solve(problem)
    assert found == pytest.approx(problem.seconds(chosen), rel=1e-12)
    assert found == pytest.approx(highs.solve(problem)[0], rel=1e-6)


def tangle(rng, count, strategies):
    """Return a problem in which every node is a neighbour of every other."""
    nodes = [
        StrategyNode(
            name=str(at),
            kind="op",
            rule=ShardingRule(choices=()),
            rows=np.zeros((strategies, 1), dtype=np.int64),
            seconds=rng.random(strategies),
            memory=rng.random(strategies),
            microbatch_memory=np.zeros(strategies),
        )
        for at in range(count)
    ]
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    edges = [Edge(a, b, rng.random((strategies, strategies))) for a, b in pairs]
    return Problem(nodes=nodes, edges=edges)


@pytest.mark.parametrize("seed", range(5))
def test_graphs_without_any_order_are_exact_too(seed):
    problem = tangle(np.random.default_rng(seed), 6, 4)
    total = np.zeros((4,) * 6)
    for at, node in enumerate(problem.nodes):
        total += wide(node.seconds, [at], 6)
    for edge in problem.edges:
        total += wide(edge.seconds, [edge.source, edge.target], 6)
    found, chosen = solve(problem)
    assert found == pytest.approx(total.min(), rel=1e-12)
    assert problem.seconds(chosen) == pytest.approx(found, rel=1e-12)


def test_nodes_kept_are_a_table_of_the_best_of_all_others():
    problem = tangle(np.random.default_rng(7), 5, 3)
    kept = eliminate(costs(problem), keep=(4, 1))
    for at in np.ndindex(3, 3):
        fixed = problem.restricted({4: np.array([at[0]]), 1: np.array([at[1]])})
        assert kept.value[at] == pytest.approx(solve(fixed)[0], rel=1e-12)
        chosen = kept.complete({4: at[0], 1: at[1]})
        assert problem.seconds([chosen[n] for n in range(5)]) == pytest.approx(kept.value[at])


def test_a_table_too_large_is_refused_before_it_is_made():
    problem = tangle(np.random.default_rng(1), 6, 4)
    with pytest.raises(TooWideError, match=r"a table of 4096 cells \(at most 1000\)"):
        eliminate(costs(problem), cells_max=1000)


def test_memory_can_be_given_a_price():
    problem = build(programs.transformer(2), setting(4))
    free, heavy = solve(problem)[1], solve(problem, weight=1.0)[1]
    assert problem.memory(heavy) < problem.memory(free)
    assert problem.seconds(heavy) > problem.seconds(free)
