"""Which plans are what the runtime does by itself."""

from __future__ import annotations

import msgspec
import numpy as np
import programs
from programs import TINY

from msrun.parallel.config import Optimizer
from msrun.parallel.search.graph.operators import rules_of_steps
from msrun.parallel.search.graph.program import Value
from msrun.parallel.search.plan.cost_breakdown import rules_of
from msrun.parallel.search.plan.lowering import Lowering, Modules, Planned, lower, runs_on
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.eliminate import solve
from msrun.parallel.search.solve.problem import Setting

SAMPLES = {"b0", "d0", "b"}
NOTHING = Modules(owners={}, kinds={})


def planned(program, axes=("dp",), sizes=(2,), params="R", others="R"):
    """Return a plan whose axis `dp` divides samples and keeps parameters as `params` says."""
    setting = Setting(sizes=sizes, topology=TINY, data_axes=frozenset({0}), batch=16)
    problem = build(program, setting)
    allowed = {}
    for at, node in enumerate(problem.nodes):
        names = np.array([choice.name for choice in node.rule.choices])
        keeps = np.ones(len(node.rows), bool)
        for axis, name in enumerate(axes):
            wanted = SAMPLES.intersection(names) or {"R"}
            if node.kind == "param":
                wanted = {params if name == "dp" else "R"}
            elif name != "dp" and node.kind == "op":
                wanted = {others if others in names else "R"}
            elif name != "dp" or node.kind == "out":
                wanted = set(names)
            keeps &= np.isin(names[node.rows[:, axis]], sorted(wanted))
        allowed[at] = np.flatnonzero(keeps)
    left = problem.restricted(allowed)
    rows = zip(left.nodes, solve(left)[1], strict=True)
    chosen = {node.name: tuple(node.rows[at].tolist()) for node, at in rows}
    rules = rules_of_steps(program) | rules_of(left.nodes)
    return Planned(program, setting, axes, rules, chosen)


def half(layers=2):
    return programs.perceptron(layers, batch=8)


def test_samples_that_are_divided_are_data_parallel():
    plan = planned(programs.perceptron(2, batch=16))
    assert lower(plan, NOTHING, half) == Lowering(means=(0,))
    assert runs_on(plan, NOTHING, half) == "data parallel"


def test_parts_of_the_state_are_those_of_the_optimizer():
    plan = planned(programs.perceptron(2, batch=16), params="Z")
    found = lower(plan, NOTHING, half)
    assert found == Lowering(means=(0,), optimizer=Optimizer(zero=1))


def test_a_program_that_depends_on_its_samples_otherwise_is_the_executors():
    plan = planned(programs.perceptron(2, batch=16))
    assert lower(plan, NOTHING, lambda: half(3)) is None
    short = half()
    first = msgspec.structs.replace(short.steps[0], attrs={"number": 8})
    other = msgspec.structs.replace(short, steps=(first, *short.steps[1:]))
    assert lower(plan, NOTHING, lambda: other) is None
    values = {**short.values, "gelu_1": Value((4, 32))}
    assert lower(plan, NOTHING, lambda: msgspec.structs.replace(short, values=values)) is None


def test_samples_that_another_axis_divides_too_are_the_executors():
    program = programs.perceptron(2, batch=16)
    plan = planned(program, axes=("dp", "tp"), sizes=(2, 2), others="b0")
    assert runs_on(plan, NOTHING, half) == "executor"
    same = planned(program, axes=("dp", "tp"), sizes=(2, 2))
    assert runs_on(same, NOTHING, half) == "data parallel"


def test_samples_that_are_gathered_are_the_executors():
    program = programs.perceptron(2, batch=16)
    plan = planned(program)
    whole = {name: (0,) * len(row) for name, row in plan.chosen.items()}
    gathered = msgspec.structs.replace(plan, chosen=whole)
    assert runs_on(gathered, NOTHING, half) == "executor"
