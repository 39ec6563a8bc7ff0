"""What scripts do to gradients and weights by hand: as in one process, or one sentence names it."""

import warnings

import pytest
import torch
from ranks import assert_equal_curves, batches, build, run_warm
from test_grid import zero
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch
DP = {"mesh": {"dp": -1}}


def rate_of_loss(_, update, loss):
    loss.backward()
    update.param_groups[0]["lr"] = 0.1 / (1 + loss.item())
    update.step()


def scaled_by_loss(network, update, loss):
    loss.backward()
    for param in network.parameters():
        param.grad.mul_(loss.detach())
    update.step()


def scaled_by_number(network, update, loss):
    loss.backward()
    for param in network.parameters():
        param.grad *= loss.item()
    update.step()


def gradients(network, _, loss):
    slopes = torch.autograd.grad(loss, list(network.parameters()))
    with torch.no_grad():
        for param, slope in zip(network.parameters(), slopes, strict=True):
            param.sub_(0.1 * slope)


def descended(network, _, loss):
    """The script keeps its parameters, which ZeRO releases behind the backward pass."""
    params = list(network.parameters())
    slopes = torch.autograd.grad(loss, params)
    [param - 0.1 * slope for param, slope in zip(params, slopes, strict=True)]


def set_gathered(network, update, _):
    for param in network.parameters():
        param.grad = torch.ones_like(param)
    update.step()


_OTHER = "ranks have other values of "
_NUMBERS = f"{_OTHER}the numbers that the script multiplied or added to sharded parameters"
_RATE = f"{_OTHER}the optimizer's lr (rank 1)"
_ALONE = "by parameters in this loop are those of this rank's samples, and no rank averages them"
_DIVIDED = "torch.autograd.grad is asked for gradients by parameters that ZeRO has divided"
_UNREDUCED = "the optimizer steps without the gradient of fc1.weight, which is that of a gathered"
CASES = [
    (rate_of_loss, DP, _RATE),
    (rate_of_loss, zero(3), _RATE),
    (scaled_by_loss, zero(1), _NUMBERS),
    (scaled_by_loss, zero(3), _NUMBERS),
    (scaled_by_number, zero(3), _NUMBERS),
    (gradients, DP, _ALONE),
    (gradients, zero(1), _DIVIDED),
    (descended, zero(1), _DIVIDED),
    (gradients, zero(3), _DIVIDED),
    (set_gathered, zero(2), _UNREDUCED),
]


def said(config, habit):
    """Return what is said of a step by hand, by an error or a warning."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    x, y = (part.chunk(2)[rt.rank] for part in batches("mlp")[0])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            for _ in range(2):
                habit(network, update, functional.cross_entropy(network(x), y))
        except msrun.UsageError as error:
            return error.message
    return "".join(str(each.message) for each in warned)


@pytest.mark.parametrize(("habit", "config", "words"), CASES)
def test_what_no_rank_averages_is_named(habit, config, words):
    for found in run_warm(said, 2, config, habit):
        assert words in found


def averaged(config):
    """Train by gradients by parameters, which the script averages over ranks."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    losses = []
    for batch in batches("mlp"):
        x, y = (part.chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)] for part in batch)
        loss = functional.cross_entropy(network(x), y)
        params = list(network.parameters())
        slopes = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for param, slope in zip(params, slopes, strict=True):
                param.sub_(0.1 * rt.mean_over_data(slope))
        losses.append(rt.mean_over_data(loss.detach()).item())
    return losses


@pytest.mark.filterwarnings("error:msrun")
def test_averaged_gradients_are_right():
    assert_equal_curves(run_warm(averaged, 2, DP), run_warm(averaged, 1, {})[0])


def pulled(config):
    """Train with a penalty on the distance of weights from where they began."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    begin = [param.detach().clone() for param in network.parameters()]
    losses = []
    for batch in batches("mlp"):
        x, y = (part.chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)] for part in batch)
        update.zero_grad()
        loss = functional.cross_entropy(network(x), y)
        pairs = zip(network.parameters(), begin, strict=True)
        loss = loss + sum(((param - old) ** 2).sum() for param, old in pairs)
        loss.backward()
        update.step()
        losses.append(rt.mean_over_data(loss).item())
    return losses


def test_a_sum_over_weights_is_none_over_the_batch():
    assert_equal_curves(run_warm(pulled, 2, DP), run_warm(pulled, 1, {})[0])
