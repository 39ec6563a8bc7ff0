"""Copies of a model of `rt.shard`, such as averages of its weights, work or are refused."""

import copy

import pytest
import torch
from ranks import MODELS, OPTIMIZERS, assert_equal_curves, batches, build, run_warm
from test_grid import MLP, zero
from torch import nn
from torch.optim.swa_utils import AveragedModel

import msrun
from msrun.errors import UsageError

pytestmark = pytest.mark.torch

TP = {"mesh": {"tp": 2}, "plan": MLP}
STAGES = {"stages": {"fc1": 0, "fc2": 1, "fc3": 1}, "microbatches": 4}


def learned(config, name, is_averaged):
    """Return the losses, and at last that of the average, or of the model as it began."""
    runtime = msrun.init(config)
    network = runtime.shard(build(name))
    try:
        other = AveragedModel(network) if is_averaged else copy.deepcopy(network)
    except UsageError as error:
        return error.message
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    losses = []
    for batch in batches(name):
        part = [tensor.chunk(count)[share] for tensor in batch]
        losses.append(runtime.step(network, update, MODELS[name][1], *part).item())
        if is_averaged:
            other.update_parameters(network)
    other.eval()
    x, y = batches(name)[0]
    with torch.no_grad():
        return [*losses, MODELS[name][1](other(x), y).item()]


@pytest.mark.sampled
@pytest.mark.parametrize("is_averaged", [True, False])
@pytest.mark.parametrize(("name", "config"), [("mlp", {}), ("conv", {}), ("mlp", TP)])
def test_a_copy_is_a_model_of_its_own(name, config, is_averaged):
    expected = run_warm(learned, 1, {}, name, is_averaged)[0]

    assert_equal_curves(run_warm(learned, 2, config, name, is_averaged), expected)


def test_a_copy_of_shards_is_refused():
    pipeline = {"mesh": {"pp": 2}, "pipeline": STAGES}
    for config, key in ((zero(2), "optimizer.zero"), (pipeline, "pipeline")):
        assert run_warm(learned, 2, config, "mlp", 0) == 2 * [
            f"a model of rt.shard cannot be copied under parallel.{key}"
        ]


def averaged_beside(config):
    """Keep an average as the hint of the refusal says."""
    runtime = msrun.init(config)
    network = build("mlp")
    average = runtime.shard(copy.deepcopy(network))
    network = runtime.shard(network)
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    losses = []
    for batch in batches("mlp"):
        part = [tensor.chunk(count)[share] for tensor in batch]
        losses.append(runtime.step(network, update, MODELS["mlp"][1], *part).item())
        with torch.no_grad():
            for mean, param in zip(average.parameters(), network.parameters(), strict=True):
                mean.lerp_(param, 0.3)
    x, y = batches("mlp")[0]
    with torch.no_grad():
        return [*losses, MODELS["mlp"][1](average(x), y).item()]


@pytest.mark.parametrize("config", [zero(1), zero(3), TP])
def test_an_average_beside_the_model(config):
    expected = run_warm(averaged_beside, 1, {})[0]

    assert_equal_curves(run_warm(averaged_beside, 2, config), expected)


class Middle(nn.Module):
    """A model of which one module has no parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)

    def forward(self, x):
        return self.last(self.act(self.first(x)))


def stage_refused(config):
    with pytest.raises(UsageError) as caught:
        msrun.init(config).shard(Middle())
    return caught.value.message


def test_a_stage_without_parameters_is_refused_on_every_rank():
    stages = {"first": 0, "act": 1, "last": 2}
    config = {"mesh": {"pp": 3}, "pipeline": {"stages": stages, "microbatches": 3}}

    assert run_warm(stage_refused, 3, config) == 3 * [
        "parallel.pipeline.stages: stage 1 has no parameter, and an optimizer needs one"
    ]
