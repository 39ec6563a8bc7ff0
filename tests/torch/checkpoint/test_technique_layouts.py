"""Checkpoints of a transformer between cp, stages, grids, tensor parallel, ZeRO and one rank."""

import pytest
import torch
from ranks import OPTIMIZERS, assert_equal_curves, batches, build, oracle, run_warm, token_loss

import msrun

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
]

CONTEXT = [{"match": "*", "style": "context"}]
TENSOR = [
    {"match": "layers.*.[qkv]", "style": "colwise"},
    {"match": "layers.*.o", "style": "rowwise"},
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]


def grid(style, *axes):
    """Return the rules of a grid: products in turns, norms as the product that follows."""
    first, second, *rest = axes
    after = [second, first, *rest] if style != "2.5d" else [first, axes[2], second]
    here = ("layers.*.[qkv]", "layers.*.up", "*norm*")
    there = ("layers.*.o", "layers.*.down")
    return [{"match": name, "style": style, "axes": list(axes)} for name in here] + [
        {"match": name, "style": style, "axes": after} for name in there
    ]


# Ranks and configuration.
LAYOUTS = {
    "one": (1, {}),
    "cp": (2, {"mesh": {"cp": 2}, "plan": CONTEXT}),
    "cp, dp, zero 3": (
        4,
        {"mesh": {"dp": 2, "cp": 2}, "plan": CONTEXT, "optimizer": {"zero": 3}},
    ),
    "cp, pp": (
        4,
        {
            "mesh": {"pp": 2, "cp": 2},
            "plan": CONTEXT,
            "pipeline": {"stages": "auto", "microbatches": 2},
            "optimizer": {"zero": 1},
        },
    ),
    "tp": (2, {"mesh": {"tp": 2}, "plan": TENSOR}),
    "zero 3": (2, {"optimizer": {"zero": 3}}),
    "2d": (4, {"mesh": {"x": 2, "y": 2}, "plan": grid("2d", "x", "y")}),
    "2d, dp, zero 1": (
        4,
        {
            "mesh": {"dp": 2, "x": 2, "y": 1},
            "plan": grid("2d", "x", "y"),
            "optimizer": {"zero": 1},
        },
    ),
    "3d": (8, {"mesh": {"x": 2, "y": 2, "z": 2}, "plan": grid("3d", "x", "y", "z")}),
}
SAVED_AFTER = 2
# Source and those that go on from it; in CI each layout is a source and a target at least once.
ROWS = [
    ("one", ["cp", "2d"]),
    ("cp", ["one", "tp", "zero 3", "cp, pp"]),
    ("cp, pp", ["one", "cp", "2d"]),
    ("tp", ["cp", "2d"]),
    ("zero 3", ["cp, dp, zero 3"]),
    ("2d", ["one", "tp", "2d, dp, zero 1"]),
    ("cp, dp, zero 3", ["cp", "one", "2d"]),
    ("2d, dp, zero 1", ["2d", "one"]),
    pytest.param("3d", ["one", "2d", "cp"], marks=pytest.mark.slow),
    pytest.param("2d", ["3d"], marks=pytest.mark.slow),
]


def saved(config, folder):
    """Train the first steps, save, and return the losses."""
    runtime, network, update, steps = prepared(config)
    losses = [step() for step in steps[:SAVED_AFTER]]
    runtime.save(network, update, step=SAVED_AFTER, path=folder)
    runtime.finish()
    return losses


def resumed(config, folder):
    """Load, and return the losses of the other steps."""
    runtime, network, update, steps = prepared(config)
    with torch.no_grad():
        for param in network.parameters():
            param.add_(1)
    assert runtime.load(network, update, path=folder) == SAVED_AFTER
    return [step() for step in steps[SAVED_AFTER:]]


def prepared(config):
    """Return runtime, model, optimizer, and a function for each step that returns its loss."""
    runtime = msrun.init(config)
    sample = batches("transformer")[0][:1] if "pipeline" in config else None
    network = runtime.shard(build("transformer"), sample=sample)
    update = runtime.optimizer(OPTIMIZERS["adamw"](network.parameters()))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")

    def step(batch):
        part = [t.chunk(count)[share] for t in batch]
        return runtime.step(network, update, token_loss, *part).item()

    return runtime, network, update, [lambda b=b: step(b) for b in batches("transformer")]


@pytest.mark.few(1)
@pytest.mark.parametrize(("source", "targets"), ROWS)
def test_a_checkpoint_of_one_technique_goes_on_under_another(tmp_path, source, targets):
    folder, expected = str(tmp_path / "saved"), oracle("transformer", "adamw")
    ranks, config = LAYOUTS[source]

    assert_equal_curves(run_warm(saved, ranks, config, folder), expected[:SAVED_AFTER])

    for target in targets:
        ranks, config = LAYOUTS[target]
        assert_equal_curves(run_warm(resumed, ranks, config, folder), expected[SAVED_AFTER:])
