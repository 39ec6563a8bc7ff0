"""Loops that call a model many times before they differentiate the loss of all calls."""

import warnings

import pytest
import torch
from ranks import run_warm
from test_counted_losses import build, data
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch
CALLS = 12


def unrolled(model, x, y):
    """The output of each call goes into the next, as in a rollout."""
    state = x
    for _ in range(CALLS):
        state = torch.tanh(x + model(state).mean(1, keepdim=True))
    return functional.cross_entropy(model(state), y)


def of_crops(model, x, y):
    """Each call gets more crops of each sample, so each has another number of rows."""
    losses = [
        functional.cross_entropy(model(x.repeat_interleave(crops, 0)), y.repeat_interleave(crops))
        for crops in range(1, CALLS)
    ]
    return sum(losses) / len(losses)


def centered(model, x, y):
    """Samples of each call are taken from their mean."""
    outputs = [model(x * number) for number in range(CALLS)]
    return sum(functional.cross_entropy(each - each.mean(0), y) for each in outputs) / CALLS


def trained(loss_of):
    """Return the weights after two steps, and the warnings."""
    rt = msrun.init({})
    model = rt.shard(build())
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in data(ignored=False)[:2]:
            part = [tensor.chunk(rt.world_size)[rt.rank] for tensor in (x, y)]
            update.zero_grad()
            loss_of(model, *part).backward()
            update.step()
    said = [str(each.message) for each in caught if "msrun" in str(each.message)]
    return [param.detach() for param in model.parameters()], said


@pytest.mark.parametrize("loss_of", [unrolled, of_crops])
def test_a_loss_of_many_calls_is_that_of_one_process(loss_of):
    """What one call of the model has the watch look up is not watched for the other calls."""
    expected, _ = run_warm(trained, 1, loss_of)[0]

    for found, said in run_warm(trained, 2, loss_of):
        assert said == []
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_what_many_calls_mix_is_told():
    for _, said in run_warm(trained, 2, centered):
        assert any("a mean over samples" in text for text in said)
