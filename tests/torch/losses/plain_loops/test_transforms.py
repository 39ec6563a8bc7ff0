"""Gradients that torch.func takes by parameters in a plain loop, which no backward pass reduces."""

import warnings

import pytest
from ranks import run_warm
from test_counted_losses import build, data
from torch.func import functional_call, grad, vmap
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch


def of_batch(model, params, x, y):
    return grad(lambda p: functional.cross_entropy(functional_call(model, p, (x,)), y))(params)


def of_samples(model, params, x, y):
    """Return the mean of gradients of each sample, of which DP-SGD clips each."""

    def loss(p, one, target):
        return functional.cross_entropy(functional_call(model, p, (one[None],)), target[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    return {name: gradient.mean(0) for name, gradient in found.items()}


def of_inputs(model, _, x, y):
    """Take no gradient by a parameter, as a loss of derivatives by places does."""
    grad(lambda value: functional.cross_entropy(model(value), y))(x)
    return {}


def said(gradients):
    """Return what a loop is told that changes weights by such gradients."""
    rt = msrun.init({})
    model = rt.shard(build())
    params = {name: param.detach() for name, param in model.named_parameters()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in data(ignored=False):
            part = [tensor.chunk(rt.world_size)[rt.rank] for tensor in (x, y)]
            for name, gradient in gradients(model, params, *part).items():
                params[name].sub_(0.1 * rt.mean_over_data(gradient))
    return [str(each.message) for each in caught if "msrun" in str(each.message)]


@pytest.mark.parametrize("gradients", [of_batch, of_samples])
def test_gradients_by_parameters_are_a_warning(gradients):
    expected = (
        "msrun: gradients that torch.func takes by parameters in this loop are those of this "
        "rank's samples: call backward(), or average them with rt.mean_over_data"
    )
    assert run_warm(said, 2, gradients) == [[expected]] * 2


def test_gradients_by_inputs_are_not():
    assert run_warm(said, 2, of_inputs) == [[]] * 2
