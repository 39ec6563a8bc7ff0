"""Under ZeRO no forward computes with parameters that were gathered before a change of them."""

import pytest
import torch
from ranks import assert_equal_curves, batches, build, run_warm
from test_grid import zero
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch

LEVELS = {f"zero {level}": zero(level) for level in (1, 2, 3)}
# The last layers belong to the model itself, which level 3 keeps gathered from forward to backward.
LEVELS["zero 3, of one unit"] = {"optimizer": {"zero": 3, "modules": ["fc1"]}}


def in_place(params, factor):
    for param in params:
        param.mul_(factor)


def by_data(params, factor):
    for param in params:
        param.data.mul_(factor)


def as_list(params, factor):
    torch._foreach_mul_(list(params), factor)


def parts(rt):
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    return [[t.chunk(count)[share] for t in batch] for batch in batches("mlp", steps=3)]


def evaluated(config, change):
    """Evaluate with other weights after each step, as with an average of them; return losses."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    losses = []
    for x, y in parts(rt):
        losses.append(rt.step(network, update, functional.cross_entropy, x, y).item())
        kept = [param.detach().clone() for param in network.parameters()]
        with torch.no_grad():
            for factor in (0.5, 0.25):
                change(network.parameters(), factor)
                loss = functional.cross_entropy(network(x), y)
                losses.append(rt.mean_over_data(loss).item())
            for param, before in zip(network.parameters(), kept, strict=True):
                param.copy_(before)
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize("change", [in_place, by_data, as_list])
@pytest.mark.parametrize("level", LEVELS)
def test_weights_may_change_around_an_evaluation(level, change):
    expected = run_warm(evaluated, 1, {}, change)[0]

    assert_equal_curves(run_warm(evaluated, 2, LEVELS[level], change), expected)


def looked_at(config, has_gradients):
    """Compute another loss between backward pass and step."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    losses = []
    for x, y in parts(rt):
        update.zero_grad()
        functional.cross_entropy(network(x), y).backward()
        with torch.set_grad_enabled(has_gradients):
            loss = functional.cross_entropy(network(x), y)
        losses.append(rt.mean_over_data(loss).item())
        update.step()
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_a_forward_between_backward_and_step_keeps_nothing(level, has_gradients):
    expected = run_warm(looked_at, 1, {}, has_gradients)[0]

    assert_equal_curves(run_warm(looked_at, 2, LEVELS[level], has_gradients), expected)


def called_alone(config):
    """Return sums over what a part computes before, between and after steps, and the losses."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    found = []
    for x, y in parts(rt):
        with torch.inference_mode():
            found.append(rt.mean_over_data(network.fc1(x).square().mean()).item())
        found.append(rt.step(network, update, functional.cross_entropy, x, y).item())
    with torch.no_grad():
        found.append(rt.mean_over_data(network.fc1(x).square().mean()).item())
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_a_part_is_called_alone_in_evaluation(level):
    """As transformers does with an encoder to generate."""
    expected = run_warm(called_alone, 1, {})[0]

    assert_equal_curves(run_warm(called_alone, 2, LEVELS[level]), expected)


def penalized_between(config):
    """Train with a penalty on weights that is computed between two forward passes."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    losses = []
    for x, y in parts(rt):
        update.zero_grad()
        first = functional.cross_entropy(network(x), y)
        penalty = sum(param.square().sum() for param in network.parameters())
        second = functional.cross_entropy(network(x / 2), y)
        (first + 0.01 * penalty + second).backward()
        shapes = [param.grad.shape for param in network.parameters()]
        update.step()
        losses.append(rt.mean_over_data(first + second).item())
    return losses, shapes


@pytest.mark.parametrize("level", [1, 2])
def test_a_penalty_between_two_forward_passes_reads_gathered_weights(level):
    expected, _ = run_warm(penalized_between, 1, {})[0]

    found = run_warm(penalized_between, 2, zero(level))
    assert_equal_curves([losses for losses, _ in found], expected)
    assert found[0][1] == [param.shape for param in build("mlp").parameters()]


def raising(grad):
    raise RuntimeError(f"of shape {tuple(grad.shape)}")


def after_a_raised_pass(config):
    """Return losses, and the norms that a script clips, behind a backward pass that raised."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    x, y = parts(rt)[0]
    given = x.clone().requires_grad_()
    given.register_hook(raising)
    both = sum(functional.cross_entropy(network(value), y) for value in (x, given))
    with pytest.raises(RuntimeError, match="of shape"):
        both.backward()
    found = []
    for own, target in parts(rt):
        update.zero_grad()
        loss = functional.cross_entropy(network(own), target)
        loss.backward()
        found.append(torch.nn.utils.clip_grad_norm_(network.parameters(), 0.1))
        update.step()
        found.append(rt.mean_over_data(loss))
    return [float(getattr(value, "full_tensor", lambda v=value: v)()) for value in found]


@pytest.mark.parametrize("level", [1, 2])
def test_a_raised_backward_pass_of_several_forward_passes_is_forgotten(level):
    expected = run_warm(after_a_raised_pass, 1, {})[0]

    assert_equal_curves(run_warm(after_a_raised_pass, 2, zero(level)), expected)


def differentiated_in_parts(config):
    """Train on two forward passes, of which the first is differentiated without a reduction."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    losses = []
    for x, y in parts(rt):
        update.zero_grad()
        pair = [functional.cross_entropy(network(own), y) for own in (x, x / 2)]
        with rt.no_sync(network):
            pair[0].backward()
        pair[1].backward()
        update.step()
        losses.append(rt.mean_over_data(pair[0] + pair[1]).item())
    return losses


@pytest.mark.parametrize("level", [1, 2])
def test_forward_passes_before_several_backward_passes_are_right(level):
    expected = run_warm(differentiated_in_parts, 1, {})[0]

    assert_equal_curves(run_warm(differentiated_in_parts, 2, zero(level)), expected)


def differentiated_twice(config):
    """Train by two backward passes of one graph with a penalty on weights, clipped after both."""
    rt = msrun.init(config)
    network = rt.shard(build("mlp"))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    found = []
    for x, y in parts(rt):
        update.zero_grad()
        loss = functional.cross_entropy(network(x), y)
        loss = loss + 0.1 * next(iter(network.parameters())).norm()
        (0.25 * loss).backward(retain_graph=True)
        found.append(torch.nn.utils.clip_grad_norm_(network.parameters(), 0.1))
        (0.75 * loss).backward(retain_graph=True)  # as many scripts do without a reason
        found.append(torch.nn.utils.clip_grad_norm_(network.parameters(), 0.2))
        update.step()
        found.append(rt.mean_over_data(loss))
    return [float(getattr(value, "full_tensor", lambda v=value: v)()) for value in found]


@pytest.mark.parametrize("level", [1, 2])
def test_backward_passes_of_one_graph_are_right(level):
    expected = run_warm(differentiated_twice, 1, {})[0]

    assert_equal_curves(run_warm(differentiated_twice, 2, zero(level)), expected)
