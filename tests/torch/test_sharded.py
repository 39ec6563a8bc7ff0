"""What a script does to a model and its optimizer after `rt.shard`: right, or refused."""

import pytest
import torch
from ranks import OPTIMIZERS, assert_equal_curves, batches, build, run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError

pytestmark = pytest.mark.torch

PLAN = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]
STAGES = {"stages": {"fc1": 0, "fc2": 1, "fc3": 1}, "microbatches": 4}
KINDS = {
    "dp": {},
    "zero": {"optimizer": {"zero": 1}},
    "small ones whole": {"optimizer": {"zero": 3, "threshold": 300}},
    "tp": {"mesh": {"tp": 2}, "plan": PLAN},
    "pp": {"mesh": {"pp": 2}, "pipeline": STAGES},
}


def parts(runtime, *, steps=5):
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    return [[t.chunk(count)[share] for t in batch] for batch in batches("mlp", steps=steps)]


def thawing(config, trained):
    """Return the losses where `fc1` is trained from the third step on, or until then."""
    is_late = trained == "late"
    runtime = msrun.init(config)
    network = build("mlp")
    network.fc1.requires_grad_(not is_late)
    network = runtime.shard(network)
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    losses = []
    for number, batch in enumerate(parts(runtime)):
        if number == 2:
            for name, param in network.named_parameters():
                if "fc1" in name:
                    param.requires_grad_(is_late)
        losses.append(runtime.step(network, update, functional.cross_entropy, *batch).item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_later_stays(kind):
    expected = run_warm(thawing, 1, {}, "early")[0]
    assert_equal_curves(run_warm(thawing, 2, KINDS[kind], "early"), expected)


def test_what_was_frozen_may_be_trained_later_where_it_is_divided():
    expected = run_warm(thawing, 1, {}, "late")[0]
    assert_equal_curves(run_warm(thawing, 2, KINDS["zero"], "late"), expected)


def refusal(call, *arguments):
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    return caught.value.message


def thawed(config):
    return refusal(thawing, config, "late")


@pytest.mark.parametrize("kind", ["dp", "small ones whole", "tp"])
def test_what_was_frozen_is_refused_later_where_ranks_would_drift_apart(kind):
    name = "fc1.bias" if "whole" in kind else "fc1.weight"
    assert run_warm(thawed, 2, KINDS[kind]) == 2 * [
        f"{name} was frozen in rt.shard, so ranks do not train it together"
    ]


def thawed_in_a_plain_loop():
    runtime = msrun.init()
    network = build("mlp")
    network.fc1.requires_grad_(requires_grad=False)
    network = runtime.shard(network)
    network.requires_grad_()
    x, y = parts(runtime)[0]
    return refusal(functional.cross_entropy(network(x), y).backward)


def test_a_plain_loop_refuses_it_before_a_weight_changes():
    assert run_warm(thawed_in_a_plain_loop, 2) == 2 * [
        "fc1.weight was frozen in rt.shard, so ranks do not train it together"
    ]


def changed(config, change):
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    if change == "replaced":
        network.fc3 = nn.Linear(32, 10)
    else:
        network.fc3.register_parameter("extra", nn.Parameter(torch.ones(1)))
    update = OPTIMIZERS["sgd"](network.parameters())
    batch = parts(runtime)[0]
    return refusal(runtime.step, network, update, functional.cross_entropy, *batch)


@pytest.mark.parametrize("kind", ["dp", "zero", "small ones whole", "tp"])
@pytest.mark.parametrize(("change", "name"), [("replaced", "weight"), ("added", "extra")])
def test_new_parameters_are_refused(kind, change, name):
    assert run_warm(changed, 2, KINDS[kind], change) == 2 * [
        f"fc3.{name} was {change} after rt.shard, so ranks do not train it together"
    ]


def with_optimizer(config, of):
    runtime = msrun.init(config)
    network, other = build("mlp"), build("mlp")
    update = OPTIMIZERS["sgd"]((network if of == "itself" else other).parameters())
    network = runtime.shard(network)
    batch = parts(runtime)[0]
    return refusal(runtime.step, network, update, functional.cross_entropy, *batch)


@pytest.mark.parametrize("kind", ["zero", "tp", "pp"])
def test_a_step_refuses_an_optimizer_of_replaced_parameters(kind):
    expected = "SGD holds parameters from before rt.shard"
    assert run_warm(with_optimizer, 2, KINDS[kind], "itself") == [expected] * 2


UNKNOWN = (
    "SGD holds a parameter of shape (32, 16) in group 0 that is in no model of rt.shard, "
    "so each data-parallel rank would train it alone"
)


@pytest.mark.parametrize(
    ("kind", "sentence"), [("dp", UNKNOWN), ("tp", "SGD holds no parameter of MLP")]
)
def test_a_step_refuses_an_optimizer_of_another_model(kind, sentence):
    assert run_warm(with_optimizer, 2, KINDS[kind], "another") == [sentence] * 2


def again(config):
    runtime = msrun.init(config)
    return refusal(runtime.shard, runtime.shard(build("mlp")))


@pytest.mark.parametrize(
    ("kind", "name"), [("dp", "MLP"), ("zero", "FSDPMLP"), ("tp", "MLP"), ("pp", "SplitModel")]
)
def test_a_model_is_sharded_once(kind, name):
    assert run_warm(again, 2, KINDS[kind]) == [f"{name} is a model of rt.shard already"] * 2


def stepped(loss_fn, samples):
    runtime = msrun.init()
    network = runtime.shard(build("mlp"))
    update = OPTIMIZERS["sgd"](network.parameters())
    batch = [tensor[:samples] for tensor in parts(runtime)[0]]
    return refusal(runtime.step, network, update, loss_fn, *batch)


def of_each(output, target):
    return functional.cross_entropy(output, target, reduction="none")


def as_number(output, target):
    return functional.cross_entropy(output, target).item()


@pytest.mark.parametrize(
    ("loss_fn", "samples", "sentence"),
    [
        (functional.cross_entropy, 0, "the batch has no sample"),
        (of_each, 4, "the loss has shape (4,), and must be one number"),
        (as_number, 4, "the loss is float, and must be a tensor of one number"),
    ],
)
def test_a_batch_and_its_loss_are_looked_at(loss_fn, samples, sentence):
    assert run_warm(stepped, 2, loss_fn, samples) == [sentence] * 2
