"""Gradients of parameters on servers, on a rank alone."""

import pytest
import torch
from torch import nn

from msrun.parallel.servers.gradients.remote_gradients import RemoteGradients, Terms
from msrun.parallel.servers.gradients.server_gradient import ServerGradient

pytestmark = pytest.mark.torch


class Remote:
    """A parameter on servers, of which nothing is pushed here."""

    def __init__(self, name, parameter):
        self.name, self.parameter = name, parameter


class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def watched():
    model = Either()
    remotes = [Remote(name, parameter) for name, parameter in model.named_parameters()]
    terms = Terms(scale=1.0, is_pushed=True, is_alone=True, is_sync=True)
    gradients = RemoteGradients(remotes, terms, no_servers)
    gradients.watch(model)
    return model, gradients


def fail(_):
    raise ArithmeticError


def no_servers():
    raise AssertionError("a rank alone needs no server for a norm")


def test_every_parameter_has_a_gradient_after_a_backward_pass_that_follows_one_that_raised():
    model, _gradients = watched()
    broken = model.used.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model(torch.ones(1, 2)).sum().backward()
    broken.remove()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()

    assert all(isinstance(each.grad, ServerGradient) for each in model.parameters())
    norms = [float(each.grad.norm()) for each in model.parameters()]
    assert norms == pytest.approx([2.0, 2**0.5, 0.0, 0.0])
