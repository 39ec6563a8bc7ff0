"""The key `data`: ranks with parts of images learn what one process learns."""

import pytest
import torch
from image_models import ResNet, UNet, trained
from ranks import run_warm

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

MODELS = {"resnet": ResNet, "unet": UNet}
GRIDS = {"2 x 1": {"h": 2}, "1 x 2": {"w": 2}, "2 x 2": {"h": 2, "w": 2}}
ZERO = {"optimizer": {"zero": 3}}
OTHERS = {
    "3 x 1": (3, {"mesh": {"h": 3}}),
    "dp": (4, {"mesh": {"dp": 2, "h": 2}}),
    "zero 1": (2, {"mesh": {"h": 2}, "optimizer": {"zero": 1}}),
    "zero 3": (2, {"mesh": {"w": 2}, **ZERO}),
    "dp, zero 3": (4, {"mesh": {"dp": 2, "w": 2}, **ZERO}),
    "recompute": (2, {"mesh": {"h": 2}, "recompute": {"modules": ["blocks.*", "down?", "up?"]}}),
    "zero 3, recompute": (
        2,
        {"mesh": {"h": 2}, **ZERO, "recompute": {"modules": ["blocks.?", "down?"]}},
    ),
    "dp, 2 x 2": (8, {"mesh": {"dp": 2, "h": 2, "w": 2}}),
}


@pytest.fixture(scope="module")
def alone():
    """Return what one process learns, by model; each is trained once."""
    known = {}

    def of(name, config=None):
        key = name, str(config)
        if key not in known:
            known[key] = run_warm(trained, 1, config or {}, MODELS[name])[0]
        return known[key]

    return of


def assert_equal(found, expected):
    losses, weights = found
    assert losses.tolist() == pytest.approx(expected[0].tolist(), abs=1e-9)
    for name, weight in expected[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "grid", ["2 x 2", *(pytest.param(g, marks=pytest.mark.slow) for g in ("2 x 1", "1 x 2"))]
)
def test_ranks_with_parts_of_images_equal_one_process(name, grid, alone):
    axes = GRIDS[grid]
    ranks = torch.Size(axes.values()).numel()
    for found in run_warm(trained, ranks, {"mesh": axes}, MODELS[name]):
        assert_equal(found, alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("name", MODELS)
def test_parts_of_images_with_other_techniques_equal_one_process(name, case, alone):
    ranks, config = OTHERS[case]
    if "recompute" in config:
        modules = ["blocks.*"] if name == "resnet" else ["down?", "up?"]
        config = {**config, "recompute": {"modules": modules}}
    for found in run_warm(trained, ranks, config, MODELS[name]):
        assert_equal(found, alone(name))
