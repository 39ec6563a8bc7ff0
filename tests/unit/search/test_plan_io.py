"""Plans in the form in which they are saved."""

from __future__ import annotations

import programs
import pytest
from programs import TINY, Draft

from msrun.errors import UsageError
from msrun.parallel.search.plan.cost_breakdown import operators, parameters, rules_of
from msrun.parallel.search.plan.plan import VERSION, SavedPlan, read_plan, write_plan
from msrun.parallel.search.plan.plan_io import choices_of, identity, shared
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.modes import search
from msrun.parallel.search.solve.problem import Setting, layout_nodes

SETTING = Setting(sizes=(2, 2), topology=TINY, data_axes=frozenset({0}), batch=8)


def saved(program, chosen):
    problem = build(program, SETTING, cuts=layout_nodes(chosen))
    rules = rules_of(problem.nodes)
    plan = SavedPlan(
        version=VERSION,
        model="transformer",
        program=identity(program),
        topology="tiny",
        world=4,
        mesh={"dp": 2, "tp": 2},
        stages=1,
        microbatches=1,
        batch=8,
        recompute=False,
        seconds=1.0,
        costs={},
        memory=1.0,
        gap=None,
        params=parameters(program, rules, chosen),
        operators=operators(program, rules, chosen),
        shared=shared(rules, chosen),
    )
    return plan, problem


def test_what_was_saved_is_chosen_again(tmp_path):
    program = programs.transformer(4)
    chosen = search(program, SETTING).chosen
    plan, problem = saved(program, chosen)
    write_plan(plan, tmp_path / "plan.json")
    plan = read_plan(tmp_path / "plan.json")
    assert choices_of(plan, "plan.json", problem, program) == chosen
    assert len(set(chosen.values())) > 4
    del plan.operators["linear_3"]
    with pytest.raises(UsageError) as caught:
        choices_of(plan, "plan.json", problem, program)
    assert caught.value.message == "plan.json has nothing for linear_3, which has no such placement"


def test_a_model_is_known_whatever_the_batch():
    one = identity(programs.transformer(2, batch=8))
    assert identity(programs.transformer(2, batch=16)) == one
    assert one.startswith("35 parameters and 43 steps (")
    for other in (programs.transformer(3), programs.transformer(2, width=16)):
        assert identity(other) != one


def test_without_a_data_axis_all_ranks_are_handed_all_and_return_all():
    d = Draft()
    program = d.done(d.linear(d.input(8, 4), 4))
    given = Setting(sizes=(2,), topology=TINY, batch=8)
    (out,) = [node for node in build(program, given).nodes if node.kind == "out"]
    assert [out.rule.choices[at].name for (at,) in out.rows] == ["R"]
    free = Setting(sizes=(2,), topology=TINY)
    (out,) = [node for node in build(program, free).nodes if node.kind == "out"]
    assert [out.rule.choices[at].name for (at,) in out.rows] == ["R", "b"]
