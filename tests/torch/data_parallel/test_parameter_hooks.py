"""Gradient hooks and attributes of parameters mean what they mean in one process."""

import functools

import pytest
import torch
from ranks import OPTIMIZERS, assert_equal_curves, batches, build, run_warm
from test_grid import MLP, zero
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError, UsageError

pytestmark = pytest.mark.torch

BEFORE = True
TP = {"mesh": {"tp": 2}, "plan": MLP}
STAGES = {"stages": {"fc1": 0, "fc2": 1, "fc3": 1}, "microbatches": 4}
CONFIGS = {
    "accumulate": (1, {"accumulate": 4}),
    "dp": (2, {}),
    "dp, accumulate": (4, {"accumulate": 2}),
    "zero1": (2, zero(1) | {"accumulate": 2}),
    "zero2": (2, zero(2) | {"accumulate": 2}),
    "zero3": (4, zero(3)),
    "zero3, accumulate, threshold": (2, zero(3, threshold=256) | {"accumulate": 2}),
    "zero3, offload": (2, zero(3, offload=True)),
    "tp": (2, TP),
    "dp x tp": (4, TP | {"mesh": {"dp": 2, "tp": 2}}),
    "dp x tp, zero2": (4, TP | {"mesh": {"dp": 2, "tp": 2}} | zero(2)),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": STAGES}),
    "pp x dp, zero1": (4, {"mesh": {"pp": 2, "dp": 2}, "pipeline": STAGES} | zero(1)),
}


def _half(grad):
    mask = torch.arange(grad.shape[0]) % 2 == 0
    return grad * mask.view(-1, *[1] * (grad.dim() - 1))


def _write(grad):
    grad.clamp_(-0.003, 0.003)


def _clip_after(param):
    param.grad.clamp_(-0.003, 0.003)


def _norm_after(param):
    param.grad.div_(param.grad.norm() + 1.0)


HOOKS = {
    "off": ("before", lambda grad: grad * 0),
    "half of the rows": ("before", _half),
    "clamp in place": ("before", _write),
    "norm": ("before", lambda grad: grad / grad.norm() * 0.1),
    "clamp after": ("after", _clip_after),
    "norm after": ("after", _norm_after),
}


def register(network, kind):
    """Register on all parameters of two layers of three."""
    when, hook = HOOKS[kind]
    for name, param in network.named_parameters():
        if not name.startswith("fc3"):
            if when == "before":
                param.register_hook(hook)
            else:
                param.register_post_accumulate_grad_hook(hook)


def learned(config, kind, is_before, optimizer="sgd"):
    runtime = msrun.init(config)
    network = build("mlp")
    if is_before:
        register(network, kind)
    network = runtime.shard(network)
    if not is_before:
        register(network, kind)
    update = runtime.optimizer(OPTIMIZERS[optimizer](network.parameters()))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    return [
        runtime.step(
            network, update, functional.cross_entropy, *(t.chunk(count)[share] for t in batch)
        ).item()
        for batch in batches("mlp")
    ]


@functools.cache
def in_one(kind, optimizer):
    return run_warm(learned, 1, {}, kind, BEFORE, optimizer)[0]


# What they show in CI others do, which add something.
AT_NIGHT = ("off", "dp", "zero1", "dp x tp")


def rows(names):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in AT_NIGHT)) for name in names]


@pytest.mark.few(24)
@pytest.mark.parametrize("config", rows(CONFIGS))
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("kind", rows(HOOKS))
def test_a_hook_gets_the_gradient_of_one_process(kind, is_before, config):
    ranks, settings = CONFIGS[config]

    assert_equal_curves(run_warm(learned, ranks, settings, kind, is_before), in_one(kind, "sgd"))
    assert in_one(kind, "sgd") != in_one("off" if kind != "off" else "norm", "sgd")


@pytest.mark.sampled
@pytest.mark.parametrize("config", ["dp", "zero3", "tp"])
@pytest.mark.parametrize("kind", ["half of the rows", "norm after"])
def test_another_optimizer(kind, config):
    ranks, settings = CONFIGS[config]

    assert_equal_curves(
        run_warm(learned, ranks, settings, kind, BEFORE, "adamw"), in_one(kind, "adamw")
    )


def removed(config):
    """Return how often hooks ran: one removes itself, the handle of another is used later."""
    runtime = msrun.init(config)
    network = build("mlp")
    calls = []

    def once(_):
        calls.append("once")
        first.remove()

    first = network.fc1.weight.register_hook(once)
    network = runtime.shard(network)
    second = network.fc1.weight.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    for number, batch in enumerate(batches("mlp")):
        runtime.step(network, update, functional.cross_entropy, *batch)
        if number == 2:
            second.remove()
    return calls


@pytest.mark.parametrize("config", ["dp", "zero1", "zero3", "tp"])
def test_handles_remove_hooks(config):
    assert run_warm(removed, *CONFIGS[config])[0] == ["once", "after", "after", "after"]


def in_backward(config):
    """Have each parameter updated by an optimizer of its own as soon as its gradient is there."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    updates = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in network.parameters()}

    def update_one(param):
        updates[param].step()
        updates[param].zero_grad()

    for param in updates:
        param.register_post_accumulate_grad_hook(update_one)
    unused = torch.optim.SGD(network.parameters(), lr=0.0)
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    return [
        runtime.step(
            network, unused, functional.cross_entropy, *(t.chunk(count)[share] for t in batch)
        ).item()
        for batch in batches("mlp")
    ]


@pytest.mark.parametrize("config", rows(name for name in CONFIGS if "pp" not in name))
@pytest.mark.few(3)
def test_an_optimizer_in_the_backward_pass(config):
    expected = run_warm(in_backward, 1, {})[0]

    assert_equal_curves(run_warm(in_backward, *CONFIGS[config]), expected)


def looped(config, kind, is_before):
    """Train by a plain loop; return the losses, or why not."""
    runtime = msrun.init(config)
    network = build("mlp")
    if is_before:
        register(network, kind)
    network = runtime.shard(network)
    if not is_before:
        register(network, kind)
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    losses = []
    try:
        for x, y in batches("mlp"):
            update.zero_grad()
            part = [tensor.chunk(count)[share] for tensor in (x, y)]
            loss = functional.cross_entropy(network(part[0]), part[1])
            loss.backward()
            update.step()
            losses.append(runtime.mean_over_data(loss).item())
    except UsageError as error:
        return error.message
    return losses


TOO_EARLY = "fc1.weight has a gradient hook, which a plain loop runs before the gradient is reduced"


@pytest.mark.sampled
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(
    ("config", "kind", "is_right"),
    [
        ("dp", "off", False),
        ("dp", "clamp after", False),
        ("zero1", "off", False),
        ("zero3", "off", False),
        ("zero3", "clamp after", True),
        ("zero3, accumulate, threshold", "off", False),
        ("tp", "off", False),
        ("tp", "clamp after", True),
        ("dp x tp", "clamp after", False),
    ],
)
def test_a_plain_loop_is_right_or_refused(config, kind, is_right, is_before):
    ranks, settings = CONFIGS[config]
    settings = {key: value for key, value in settings.items() if key != "accumulate"}

    found = run_warm(looped, ranks, settings, kind, is_before)

    if is_right:
        assert_equal_curves(found, in_one(kind, "sgd"))
    else:
        assert found == ranks * [TOO_EARLY]


def with_reference(config, kind):
    """Register a hook that uses its parameter, as a penalty on weights does."""
    runtime = msrun.init(config)
    network = build("mlp")
    weight = network.fc1.weight
    keeper = {"decay": [weight]}
    hooks = {
        "closure": lambda grad: grad + 0.1 * weight.detach(),
        "partial": functools.partial(lambda own, grad: grad + 0.1 * own.detach(), weight),
        "container": lambda grad: grad + 0.1 * keeper["decay"][0].detach(),
    }
    weight.register_hook(hooks[kind])
    try:
        network = runtime.shard(network)
    except UsageError as error:
        return error.message
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    return [
        runtime.step(
            network, update, functional.cross_entropy, *(t.chunk(count)[share] for t in batch)
        ).item()
        for batch in batches("mlp")
    ]


@pytest.mark.parametrize("kind", ["closure", "partial", "container"])
def test_a_hook_that_holds_a_replaced_parameter_is_refused(kind):
    expected = run_warm(with_reference, 1, {}, kind)[0]

    assert_equal_curves(run_warm(with_reference, 2, {}, kind), expected)
    for config in ("zero3", "tp"):
        ranks, settings = CONFIGS[config]
        assert run_warm(with_reference, ranks, settings, kind) == ranks * [
            "the gradient hook of fc1.weight holds a parameter that rt.shard replaced"
        ]


class Scaled(nn.Module):
    """A layer that reads an attribute of its weight in forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 160).view(10, 16))
        self.weight.factor = 0.5
        self.bias = nn.Parameter(torch.zeros(10))
        self.bias.no_decay = True

    def forward(self, x):
        return functional.linear(x, self.weight * self.weight.factor, self.bias)


def attributes(config):
    """Train with groups by attributes of parameters, of which some are set after `rt.shard`."""
    runtime = msrun.init(config)
    network = runtime.shard(nn.Sequential(Scaled(), nn.Linear(10, 10)))
    network[1].bias.no_decay = True
    named = list(network.parameters())
    groups = [
        {"params": [p for p in named if not hasattr(p, "no_decay")], "weight_decay": 0.5},
        {"params": [p for p in named if hasattr(p, "no_decay")], "weight_decay": 0.0},
    ]
    assert [len(group["params"]) for group in groups] == [2, 2]
    update = runtime.optimizer(torch.optim.AdamW(groups, lr=0.05))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    return [
        runtime.step(
            network, update, functional.cross_entropy, *(t.chunk(count)[share] for t in batch)
        ).item()
        for batch in batches("mlp")
    ]


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {}),
        (2, zero(1)),
        (2, zero(3)),
        (2, zero(3, modules=["0"])),
        (2, {"mesh": {"tp": 2}, "plan": [{"match": "0", "params": {"weight": ["tp", None]}}]}),
        (
            4,
            {"mesh": {"dp": 2, "tp": 2}, "plan": [{"match": "1", "style": "colwise"}]} | zero(2),
        ),
    ],
)
def test_attributes_stay_with_their_parameters(ranks, config):
    expected = run_warm(attributes, 1, {})[0]

    assert_equal_curves(run_warm(attributes, ranks, config), expected)


def built_on_meta(config):
    """Return what a parameter of a model without memory keeps."""
    runtime = msrun.init(config)
    seen = []
    with runtime.init_on_meta():
        network = build("mlp")
        network.fc1.weight.factor = 2
        network.fc1.weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    network = runtime.shard(network)
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    runtime.step(network, update, functional.cross_entropy, *batches("mlp")[0])
    return network.fc1.weight.factor, seen


@pytest.mark.parametrize("config", ["dp", "zero3", "zero3, offload", "tp", "dp x tp, zero2"])
def test_a_model_without_memory_keeps_both(config):
    ranks, settings = CONFIGS[config]

    assert run_warm(built_on_meta, ranks, settings) == ranks * [(2, [(32, 16)])]


def searched(config, when):
    """Train by a plan of mode auto; return whether an attribute was kept, or the refusal."""
    runtime = msrun.init(config)
    network = build("mlp")
    network.fc1.weight.factor = 2
    x, y = batches("mlp")[0]
    try:
        if when == "before":
            network.fc1.weight.register_hook(lambda grad: grad * 0)
        network = runtime.shard(network, sample=(x,))
        if when == "after":
            network.fc1.weight.register_hook(lambda grad: grad * 0)
        update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
        runtime.step(network, update, functional.cross_entropy, x, y)
    except UsageError as error:
        return error.message
    return network.fc1.weight.factor


def test_the_executor_of_mode_auto_refuses_hooks():
    config = {"mesh": {"dp": 2}, "mode": "auto"}
    refused = "fc1.weight has a gradient hook, which the executor of mode auto does not run"

    assert run_warm(searched, 2, config, "never") == [2, 2]
    assert run_warm(searched, 2, config, "before") == [refused, refused]
    assert run_warm(searched, 2, config, "after") == [refused, refused]


def in_parts(config, kind):
    """Train by a plain loop that splits each batch in two; return the losses, or why not."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    register(network, kind)
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    losses = []
    try:
        for x, y in batches("mlp"):
            update.zero_grad()
            halves = [half.chunk(count)[share] for half in (*x.chunk(2), *y.chunk(2))]
            with runtime.no_sync(network):
                first = functional.cross_entropy(network(halves[0]), halves[2]) / 2
                first.backward()
            second = functional.cross_entropy(network(halves[1]), halves[3]) / 2
            second.backward()
            update.step()
            losses.append(runtime.mean_over_data(first + second).item())
    except UsageError as error:
        return error.message
    return losses


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_hook_after_each_part_of_a_plain_loop(zero):
    """In one process it runs after each part, under ZeRO 2 and 3 once for both."""
    config = {"mesh": {"dp": -1}, "optimizer": {"zero": zero}}
    found = run_warm(in_parts, 2, config, "norm after")

    expected = "fc1.weight has a hook after accumulation, which ZeRO runs once for all parts"
    assert found[0].startswith(expected)
    assert found[1] == found[0]


def penalized_by_weights(*, has_hook):
    """Return what a step says whose loss takes a gradient by a weight."""
    runtime = msrun.init()
    network = runtime.shard(build("mlp"))
    weight = network.fc3.weight
    if has_hook:
        weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))

    def loss_fn(output, target):
        loss = functional.cross_entropy(output, target)
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        return loss + slope.square().sum()

    try:
        runtime.step(network, update, loss_fn, *batches("mlp")[0])
    except ModelError as error:
        return error.message
    return ""


def test_a_gradient_that_a_loss_takes_by_a_weight_with_a_hook_is_refused():
    (said,) = run_warm(functools.partial(penalized_by_weights, has_hook=True), 1)

    assert said.startswith("a loss takes a gradient by fc3.weight, which has a gradient hook")
    assert run_warm(functools.partial(penalized_by_weights, has_hook=False), 1) == [""]
