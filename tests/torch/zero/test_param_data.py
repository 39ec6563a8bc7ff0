"""Values that `param.data = tensor` gives a sharded parameter; memory in common is refused."""

from functools import partial

import pytest
import torch
from ranks import run_warm
from torch import nn

import msrun
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

PLAN = [{"match": "0", "style": "colwise"}]
SAID = (
    "ModelError: param.data = tensor has no effect on 0.weight, which is sharded, so it keeps its "
    "values"
)


def loss_of(output, _):
    return output.square().mean()


def whole(_):
    return torch.ones(8, 8)


def of_itself(model):
    return model[0].weight.data.clamp(-0.1, 0.1)


def of_another(model):
    return model[1].weight.data


def rebound(config, steps_of, new):
    """Return what a step says after `param.data = tensor`, and the weights then."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = rt.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.linspace(-1, 1, 32).view(4, 8)
    steps_of(rt, model, update, x)
    before = [full_tensor(param.detach()).clone() for param in model.parameters()]
    model[0].weight.data = new(model)
    try:
        steps_of(rt, model, update, x)
    except msrun.ModelError as error:
        said = f"ModelError: {error.message}"
    else:
        said = ""
    now = [full_tensor(param.detach()) for param in model.parameters()]
    return said, before, now


def step(rt, model, update, x):
    rt.step(model, update, loss_of, x, x)


def loop(_, model, update, x):
    """Train as a script does."""
    update.zero_grad()
    loss_of(model(x), x).backward()
    update.step()


def by_hand(_, model, update, x):
    """Train as a script does that has no optimizer."""
    del update
    model.zero_grad()
    loss_of(model(x), x).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(0.1 * param.grad)


CONFIGS = [
    {"optimizer": {"zero": 1}},
    {"optimizer": {"zero": 3}},
    {"mesh": {"tp": 2}, "plan": PLAN},
]


@pytest.mark.sampled
@pytest.mark.parametrize("new", [whole, of_itself])
@pytest.mark.parametrize("steps_of", [step, loop, by_hand])
@pytest.mark.parametrize("config", CONFIGS)
def test_new_data_of_a_sharded_parameter_is_that_of_one_process(config, steps_of, new):
    [(_, _, expected)] = run_warm(rebound, 1, {}, steps_of, new)

    for said, _, now in run_warm(rebound, 2, config, steps_of, new):
        assert said == ""
        torch.testing.assert_close(now, expected)


@pytest.mark.parametrize("steps_of", [step, loop])
@pytest.mark.parametrize("config", CONFIGS)
def test_data_of_another_parameter_is_refused(config, steps_of):
    for said, before, now in run_warm(rebound, 2, config, steps_of, of_another):
        assert said == SAID
        assert all(map(torch.equal, before, now))


def changed(config):
    """Give parameters the data that they have, and all of a model another type and back."""
    rt = msrun.init(config)
    model = rt.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for param in model.parameters():
        param.data = param.data
    loop(rt, model, update, torch.randn(4, 8))
    if "plan" in config:
        model.double()
        loop(rt, model, update, torch.randn(4, 8).double())
    return True


@pytest.mark.parametrize("config", CONFIGS)
def test_data_that_stays_the_same_and_new_types_are_taken(config):
    assert all(run_warm(changed, 2, config))


def normed(*, is_written):
    """Return what the first step says after a write to what is yet in a weight's memory."""
    rt = msrun.init({"optimizer": {"zero": 3}})
    model = rt.shard(nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if is_written:
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
    try:
        step(rt, model, update, torch.randn(4, 8))
    except msrun.ModelError as error:
        return error.message
    return ""


@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated:FutureWarning")
def test_a_write_to_a_plain_tensor_in_the_memory_of_a_parameter_is_refused():
    said = "0.weight was written before the first forward of its module: it was in the memory of "

    for found in run_warm(partial(normed, is_written=True), 2):
        assert found.startswith(f"{said}0.weight_orig")
    assert run_warm(partial(normed, is_written=False), 2) == ["", ""]


class Scaled(nn.Module):
    """Has a parameter of one element, of which only one rank has a shard."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterDict({"a": torch.ones(16), "b": torch.full((1,), 0.5)})

    def forward(self, x):
        return x * self.scales["a"] * self.scales["b"]


def penalized(config):
    """Train with a penalty that is differentiated before the loss."""
    rt = msrun.init(config)
    model = rt.shard(Scaled())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        update.zero_grad()
        (0.1 * sum(param.square().sum() for param in model.parameters())).backward()
        x = torch.linspace(-1, 1, 64).reshape(4, 16)
        loss_of(model(x), x).backward()
        update.step()
    return torch.cat([full_tensor(param.detach()) for param in model.parameters()]).tolist()


def test_a_penalty_on_a_parameter_of_one_element():
    expected = run_warm(penalized, 1, {})[0]

    assert run_warm(penalized, 2, {"optimizer": {"zero": 3}}) == 2 * [pytest.approx(expected)]
