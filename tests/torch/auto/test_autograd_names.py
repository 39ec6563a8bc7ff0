"""Private names of torch about hooks and functions still mean what we use them for."""

import pytest
import torch

from msrun.parallel.torch_compat import count_hooks, function_of, result_shapes

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


def test_a_step_of_the_graph_knows_the_shapes_of_what_it_computed():
    x = torch.ones(2, 3, requires_grad=True)
    maxima = torch.max(x * 2, 1)

    assert result_shapes(maxima.values.grad_fn) == [(2,)]
    assert result_shapes(maxima.values.sum().grad_fn) == [()]
    assert result_shapes((x * 2).grad_fn.next_functions[0][0]) == [(2, 3)]
    assert result_shapes(torch.split(x * 2, 1)[1].grad_fn) == [(1, 3), (1, 3)]
