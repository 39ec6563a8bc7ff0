"""Wishes for inputs, outputs and parameters: the plan keeps them, or they are refused by name."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from auto_models import MODELS
from ranks import Counted, run_warm

import msrun
from msrun.errors import UsageError
from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.auto.wishes import pins_of
from msrun.parallel.config_file import parse_config
from msrun.parallel.layout import resolve
from msrun.parallel.search.cost.topology import PRESETS
from msrun.parallel.search.graph.axis_placement import RR, value_placement
from msrun.parallel.search.graph.module_io import ModuleIO
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.modes import search
from msrun.parallel.search.solve.problem import Setting, layout_node, layout_nodes

pytestmark = pytest.mark.torch

MESH = {"dp": 2, "tp": 2}
UP = {"match": "blocks.0.up", "style": "colwise"}
# Model -> rules, and what of them stands in a plan: module, end, code of `tp`.
WISHES = {
    "gpt": [
        ([{"match": "blocks.0.up", "in": [None, None, None]}], "blocks.0.up", "in", RR),
        ([{"match": "blocks.1.up", "in": [None, "tp", None]}], "blocks.1.up", "in", 1),
        ([{"match": "blocks.0.up", "out": [None, None, "tp"]}], "blocks.0.up", "out", 2),
        ([{"match": "blocks.0.down", "out": [None, "tp", None]}], "blocks.0.down", "out", 1),
        ([{"match": "blocks.0.norm1", "style": "sequence"}], "blocks.0.norm1", "out", 1),
        (
            [{"match": "blocks.0.attention", "in": [None, None, None]}],
            "blocks.0.attention",
            "in",
            RR,
        ),
        ([{"match": "blocks.0", "out": [None, "tp", "..."]}], "blocks.0", "out", 1),
        ([{"match": "blocks.1.up", "strategy": [[1, 1], [2, 1]]}], "blocks.1.up", "in", RR),
    ],
    "llama": [
        ([{"match": "blocks.0.gate", "out": [None, None, "tp"]}], "blocks.0.gate", "out", 2),
        (
            [{"match": "blocks.1.attention.o", "in": [None, None, "tp"]}],
            "blocks.1.attention.o",
            "in",
            2,
        ),
    ],
    "perceptron": [
        ([{"match": "layers.1", "in": [None, "tp"], "out": [None, None]}], "layers.1", "in", 1),
    ],
}
CASES = [(name, *case) for name, cases in WISHES.items() for case in cases]


def planned(name, rules, mode="exact", mesh=None):
    """Return program, problem and the plan of a search with `rules`."""
    mesh = mesh or MESH
    torch.manual_seed(0)
    model, inputs = MODELS[name][0](), MODELS[name][1]()
    program = trace(model, inputs).program
    config = parse_config({"mode": "auto", "mesh": mesh, "plan": rules})
    layout = resolve(config, 4)
    pins = pins_of(config, layout, model, program)
    setting = Setting(
        sizes=tuple(mesh.values()),
        topology=PRESETS["cpu"],
        data_axes=frozenset({0}) if "dp" in mesh else frozenset(),
        batch=len(inputs[0]),
    )
    found = search(program, setting, mode=mode, pins=pins)
    problem = build(program, setting, cuts=layout_nodes(found.chosen), pins=pins)
    return program, problem, found, (setting, pins)


def code_of(program, problem, found, module, end):
    """Return the placements over the last axis in which a module reads its input, or hands on."""
    io = ModuleIO(program)
    nodes = {node.name: node for node in problem.nodes}

    def placed(name, port):
        choice = nodes[name].rule.choices[found.chosen[name][-1]]
        code = choice.outs[0] if port is None else choice.ins[port]
        return int(value_placement(torch.tensor(code).numpy()))

    if end == "in":
        (value,) = io.inputs(module)
        reads = [read for read in io.reads(value, module) if read.view is None]
        return {placed(read.step.name, read.port) for read in reads}
    (value,) = io.outputs(module)
    return {placed(layout_node(io.base(value)[0]), None)}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}-{case[3]}")
@pytest.mark.parametrize("mode", ["exact", "recursive", "propagation"])
def test_wishes_stand_in_the_plan(case, mode):
    name, rules, module, end, code = case
    program, problem, found, _ = planned(name, rules, mode)
    want = -1 if code == RR else code
    assert code_of(program, problem, found, module, end) == {want}


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        (
            [{"match": "blocks.0.norm1", "in": [None, None, "tp"]}],
            "parallel.plan[0].in: layer_norm of blocks.0.norm1 cannot be placed like that",
        ),
        (
            [{"match": "blocks.0.up", "in": [None, "tp"]}],
            "parallel.plan[0].in: 2 entries for the 3 dims of blocks.0.up, [8, 8, 16]",
        ),
        (
            [{"match": "", "in": [None, "tp"]}],
            "parallel.plan[0].in: the model reads 2 tensors",
        ),
    ],
)
def test_wishes_that_no_plan_keeps_are_refused(rules, sentence):
    with pytest.raises(UsageError) as caught:
        planned("gpt", rules)
    assert sentence in caught.value.message


def train(name, config):
    """Return the losses of three steps."""
    rt = msrun.init({"mode": "auto", **config})
    torch.manual_seed(0)
    net = MODELS[name][0]()
    torch.manual_seed(1)
    parts, index = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    batches = [[x.chunk(parts)[index] for x in MODELS[name][1]()] for _ in range(3)]
    net = rt.shard(net, sample=batches[0])
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    return [rt.step(net, optimizer, lambda out, _: out, *both, both[1]).item() for both in batches]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "rules"), [("gpt", [UP, WISHES["gpt"][3][0][0]]), ("llama", WISHES["llama"][1][0])]
)
@pytest.mark.parametrize("mode", ["exact", "propagation"])
def test_plans_with_wishes_learn_what_one_process_does(name, rules, mode):
    (want,) = run_warm(partial(train, name), 1, {"mesh": {"dp": 1}})
    config = {"mesh": MESH, "search": mode, "plan": rules}
    for losses in run_warm(partial(train, name), 4, config):
        assert losses == pytest.approx(want, abs=1e-6)


def moved(rules, mesh):
    """Return losses, and the all-to-alls of a step."""
    rt = msrun.init({"mode": "auto", "mesh": mesh, "plan": rules})
    torch.manual_seed(0)
    net = MODELS["gpt"][0]()
    torch.manual_seed(1)
    batches = [MODELS["gpt"][1]() for _ in range(2)]
    net = rt.shard(net, sample=batches[0])
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    losses = []
    for both in batches:
        with Counted() as counted:
            losses.append(rt.step(net, optimizer, lambda out, _: out, *both, both[1]).item())
    return losses, counted.calls["all_to_all_single"]


def test_a_plan_that_moves_shards_does_so_by_all_to_alls_and_learns_the_same():
    """Tokens are divided where `up` reads, and columns where it hands on."""
    rules = [{"match": "blocks.0.up", "in": [None, "tp", None], "out": [None, None, "tp"]}]
    ((want, _),) = run_warm(partial(moved, []), 1, {"tp": 1})
    for losses, count in run_warm(partial(moved, rules), 2, {"tp": 2}):
        assert losses == pytest.approx(want, abs=1e-6)
        assert count >= 2  # forward, and the gradient on its way back
