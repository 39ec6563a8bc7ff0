"""The groups of an optimizer stay those of the script, whatever parameters they hold."""

import pytest
import torch
from ranks import OPTIMIZERS, assert_equal_curves, batches, build, run_warm
from test_grid import MLP, zero
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import msrun
from msrun.errors import UsageError
from msrun.parallel.checkpoint.user_state import plain_extra, restore_extra

pytestmark = pytest.mark.torch

# Configurations whose models have plain parameters, and shards of one mesh or two.
MIXED = {
    "tp": (2, {"mesh": {"tp": 2}, "plan": MLP}),
    "threshold": (2, zero(3, threshold=256)),
    "dp x tp, zero 1, threshold": (
        4,
        {"mesh": {"dp": 2, "tp": 2}, "plan": MLP} | zero(1, threshold=200),
    ),
}
KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.003}),
    "fused": (torch.optim.AdamW, {"lr": 0.003, "fused": True}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.003, "amsgrad": True, "foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.003, "foreach": True}),
    "tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.003)}),
}


def by_name(network):
    """Return groups as people write them: biases without decay, and a faster head."""
    named = list(network.named_parameters())
    return [
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.3, "lr": 0.02},
    ]


def steps(runtime, network, update, each=lambda _: None):
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    losses = []
    for number, batch in enumerate(batches("mlp")):
        part = [tensor.chunk(count)[share] for tensor in batch]
        losses.append(runtime.step(network, update, functional.cross_entropy, *part).item())
        each(number)
    return losses


def same(function, config, *arguments):
    """`function` returns the same losses on the ranks of `config` as in one process."""
    ranks, config = MIXED[config]
    expected = run_warm(function, 1, {}, *arguments)[0]
    assert len(set(expected)) == len(expected)
    assert_equal_curves(run_warm(function, ranks, config, *arguments), expected)


def grouped(config, kind):
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    make, options = KINDS[kind]
    update = make(by_name(network), **options)
    groups = update.param_groups
    before = [(id(group), id(group["params"]), dict(group)) for group in groups]
    assert runtime.optimizer(update) is update
    losses = steps(runtime, network, update)
    assert update.param_groups is groups
    after = [(id(group), id(group["params"]), dict(group)) for group in groups]
    assert [entry[:2] for entry in after] == [entry[:2] for entry in before]
    for (*_, old), (*_, new) in zip(before, after, strict=True):
        assert {key: old[key] for key in old if key != "params"} == {
            key: new[key] for key in new if key != "params"
        }
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize("config", MIXED)
@pytest.mark.parametrize("kind", KINDS)
def test_groups_and_their_options_stay(kind, config):
    same(grouped, config, kind)


def frozen_later(config, kind):
    """Stop training by the learning rate, as scripts do it."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(OPTIMIZERS[kind](network.parameters()))

    def stop(number):
        if number == 2:
            update.param_groups[0]["lr"] = 0.0

    steps(runtime, network, update, stop)
    x, y = batches("mlp")[0]
    with torch.no_grad():
        return [functional.cross_entropy(network(x), y).item()]


@pytest.mark.sampled
@pytest.mark.parametrize("config", MIXED)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_learning_rate_of_the_first_group_is_that_of_all(kind, config):
    same(frozen_later, config, kind)


def scheduled(config, kind, is_before):
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    make, options = KINDS[kind]
    update = make(by_name(network), **options)
    schedulers = []

    def schedule():
        schedulers.append(LambdaLR(update, [lambda step: 0.5**step, lambda step: 0.9**step]))
        schedulers.append(OneCycleLR(update, max_lr=[0.05, 0.1], total_steps=8))

    if is_before:
        schedule()
    assert runtime.optimizer(update) is update
    if not is_before:
        schedule()
    losses = steps(runtime, network, update, lambda number: schedulers[number % 2].step())
    seen = [group["lr"] for group in update.param_groups]
    assert len(seen) == 2
    return [*losses, *map(float, seen)]


@pytest.mark.sampled
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("config", MIXED)
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_schedulers_with_a_value_a_group(kind, is_before, config):
    same(scheduled, config, kind, is_before)


def hooked(config, kind):
    """Edit groups in a hook of the step, which runs inside of it."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    make, options = KINDS[kind]
    update = runtime.optimizer(make(by_name(network), **options))

    def before(optimizer, *_):
        assert len(optimizer.param_groups) == 2
        optimizer.param_groups[1]["lr"] *= 0.5

    update.register_step_pre_hook(before)
    return steps(runtime, network, update)


@pytest.mark.parametrize("config", MIXED)
def test_hooks_of_the_step_see_the_groups(config):
    same(hooked, config, "adamw")


def added(config, kind):
    """Add a group after `rt.optimizer`."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    make, options = KINDS[kind]
    first, second = by_name(network)
    update = runtime.optimizer(make([second], **options))
    update.add_param_group(first)
    return steps(runtime, network, update)


@pytest.mark.parametrize("config", MIXED)
def test_a_group_that_is_added_later(config):
    same(added, config, "sgd")


def in_closures(config, kind):
    """Compute losses and gradients in closures of the optimizer, as loops of Lightning do."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    make, options = KINDS[kind]
    update = runtime.optimizer(make(network.parameters(), **options))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    losses = []
    for batch in batches("mlp"):
        x, y = (tensor.chunk(count)[share] for tensor in batch)

        def closure():
            update.zero_grad()
            loss = functional.cross_entropy(network(x), y)  # noqa: B023 - of this step
            loss.backward()
            return loss

        losses.append(runtime.mean_over_data(update.step(closure)).item())
    return losses


@pytest.mark.sampled
@pytest.mark.parametrize("config", MIXED)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_closure_are_those_of_its_step(kind, config):
    same(in_closures, config, kind)


def fails(config):
    """Return the options after a step that raised."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))

    def closure():
        raise KeyError("broken")

    with pytest.raises(KeyError):
        update.step(closure)
    return [group["foreach"] for group in update.param_groups]


def test_a_step_that_fails_leaves_the_options():
    assert run_warm(fails, *MIXED["tp"]) == 2 * [[None]]


def saved(config, folder):
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(torch.optim.AdamW(by_name(network), lr=0.01))
    scheduler = LambdaLR(update, lambda step: 0.8**step)
    losses = steps(runtime, network, update, lambda _: scheduler.step())
    runtime.save(network, update, step=5, path=folder, extra={"scheduler": scheduler})
    runtime.finish()
    return losses


def resumed(config, folder):
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(torch.optim.AdamW(by_name(network), lr=0.01))
    scheduler = LambdaLR(update, lambda step: 0.8**step)
    runtime.load(network, update, path=folder, extra={"scheduler": scheduler})
    return steps(runtime, network, update, lambda _: scheduler.step())


DP = {"mesh": {"dp": 2}}


@pytest.mark.parametrize(
    ("source", "target"),
    [(MIXED["tp"], (2, DP)), ((2, DP), MIXED["tp"]), (MIXED["threshold"], (1, {}))],
)
def test_a_scheduler_goes_with_its_optimizer_to_any_layout(tmp_path, source, target):
    run_warm(saved, 1, {}, tmp_path / "one")
    expected = run_warm(resumed, 1, {}, tmp_path / "one")[0]

    run_warm(saved, *source, tmp_path / "saved")

    assert_equal_curves(run_warm(resumed, *target, tmp_path / "saved"), expected)


def test_a_scheduler_of_groups_that_were_split():
    """Earlier releases appended a group of shards for each group that had both kinds."""
    first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
    split = torch.optim.SGD([{"params": [first], "lr": 0.4}, {"params": [second], "lr": 0.4}])
    old = LambdaLR(split, lambda step: 0.5**step)
    split.step()
    old.step()
    whole = torch.optim.SGD([{"params": [first, second], "lr": 0.4}])
    scheduler = LambdaLR(whole, lambda step: 0.5**step)

    restore_extra(scheduler, plain_extra("scheduler", old))
    whole.step()
    scheduler.step()

    assert scheduler.get_last_lr() == [0.1]


class Clamped(torch.optim.Optimizer):
    """Clamps sums in place, as some optimizers of other libraries do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad.sum().clamp_(-0.1, 0.1))


def refused_in_step(config):
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(Clamped(network.parameters()))
    with pytest.raises(UsageError) as caught:
        steps(runtime, network, update)
    return caught.value.message.partition(":")[0]


def test_an_operation_that_shards_do_not_have_is_named():
    expected = ["Clamped cannot update sharded parameters"] * 2

    assert run_warm(refused_in_step, 2, zero(1)) == expected


def other_library(config):
    """Return what `rt.optimizer` says of another library's optimizer of a known name."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    kind = type("Muon", (Clamped,), {})
    try:
        runtime.optimizer(type("MyMuon", (kind,), {})(network.parameters()))
    except UsageError as error:
        return error.message
    return None


def test_optimizers_of_other_libraries_are_known_by_name():
    assert run_warm(other_library, 2, {}) == [None, None]
    assert "6 of its 6 parameters are sharded" in run_warm(other_library, 2, zero(1))[0]
