"""Buffers that each micro-batch of a pipeline writes are refused."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel.pipeline.microbatch import WrittenBuffers

pytestmark = pytest.mark.torch


class Average(nn.Module):
    """Keeps a moving average of what it sees."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x - self.mean)


class Filled(Average):
    """Fills its buffer once."""

    def forward(self, x):
        if not self.mean.any():
            self.mean.fill_(0.5)
        return self.linear(x - self.mean)


def stepped(kind, options):
    stages = {"stages": {"0": 0, "1": 1}, "microbatches": 2}
    runtime = msrun.init({"mesh": {"pp": 2}, "pipeline": stages, **options})
    torch.manual_seed(0)
    model = runtime.shard(nn.Sequential(nn.Linear(8, 8), kind()))
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(4, 8), torch.ones(4, 8)  # stages draw other numbers
    return [runtime.step(model, update, functional.mse_loss, x, y).item() > 0 for _ in range(2)]


def test_a_buffer_that_each_micro_batch_writes_is_refused():
    model, buffers = Average(), WrittenBuffers(2)
    found = []
    for _ in range(2):
        with buffers.watched(model, found.append):
            model(torch.ones(2, 8))

    (caught,) = found
    assert isinstance(caught, ModelError)
    assert caught.message == (
        "parallel.pipeline.microbatches: each of 2 micro-batches changes mean, which one process "
        "changes once a step"
    )


@pytest.mark.parametrize(
    ("kind", "options"), [(Filled, {}), (Average, {"batch_norm": "local"})], ids=["filled", "local"]
)
def test_buffers_that_one_micro_batch_writes_pass(kind, options):
    assert run_warm(stepped, 2, kind, options) == [[True, True]] * 2
