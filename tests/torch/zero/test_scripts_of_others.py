"""What scripts do to gradients and weights by hand, which ZeRO keeps in other tensors."""

import warnings
from functools import partial

import pytest
import torch
from ranks import assert_equal_curves, batches, build, run_warm
from test_grid import zero
from torch import nn
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
@pytest.mark.few(2)
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


class Recurrent(nn.Module):
    """Its first hidden state is made like a parameter, as in torch's examples."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 10)

    def first_state(self, samples):
        weight = next(self.parameters())
        return weight.new_zeros(1, samples, 16), weight.data.new_full((1, samples, 16), 0.5)

    def forward(self, x, state=None):
        outputs, state = self.cells(x, state or self.first_state(len(x)))
        return self.head(outputs[:, -1]), state


def carried(config, *, starts_outside):
    """Train by hand on states that steps hand on; return losses."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    network = rt.shard(Recurrent())
    update = rt.optimizer(torch.optim.Adam(network.parameters(), lr=0.05))
    state, losses = None, []
    for x, y in parts(rt):
        if starts_outside and state is None:
            state = network.first_state(len(x))
        outputs, state = network(x.unsqueeze(1), state)
        state = tuple(each.detach() for each in state)
        loss = functional.cross_entropy(outputs, y)
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(rt.mean_over_data(loss).item())
    return losses


def is_made(config):
    """Return whether what a script makes of a parameter's kind is plain, by shapes."""
    rt = msrun.init(config)
    weight = rt.shard(build("mlp")).fc1.weight
    shapes = ((2, 3), weight.shape)
    return [type(weight.new_zeros(shape)) is torch.Tensor for shape in shapes]


# The layer returns views, which nothing writes.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("starts_outside", [True, False])
@pytest.mark.parametrize("level", ["zero 1", "zero 3"])
def test_first_states_are_made_like_parameters(level, starts_outside):
    expected = run_warm(partial(carried, starts_outside=starts_outside), 1, {})[0]

    found = run_warm(partial(carried, starts_outside=starts_outside), 2, LEVELS[level])
    assert_equal_curves(found, expected)


def test_what_has_the_shape_of_a_parameter_is_sharded():
    plan = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]
    for config in (zero(3), {"mesh": {"tp": 2}, "plan": plan}):
        assert run_warm(is_made, 2, config) == [[True, False]] * 2


class Codes(nn.Module):
    """Writes its codes through `data` in a forward, and returns a loss of its own."""

    def __init__(self):
        super().__init__()
        # Of one row, so that the first rank has all of it.
        self.codes = nn.Parameter(torch.randn(1, 4, 16))
        self.own = nn.Linear(16, 16)

    def forward(self, h):
        self.codes.data.copy_(self.codes.data * 0.9 + 0.01)
        return h + self.codes.mean(1), functional.mse_loss(self.own(h), h.detach())


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 10)

    def forward(self, h, aside):
        return self.layer(h), aside


class Coded(nn.Module):
    """Each module is a unit; the last may hand on a number of another one."""

    def __init__(self, hands_on):
        super().__init__()
        self.first, self.codes, self.head = nn.Linear(16, 16), Codes(), Head()
        self.hands_on = hands_on

    def forward(self, x):
        h, aside = self.codes(self.first(x))
        logits, handed = self.head(h, aside if self.hands_on else None)
        return logits, handed if self.hands_on else aside


def coded(config, hands_on):
    """Train by hand with a loss that a unit returns; return losses, and what was said."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    network = rt.shard(Coded(hands_on))
    update = rt.optimizer(torch.optim.SGD(network.parameters(), lr=0.05))
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in parts(rt):
            logits, aside = network(x)
            loss = functional.cross_entropy(logits, y) + 0.1 * aside
            loss.backward()
            update.step()
            update.zero_grad()
            losses.append(rt.mean_over_data(loss).item())
    return losses, {str(one.message)[:59] for one in caught if "msrun" in str(one.message)}


@pytest.mark.parametrize("level", ["zero 1", "zero 2", "zero 3"])
def test_units_write_their_parameters_and_return_losses(level):
    expected, _ = run_warm(coded, 1, {}, False)[0]  # noqa: FBT003

    found = run_warm(coded, 2, LEVELS[level], False)  # noqa: FBT003
    assert [said for _, said in found] == [set()] * 2
    assert_equal_curves([losses for losses, _ in found], expected)


def test_a_number_that_units_of_zero_3_hand_on_is_not_compared():
    expected, _ = run_warm(coded, 1, {}, True)[0]  # noqa: FBT003

    found = run_warm(coded, 2, zero(3), True)  # noqa: FBT003
    assert [said for _, said in found] == [
        {"msrun: the model hands a number of the loss from one module"}
    ] * 2
    assert_equal_curves([losses for losses, _ in found], expected)
