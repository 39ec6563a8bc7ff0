"""Private names of torch about hooks and functions still mean what we use them for."""

import pytest
import torch

from msrun.parallel.torch_compat import count_hooks, function_of

pytestmark = pytest.mark.torch


def test_hooks_of_each_kind_are_counted():
    net = torch.nn.Linear(2, 2)
    assert count_hooks(net) == 0
    net.register_forward_pre_hook(lambda *_: None)
    net.register_forward_hook(lambda *_: None)
    net.register_full_backward_hook(lambda *_: None)
    assert count_hooks(net) == 3
    net.register_full_backward_pre_hook(lambda *_: None).remove()
    assert count_hooks(net) == 3


def test_a_function_with_its_own_gradient_is_known_by_its_step():
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            del ctx
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            del ctx
            return gradient

    x = torch.ones(1, requires_grad=True)
    assert function_of(Same.apply(x).grad_fn) is Same
    assert function_of((x * 2).grad_fn) is None
