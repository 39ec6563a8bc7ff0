"""Parameters with memory in common that are not one, as after `a.weight.data = b.weight.data`."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = pytest.mark.torch

SENTENCE = "embed.weight and head.weight are not one tensor and have memory in common"


class Tied(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        if kind == "data":
            self.head.weight.data = self.embed.weight.data
        elif kind == "buffer":
            self.register_buffer("first", self.embed.weight.detach()[:1])
        elif kind == "flat":
            flat = torch.cat([p.detach().reshape(-1) for p in self.parameters()])
            sizes = [p.numel() for p in self.parameters()]
            for p, part in zip(self.parameters(), flat.split(sizes), strict=True):
                p.data = part.view_as(p)

    def forward(self, x):
        return self.head(self.embed(x))


def curve(kind, rt=None):
    model = Tied(kind)
    model = rt.shard(model) if rt else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = rt.optimizer(optimizer) if rt else optimizer
    x, y = torch.arange(8), torch.arange(8).flip(0)
    losses = []
    for _ in range(4):
        if rt:
            share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
            part = x.chunk(count)[share], y.chunk(count)[share]
            losses.append(rt.step(model, optimizer, functional.cross_entropy, *part).item())
        else:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def trained(config, kind):
    with msrun.init(config) as rt:
        try:
            return curve(kind, rt)
        except ModelError as error:
            return error.message


@pytest.mark.parametrize("kind", ["data", "buffer", "flat"])
def test_they_stay_so_by_data_parallelism(kind):
    for found in run_warm(trained, 2, {}, kind):
        assert found == pytest.approx(curve(kind), abs=1e-6)


PLAN = [{"match": "head", "style": "colwise"}]
STAGES = {"stages": {"embed": 0, "head": 1}, "microbatches": 2}


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": {"zero": 1}},
        {"optimizer": {"zero": 3}},
        {"mesh": {"tp": 2}, "plan": PLAN},
        {"mesh": {"pp": 2}, "pipeline": STAGES},
    ],
    ids=["zero 1", "zero 3", "tp", "pp"],
)
def test_they_are_refused_where_parameters_are_divided(config):
    for said in run_warm(trained, 2, config, "data"):
        assert said.startswith(SENTENCE)
    for said in run_warm(trained, 2, config, "buffer"):
        assert said.startswith("first and embed.weight are not one tensor")
    for found in run_warm(trained, 2, config, "flat"):
        assert found == pytest.approx(curve("flat"), abs=1e-6)
