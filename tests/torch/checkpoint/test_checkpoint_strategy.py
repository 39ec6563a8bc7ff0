"""The strategy file: written by a job, edited by hand, read as an operator plan."""

import json

import pytest
from checkpoint_calls import refusal
from checkpoint_layouts import prepare
from ranks import build, run_warm
from test_grid import V, pp

import msrun
from msrun.parallel.checkpoint import strategy_file
from msrun.parallel.config import ParallelConfig
from msrun.parallel.local import local_part
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.settings.plan_rules import PlanRule

pytestmark = pytest.mark.torch

SHAPES = {name: list(param.shape) for name, param in build("mlp").named_parameters()}
MESH = {"dp": 2, "tp": 2}
TP = MeshLayout({"dp": 3, "tp": 4})


def _write(name, path):
    _, _, models, _, checkpoints = prepare(name, dir="c", strategy=str(path))
    checkpoints.write_strategy(path, models)


def entry(name, dims, mesh=None, **changes):
    shape = SHAPES.get(name, [2])
    return {
        "shape": shape,
        "dtype": "float32",
        "mesh": MESH if mesh is None else mesh,
        "dims": dims,
        "stage": 0,
        **changes,
    }


def test_what_is_written(tmp_path):
    run_warm(_write, 4, "zero3 x tp", tmp_path / "s.json")

    assert json.loads((tmp_path / "s.json").read_text()) == {
        "fc1.weight": entry("fc1.weight", [["tp", "dp"], None]),
        "fc1.bias": entry("fc1.bias", [["tp", "dp"]]),
        "fc2.weight": entry("fc2.weight", ["dp", "tp"]),
        "fc2.bias": entry("fc2.bias", ["dp"]),
        "fc3.weight": entry("fc3.weight", [["tp", "dp"], None]),
        "fc3.bias": entry("fc3.bias", [["tp", "dp"]]),
    }


def _write_stages(path):
    runtime, _, models, _, checkpoints = prepare("pp2")
    checkpoints.write_strategy(path, models, stages=[0, 2] if runtime.rank == 0 else [1])


def test_stages(tmp_path):
    run_warm(_write_stages, 2, tmp_path / "s.json")

    found = json.loads((tmp_path / "s.json").read_text())
    stages = [("fc1.weight", 0), ("fc1.bias", 0), ("fc3.weight", 1), ("fc3.bias", 1)]
    assert [(name, value["stage"]) for name, value in found.items()] == [
        *stages,
        ("fc2.weight", 2),
        ("fc2.bias", 2),
    ]


def _write_of_a_pipeline(folder):
    """Save a model of a pipeline, which has its file written."""
    plan = [{"match": "layers.*.up", "style": "colwise"}]
    config = pp(V, "zbv") | {"mesh": {"pp": 2, "dp": 1, "tp": 2}, "plan": plan}
    config |= {"checkpoint": {"dir": f"{folder}/ckpt", "strategy": f"{folder}/s.json"}}
    runtime = msrun.init(config)
    network = runtime.shard(build("transformer"))
    runtime.save(network, step=1)


def test_the_file_of_a_pipeline(tmp_path):
    run_warm(_write_of_a_pipeline, 4, str(tmp_path))

    found = json.loads((tmp_path / "s.json").read_text())
    named = build("transformer").named_parameters(remove_duplicate=False)
    shapes = {name: list(param.shape) for name, param in named}
    assert {name: value["shape"] for name, value in found.items()} == shapes
    stages = {name: value["stage"] for name, value in found.items()}
    # The way goes down and up again: the second block lies where the first one does.
    assert (stages["embed.weight"], stages["norm.weight"]) == (0, 0)
    assert (stages["layers.0.up.weight"], stages["layers.1.q.weight"]) == (1, 1)
    divided = {name: value["dims"] for name, value in found.items() if any(value["dims"])}
    assert divided == {
        f"layers.{layer}.up.{param}": ["tp", None][: 2 if param == "weight" else 1]
        for layer in (0, 1)
        for param in ("weight", "bias")
    }
    rules = strategy_file.read_strategy(tmp_path / "s.json", TP, shapes)
    assert rules == [
        PlanRule(match=f"layers.{layer}.up", params={"weight": ["tp", None], "bias": ["tp"]})
        for layer in (0, 1)
    ]


def write(path, content):
    path.write_text(json.dumps(content))
    return path


def test_read_as_a_plan(tmp_path):
    path = write(
        tmp_path / "s.json",
        {
            "fc1.weight": entry("fc1.weight", [["tp", "dp"], None]),
            "fc1.bias": entry("fc1.bias", [["dp_replicate", "dp_shard"]]),
            "fc2.weight": entry("fc2.weight", [None, "tp"]),
            "fc3.weight": entry("fc3.weight", [None, None], mesh={}),
        },
    )

    assert strategy_file.read_strategy(path, TP, SHAPES) == [
        PlanRule(match="fc1", params={"weight": ["tp", None]}),
        PlanRule(match="fc2", params={"weight": [None, "tp"]}),
    ]


def _divided(path):
    layout = MeshLayout({"tp": 2})
    plan = strategy_file.read_strategy(path, layout, SHAPES)
    runtime = msrun.init(ParallelConfig(mesh=layout.axes, plan=plan))
    model = runtime.shard(build("mlp"))
    return {name: list(local_part(param).shape) for name, param in model.named_parameters()}


def test_the_plan_divides_alike(tmp_path):
    run_warm(_write, 4, "zero3 x tp", tmp_path / "s.json")

    assert run_warm(_divided, 2, tmp_path / "s.json") == 2 * [
        {
            "fc1.weight": [16, 16],
            "fc1.bias": [16],
            "fc2.weight": [32, 16],
            "fc2.bias": [32],
            "fc3.weight": [5, 32],
            "fc3.bias": [5],
        }
    ]


def test_a_file_that_does_not_fit(tmp_path):
    bad = {
        "'fc9.weight' is no parameter (did you mean fc3.weight?)": {
            "fc9.weight": entry("fc9.weight", [None])
        },
        "fc1.bias: shape [3] is [32] in the model": {"fc1.bias": entry("", [None], shape=[3])},
        "fc1.bias: 2 dims for a shape of 1": {"fc1.bias": entry("fc1.bias", [None, "tp"])},
        "fc1.bias: axis 'x' is not in mesh (dp, tp)": {"fc1.bias": entry("fc1.bias", ["x"])},
    }
    for sentence, content in bad.items():
        path = write(tmp_path / "s.json", content)
        found = refusal(strategy_file.read_strategy, path, TP, SHAPES)
        assert found == f"{path}: {sentence}"
    path = write(tmp_path / "s.json", {"fc1.bias": {"shape": "x"}})
    found = refusal(strategy_file.read_strategy, path, TP, SHAPES)
    assert found.startswith(f"{path} is no strategy file: ")
    gone = tmp_path / "gone"
    assert refusal(strategy_file.read_strategy, gone, TP, SHAPES) == (
        f"{gone} cannot be read: No such file or directory"
    )
