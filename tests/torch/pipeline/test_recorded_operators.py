"""Operators between stages, which a recording calls again."""

import pytest
import torch
from ranks import run_warm
from torch import nn

import msrun

pytestmark = pytest.mark.torch


class Powers(nn.Module):
    """Computes powers between its modules, by operators of tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x) ** 2
        y **= 2
        return (self.second(y) - x) ** 2


def powers():
    torch.manual_seed(0)
    whole = Powers().double()
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = whole(x).mean()
    expected.backward()
    stages = {"first": 0, "second": 1}
    runtime = msrun.init({"mesh": {"pp": 2}, "pipeline": {"stages": stages, "microbatches": 2}})
    torch.manual_seed(0)
    part = runtime.shard(Powers().double(), sample=[x])
    update = runtime.optimizer(torch.optim.SGD(part.parameters(), lr=0.0))
    return runtime.step(part, update, lambda o, _: o.mean(), x, x).item() - expected.item()


def test_powers_by_operators_run_between_stages():
    assert max(map(abs, run_warm(powers, 2))) < 1e-12
