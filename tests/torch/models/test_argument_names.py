"""Arguments of a forward may have any name, that of an argument of msrun or torch too."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch

STAGES = {"one": 0, "two": 1}


class Named(nn.Module):
    """Adds up all that it is given."""

    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), norm(8)

    def forward(self, x, *, state, name, module, run, unit, context, use_reentrant, debug, how):
        given = (state, name, module, run, unit, context, use_reentrant, debug, how)
        return self.norm(self.linear(x) + sum(given), functions=1.0, name=2.0, own=3.0)


class OfBatches(nn.BatchNorm1d):
    """Scales what it normalizes."""

    def forward(self, x, *, functions, name, own):
        return super().forward(x) * functions + name * own


class OfSamples(nn.LayerNorm):
    """The same of each sample."""

    def forward(self, x, *, functions, name, own):
        return super().forward(x) * functions + name * own


GIVEN = {"state": 1.0, "name": 2.0, "module": 3.0, "unit": 4.0}
GIVEN |= {"context": 5.0, "use_reentrant": 6.0, "debug": True, "how": 7.0}


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.one, self.two = Named(norm), Named(norm)

    def forward(self, x):
        for part in (self.one, self.two):
            x = part(x, run=x, **GIVEN)
        return x


def learned(config, norm):
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = Net(norm)
    x, y = torch.randn(2, 8, 8)
    sample = (x,) if rt.config.pipeline else None
    net = rt.shard(net, sample)
    update = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    at, of = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    parts = [t.chunk(of)[at] for t in (x, y)]
    return [rt.step(net, update, functional.mse_loss, *parts).item() for _ in range(3)]


@pytest.mark.parametrize(
    ("config", "norm"),
    [
        ({"recompute": {"modules": ["one", "two"]}}, OfBatches),
        ({"mesh": {"pp": 2}, "pipeline": {"stages": STAGES, "microbatches": 2}}, OfSamples),
    ],
)
def test_they_have_the_names_of_ours(config, norm):
    expected = run_warm(learned, 1, {}, norm)[0]

    for found in run_warm(learned, 2, config, norm):
        assert found == pytest.approx(expected, rel=1e-5)
