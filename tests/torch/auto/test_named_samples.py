"""A sample by name, and batches by name, in mode auto."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ConfigError, ModelError

pytestmark = pytest.mark.torch

MESHES = {
    "dp": {"mode": "auto", "mesh": {"dp": 2}},
    "pp": {
        "mode": "auto",
        "mesh": {"pp": 2},
        "pipeline": {"stages": "auto", "microbatches": 2},
    },
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x, scale=1.0, labels=None, *, mask=None):
        output = self.layers(x) * scale
        if mask is not None:
            output = output * mask
        return output if labels is None else functional.cross_entropy(output, labels)


class Means(Model):
    """Returns a loss of means over elements, of which equal parts have equally many."""

    def forward(self, x, labels=None):
        output = self.layers(x)
        target = functional.one_hot(labels, 8).to(output.dtype)
        return 0.5 * functional.mse_loss(output, target) + output.abs().mean() / 3


class HalfMeans(Model):
    def forward(self, x, labels=None):
        return self.layers(x)[:4].square().mean() + 0.0 * labels.to(x.dtype).mean()


class FirstMeans(Model):
    def forward(self, x, labels=None):
        output = self.layers(x)
        return (output - output[0]).square().mean() + 0.0 * labels.to(x.dtype).mean()


class JoinedMeans(Model):
    def forward(self, x, labels=None):
        output = self.layers(x)
        return (
            torch.cat([output[:4], 2 * output[4:]]).abs().mean() + 0.0 * labels.to(x.dtype).mean()
        )


def batches():
    torch.manual_seed(1)
    return [{"labels": torch.arange(8) % 5, "x": torch.randn(8, 8)} for _ in range(2)]


def model(kind=Model):
    torch.manual_seed(0)
    return kind()


def alone(kind=Model):
    found, network = [], model(kind)
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    for batch in batches():
        update.zero_grad()
        loss = network(**batch)
        loss.backward()
        update.step()
        found.append(loss.item())
    return found


def trained(config, has_loss, kind=Model):
    rt = msrun.init(config)
    count, share = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    parts = [{k: v.chunk(count)[share] for k, v in batch.items()} for batch in batches()]
    sample = parts[0] if has_loss else {"x": parts[0]["x"]}
    network = rt.shard(model(kind), sample=sample)
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    found = []
    for part in parts:
        if has_loss:
            found.append(rt.step(network, update, part).item())
        else:
            inputs, target = {"x": part["x"]}, part["labels"]
            loss = rt.step(network, update, functional.cross_entropy, inputs, target)
            found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("mesh", "has_loss"),
    [*((mesh, False) for mesh in MESHES), *((mesh, True) for mesh in MESHES if mesh != "pp")],
)
def test_a_sample_by_name_trains_as_one_process(mesh, has_loss):
    expected = alone()
    for found in run_warm(trained, 2, MESHES[mesh], has_loss):
        assert found == pytest.approx(expected, rel=1e-6)


def means():
    return trained(MESHES["pp"], has_loss=True, kind=Means)


def test_means_that_a_model_returns_are_those_of_micro_batches():
    for found in run_warm(means, 2):
        assert found == pytest.approx(alone(Means), rel=1e-6)


def own_loss_in_stages(kind):
    try:
        trained(MESHES["pp"], has_loss=True, kind=kind)
    except ModelError as error:
        return error.message


@pytest.mark.parametrize("kind", [Model, HalfMeans, FirstMeans, JoinedMeans])
def test_the_loss_of_a_model_in_micro_batches_of_a_plan_is_refused(kind):
    """Its operators do not tell over how many targets it is a mean, or it is of some samples."""
    for said in run_warm(own_loss_in_stages, 2, kind):
        assert said == (
            "parallel.mode: auto runs a model that returns its loss on 2 micro-batches, and does "
            "not know how their losses make that of the batch"
        )


def refusals():
    rt = msrun.init(MESHES["dp"])
    found = []
    for other in ("y", "mask"):
        sample = {"x": torch.ones(4, 8), other: torch.ones(4, 8)}
        try:
            rt.shard(model(), sample=sample)
        except ConfigError as error:
            found.append(error.message)
    return found


def test_a_sample_that_does_not_fit_is_refused():
    for first, second in run_warm(refusals, 2):
        assert first.startswith("the sample of rt.shard does not fit the forward: ")
        assert second == (
            "parallel.mode: auto traces a model with positional arguments, and mask has no place "
            "in its forward"
        )
