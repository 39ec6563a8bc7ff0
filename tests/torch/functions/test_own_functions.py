"""A script's own `torch.autograd.Function` beside a plan trains as in one process."""

import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

PLAN = [{"match": "up", "style": "colwise"}, {"match": "down", "style": "rowwise"}]


class Rounds(torch.autograd.Function):
    """Its gradient has no layout of what it got."""

    @staticmethod
    def forward(ctx, x):
        del ctx
        return (x * 4).floor() / 4

    @staticmethod
    def backward(ctx, gradient):
        del ctx
        return gradient * 2


class Adds(torch.autograd.Function):
    """Saves what it gets; its gradient adds up over all values of a sample."""

    @staticmethod
    def forward(ctx, x, weight, *, scale=1.0):
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return x.cumsum(-1) @ weight.T * scale

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        into = gradient @ weight * ctx.scale
        return into.flip(-1).cumsum(-1).flip(-1), gradient.T @ x.cumsum(-1) * ctx.scale


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        del ctx
        return gradient * 2


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = torch.tanh(self.up(x))
        h = h + 0.1 * Rounds.apply(h)
        return self.down(h) + Adds.apply(h, self.down.weight)


class WritesIn(Network):
    def forward(self, x):
        h = self.up(x).clone()
        Doubles.apply(h)
        return self.down(h)


class WritesWhole(Network):
    def forward(self, x):
        x = x.clone()
        Doubles.apply(x)
        return self.down(torch.tanh(self.up(x)))


def train(kind, config, *, is_plain):
    """Return the parameters after two steps."""
    warnings.simplefilter("ignore")  # functions computed whole
    torch.manual_seed(0)
    model = kind().double()
    rt = None
    if config is not None:
        rt = msrun.init(config)
        model = rt.shard(model)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    update = rt.optimizer(update) if rt else update
    for step in range(2):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).double()
        if rt and not is_plain:
            rt.step(model, update, nn.functional.mse_loss, x, x.flip(1))
        else:
            update.zero_grad()
            nn.functional.mse_loss(model(x), x.flip(1)).backward()
            update.step()
    return {name: full_tensor(param.detach()) for name, param in model.named_parameters()}


def gaps(is_plain):
    """Return how far weights are from one process, with and without recomputation."""
    found = []
    for kind in (Network, WritesWhole):
        alone = train(kind, None, is_plain=True)
        for more in ({}, {"recompute": {"modules": ["up", "down"]}}):
            config = {"mesh": {"tp": 2}, "plan": PLAN, **more}
            weights = train(kind, config, is_plain=is_plain)
            found += [float((weights[name] - alone[name]).abs().max()) for name in alone]
            msrun.init(config).close()
    return max(found)


@pytest.mark.parametrize("is_plain", [False, True], ids=["step", "plain loop"])
def test_it_trains_as_in_one_process(is_plain):
    for gap in run_warm(gaps, 2, is_plain):
        assert gap < 1e-12


def refusals():
    """Return what is said of a function that writes, with and without gradients."""
    warnings.simplefilter("ignore")  # functions computed whole
    config = {"mesh": {"tp": 2}, "plan": PLAN}
    rt = msrun.init(config)
    model = rt.shard(WritesIn())
    found = []
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            try:
                model(torch.ones(6, 4))
            except ModelError as error:
                found.append(error.message)
    return found


def test_one_that_writes_a_divided_tensor_is_refused():
    for said in run_warm(refusals, 2):
        assert "the model writes to a view of a divided tensor" in said[0]
        assert "torch.autograd.Function Doubles writes a divided tensor in place" in said[1]
