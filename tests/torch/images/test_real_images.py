"""Models of timm, torchvision and diffusers on parts of images learn what one process does."""

import pytest
from ranks import run_warm
from real_models import MODELS, trained

pytestmark = [
    pytest.mark.torch,
    # Each rank imports the package for itself, which takes most of the time.
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
]

TIMEOUT = 180.0
GRIDS = {"h": {"h": 2}, "w": {"w": 2}, "h x w": {"h": 2, "w": 2}}
QUICK = [("timm ResNet", "h"), ("torchvision ConvNeXt", "w"), ("diffusers UNet2D", "h")]


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        pytest.param(name, grid, marks=() if (name, grid) in QUICK else pytest.mark.slow)
        for name in MODELS
        for grid in GRIDS
    ],
)
def test_parts_of_images_learn_what_one_process_does(name, grid):
    pytest.importorskip(MODELS[name][0], exc_type=ImportError)
    ((losses, alone),) = run_warm(trained, 1, {}, name, timeout=TIMEOUT)
    mesh = GRIDS[grid]
    ranks = run_warm(trained, 2 ** len(mesh), {"mesh": mesh}, name, timeout=TIMEOUT)

    for found, values in ranks:
        assert found == pytest.approx(losses, abs=1e-10)
        for key, expected in alone.items():
            gap = (values[key].double() - expected.double()).abs().max().item()
            assert gap < 1e-9, (key, gap)
