"""Convolutions of large parts: rows of other ranks are added, and own rows are not copied."""

import pytest
import torch
import torch.distributed as dist
from ranks import Counted, run_warm
from torch.nn import functional

import msrun
from msrun.parallel.images.division import ImageDims
from msrun.parallel.images.image_tensor import gathered

pytestmark = pytest.mark.torch

AXES = ("d", "h", "w")
# Mesh; size; kernel, stride, padding, dilation and groups.
CASES = {
    "common": ({"h": 2}, (40, 9), (3, 1, 1, 1, 1)),
    "large kernel": ({"h": 2}, (67, 9), (7, 1, 3, 1, 4)),
    "even kernel": ({"w": 2}, (9, 80), (4, 1, 2, 1, 1)),
    "dilated": ({"h": 2}, (80, 9), (3, 1, 3, 3, 1)),
    "dilated with strides": ({"h": 2}, (96, 9), (3, 2, 2, 2, 1)),
    "strides": ({"h": 2}, (64, 9), (3, 2, 1, 1, 2)),
    "wide strides": ({"h": 2}, (96, 9), (7, 2, 3, 1, 1)),
    "two dims": ({"h": 2, "w": 2}, (40, 36), (3, 1, 1, 1, 1)),
    "two dims, wide strides": ({"h": 2, "w": 2}, (96, 98), (7, 2, 3, 1, 1)),
    "two dims, dilated": ({"h": 2, "w": 2}, (90, 81), (3, 1, 3, 3, 2)),
    "two dims, even kernel": ({"h": 2, "w": 2}, (80, 80), (4, 2, 1, 1, 1)),
    "two dims, unlike ranks": ({"h": 2, "w": 2}, (80, 80), (4, 1, 2, 1, 1)),
    "neighbours on all sides": ({"h": 3, "w": 3}, (54, 57), (3, 1, 1, 1, 1)),
    "many borders": ({"h": 2, "w": 2}, (10, 36), (3, 1, 1, 1, 1)),
    "signal": ({"w": 4}, (160,), (5, 1, 2, 1, 1)),
    "volume": ({"d": 2, "w": 2}, (6, 5, 48), (3, 1, 1, 1, 1)),
}
NEEDS = ("x weight bias", "x", "weight bias", "x weight", "bias")


class Copied(Counted):
    """Notes the largest copy of tensors, too."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if func.name() in ("aten::cat", "aten::clone", "aten::constant_pad_nd"):
            self.largest = max(self.largest, found.numel())
        return found


def drawn(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def derived(found, factors, needs, gradient):
    """Return the gradients that are needed by name."""
    names = needs.split()
    of_factors = torch.autograd.grad(found, [factors[name] for name in names], gradient)
    return dict(zip(names, of_factors, strict=True))


def compared(case, needs="x weight bias", dtype=torch.float64, layout=None):
    """Return errors beside one process, the largest copy as a share of a part, and exchanges."""
    mesh, size, (kernel, *others) = case
    dims = len(size)
    axes = [axis if axis in mesh else None for axis in AXES[3 - dims :]]
    with msrun.init({"mesh": mesh, "data": {"x": ["dp", None, *axes]}}) as rt:
        images = ImageDims(rt.config, rt.context)
        factors = {
            "x": drawn(1, 16, 4, *size, dtype=dtype),
            "weight": drawn(2, 8, 4 // others[-1], *[kernel] * dims, dtype=dtype),
            "bias": drawn(3, 8, dtype=dtype),
        }
        if layout:
            factors["x"] = factors["x"].to(memory_format=layout)

        def convolution(*factors):
            return getattr(functional, f"conv{dims}d")(*factors, *others)

        image = images.part("x", factors["x"])
        own = {**factors, "x": image.local}
        for name in needs.split():
            for of in (factors, own):
                of[name] = of[name].detach().clone().requires_grad_()
        expected = convolution(*factors.values())
        gradient = drawn(4, *expected.shape, dtype=dtype)
        of_alone = derived(expected, factors, needs, gradient)
        part, image.local = images.part("x", gradient).local, own["x"]
        with Copied() as copied:
            found = convolution(image, own["weight"], own["bias"])
            of_parts = derived(found.local, own, needs, part)
        largest = copied.largest / own["x"].numel()
        errors = {"output": (gathered(found) - expected).abs().max().item()}
        for name, alone in of_alone.items():
            if name == "x":
                expected = images.part("x", alone).local
            else:
                expected = alone
                dist.all_reduce(of_parts[name])
            error = (of_parts[name] - expected).abs().max() / alone.abs().max()
            errors[name] = error.item()
    return errors, largest, copied.calls["all_to_all_single"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(6)
def test_large_parts_equal_one_process_and_are_not_copied(name):
    mesh, *_ = CASES[name]
    ranks = torch.Size(mesh.values()).numel()
    copies = []
    for errors, copied, exchanges in run_warm(compared, ranks, CASES[name]):
        assert max(errors.values()) < 1e-12
        assert exchanges == 2 * len(mesh)
        copies.append(copied > 0.5)
    # The last rank's windows over an even kernel read fewer rows after its part than before it; of
    # a dim of few rows, much of the output reads those of others.
    joined = {
        "even kernel": [1],
        "two dims, unlike ranks": [1, 2, 3],
        "volume": range(4),
        "many borders": range(4),
    }
    assert copies == [rank in joined.get(name, ()) for rank in range(ranks)]


@pytest.mark.parametrize("needs", NEEDS[1:])
def test_gradients_that_nobody_needs_are_not_computed(needs):
    for errors, _, exchanges in run_warm(compared, 2, CASES["common"], needs):
        assert max(errors.values()) < 1e-12
        assert exchanges == 1 + ("x" in needs.split())


def test_channels_may_be_last():
    found = run_warm(
        compared, 2, CASES["common"], "x weight bias", torch.float64, torch.channels_last
    )
    for errors, copied, _ in found:
        assert max(errors.values()) < 1e-12
        assert copied < 0.5


def test_narrow_parts_are_joined_so_that_their_sums_are_rounded_once():
    for _, copied, _ in run_warm(compared, 2, CASES["common"], "x", torch.bfloat16):
        assert copied > 1
