"""What scripts do to gradients and weights by hand, which ZeRO keeps in other tensors."""

import pytest
import torch
from ranks import assert_equal_curves, batches, build, run_warm
from test_grid import zero
from torch.func import functional_call
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

LEVELS = {f"zero {level}": zero(level) for level in (1, 2, 3)}
LEVELS["zero 1, small ones whole"] = {"optimizer": {"zero": 1, "threshold": 300}}


def parts(rt):
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    return [[t.chunk(count)[share] for t in batch] for batch in batches("mlp", steps=4)]


def to_none(network):
    network.zero_grad()


def to_zeros(network):
    network.zero_grad(set_to_none=False)


def by_hand(network):
    for param in network.parameters():
        param.grad = None


def of_layers(network):
    for layer in network.children():
        layer.zero_grad()


def dropped_between(config, drop):
    """Drop gradients between forward and backward, and step by hand; return losses."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    losses = []
    for x, y in parts(rt):
        loss = functional.cross_entropy(network(x), y)
        drop(network)
        loss.backward()
        with torch.no_grad():
            for param in network.parameters():
                param.sub_(0.1 * param.grad)
        losses.append(rt.mean_over_data(loss).item())
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize("drop", [to_none, to_zeros, by_hand, of_layers])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_may_be_dropped_between_forward_and_backward(level, drop):
    expected = run_warm(dropped_between, 1, {}, drop)[0]

    assert_equal_curves(run_warm(dropped_between, 2, LEVELS[level], drop), expected)


def test_gradients_may_be_dropped_one_by_one():
    expected = run_warm(dropped_between, 1, {}, by_hand)[0]

    assert_equal_curves(run_warm(dropped_between, 2, {}, by_hand), expected)


def dropped_in_part(config):
    """Drop gradients of one layer at some steps, and accumulate the others; return weights."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    for step, (x, y) in enumerate(parts(rt)):
        network(x)  # for a plot
        loss = functional.cross_entropy(network(x), y)
        for param in network.fc1.parameters() if step % 2 else ():
            param.grad = None
        loss.backward()
        update.step()
    return [full_tensor(param.detach()).tolist() for param in network.parameters()]


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_some_parameters_may_be_dropped(level):
    expected = run_warm(dropped_in_part, 1, {})[0]

    for found in run_warm(dropped_in_part, 2, LEVELS[level]):
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(own), torch.tensor(other))


def called_with_others(config):
    """Call a model with other weights, and with its own; return what the first call says."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    x, _ = parts(rt)[0]
    own = dict(network.named_parameters())
    same = torch.equal(functional_call(network, own, (x,)), network(x))
    try:
        functional_call(network, {name: param * 0.5 for name, param in own.items()}, (x,))
    except msrun.ModelError as error:
        return same, error.message
    return same, ""


@pytest.mark.parametrize("level", ["zero 1", "zero 2", "zero 3"])
def test_a_call_with_other_weights_is_refused(level):
    for same, said in run_warm(called_with_others, 2, LEVELS[level]):
        assert same
        assert said.startswith("parallel.optimizer.zero: fc1.weight is another tensor than in")


def test_a_call_with_other_weights_is_one_of_replicated_parameters():
    assert run_warm(called_with_others, 2, {}) == [(True, "")] * 2


def cast(config):
    """Change the type of all weights after a step; return what the next forward says."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    x, _ = parts(rt)[0]
    network(x)
    network.double()
    try:
        network(x.double())
    except msrun.ModelError as error:
        return error.message
    return ""


@pytest.mark.parametrize("level", ["zero 1", "zero 3"])
def test_another_type_after_shard_is_refused(level):
    for said in run_warm(cast, 2, LEVELS[level]):
        assert "or has another type, as in torch.func.functional_call or after model.to" in said
