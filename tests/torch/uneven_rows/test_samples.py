"""Functions of tensors that ranks share by sample give what they give in one process."""

import pytest
import torch
from ranks import run_warm
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

import msrun
from msrun.parallel.tensor.guard import Guard

pytestmark = pytest.mark.torch

SAMPLES, WIDTH = 8, 6
TARGET = torch.linspace(-1, 1, SAMPLES * WIDTH).view(SAMPLES, WIDTH)
# Each takes samples, a weight and a bias, and returns a number; and the last node that it makes.
CALLS = {
    "linear": (functional.linear, "_LinearBackward"),
    "linear without bias": (lambda x, w, b: functional.linear(x, w) * b, None),
    "linear of more dims": (lambda x, w, b: functional.linear(x.view(8, 2, 3), w[:, :3], b), None),
    "linear of a frozen weight": (
        lambda x, w, b: functional.linear(x, w.detach(), b),
        "_LinearBackward",
    ),
    "mean": (lambda x, w, b: x.mean() + 0 * w.sum() + 0 * b.sum(), None),
    "mean alone": (lambda x, w, b: torch.mean(functional.linear(x, w, b)), "_MeanBackward"),
    "difference": (lambda x, w, b: functional.linear(x, w, b)[:, :4] - TARGET[:, :4], None),
    "the other way": (lambda x, w, b: (TARGET - x).square() @ w.t() + b, None),
    "factor": (lambda x, w, b: functional.linear(x * TARGET, w, b) / 3, None),
    "quotient": (lambda x, w, b: functional.linear(x / (TARGET + 2), w, b), None),
}


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def of(call, x, weight, bias, *, is_second):
    """Return the result of a call, and its gradients or those of a penalty on the first ones."""
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    result = call(*leaves)
    loss = whole(result.square().mean())
    if is_second:
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = whole(first.square().sum())
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return result, [None if each is None else whole(each) for each in found]


def swept(is_second):
    """Return the calls that are wrong, and of what node the result of each is."""
    runtime = msrun.init({"mesh": {"dp": 1, "tp": -1}, "mode": "manual"})
    mesh = runtime.mesh["dp", "tp"]
    draw = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(size, generator=draw) for size in ((SAMPLES, WIDTH), (4, WIDTH), (4,))
    )
    wrong, nodes = [], {}
    for name, (call, _) in CALLS.items():
        expected = of(call, x.clone(), weight.clone(), bias.clone(), is_second=is_second)
        part = distribute_tensor(x, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        with Guard(mesh):
            found = of(call, part, weight.clone(), bias.clone(), is_second=is_second)
            nodes[name] = found[0].grad_fn.name()
        pairs = zip([whole(found[0]), *found[1]], [expected[0], *expected[1]], strict=True)
        for one, other in pairs:
            same = one is other if None in (one, other) else torch.allclose(one, other, atol=1e-6)
            if not same:
                wrong.append(name)
    return wrong, nodes


@pytest.mark.parametrize("is_second", [False, True])
def test_functions_of_samples_are_right(is_second):
    """Of their gradients, too, and of what is differentiated again."""
    for wrong, nodes in run_warm(swept, 2, is_second):
        assert wrong == []
        for name, (_, node) in CALLS.items():
            assert node in (None, nodes[name])
