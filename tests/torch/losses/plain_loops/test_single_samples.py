"""Gradients of single samples that a plain loop clips, each before they are averaged."""

import pytest
import torch
from ranks import run_warm
from test_counted_losses import build, data
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch


def clipped(config):
    """Return weights after steps by the mean of clipped gradients, or what was refused."""
    rt = msrun.init(config)
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in data(ignored=False):
        part = [tensor.chunk(rt.world_size)[rt.rank].split(1) for tensor in (x, y)]
        sums = [torch.zeros_like(param) for param in model.parameters()]
        for one, target in zip(*part, strict=True):
            with rt.no_sync(model):
                update.zero_grad()
                functional.cross_entropy(model(one), target).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for total, param in zip(sums, model.parameters(), strict=True):
                total.add_(param.grad)
        try:
            for total, param in zip(sums, model.parameters(), strict=True):
                param.grad = rt.mean_over_data(total / len(part[0]))
        except ModelError as error:
            return error.message
        update.step()
    return [full_tensor(param.detach()) for param in model.parameters()]


def test_gradients_of_single_samples_are_clipped_as_in_one_process():
    expected = run_warm(clipped, 1, {})[0]

    for found in run_warm(clipped, 2, {}):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_mean_over_ranks_of_what_they_have_parts_of_is_refused():
    said = "rt.mean_over_data got a sharded tensor, of which ranks have parts"
    assert run_warm(clipped, 2, {"optimizer": {"zero": 1}}) == [said] * 2
