"""The key `data` in a pipeline: stages with parts of images learn what one process learns."""

import pytest
import torch
from image_models import ResNet, UNet, batches, build, data_of, loss_fn, trained
from ranks import run_warm
from test_image_training import Parts, Plain
from test_images import MODELS, assert_equal
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

# Both tensors of skips of the U-Net go to the second stage.
STAGES = {
    ResNet: {"stem*": 0, "pool": 0, "blocks.[01]*": 0, "*": 1},
    UNet: {"down*": 0, "bottom*": 0, "*": 1},
}


def pipeline(schedule="1f1b", microbatches=2, stages="auto", **more):
    settings = {"stages": stages, "schedule": schedule, "microbatches": microbatches}
    # Statistics of micro-batches are those of one process that accumulates gradients.
    norms = {"batch_norm": "local"} if microbatches > 1 else {}
    return {"mesh": {"pp": 2, "h": 2}, "pipeline": settings, **norms, **more}


RECOMPUTE = {"recompute": {"modules": ["blocks.?", "down?", "up?"]}}
CONFIGS = {
    "1f1b": (4, pipeline()),
    "gpipe, w": (4, pipeline("gpipe", mesh={"pp": 2, "w": 2})),
    "interleaved, zero 1": (4, pipeline("interleaved", optimizer={"zero": 1})),
    "interleaved zero bubble": (4, pipeline("interleaved_zb")),
    "zbv": (4, pipeline("zbv")),
    "zero 3": (4, pipeline(optimizer={"zero": 3})),
    "recompute": (4, pipeline("zbv")),
    "dp 2, zero 2": (
        8,
        pipeline("gpipe", 1, mesh={"pp": 2, "dp": 2, "h": 2}, optimizer={"zero": 2}),
    ),
    "2 x 2": (8, pipeline(mesh={"pp": 2, "h": 2, "w": 2})),
}


@pytest.fixture(scope="module")
def alone():
    """Return what one process learns, by model and micro-batches; each is trained once."""
    known = {}

    def of(make, config):
        parts = config["pipeline"]["microbatches"]
        if (make, parts) not in known:
            norms = {"batch_norm": "local"} if parts > 1 else {}
            known[make, parts] = run_warm(trained, 1, {"accumulate": parts, **norms}, make)[0]
        return known[make, parts]

    return of


def assert_stages_equal(found, expected):
    """Compare losses, outputs of all ranks, and the weights and buffers that stages have."""
    names = set()
    for losses, weights in found:
        assert_equal((losses, expected[1] | weights), expected)
        names |= set(weights)
    assert names == set(expected[1])


@pytest.mark.parametrize("make", MODELS.values())
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.few(1)
def test_stages_with_parts_of_images_equal_one_process(make, microbatches, alone):
    schedule = "gpipe" if microbatches == 1 else "1f1b"
    config = pipeline(schedule, microbatches, STAGES[make])
    assert_stages_equal(run_warm(trained, 4, config, make), alone(make, config))


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_every_schedule_and_technique_equals_one_process(name, case, alone):
    ranks, config = CONFIGS[case]
    if case == "recompute":
        modules = ["blocks.*"] if name == "resnet" else ["down?", "up?"]
        config = {**config, "recompute": {"modules": modules}}
    assert_stages_equal(run_warm(trained, ranks, config, MODELS[name]), alone(MODELS[name], config))


def mixed_by(make, config, path, other):
    """Return losses, weights and outputs of steps between which a checkpoint changes the layout.

    Images have other sizes in each step, and some micro-batch has fewer samples.
    """
    sizes = [(12, 10), (9, 14), (12, 10)]
    steps = [batches(UNet, count=1, size=size)[0] for size in sizes]
    losses = []
    for number, settings in enumerate((config, other, config)):
        with msrun.init(settings) as rt:
            model = rt.shard(build(make), sample=steps[0][:1])
            optimizer = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
            if number:
                rt.load(model, optimizer, path=path / str(number - 1))
            losses.append(rt.step(model, optimizer, loss_fn, *steps[number], max_norm=0.1))
            rt.save(model, optimizer, step=number + 1, path=path / str(number))
            weights = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
            with torch.no_grad():
                weights["output"] = model.eval()(steps[1][0])
    return torch.stack(losses), weights


def test_sizes_change_and_checkpoints_go_from_stages_to_other_layouts(tmp_path):
    data = {"data": data_of(UNet, "h")}
    stages = pipeline(microbatches=3, stages={"one": 0, "norm": 0, "*": 1}) | data
    other = {"mesh": {"dp": 1, "h": 4}, "accumulate": 2, **data}
    alone = {"accumulate": 2}
    expected = run_warm(mixed_by, 1, Plain, alone, tmp_path / "alone", alone)[0]
    assert_stages_equal(run_warm(mixed_by, 4, Plain, stages, tmp_path / "stages", other), expected)


class Returned(Plain):
    """Returns its loss."""

    def forward(self, image, label):
        return functional.cross_entropy(super().forward(image), label)


class Read(Parts):
    """Reads parts, by name."""

    def get_part(self, index, rows):
        image, label = super().get_part(index, rows)
        return {"label": label, "image": image}

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"label": label, "image": image}


def read(config):
    """Return the losses of an epoch of a loader that reads parts."""
    with msrun.init(config) as rt:
        sample = {name: x[None] for name, x in Read()[0].items()}
        model = rt.shard(build(Returned), sample=sample)
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        loader = rt.loader(Read(), 2, shuffle=True)
        return [rt.step(model, optimizer, batch).item() for batch in loader]


def test_stages_take_parts_that_a_loader_has_read():
    ((alone),) = run_warm(read, 1, {"accumulate": 2})
    data = {"label": ["dp", "h", None], "image": ["dp", None, "h", None]}
    for losses in run_warm(read, 4, pipeline() | {"data": data}):
        assert losses == pytest.approx(alone, abs=1e-10)


class Exponential(nn.Module):
    def forward(self, x):
        return torch.matrix_exp(x)


class Asking(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Mixing(Plain):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind()

    def forward(self, image):
        return super().forward(self.kind(image))


def refused(kind):
    """Return what is said of a model, and whether its weights changed."""
    stages = {"kind": 0, "one": 0, "norm": 0, "*": 1}
    with msrun.init(pipeline(stages=stages) | {"data": data_of(UNet, "h")}) as rt:
        x, y = batches(UNet, size=(12, 12))[0]
        torch.manual_seed(0)
        model = rt.shard(Mixing(kind).double(), sample=(x,))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ModelError) as error:
            rt.step(model, optimizer, loss_fn, x, y)
        now = zip(before, model.parameters(), strict=True)
        return error.value.message, all(torch.equal(*pair) for pair in now)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (
            Exponential,
            "the model has matrix_exp, which is not known for parts of images (test_images_pipe",
        ),
        (Asking, "the model reads a value (test_images_pipeline.py, line"),
    ],
)
def test_what_has_no_rule_or_reads_values_is_refused_on_all_stages(kind, problem):
    for said, is_unchanged in run_warm(refused, 4, kind):
        assert problem in said
        assert is_unchanged
