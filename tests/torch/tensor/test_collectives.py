"""Collectives with gradients: values, first and second derivatives, refusals."""

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import Counted, run_warm
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import msrun
from msrun.errors import UsageError
from msrun.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    neighbor_exchange,
    reduce_scatter,
    shift,
)

pytestmark = pytest.mark.torch


class Own(Function):
    """From a tensor of all ranks' inputs, equal on every rank, take this rank's."""

    @staticmethod
    def forward(_ctx, everything):
        return everything[dist.get_rank()].clone()

    @staticmethod
    def backward(_ctx, gradient):
        return Everyone.apply(gradient)


class Everyone(Function):
    """Stack every rank's output, for a function of it that every rank computes alike."""

    @staticmethod
    def forward(_ctx, own):
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(_ctx, gradient):
        return Own.apply(gradient)


def _halo(x, axis, **options):
    above, below = neighbor_exchange(x[:1], x[-2:] * 2, axis, **options)
    return torch.cat([above, x, below])


CASES = {
    "sum": all_reduce,
    "mean": lambda x, axis: all_reduce(x, axis, op="mean"),
    "max": lambda x, axis: all_reduce(x, axis, op="max"),
    "gather rows": all_gather,
    "gather columns": lambda x, axis: all_gather(x, axis, dim=-1),
    "scatter rows": reduce_scatter,
    "scatter columns": lambda x, axis: reduce_scatter(x, axis, dim=1),
    "to columns": lambda x, axis: all_to_all(x, axis, split_dim=1, concat_dim=0),
    "to rows": lambda x, axis: all_to_all(x.mT, axis, split_dim=-1, concat_dim=-2),
    "same dim": lambda x, axis: all_to_all(x, axis, split_dim=1, concat_dim=1),
    "broadcast": lambda x, axis: broadcast(x, axis, src=1),
    "halo": _halo,
    "halo in a ring": lambda x, axis: _halo(x, axis, ring=True),
    "shift": shift,
    "shift back": lambda x, axis: shift(x, axis, -1, ring=False, fill=3.0),
}


def _expected(inputs, rank):
    """Return what `rank` gets in each of `CASES`, from what each rank gives."""
    size, total = len(inputs), sum(inputs)
    zero = torch.zeros_like(total)
    edges = [zero, *inputs, zero]
    before, after = edges[rank], edges[rank + 2]
    last, first = inputs[rank - 1], inputs[(rank + 1) % size]
    return {
        "sum": total,
        "mean": total / size,
        "max": torch.stack(inputs).amax(0),
        "gather rows": torch.cat(inputs),
        "gather columns": torch.cat(inputs, 1),
        "scatter rows": total.chunk(size)[rank],
        "scatter columns": total.chunk(size, 1)[rank],
        "to columns": torch.cat([x.chunk(size, 1)[rank] for x in inputs]),
        "to rows": torch.cat([x.mT.chunk(size, 1)[rank] for x in inputs]),
        "same dim": torch.cat([x.chunk(size, 1)[rank] for x in inputs], 1),
        "broadcast": inputs[1],
        "halo": torch.cat([before[-2:] * 2, inputs[rank], after[:1]]),
        "halo in a ring": torch.cat([last[-2:] * 2, inputs[rank], first[:1]]),
        "shift": last,
        "shift back": after if rank + 1 < size else zero + 3,
    }


def _check_all():
    """Return the cases with a wrong value or derivative."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(5)  # all ranks check the same function at the same point
    inputs = torch.randn(size, size, size, dtype=torch.float64)
    expected = _expected(list(inputs), rank)
    wrong = []
    for name, function in CASES.items():
        found = function(inputs[rank], dist.group.WORLD)
        if found.shape != expected[name].shape or not torch.allclose(found, expected[name]):
            wrong.append(f"{name}: value")

        def whole(everything, function=function):
            return Everyone.apply(function(Own.apply(everything), dist.group.WORLD)).square()

        everything = inputs.clone().requires_grad_()
        if not gradcheck(whole, everything, fast_mode=size > 2, raise_exception=False):
            wrong.append(f"{name}: gradient")
        # Once is enough: gradients of second order are the same collectives.
        if size == 2 and not gradgradcheck(
            whole, everything, fast_mode=True, raise_exception=False
        ):
            wrong.append(f"{name}: second derivative")
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_values_and_derivatives(world_size):
    assert run_warm(_check_all, world_size) == [[]] * world_size


def _refusal(call):
    with pytest.raises(UsageError) as caught:
        call()
    return caught.value.message


def _named():
    """Return what collectives over each axis of a 2 x 2 mesh see of the ranks' numbers."""
    runtime = msrun.init({"mesh": {"a": 2, "b": 2}, "mode": "manual"})
    x = torch.tensor([float(runtime.rank)])
    return {
        axis: (
            all_gather(x, axis).tolist(),
            broadcast(x, axis, src=1).item(),
            shift(x, axis, ring=False, fill=-1).item(),
        )
        for axis in "ab"
    }


def test_an_axis_is_named():
    assert run_warm(_named, 4) == [
        {"a": ([0, 2], 2, -1), "b": ([0, 1], 1, -1)},
        {"a": ([1, 3], 3, -1), "b": ([0, 1], 1, 0)},
        {"a": ([0, 2], 2, 0), "b": ([2, 3], 3, -1)},
        {"a": ([1, 3], 3, 1), "b": ([2, 3], 3, 2)},
    ]


def _alone():
    msrun.init({"mesh": {"tp": 1}, "mode": "manual"})
    x = torch.ones(2, 3, requires_grad=True)
    same = ("sum", "mean", "max", "gather columns", "scatter columns", "to columns", "shift")
    assert all(CASES[name](x, "tp") is x for name in same)
    assert broadcast(x, "tp") is x
    above, below = neighbor_exchange(x[:1], 2 * x[:2], "tp", fill=-1)
    assert torch.equal(above, -torch.ones(2, 3))
    assert torch.equal(below, -torch.ones(1, 3))
    above, below = neighbor_exchange(x[:1], 2 * x[:2], "tp", ring=True)
    assert torch.equal(above, 2 * x)
    assert torch.equal(below, x[:1])


def test_one_rank_is_the_identity():
    run_warm(_alone, 1)


def _refusals():
    x = torch.ones(4, 3)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    before = _refusal(lambda: all_reduce(x, "tp"))
    msrun.init({"mesh": {"tp": 2}, "mode": "manual"})
    return [
        before,
        _refusal(lambda: all_reduce(x, "mp")),
        _refusal(lambda: all_reduce(x, "tp", op="prod")),
        _refusal(lambda: reduce_scatter(x, "tp", dim=1)),
        _refusal(lambda: all_to_all(x, dist.group.WORLD, split_dim=-1, concat_dim=0)),
        _refusal(lambda: all_gather(x, "tp", dim=2)),
        _refusal(lambda: all_gather(torch.tensor(1.0), "tp")),
        _refusal(lambda: broadcast(x, "tp", src=2)),
        _refusal(lambda: shift(x, "tp", 2)),
        _refusal(lambda: neighbor_exchange(x, x.double(), "tp")),
        _refusal(lambda: all_reduce(distribute_tensor(x, mesh, [Shard(0)]), "tp")),
    ]


def test_refusals():
    expected = [
        "all_reduce over axis tp: msrun.init was not called",
        "axis 'mp' is not in mesh (tp)",
        "all_reduce: op 'prod' has no gradient here (choose sum, mean or max)",
        "reduce_scatter over axis tp: dim 1 of size 3 can not be split into 2",
        "all_to_all over a group of 2 ranks: dim -1 of size 3 can not be split into 2",
        "all_gather over axis tp: a 2-dim tensor has no dim 2",
        "all_gather over axis tp: a 0-dim tensor has no dim 0",
        "broadcast over axis tp: src 2 is no rank of it (0 to 1)",
        "shift over axis tp: step 2 is neither 1 nor -1",
        "neighbor_exchange over axis tp: types torch.float32 and torch.float64 differ",
        "all_reduce over axis tp: a DTensor already knows its mesh",
    ]

    assert run_warm(_refusals, 2) == [expected, expected]


def _types():
    """Return sums of other types, of nothing, and of a transposed tensor changed in place."""
    world, rank = dist.group.WORLD, dist.get_rank()
    numbers = torch.tensor([rank + 1, 10])
    half = torch.tensor([0.5 * rank], dtype=torch.bfloat16)
    rows = torch.arange(4.0).view(2, 2).mT.requires_grad_()
    back = reduce_scatter(all_gather(rows, world, dim=1), world, dim=1)
    back += 1
    before, after = neighbor_exchange(rows.mT, rows[:, :1], world)
    before += 1
    after += 1
    return (
        all_reduce(numbers, world).tolist(),
        all_reduce(numbers, world, op="mean").tolist(),
        (all_reduce(half, world).dtype, all_reduce(half, world).item()),
        all_gather(torch.empty(0, 3), world, dim=1).shape,
        all_to_all(torch.empty(2, 0), world, split_dim=1, concat_dim=0).shape,
        back.tolist(),
    )


def test_types_and_strides():
    expected = (
        [3, 20],
        [1.5, 10.0],
        (torch.bfloat16, 0.5),
        (0, 6),
        (4, 0),
        [[1.0, 5.0], [3.0, 7.0]],
    )

    assert run_warm(_types, 2) == [expected, expected]


def _every_case(x):
    """Apply every collective to the result of the one before."""
    for function in CASES.values():
        x = x.sin() * (1 + function(x.cos(), dist.group.WORLD).square().mean())
    return x


def _keep(_context, operator, *_args, **_kwargs):
    is_kept = "c10d" in operator.namespace
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


RECOMPUTATIONS = {
    "none": _every_case,
    "all": lambda x: checkpoint(_every_case, x, use_reentrant=False),
    "all but communication": lambda x: checkpoint(
        _every_case,
        x,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, _keep),
    ),
}


def _recomputed(name):
    """Return the gradient and how many collectives ran."""
    x = torch.full((2, 2), 1.0 + dist.get_rank(), dtype=torch.float64, requires_grad=True)
    with Counted() as counted:
        RECOMPUTATIONS[name](x).sum().backward()
    return x.grad.tolist(), counted.calls.total()


def test_recomputation():
    """Kept results are those of the forward pass, not what an in-place collective left over."""
    plain = run_warm(_recomputed, 2, "none")
    repeated = run_warm(_recomputed, 2, "all")
    kept = run_warm(_recomputed, 2, "all but communication")

    assert kept == plain
    assert repeated == [(gradient, calls + len(CASES)) for gradient, calls in plain]


def _ring_attention(q, k, v):
    """Attend from this rank's queries to the keys of all ranks, which travel around the ring."""
    world = dist.group.WORLD
    largest = torch.full_like(q[..., :1], -torch.inf)
    total, out = torch.zeros_like(largest), torch.zeros_like(q)
    kv = torch.stack([k, v])
    for step in range(world.size()):
        scores = q @ kv[0].mT / q.size(-1) ** 0.5
        new = torch.maximum(largest, scores.amax(-1, keepdim=True).detach())
        weights, keep = torch.exp(scores - new), torch.exp(largest - new)
        total = total * keep + weights.sum(-1, keepdim=True)
        out = out * keep + weights @ kv[1]
        largest = new
        if step + 1 < world.size():
            kv = shift(kv, world)
    return out / total


def _ring():
    torch.manual_seed(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = [torch.randn(2, 4 * size, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    expected = functional.scaled_dot_product_attention(*whole)
    expected.square().sum().backward()
    own = [t.detach().chunk(size, 1)[rank].clone().requires_grad_() for t in whole]
    found = _ring_attention(*own)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected.chunk(size, 1)[rank])
    for part, t in zip(own, whole, strict=True):
        torch.testing.assert_close(part.grad, t.grad.chunk(size, 1)[rank])


@pytest.mark.parametrize("world_size", [2, 3])
def test_ring_attention(world_size):
    run_warm(_ring, world_size)


def _image(kernel, grid):
    """Convolve blocks of an image on a grid of ranks, with the rows and columns around them."""
    runtime = msrun.init({"mesh": dict(zip("hw", grid, strict=True)), "mode": "manual"})
    torch.manual_seed(1)
    edge, at = kernel // 2, runtime.coordinate
    weight = torch.randn(2, 3, kernel, kernel, dtype=torch.float64, requires_grad=True)
    whole = torch.randn(1, 3, 8, 8, dtype=torch.float64, requires_grad=True)

    def block(t):
        return t.chunk(grid[0], 2)[at["h"]].chunk(grid[1], 3)[at["w"]]

    expected = functional.conv2d(whole, weight, padding=edge)
    wanted = torch.autograd.grad(expected.square().sum(), (whole, weight))
    x = own = block(whole.detach()).clone().requires_grad_()
    for dim, axis in ((2, "h"), (3, "w")):
        first, last = x.narrow(dim, 0, edge), x.narrow(dim, x.size(dim) - edge, edge)
        before, after = neighbor_exchange(first, last, axis)
        x = torch.cat([before, x, after], dim)
    found = functional.conv2d(x, weight)
    gradients = torch.autograd.grad(found.square().sum(), (own, weight))
    torch.testing.assert_close(found, block(expected))
    torch.testing.assert_close(gradients[0], block(wanted[0]))
    total = all_reduce(all_reduce(gradients[1], "h"), "w")
    torch.testing.assert_close(total, wanted[1])


@pytest.mark.sampled
@pytest.mark.parametrize("grid", [(4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kernel", [3, 5])
def test_image_blocks(kernel, grid):
    run_warm(_image, grid[0] * grid[1], kernel, grid)
