"""What a script asks of a whole model, asked of a stage, is right, or refused by name."""

import pytest
import torch
from ranks import assert_equal_curves, run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import DividedModelError

pytestmark = pytest.mark.torch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.config = {"width": 4}

    def forward(self, x):
        return self.last(self.first(x))

    def generate(self, x):
        return self(x).argmax(-1)


def asked():
    pipeline = {"stages": {"first": 0, "last": 1}, "microbatches": 2}
    rt = msrun.init({"mesh": {"pp": 2}, "pipeline": pipeline})
    x = torch.zeros(2, 4)
    model = rt.shard(Net(), sample=(x,))
    assert not hasattr(model, "generate")
    with pytest.raises(msrun.UsageError) as error:
        model.generate(x)
    with pytest.raises(AttributeError) as plain:
        model.nothing()
    assert not isinstance(plain.value, msrun.UsageError)
    return error.value.message, model.config, model.eval()(x).shape


def test_a_method_of_the_whole_model_is_refused_by_name():
    said = "parallel.pipeline: generate is of Net, of which this rank has one stage"
    assert run_warm(asked, 2) == [(said, {"width": 4}, torch.Size([2, 2]))] * 2


class Deep(nn.Module):
    """Has lists that stages divide, and parameters of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.body = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(4))})
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x) * self.scale
        for layer in self.body["layers"]:
            x = layer(x).relu()
        return self.last(x)


STAGES = {"first": 0, "body.layers.[01]": 0, "body.layers.[23]": 1, "last": 1}
DATA = [(torch.randn(4, 4, generator=torch.Generator().manual_seed(i)), torch.arange(4) % 3)
        for i in range(4)]  # fmt: skip


def started(world):
    if world == 1:
        return msrun.init()
    return msrun.init({"mesh": {"pp": 2}, "pipeline": {"stages": STAGES, "microbatches": 2}})


READS = {
    "scale": lambda model: model.scale.square().sum(),
    "first.weight": lambda model: model.first.weight.square().sum(),
    "first.in_features": lambda model: model.first.in_features,
    "first layer": lambda model: model.body["layers"][0].in_features,
    "all layers": lambda model: [layer.in_features for layer in model.body["layers"]],
}


def read_in_loss(name):
    rt = started(2)
    model = rt.shard(Deep())
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def loss(output, target):
        READS[name](model)
        return functional.cross_entropy(output, target)

    with pytest.raises(DividedModelError) as error:
        rt.step(model, optimizer, loss, *DATA[0])
    return error.value.message


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("scale", "scale"),
        ("first.weight", "first"),
        ("first.in_features", "first"),
        ("first layer", "body.layers[0]"),
        ("all layers", "body.layers[0]"),
    ],
)
def test_a_loss_that_reads_what_another_stage_has_is_refused_on_all_ranks(name, shown):
    said = f"parallel.pipeline: this rank has one stage of the model, and {shown} is of another one"

    assert run_warm(read_in_loss, 2, name) == [said] * 2


def counted():
    rt = started(2)
    layers = rt.shard(Deep()).body["layers"]
    own = [id(layer) for layer in layers.children()]
    sliced = [[id(layer) in own for layer in layers[part]] for part in (slice(3), slice(-1, None))]
    try:
        last = id(layers[-1]) == own[-1]
    except DividedModelError:
        last = None
    assert all(id(layer) in own for layer in layers[:])
    return len(layers), last, [len(each) for each in sliced], "Linear" in repr(layers)


def test_members_of_a_divided_list_have_the_numbers_of_the_whole():
    assert run_warm(counted, 2) == [(4, None, [2, 0], True), (4, True, [1, 1], True)]


def trained(which, folder):
    """Train a part of a model, resume, and train on; return losses."""
    rt = started(torch.distributed.get_world_size())
    model = Deep()
    if which == "frozen":
        model.requires_grad_(requires_grad=False)
        model.last.requires_grad_()
    model = rt.shard(model)
    if which == "frozen":
        params = [param for param in model.parameters() if param.requires_grad]
    else:
        params = [param for name, param in model.named_parameters() if "last" in name]
    optimizer = rt.optimizer(torch.optim.AdamW(params, lr=0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for index, batch in enumerate(DATA):
        losses.append(rt.step(model, optimizer, functional.cross_entropy, *batch).item())
        scheduler.step()
        if index == 1:
            rt.save(model, optimizer, step=2, path=folder)
            rt.load(model, optimizer, path=folder)
    return losses


@pytest.mark.parametrize("which", ["frozen", "chosen"])
def test_a_stage_of_which_nothing_is_trained_needs_no_parameter(which, tmp_path):
    expected = run_warm(trained, 1, which, str(tmp_path / "one"))[0]

    assert_equal_curves(run_warm(trained, 2, which, str(tmp_path / "two")), expected)


def without_any():
    rt = started(2)
    model = rt.shard(Deep())
    exhausted = iter([])
    optimizer = rt.optimizer(torch.optim.SGD(exhausted, lr=0.1))
    with pytest.raises(msrun.UsageError) as error:
        rt.step(model, optimizer, functional.cross_entropy, *DATA[0])
    return error.value.message


def test_an_optimizer_that_has_no_parameter_on_any_stage_is_refused():
    said = run_warm(without_any, 2)

    assert [text.startswith("SGD holds no parameter of ") for text in said] == [True] * 2


def replicated():
    """Train the head of a pipeline in copies, whose ranks compare replicas."""
    config = {"mesh": {"pp": 2, "dp": 2}, "pipeline": {"stages": STAGES, "microbatches": 2}}
    rt = msrun.init(config)
    model = rt.shard(Deep())
    params = [param for name, param in model.named_parameters() if "last" in name]
    optimizer = rt.optimizer(torch.optim.AdamW(params, lr=0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    share, losses = rt.coordinate["dp"], []
    for batch in DATA:
        part = [t.chunk(2)[share] for t in batch]
        losses.append(rt.step(model, optimizer, functional.cross_entropy, *part).item())
        scheduler.step()
    return losses


def test_stages_without_trained_parameters_take_part_in_comparing_replicas(tmp_path):
    expected = run_warm(trained, 1, "chosen", str(tmp_path))[0]

    assert_equal_curves(run_warm(replicated, 4), expected)


def thawed():
    """Train a head, thaw a stage that had nothing to train, and train both; return losses."""
    rt = started(torch.distributed.get_world_size())
    model = rt.shard(Deep())
    named = dict(model.named_parameters())
    early = [param for name, param in named.items() if "last" not in name]
    for param in early:
        param.requires_grad_(requires_grad=False)
    late = [param for name, param in named.items() if "last" in name]
    optimizer = rt.optimizer(torch.optim.SGD(late, lr=0.1, momentum=0.9))
    losses = []
    for index, batch in enumerate(DATA):
        if index == 2:
            for param in early:
                param.requires_grad_()
            optimizer.add_param_group({"params": early, "lr": 0.05})
        losses.append(rt.step(model, optimizer, functional.cross_entropy, *batch).item())
    return losses


def test_a_stage_that_had_nothing_to_train_may_be_thawed():
    expected = run_warm(thawed, 1)[0]

    assert_equal_curves(run_warm(thawed, 2), expected)
