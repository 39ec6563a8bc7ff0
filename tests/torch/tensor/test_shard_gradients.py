"""Functions of several tensors, each of them sharded or whole: results and all gradients."""

import warnings

import pytest
import torch
from ranks import run_warm
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

import msrun
from msrun.parallel.tensor.guard import Guard

pytestmark = pytest.mark.torch

WHOLE = Replicate()


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def conv(func=functional.conv2d, **options):
    return lambda x, weight, bias: func(x, weight, bias, **options)


TRANSPOSED = functional.conv_transpose2d
IMAGE, FILTERS, BIAS = (2, 4, 6, 6), (8, 4, 3, 3), (8,)
NORM = lambda x, w, b: functional.group_norm(x, 2, w, b)  # noqa: E731
# Function, shapes, and how the plan divides each tensor; whether it must run on shards.
CASES = {
    "columns": (conv(), (IMAGE, FILTERS, BIAS), (WHOLE, Shard(0), Shard(0)), True),
    "rows": (conv(padding=1), (IMAGE, FILTERS, BIAS), (Shard(1), Shard(1), WHOLE), True),
    "rows of a whole image": (conv(), (IMAGE, FILTERS, BIAS), (WHOLE, Shard(1), WHOLE), True),
    "samples": (conv(stride=2), (IMAGE, FILTERS, BIAS), (Shard(0), WHOLE, WHOLE), True),
    "groups": (
        conv(groups=2),
        (IMAGE, (8, 2, 3, 3), BIAS),
        (Shard(1), Shard(0), Shard(0)),
        True,
    ),
    "groups of a whole filter": (
        conv(groups=4),
        (IMAGE, (8, 1, 3, 3), BIAS),
        (Shard(1), WHOLE, WHOLE),
        True,
    ),
    "channels that meet": (conv(), (IMAGE, FILTERS, BIAS), (Shard(1), WHOLE, WHOLE), False),
    "height": (conv(), (IMAGE, FILTERS, BIAS), (Shard(2), WHOLE, WHOLE), False),
    "transposed columns": (
        conv(TRANSPOSED, stride=2),
        (IMAGE, (4, 8, 3, 3), BIAS),
        (WHOLE, Shard(1), Shard(0)),
        True,
    ),
    "transposed rows": (
        conv(TRANSPOSED, stride=2, padding=1, output_padding=1),
        (IMAGE, (4, 8, 3, 3), BIAS),
        (Shard(1), Shard(0), WHOLE),
        True,
    ),
    "transposed groups": (
        conv(TRANSPOSED, groups=2),
        (IMAGE, (4, 4, 3, 3), BIAS),
        (Shard(1), Shard(0), Shard(0)),
        True,
    ),
    "group norm of channels": (NORM, (IMAGE, (4,), (4,)), (Shard(1), Shard(0), WHOLE), True),
    "group norm of samples": (NORM, (IMAGE, (4,), (4,)), (Shard(0), WHOLE, WHOLE), True),
    "instance norm": (
        lambda x, w, b: functional.instance_norm(x, weight=w, bias=b),
        (IMAGE, (4,), (4,)),
        (Shard(1), WHOLE, WHOLE),
        True,
    ),
    "batch norm": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
        (IMAGE, (4,), (4,)),
        (Shard(1), WHOLE, Shard(0)),
        True,
    ),
    "batch norm of samples": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
        (IMAGE, (4,), (4,)),
        (Shard(0), WHOLE, WHOLE),
        False,
    ),
    "rms norm": (
        lambda x, w: functional.rms_norm(x, (6,), w),
        ((2, 4, 6), (6,)),
        (Shard(1), WHOLE),
        True,
    ),
    "einsum of heads": (
        lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y),
        ((2, 4, 3, 5), (2, 4, 6, 5)),
        (Shard(1), WHOLE),
        True,
    ),
    "einsum of a sum": (
        lambda x, y: torch.einsum("b...d,fd->b...f", x, y),
        ((2, 3, 4), (6, 4)),
        (Shard(2), Shard(1)),
        True,
    ),
    "einsum of columns": (
        lambda x, y: torch.einsum("bsd,fd->bsf", x, y),
        ((2, 3, 4), (6, 4)),
        (WHOLE, Shard(0)),
        True,
    ),
    "einsum of two letters": (
        lambda x, y: torch.einsum("bsd,fd->bsf", x, y),
        ((2, 3, 4), (6, 4)),
        (Shard(0), Shard(0)),
        False,
    ),
    "a bias by channel": (
        torch.maximum,
        (IMAGE, (4, 1, 1)),
        (Shard(1), WHOLE),
        True,
    ),
    "a scale by sample": (
        torch.atan2,
        (IMAGE, (4, 6, 6)),
        (Shard(0), WHOLE),
        True,
    ),
}


def sweep():
    """Return what is wrong, by case, and the cases that were computed whole."""
    runtime = msrun.init({"mesh": {"tp": -1}, "mode": "manual"})
    mesh = runtime.mesh["tp"]
    wrong, whole = [], set()
    for name, (func, shapes, placements, _) in CASES.items():
        plain = [random(*shape).requires_grad_() for shape in shapes]
        expected = func(*plain)
        expected.square().sum().backward()
        parts = [
            # A plain tensor is a whole one: a parameter of a module without a rule.
            tensor.detach().clone().requires_grad_()
            if placement.is_replicate() and at
            else distribute_tensor(
                tensor.detach(), mesh, [placement], src_data_rank=None
            ).requires_grad_()
            for at, (tensor, placement) in enumerate(zip(plain, placements, strict=True))
        ]
        with warnings.catch_warnings(record=True) as caught, Guard(mesh):
            warnings.simplefilter("always")
            found = func(*parts)
            found.square().sum().backward()
        whole |= {name for w in caught if "computed whole" in str(w.message)}
        pairs = [(found, expected), *((p.grad, t.grad) for p, t in zip(parts, plain, strict=True))]
        for at, (one, other) in enumerate(pairs):
            full = one.full_tensor() if isinstance(one, DTensor) else one
            if full.shape != other.shape or not torch.allclose(full, other, rtol=1e-4, atol=1e-5):
                wrong.append(f"{name}: {at}")
    return wrong, whole


def test_results_and_gradients_are_those_of_whole_tensors():
    expected = {name for name, (*_, on_shards) in CASES.items() if not on_shards}
    for wrong, whole in run_warm(sweep, 2):
        assert wrong == []
        assert whole == expected


def statistics():
    """Return the running statistics of a batch norm of channels, and what is wrong with a rank."""
    runtime = msrun.init({"mesh": {"tp": -1}, "mode": "manual"})
    mesh = runtime.mesh["tp"]
    x = random(*IMAGE)
    alone, ours = torch.nn.BatchNorm2d(4), torch.nn.BatchNorm2d(4)
    part = distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None)
    with Guard(mesh):
        found = [whole(ours(part)), whole(ours.eval()(part))]
    expected = [alone(x), alone.eval()(x)]
    found += [ours.running_mean, ours.running_var, ours.num_batches_tracked]
    expected += [alone.running_mean, alone.running_var, alone.num_batches_tracked]
    return [torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True)]


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_every_rank_has_the_running_statistics_of_all_channels():
    assert run_warm(statistics, 2) == 2 * [[True] * 5]
