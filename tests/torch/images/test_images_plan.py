"""Operator plans beside the key `data`: ranks of both axes learn what one process learns."""

import pytest
import torch
from image_models import CLASSES, ResNet, UNet, batches, build, data_of, loss_fn, trained
from ranks import run_warm
from test_images import assert_equal
from test_images_pipeline import assert_stages_equal, mixed_by
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]
WIDTH = 8


class Block(nn.Module):
    """A convolution, and an MLP of the channels of each pixel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale, self.drop = nn.Parameter(torch.ones(WIDTH)), nn.Dropout(0.0)

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.drop(functional.gelu(self.up(y)))
        y = self.scale * self.down(y)
        return x + y.permute(0, 3, 1, 2)


class ConvNet(nn.Module):
    """A class for each pixel."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1), nn.BatchNorm2d(WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head, self.last = nn.Linear(WIDTH, 4), nn.Linear(4, CLASSES)

    def forward(self, image):
        x = self.blocks(self.norm(self.stem(image)))
        x = functional.interpolate(x, size=image.shape[2:], mode="bilinear")
        return self.last(self.head(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class Attending(ConvNet):
    """Pixels attend to each other, which every rank computes whole."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, image):
        x = self.blocks(self.norm(self.stem(image)))
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = (
            layer(tokens).unflatten(2, (4, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.o(y).transpose(1, 2).view(x.shape)
        x = functional.interpolate(x, size=image.shape[2:], mode="bilinear")
        return self.last(self.head(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


MLPS = [
    {"match": "blocks.*.up", "style": "colwise"},
    {"match": "blocks.*.down", "style": "rowwise"},
    {"match": "head", "style": "colwise"},
    {"match": "last", "style": "rowwise"},
]
HEADS = [{"match": "[qkv]", "style": "colwise"}, {"match": "o", "style": "rowwise"}]
CONVOLUTIONS = [
    {
        "match": "blocks.*.conv1",
        "params": {"weight": ["tp", None, None, None]},
        "out": [None, "tp", None, None],
    },
    {
        "match": "blocks.*.conv2",
        "params": {"weight": [None, "tp", None, None]},
        "in": [None, "tp", None, None],
        "out": [None, None, None, None],
    },
]
H_TP = {"mesh": {"h": 2, "tp": 2}}
GPIPE = {"pipeline": {"stages": "auto", "schedule": "gpipe", "microbatches": 1}}
CONFIGS = {
    "tp, w": (4, {"mesh": {"tp": 2, "w": 2}}),
    "zero 1": (4, {**H_TP, "optimizer": {"zero": 1}}),
    "zero 3": (4, {**H_TP, "optimizer": {"zero": 3}}),
    "recompute": (4, {**H_TP, "recompute": {"modules": ["blocks.?"]}}),
    "recompute, saved": (4, {**H_TP, "recompute": {"modules": ["blocks.?"], "save": ["comm"]}}),
    "dp 2": (8, {"mesh": {"dp": 2, "h": 2, "tp": 2}}),
    "pp 2": (8, {"mesh": {"pp": 2, "h": 2, "tp": 2}, **GPIPE}),
}
WHOLE = pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank")


@pytest.mark.slow  # CI has it with checkpoints, with micro-batches and with writes in place
def test_mlps_of_parts_run_on_shards_and_equal_one_process():
    """Without a warning of anything that is computed whole."""
    alone = run_warm(trained, 1, {}, ConvNet)[0]
    for found in run_warm(trained, 4, {**H_TP, "plan": MLPS}, ConvNet):
        assert_equal(found, alone)


class Checkpointed(ConvNet):
    """Computes its blocks again, by itself."""

    def forward(self, image):
        x = self.norm(self.stem(image))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x = functional.interpolate(x, size=image.shape[2:], mode="bilinear")
        return self.last(self.head(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def test_checkpoints_of_the_model_itself_run_on_shards_again():
    alone = run_warm(trained, 1, {}, Checkpointed)[0]
    for found in run_warm(trained, 4, {**H_TP, "plan": MLPS}, Checkpointed):
        assert_equal(found, alone)


class Written(ConvNet):
    """Writes channels, which a plan shards."""

    def write(self, x):
        x[..., ::2] = 0
        return x

    def forward(self, image):
        x = functional.interpolate(self.norm(self.stem(image)), size=image.shape[2:])
        y = self.head(x.permute(0, 2, 3, 1))
        return self.last(self.write(y)).permute(0, 3, 1, 2)


class Sliced(Written):
    def write(self, x):
        part = x[..., :2]
        part += 1
        return x


class InPlace(Written):
    def write(self, x):
        x *= 2
        return functional.relu(x, inplace=True)


def test_elements_of_shards_are_written_in_place():
    alone = run_warm(trained, 1, {}, InPlace)[0]
    for found in run_warm(trained, 4, {**H_TP, "plan": MLPS}, InPlace):
        assert_equal(found, alone)


@WHOLE
@pytest.mark.filterwarnings("ignore:To construct DTensor")  # torch's, of a norm in evaluation
@pytest.mark.parametrize(("make", "plan"), [(Attending, [*MLPS, *HEADS]), (ResNet, CONVOLUTIONS)])
def test_attention_and_convolutions_of_a_plan_equal_one_process(make, plan):
    alone = run_warm(trained, 1, {}, make)[0]
    for found in run_warm(trained, 4, {**H_TP, "plan": plan}, make):
        assert_equal(found, alone)


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
def test_plans_beside_other_techniques_equal_one_process(case):
    ranks, config = CONFIGS[case]
    alone = run_warm(trained, 1, {}, ConvNet)[0]
    assert_stages_equal(run_warm(trained, ranks, {**config, "plan": MLPS}, ConvNet), alone)


class Grouped(ConvNet):
    """Norms of groups alone, so that micro-batches are those of one process."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)


def test_micro_batches_and_checkpoints_of_a_plan_equal_one_process(tmp_path):
    data = {"data": data_of(UNet, "h"), "accumulate": 2}
    plan = {**H_TP, "plan": MLPS, **data}
    other = {"mesh": {"tp": 1, "h": 4}, "plan": [], **data}
    alone = {"accumulate": 2}
    expected = run_warm(mixed_by, 1, Grouped, alone, tmp_path / "alone", alone)[0]
    assert_stages_equal(run_warm(mixed_by, 4, Grouped, plan, tmp_path / "plan", other), expected)


class Dropping(ConvNet):
    """Drops channels of the MLPs, which a plan shards."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.drop.p = 0.25


@WHOLE
def test_masks_of_dropout_are_those_without_a_plan():
    alone = run_warm(trained, 2, {"mesh": {"h": 2}}, Dropping)[0]
    for found in run_warm(trained, 4, {**H_TP, "plan": MLPS}, Dropping):
        assert_equal(found, alone)


class Wide(ConvNet):
    """Returns an even number of classes, which ranks share."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 4)


def looped(config):
    """Return losses and weights of a plain loop."""
    config = {**config, "data": data_of(UNet, "h")} if config else config
    with msrun.init(config) as rt:
        model = rt.shard(build(Wide))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for x, y in batches(UNet):
            optimizer.zero_grad()
            losses.append(loss_fn(model(x), y))
            losses[-1].backward()
            optimizer.step()
        weights = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
        return torch.stack(losses).detach(), weights


@WHOLE
@pytest.mark.parametrize("sharded", ["last", "head"])
def test_plain_loops_get_whole_outputs_of_sharded_channels(sharded):
    """Also of sums that ranks have not added up, behind a layer without a rule."""
    plan = [*MLPS[:2], {"match": sharded, "style": "colwise"}]
    alone = run_warm(looped, 1, {})[0]
    for found in run_warm(looped, 4, {**H_TP, "plan": plan}):
        assert_equal(found, alone)


class Calling(ConvNet):
    """Calls a function on shards."""

    def __init__(self):
        super().__init__()
        self.twice = msrun.shard(lambda x: 2 * x, in_=[[None, "tp", None, None]])

    def forward(self, image):
        return super().forward(self.twice(image))


def refused(plan, make=ConvNet):
    """Return what is said of a plan for a model, and whether its weights changed."""
    with msrun.init({**H_TP, "plan": plan, "data": data_of(UNet, "h")}) as rt:
        model = rt.shard(build(make))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ModelError) as error:
            rt.step(model, optimizer, loss_fn, *batches(UNet)[0])
        return error.value.message, all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (
            {"match": "blocks.0.norm", "style": "sequence"},
            "parallel.plan[0].in: blocks.0.norm gets images whose dim 1 h divides",
        ),
        (
            {"match": "blocks.0.conv", "params": {}, "out": [None, None, "tp", None]},
            "parallel.plan[0].out: blocks.0.conv gets images whose dim 2 h divides",
        ),
    ],
)
def test_rules_that_shard_rows_of_images_are_refused(rule, problem):
    for said, is_unchanged in run_warm(refused, 4, [rule]):
        assert problem in said
        assert is_unchanged


def test_a_function_on_shards_takes_no_image():
    for said, is_unchanged in run_warm(refused, 4, MLPS, Calling):
        assert "gets an image, of which ranks have parts" in said
        assert is_unchanged


@WHOLE
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (Written, "__setitem__, which writes an image that a plan shards (test_images_plan.py"),
        (Sliced, "the model writes to a view of a divided tensor, such as a slice"),
    ],
)
def test_writes_that_shards_would_not_see_are_refused(make, problem):
    for said, is_unchanged in run_warm(refused, 4, MLPS, make):
        assert problem in said
        assert is_unchanged
