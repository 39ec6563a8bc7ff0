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
STAGED = [
    "torchvision ConvNeXt",
    "timm EfficientNet",
    "timm ViT",
    "torchvision ResNet-18",
    "diffusers UNet2D, attention",
    "diffusers UNet2D, conditioned",
    "diffusers AutoencoderKL",
]


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
    alone = run_warm(trained, 1, {}, name, timeout=TIMEOUT)
    mesh = GRIDS[grid]
    assert_equal(run_warm(trained, 2 ** len(mesh), {"mesh": mesh}, name, timeout=TIMEOUT), alone)


def assert_equal(found, alone):
    """Compare losses and outputs of all ranks, and weights, which ranks may have a part of."""
    ((expected, values),) = alone
    seen = set()
    for losses, own in found:
        assert losses == pytest.approx(expected, abs=1e-10)
        seen |= set(own)
        for key, value in own.items():
            gap = (value.double() - values[key].double()).abs().max().item()
            assert gap < 1e-9, (key, gap)
    assert seen == set(values)


@pytest.mark.parametrize(
    "name",
    [
        "timm ResNet",
        "diffusers UNet2D",
        *(pytest.param(name, marks=pytest.mark.slow) for name in STAGED),
    ],
)
def test_stages_with_parts_of_images_learn_what_one_process_does(name):
    pytest.importorskip(MODELS[name][0], exc_type=ImportError)
    # Batch norms in training see one micro-batch.
    parts = 2 if "UNet2D" in name else 1
    alone = run_warm(trained, 1, {"accumulate": parts}, name, timeout=TIMEOUT)
    config = {
        "mesh": {"pp": 2, "h": 2},
        "pipeline": {"stages": "auto", "schedule": "gpipe", "microbatches": parts},
    }
    assert_equal(run_warm(trained, 4, config, name, timeout=TIMEOUT), alone)


PLANNED = {
    "timm ConvNeXt V2": ["auto_tp"],
    "timm ViT": ["auto_tp"],
    "timm ResNet": ["auto_tp"],
    "timm Swin": ["auto_tp"],
    "torchvision ConvNeXt": [
        {"match": "*.block.3", "style": "colwise"},
        {"match": "*.block.5", "style": "rowwise"},
    ],
    "diffusers UNet2D, attention": ["auto_tp"],
    "diffusers UNet2D, conditioned": ["auto_tp"],
}


@pytest.mark.parametrize(
    "name",
    [
        "timm ConvNeXt V2",
        "diffusers UNet2D, attention",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in PLANNED
            if name not in ("timm ConvNeXt V2", "diffusers UNet2D, attention")
        ),
    ],
)
def test_a_plan_beside_parts_of_images_learns_what_one_process_does(name):
    pytest.importorskip(MODELS[name][0], exc_type=ImportError)
    alone = run_warm(trained, 1, {}, name, timeout=TIMEOUT)
    config = {"mesh": {"h": 2, "tp": 2}, "plan": PLANNED[name]}
    assert_equal(run_warm(trained, 4, config, name, timeout=TIMEOUT), alone)
