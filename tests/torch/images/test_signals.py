"""Signals and volumes in parts: functions and training equal those of the whole."""

import warnings

import pytest
import torch
import torch.distributed as dist
from fuzz_images import drawn
from ranks import run_warm
from signal_operators import CHANNELS, DTYPE, operators

import msrun
from msrun.errors import ModelError
from msrun.parallel.images.division import ImageDims
from msrun.parallel.images.image_tensor import gathered

pytestmark = pytest.mark.torch

GRIDS = {
    "a signal over 3": ({"h": 3}, (10,)),
    "a signal over 4": ({"h": 4}, (13,)),
    "depth over 2": ({"d": 2}, (7, 6, 5)),
    "height over 3": ({"h": 3}, (5, 7, 6)),
    "depth and width": ({"d": 2, "w": 2}, (5, 6, 7)),
    "all three": ({"d": 2, "h": 2, "w": 2}, (6, 5, 7)),
}


def difference(rt, dims, function, size):
    """Return by how much a function of parts is off, or what went wrong."""
    torch.manual_seed(1)
    x = torch.randn(2, CHANNELS, *size, dtype=DTYPE)
    alone = x.clone().requires_grad_()
    expected = function(alone)
    weight = torch.randn(expected.shape, dtype=DTYPE)
    (expected * weight).sum().backward()
    image = dims.part("x", x)
    part = image.local.requires_grad_()
    result = function(image)
    shape, whole = tuple(result.shape), gathered(result)
    (whole * weight).sum().backward()
    if shape != tuple(expected.shape):
        return shape
    gradient = dims.part("x", alone.grad).local
    off = (part.grad / rt.world_size - gradient).abs().max().item()
    return max((whole - expected).abs().max().item(), off)


def data_of(mesh, size):
    axes = ["h"] if len(size) == 1 else ["d", "h", "w"][-len(size) :]
    return {"x": ["dp", None, *(axis if axis in mesh else None for axis in axes)]}


def differences(mesh, size):
    """Return the functions that give something else on parts, with what."""
    warnings.simplefilter("ignore")  # of functions that are computed whole
    found = {}
    with msrun.init({"mesh": mesh, "data": data_of(mesh, size)}) as rt:
        dims = ImageDims(rt.config, rt.context)
        for name, function in operators(len(size)):
            off = difference(rt, dims, function, size)
            if not (isinstance(off, float) and off <= 1e-10):
                found[name] = off
    return found


@pytest.mark.parametrize(
    "grid", ["a signal over 3", *(pytest.param(g, marks=pytest.mark.slow) for g in list(GRIDS)[1:])]
)
def test_functions_of_parts_equal_those_of_the_whole(grid):
    mesh, size = GRIDS[grid]
    ranks = torch.Size(mesh.values()).numel()
    assert run_warm(differences, ranks, mesh, size, timeout=200) == [{}] * ranks


def chains(ranks, seeds):
    """Return the chains of functions that give something else on parts, and those refused."""
    warnings.simplefilter("ignore")
    wrong, refused = {}, {}
    for seed in seeds:
        mesh, size, steps = drawn(seed, ranks)
        with msrun.init({"mesh": mesh, "data": data_of(mesh, size)}) as rt:
            text = f"{mesh} {size} {' | '.join(step.text for step in steps)}"
            try:
                off = chained(rt, size, steps)
            except ModelError as error:
                refused[seed] = f"{text}: {error.message}"
                continue
            if not (isinstance(off, float) and off <= 1e-9):
                wrong[seed] = text, off
    return wrong, refused


def chained(rt, size, steps):
    """Return by how much a chain is off, of its result and of each gradient."""
    dims = ImageDims(rt.config, rt.context)
    model = torch.nn.Sequential(*steps)
    torch.manual_seed(2)
    x = torch.randn(2, CHANNELS, *size, dtype=DTYPE)
    alone = x.clone().requires_grad_()
    expected = model(alone)
    direction = torch.randn(expected.shape, dtype=DTYPE)
    (expected * direction).sum().backward()
    gradients = [param.grad for param in model.parameters()]
    model.zero_grad()
    image = dims.part("x", x)
    part = image.local.requires_grad_()
    result = model(image)
    if tuple(result.shape) != tuple(expected.shape):
        return tuple(result.shape), tuple(expected.shape)
    whole = gathered(result)
    (whole * direction).sum().backward()
    pairs = [(whole, expected), (part.grad / rt.world_size, dims.part("x", alone.grad).local)]
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        own = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(own)
        pairs.append((own / rt.world_size, gradient))
    return max(relative(a, b) for a, b in pairs)


def relative(found, expected):
    scale = max(1.0, expected.abs().max().item())
    return (found - expected).abs().max().item() / scale


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (3, range(20)),
        *(pytest.param(n, range(100), marks=pytest.mark.slow) for n in (2, 3, 4, 6)),
    ],
)
@pytest.mark.timeout(600)
def test_chains_of_functions_drawn_at_random_equal_those_of_the_whole(ranks, seeds):
    for wrong, _ in run_warm(chains, ranks, ranks, seeds, timeout=500):
        assert wrong == {}
