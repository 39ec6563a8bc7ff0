"""What a script does to a model and its optimizer after `rt.shard`: right, or refused."""

import pytest
import torch
from ranks import OPTIMIZERS, assert_equal_curves, batches, build, run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.pipeline.border import Border, ready_to_send

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


def thawing(config, trained, names=("fc1",)):
    """Return the losses where `names` are trained from the third step on, or until then."""
    is_late = trained == "late"
    runtime = msrun.init(config)
    network = build("mlp")
    for name, param in network.named_parameters():
        param.requires_grad_(not (is_late and name.startswith(names)))
    network = runtime.shard(network)
    update = runtime.optimizer(OPTIMIZERS["adamw"](network.parameters()))
    losses = []
    for number, batch in enumerate(parts(runtime, steps=6)):
        if number == 2:
            for name, param in network.named_parameters():
                if name.startswith(names):
                    param.requires_grad_(is_late)
        losses.append(runtime.step(network, update, functional.cross_entropy, *batch).item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_later_stays(kind):
    expected = run_warm(thawing, 1, {}, "early")[0]
    assert_equal_curves(run_warm(thawing, 2, KINDS[kind], "early"), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("names", [("fc1",), ("fc1.bias", "fc3"), ("fc2", "fc1.weight")])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "pp" not in kind])
def test_what_was_frozen_may_be_trained_later(kind, names):
    expected = run_warm(thawing, 1, {}, "late", names)[0]
    assert_equal_curves(run_warm(thawing, 2, KINDS[kind], "late", names), expected)


GRID = {
    "dp, tp": {"mesh": {"dp": 2, "tp": 2}, "plan": PLAN},
    "tp, zero 1": {"mesh": {"dp": 2, "tp": 2}, "plan": PLAN, "optimizer": {"zero": 1}},
    "tp, zero 3": {"mesh": {"dp": 2, "tp": 2}, "plan": PLAN, "optimizer": {"zero": 3}},
    "dp, pp": {"mesh": {"pp": 2, "dp": 2}, "pipeline": STAGES},
    "zero 2, pp": {"mesh": {"pp": 2, "dp": 2}, "pipeline": STAGES, "optimizer": {"zero": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [("fc1",), ("fc1.bias", "fc3"), ("fc2", "fc1.weight")])
@pytest.mark.parametrize("kind", GRID)
def test_what_was_frozen_is_trained_later_on_two_axes(kind, names):
    if "pp" in kind and "fc1" in names:
        said = (
            "parallel.pipeline.stages: relu after fc1 needs a gradient, and needed none when the "
            "model was split, so the next stage computes none"
        )
        assert run_warm(refusal, 4, thawing, GRID[kind], "late", names) == [said] * 4
        return
    expected = run_warm(thawing, 1, {}, "late", names)[0]
    assert_equal_curves(run_warm(thawing, 4, GRID[kind], "late", names), expected)


def thawing_stage(config):
    """Freeze a whole stage after `rt.shard`, and train it from the third step on."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    own = [param for name, param in network.named_parameters() if name.startswith("fc1")]
    for param in own:
        param.requires_grad_(requires_grad=False)
    update = runtime.optimizer(OPTIMIZERS["adamw"](network.parameters()))
    losses = []
    for number, batch in enumerate(parts(runtime, steps=6)):
        for param in own if number == 2 else ():
            param.requires_grad_()
        losses.append(runtime.step(network, update, functional.cross_entropy, *batch).item())
    return losses


@pytest.mark.parametrize("kind", ["pp", "small ones whole"])
def test_a_stage_that_is_frozen_after_shard_may_be_trained_later(kind):
    expected = run_warm(thawing_stage, 1, {})[0]
    assert_equal_curves(run_warm(thawing_stage, 2, KINDS[kind]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in GRID if "pp" not in kind])
def test_layers_thaw_one_after_the_other_on_two_axes(kind, is_plain):
    expected = run_warm(gradually, 1, {}, is_plain)[0]
    assert_equal_curves(run_warm(gradually, 4, GRID[kind], is_plain), expected)


@pytest.mark.parametrize("names", [("fc1.bias",), ("fc2", "fc1.weight"), ("fc3",)])
def test_stages_train_later_what_was_frozen(names):
    expected = run_warm(thawing, 1, {}, "late", names)[0]
    assert_equal_curves(run_warm(thawing, 2, KINDS["pp"], "late", names), expected)


def refusal(call, *arguments):
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    return caught.value.message


def gradually(config, is_plain):
    """Thaw one layer after the other, in groups that the optimizer gets when they thaw."""
    runtime = msrun.init(config)
    network = build("mlp")
    network.requires_grad_(requires_grad=False)
    network.fc3.requires_grad_()
    network = runtime.shard(network)
    update = runtime.optimizer(OPTIMIZERS["adamw"](network.fc3.parameters()))
    losses = []
    for number, (x, y) in enumerate(parts(runtime, steps=6)):
        if number in (2, 4):
            layer = network.fc2 if number == 2 else network.fc1
            layer.requires_grad_()
            update.add_param_group({"params": [*layer.parameters()], "lr": 1e-3})
        if is_plain:
            update.zero_grad()
            loss = functional.cross_entropy(network(x), y)
            loss.backward()
            update.step()
            losses.append(runtime.mean_over_data(loss).item())
        else:
            loss = runtime.step(network, update, functional.cross_entropy, x, y, max_norm=0.1)
            losses.append(loss.item())
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "pp" not in kind])
def test_layers_thaw_one_after_the_other(kind, is_plain):
    expected = run_warm(gradually, 1, {}, is_plain)[0]
    assert_equal_curves(run_warm(gradually, 2, KINDS[kind], is_plain), expected)


def turns():
    """Train two parts in turns, frozen while the other learns, as a GAN of one model does."""
    runtime = msrun.init()
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    losses = []
    for number, (x, y) in enumerate(parts(runtime, steps=6)):
        network.fc1.requires_grad_(number % 2 == 0)
        network.fc3.requires_grad_(number % 2 == 1)
        update.zero_grad()
        loss = functional.cross_entropy(network(x), y)
        loss.backward()
        update.step()
        losses.append(runtime.mean_over_data(loss).item())
    return losses


def test_parts_are_trained_in_turns():
    assert_equal_curves(run_warm(turns, 2), run_warm(turns, 1)[0])


def test_a_gradient_that_the_next_stage_does_not_send_is_refused():
    sent = Border(name="fc1", shape=(2,), dtype=torch.float32, requires_grad=False)
    assert refusal(ready_to_send, [torch.ones(2, requires_grad=True)], [sent], []) == (
        "parallel.pipeline.stages: fc1 needs a gradient, and needed none when the model was split, "
        "so the next stage computes none"
    )


def thawed_alone(is_plain, which):
    runtime = msrun.init()
    network = build("mlp")
    network.fc1.requires_grad_(requires_grad=False)
    network.fc3.bias.requires_grad_(requires_grad=False)
    network = runtime.shard(network)
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    own = network.get_parameter(which[runtime.rank]) if which[runtime.rank] else None
    before = [param.detach().clone() for param in network.parameters()]
    if own is not None:
        own.requires_grad_(not own.requires_grad)
    x, y = parts(runtime)[0]
    if is_plain:
        found = refusal(functional.cross_entropy(network(x), y).backward)
    else:
        found = refusal(runtime.step, network, update, functional.cross_entropy, x, y)
    assert all(map(torch.equal, before, network.parameters()))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize(
    ("which", "sentence"),
    [
        (("fc1.bias", ""), "fc1.bias is trained on rank 0 and frozen on the others"),
        (("", "fc2.weight"), "fc2.weight is trained on rank 0 and frozen on the others"),
        (
            ("fc1.bias", "fc3.bias"),
            "fc1.bias is trained on rank 0 and frozen on the others, and so for 1 more",
        ),
    ],
)
def test_ranks_that_train_other_parameters_are_told(is_plain, which, sentence):
    expected = f"{sentence}; no weight was changed"
    assert run_warm(thawed_alone, 2, is_plain, which) == [expected] * 2


def test_a_later_thaw_of_a_parameter_of_no_model_is_refused():
    expected = UNKNOWN.replace("(32, 16) in group 0", "(3, 3) in group 1")
    assert run_warm(with_thawed_head, 2) == [expected] * 2


def with_thawed_head():
    runtime = msrun.init()
    network = runtime.shard(build("mlp"))
    head = nn.Linear(3, 3, bias=False).requires_grad_(requires_grad=False)
    groups = [{"params": [*network.parameters()]}, {"params": [*head.parameters()]}]
    update = runtime.optimizer(torch.optim.SGD(groups, lr=0.1))
    batch = parts(runtime)[0]
    runtime.step(network, update, functional.cross_entropy, *batch)
    head.requires_grad_()
    return refusal(runtime.step, network, update, functional.cross_entropy, *batch)


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


@pytest.mark.sampled
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


def lazy(config):
    runtime = msrun.init(config)
    network = nn.Sequential()
    for name, layer in (("fc1", nn.LazyLinear(32)), ("fc2", nn.Linear(32, 32))):
        network.add_module(name, layer)
    network.add_module("fc3", nn.Linear(32, 10))
    return refusal(runtime.shard, network)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("kind", KINDS)
def test_a_lazy_layer_is_refused_before_its_first_batch(kind):
    said = "fc1.weight has no shape yet: its module is lazy"
    assert run_warm(lazy, 2, KINDS[kind]) == [said] * 2
