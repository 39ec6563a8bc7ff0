"""Loops that call a model many times before one backward pass, as in meta learning."""

import warnings

import pytest
import torch
from ranks import run_warm
from test_counted_losses import build, data
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

CALLS = 12


def trained(config, centers=0):
    """Return weights after steps by a mean over calls, and how many warnings tell of mixtures.

    Args:
        config: Of msrun.init.
        centers: How often the mean over samples is taken from an output.
    """
    rt = msrun.init(config)
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in data(ignored=False):
            x, y = (tensor.chunk(rt.world_size)[rt.rank] for tensor in batch)
            losses = []
            for number in range(CALLS):
                output = model(x * number)
                for _ in range(centers):
                    output = output - output.mean(0)
                losses.append(functional.cross_entropy(output, y))
            update.zero_grad()
            (sum(losses) / CALLS).backward()
            update.step()
    told = [each for each in caught if "a mean over samples" in str(each.message)]
    return [full_tensor(param.detach()) for param in model.parameters()], len(told)


@pytest.mark.parametrize("config", [{}, {"optimizer": {"zero": 3}}], ids=["dp", "zero 3"])
def test_many_calls_train_as_in_one_process(config):
    """In a moment, too: each watch of a call does not follow what the others look at."""
    expected, _ = run_warm(trained, 1, {})[0]

    for found, told in run_warm(trained, 2, config):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert told == 0


def test_what_many_calls_mix_is_told():
    for _, told in run_warm(trained, 2, {}, 1):
        assert told
