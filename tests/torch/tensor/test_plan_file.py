"""`plan: FILE`: a strategy file in place of rules."""

import json

import pytest
from ranks import assert_equal_curves, build, oracle, run_warm, train
from test_grid import ALL

import msrun
from msrun.errors import UsageError
from msrun.parallel.checkpoint.api import Checkpoints
from msrun.parallel.local import local_part

pytestmark = pytest.mark.torch

MLP = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]


def write(config, model, path):
    """Write how the parameters of `model` lie under `config`."""
    runtime = msrun.init(config)
    network = runtime.shard(build(model))
    Checkpoints(runtime.config, runtime.context).write_strategy(path, network)


def local_shapes(config, model="mlp"):
    network = msrun.init(config).shard(build(model))
    return {name: list(local_part(param).shape) for name, param in network.named_parameters()}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "plan", "mesh", "ranks"),
    [
        ("mlp", MLP, {"tp": 2}, 2),
        ("mlp", MLP, {"dp": 2, "tp": 2}, 4),
        ("transformer", ALL, {"tp": 4}, 4),
    ],
)
def test_what_was_written_divides_alike_and_learns_alike(model, plan, mesh, ranks, tmp_path):
    path = str(tmp_path / "layout.json")
    run_warm(write, 2, {"mesh": {"tp": 2}, "plan": plan}, model, path)

    config = {"mesh": mesh}
    expected = run_warm(local_shapes, ranks, config | {"plan": plan}, model)
    assert run_warm(local_shapes, ranks, config | {"plan": path}, model) == expected
    found = run_warm(train, ranks, config | {"plan": path}, model)
    assert_equal_curves(found, oracle(model))


def test_an_edited_file_changes_the_plan(tmp_path):
    path = tmp_path / "layout.json"
    run_warm(write, 2, {"mesh": {"tp": 2}, "plan": MLP}, "mlp", str(path))
    content = json.loads(path.read_text())
    content["fc1.weight"]["dims"] = [None, "tp"]
    del content["fc1.bias"]
    path.write_text(json.dumps(content))

    [shapes, _] = run_warm(local_shapes, 2, {"mesh": {"tp": 2}, "plan": str(path)})

    assert (shapes["fc1.weight"], shapes["fc1.bias"]) == ([32, 8], [32])
    assert shapes["fc2.weight"] == [32, 16]


def refused(config):
    with pytest.raises(UsageError) as caught:
        msrun.init(config).shard(build("mlp"))
    return caught.value.message


def entry(shape, dims):
    return {"shape": shape, "dtype": "float32", "mesh": {"tp": 2}, "dims": dims}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "{path} cannot be read: No such file or directory"),
        ({}, "parallel.mesh.tp: no rule of parallel.plan uses this axis"),
        (
            {"fc4.bias": entry([2], ["tp"])},
            "{path}: 'fc4.bias' is no parameter (did you mean fc3.bias?)",
        ),
        (
            {"fc1.weight": entry([32, 16], ["tp", "tp"])},
            "{path}: fc1.weight: axis 'tp' stands there twice",
        ),
        (
            {"fc3.bias": entry([10], ["tp"])},
            "{path}: fc3: fc3.bias [10] can not be split by strategy: dim 0 of 10 in 4 parts (tp)",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(content, sentence, tmp_path):
    path = tmp_path / "layout.json"
    if content is not None:
        path.write_text(json.dumps(content))

    found = run_warm(refused, 4, {"mesh": {"tp": 4}, "plan": str(path)})

    assert found == 4 * [sentence.format(path=path)]
