"""`precision` over axes of images: parts round as whole images do, and rows travel narrow."""

import ctypes
import functools
import platform

import pytest
import torch
from image_models import ResNet, UNet, batches, build, data_of, loss_fn
from ranks import Counted, run_warm
from reduced import assert_as_near, learned, plain
from torch import nn
from torch.nn import functional as fn

import msrun

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]


class Summing(nn.Module):
    """Norms over the image, and sums that would round or overflow in the type of autocast."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.one, self.two = nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)
        self.up, self.down = nn.ConvTranspose2d(8, 8, 3, stride=2), nn.Conv2d(8, 8, 3, stride=2)
        self.pool = nn.AdaptiveAvgPool2d((2, 1))
        self.head = nn.Linear(8, 3)

    def forward(self, image):
        x = self.up(fn.gelu(self.one(self.conv(image))))
        x = fn.gelu(self.two(self.down(x)))
        x = x / (
            x.std((2, 3), keepdim=True) + torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True)
        )
        return self.head(x.mean((2, 3)) + self.pool(x).sum((2, 3)))


MODELS = {"resnet": ResNet, "unet": UNet, "summing": Summing}
ZERO = {"optimizer": {"zero": 3}}
CONFIGS = {
    "2 x 1": (2, {"mesh": {"h": 2}}),
    "2 x 2": (4, {"mesh": {"h": 2, "w": 2}}),
    "dp, zero 3": (4, {"mesh": {"dp": 2, "w": 2}, **ZERO}),
    "zero 1": (2, {"mesh": {"h": 2}, "optimizer": {"zero": 1}}),
    "recompute": (2, {"mesh": {"h": 2}, "recompute": {"modules": ["*"]}}),
}
RECOMPUTED = {"resnet": "blocks.*", "unet": "down?", "summing": "up"}


def images(name):
    make = UNet if name == "unet" else ResNet
    return [(x.float(), y) for x, y in batches(make)]


def of(name, config):
    """Return the configuration of a model."""
    make = UNet if name == "unet" else ResNet
    found = {**config, "data": data_of(make, config["mesh"])} if "mesh" in config else {**config}
    if "recompute" in config:
        found["recompute"] = {"modules": [RECOMPUTED[name]]}
    return found


def on_ranks(config, name):
    return learned(of(name, config), build(MODELS[name]).float(), images(name), loss_fn)


@functools.cache
def alone(precision, name):
    return plain(precision, build(MODELS[name]).float(), images(name), loss_fn)


@functools.cache
def gathering(precision, name):
    """Return what ranks learn that have whole samples, and gather parameters in that type."""
    config = {"optimizer": {"zero": 3}, "precision": precision}
    return run_warm(on_ranks, 4, config, name)[0]


def check(precision, name, case):
    ranks, config = CONFIGS[case]
    for found in run_warm(on_ranks, ranks, {**config, "precision": precision}, name):
        others = [alone(precision, name)]
        if "optimizer" in config:
            others.append(gathering(precision, name))
        assert_as_near(found, alone(None, name), *others)


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_images_round_as_one_process_does(name):
    check("bf16", name, "2 x 2")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CONFIGS)
def test_parts_with_other_techniques_round_as_one_process_does(case, name, precision):
    check(precision, name, case)


GLIBC_PERTURB, NAN = -6, 0x100  # bytes of 0xff, the inverse of the low byte, fill new memory


def on_ranks_with_garbage(config):
    """Train while memory that nothing wrote to is NaN."""
    c = ctypes.CDLL(None)
    c.mallopt(GLIBC_PERTURB, NAN)
    try:
        return on_ranks(config, "resnet")
    finally:
        c.mallopt(GLIBC_PERTURB, 0)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="fills memory by glibc")
def test_nothing_that_was_never_written_gets_into_gradients():
    # The last windows of a rank are one column with a stride.
    ranks, config = CONFIGS["2 x 2"]
    for losses, _ in run_warm(on_ranks_with_garbage, ranks, {**config, "precision": "bf16"}):
        assert losses == pytest.approx(alone("bf16", "resnet")[0], abs=0.02)


class Halos(nn.Module):
    """Notes the types of what it computes."""

    def __init__(self):
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 3, stride=2)
        self.norm, self.group = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.types = []

    def forward(self, x):
        for module in (self.conv, self.norm, self.up, self.group):
            x = module(x)
            self.types.append(x.dtype)
        x = x.mean((2, 3))
        self.types.append(x.dtype)
        return x


def sent(config):
    """Return the bytes of rows in a step, and the types of results."""
    with msrun.init(config) as rt:
        torch.manual_seed(0)
        model = rt.shard(Halos())
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with Counted() as counted:
            rt.step(model, optimizer, loss_fn, *images("resnet")[0])
        return counted.bytes["all_to_all_single"], model.types


def test_rows_travel_in_the_type_of_their_product_and_results_have_that_of_torch():
    config = {"mesh": {"h": 2}, "data": data_of(ResNet, "h")}
    wide = run_warm(sent, 2, config)
    narrow = run_warm(sent, 2, {**config, "precision": "bf16"})
    ((_, types),) = run_warm(sent, 1, {"precision": "bf16"})
    assert wide[0][0] > 0
    assert [2 * size for size, _ in narrow] == [size for size, _ in wide]
    assert [found for _, found in narrow] == [types, types]
    assert torch.bfloat16 in types
