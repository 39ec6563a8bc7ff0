"""`verify` of a model of which rank 0 has no memory for a copy: sampled layers are compared."""

import warnings

import pytest
import torch
from ranks import MODELS, OPTIMIZERS, batches, build, run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ConfigError, ModelError
from msrun.parallel.config_file import parse_config
from msrun.parallel.local import full_tensor
from msrun.parallel.verify.layers import comparison_size

pytestmark = pytest.mark.torch

TP = [
    {"match": "layers.*.q", "style": "colwise"},
    {"match": "layers.*.k", "style": "colwise"},
    {"match": "layers.*.v", "style": "colwise"},
    {"match": "layers.*.o", "style": "rowwise"},
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]
STAGES = {"embed": 0, "position": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}
PIPELINE = {"stages": STAGES, "microbatches": 2}
ALL = {"memory": "1GiB", "modules": ["*"]}
# name -> ranks, configuration, model.
CONFIGS = {
    "one rank, accumulate": (1, {"accumulate": 2}, "transformer"),
    "dp": (2, {}, "transformer"),
    "dp, batch norm": (2, {}, "conv"),
    "dp 4, accumulate": (4, {"accumulate": 2}, "transformer"),
    "zero 1, accumulate": (2, {"optimizer": {"zero": 1}, "accumulate": 2}, "transformer"),
    "zero 2, threshold": (2, {"optimizer": {"zero": 2, "threshold": 200}}, "transformer"),
    "zero 3": (2, {"optimizer": {"zero": 3}}, "transformer"),
    "zero 3, offload": (2, {"optimizer": {"zero": 3, "offload": True}}, "conv"),
    "zero 3, narrow": (2, {"optimizer": {"zero": 3, "dtype": "bfloat16"}}, "mlp"),
    "recompute": (2, {"recompute": {"modules": ["layers.*"]}}, "transformer"),
    "tp": (2, {"mesh": {"tp": 2}, "plan": TP}, "transformer"),
    "dp x tp, zero 3": (
        4,
        {"mesh": {"dp": 2, "tp": 2}, "plan": TP, "optimizer": {"zero": 3}},
        "transformer",
    ),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": PIPELINE}, "transformer"),
    "pp x dp": (4, {"mesh": {"pp": 2, "dp": 2}, "pipeline": PIPELINE}, "transformer"),
}


def _train(config, name, wrong=None, dropout=0.0):
    """Train under `config`; return losses, the error, and what was said of verification."""
    runtime = msrun.init(config)
    torch.manual_seed(5)
    model = runtime.shard(build(name, **({"dropout": dropout} if dropout else {})))
    if wrong:
        change, module = wrong
        if module in dict(model.named_modules()):
            model.get_submodule(module).register_forward_hook(change)
    weights = [full_tensor(param.detach()).clone() for param in model.parameters()]
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.axes.get("dp", 1)
    update = runtime.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    losses, message = [], ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches(name, steps=2):
            part = [tensor.chunk(count)[share] for tensor in batch]
            try:
                losses.append(runtime.step(model, update, MODELS[name][1], *part).item())
            except ModelError as error:
                message = error.message
                for param, weight in zip(model.parameters(), weights, strict=True):
                    assert torch.equal(full_tensor(param.detach()), weight)
                break
    verifier = runtime.sharded(model).verifier
    told = [str(w.message) for w in caught if "verif" in str(w.message)]
    return losses, message, verifier.outcome if verifier else "", told


# Compared in CI with dropout.
AT_NIGHT = ("dp", "zero 3", "tp", "pp")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c in AT_NIGHT)) for c in CONFIGS]
)
@pytest.mark.few(5)
def test_right_layers_give_no_alarm(case):
    ranks, config, model = CONFIGS[case]
    found = run_warm(_train, ranks, config | {"verify": ALL}, model)
    assert [(message, told) for _, message, _, told in found] == [("", [])] * ranks
    outcome = found[0][2]
    assert "step 1: the configuration names modules, so layers were compared: " in outcome
    last = {"mlp": "fc3", "conv": "head", "transformer": "head"}[model]
    assert f"{last} (Linear)" in outcome
    plain = run_warm(_train, ranks, config, model)
    assert [losses for losses, *_ in found] == [losses for losses, *_ in plain]


def louder(_, args, output):  # noqa: ARG001 - a forward hook
    """Compute another output than one process."""
    return output * 1.01


class _Steeper(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient * 1.01


def steeper(_, args, output):  # noqa: ARG001 - a forward hook
    """Compute another gradient than one process."""
    return _Steeper.apply(output)


@pytest.mark.sampled
@pytest.mark.parametrize("change", [louder, steeper])
@pytest.mark.parametrize(
    "case", ["dp", "dp 4, accumulate", "zero 3", "recompute", "tp", "dp x tp, zero 3", "pp x dp"]
)
def test_a_wrong_layer_is_found(case, change):
    ranks, config, model = CONFIGS[case]
    verified = {"modules": ["layers.*"]}
    found = run_warm(_train, ranks, config | {"verify": verified}, model, (change, "layers.1"))
    for _, message, _, _ in found:
        assert message.startswith("step 1 is not that of one process: layer layers.1 (")
        words = "its output differs by 0.01 of its norm" if change is louder else "that differ: "
        assert words in message


@pytest.mark.parametrize("case", ["dp", "zero 3", "tp", "pp"])
def test_a_model_with_too_little_memory_is_compared_by_layers(case):
    ranks, config, model = CONFIGS[case]
    memory = comparison_size(build(model)) - 1
    found = run_warm(_train, ranks, config | {"verify": {"memory": memory}}, model)
    assert [message for _, message, _, _ in found] == [""] * ranks
    outcome = found[0][2]
    assert "a copy of the model with gradients takes" in outcome
    assert "and verify.memory is" in outcome
    assert "were not compared" in outcome

    found = run_warm(_train, ranks, config | {"verify": {"memory": memory + 1}}, model)
    assert "step 1 equals one process: loss " in found[0][2]


@pytest.mark.parametrize("case", ["dp", "zero 3", "tp", "pp"])
def test_dropout_is_put_to_0_for_the_comparison(case):
    ranks, config, model = CONFIGS[case]
    found = run_warm(_train, ranks, config | {"verify": ALL}, model, None, 0.3)
    assert [(message, told) for _, message, _, told in found] == [("", [])] * ranks
    plain = run_warm(_train, ranks, config, model, None, 0.3)
    assert [losses for losses, *_ in found] == [losses for losses, *_ in plain]


class Centred(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(0)


class Ranked(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.0 + torch.distributed.get_rank())


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn(len(x), self.out_features)


class Counting(nn.Linear):
    """Keeps a state that one process would write from the whole batch."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.copy_(x.detach().mean())
        return super().forward(x)


class Tied(nn.Module):
    """Has a weight that two layers share, and uses that of a third by itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, 10)
        self.side = nn.Linear(16, 10)

    def forward(self, x):
        y = self.side(x) + functional.linear(x, self.side.weight)
        return y + self.head(self.second(self.first(x)))


class SequenceFirst(nn.Module):
    """Has layers that take the samples in the second dim."""

    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleList([nn.LSTM(4, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0)])
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        y, _ = self.inside[0](x.reshape(len(x), -1, 4).transpose(0, 1))
        return self.head(self.inside[1](y)[-1])


class Scale(nn.Module):
    """Takes nothing and returns its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self):
        return self.weight


class Packed(nn.Module):
    """Gives its layers keyword arguments, lists, an object of its own and flat samples."""

    def __init__(self):
        super().__init__()
        self.scale = Scale()
        self.parts = nn.ModuleList([Part(), Part()])
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        cache = Cache()
        for part in self.parts:
            x = part({"x": [x]}, scale=0.5, mask=torch.ones(1, 16), cache=cache)["x"]
        return self.head(x * self.scale())


class Cache:
    """What layers write and others read."""

    def __init__(self):
        self.kept = []


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values, *, scale, mask, cache):
        x = values["x"][0] * mask
        cache.kept.append(x)
        y = self.layer(x.reshape(-1, 4)).reshape_as(x)
        # `y` is an output, and another is computed from it.
        return {"x": y.sin() * scale + x, "again": y, "mean": y.mean()}


def _one_step(config, make):
    runtime = msrun.init(config)
    torch.manual_seed(3)
    model = runtime.shard(make())
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.axes.get("dp", 1)
    x, y = (tensor.chunk(count)[share] for tensor in batches("mlp")[0])
    message = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            runtime.step(model, update, functional.cross_entropy, x, y)
        except ModelError as error:
            message = error.message
    told = [str(w.message) for w in caught if "verif" in str(w.message)]
    return message, runtime.sharded(model).verifier.outcome, told


def between(kind):
    return nn.Sequential(nn.Linear(16, 12), kind(12, 12), nn.Linear(12, 10))


def of_centred():
    return between(Centred)


def of_ranked():
    return between(Ranked)


def of_noisy():
    return between(Noisy)


def of_counting():
    return between(Counting)


@pytest.mark.sampled
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(
    ("make", "layer", "cause"),
    [
        (of_centred, "1 (Centred)", "computes from all samples of a batch"),
        (of_ranked, "1 (Ranked)", "depend on the rank"),
        (of_counting, "1 (Counting)", "forward writes seen from the samples of one rank"),
    ],
)
def test_a_layer_that_is_wrong_on_ranks_is_found(make, layer, cause, zero):
    config = {"optimizer": {"zero": zero}, "verify": {"modules": ["*"]}}
    for message, _, _ in run_warm(_one_step, 2, config, make):
        assert message.startswith(f"step 1 is not that of one process: layer {layer}: ")
        assert cause in message


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Tied, "gradients not compared: first.weight, second.weight, side.weight"),
        (SequenceFirst, "inside.0 (LSTM), inside.1 (TransformerEncoderLayer), head (Linear)"),
        (Packed, "scale (Scale), parts.0 (Part), parts.0.layer (Linear), "),
        (of_noisy, "not compared: 1 (Noisy): it draws random numbers"),
    ],
)
@pytest.mark.parametrize("zero", [0, 3])
def test_odd_layers_give_no_alarm(make, words, zero):
    # Of `Tied` ZeRO gathers all through forward what is used outside of its module.
    modules = {"modules": ["head"]} if make is Tied else {}
    optimizer = {"zero": zero, **(modules if zero else {})}
    patterns = ["inside.?", "head"] if make is SequenceFirst else ["*"]
    config = {"optimizer": optimizer, "verify": {"modules": patterns}}
    found = run_warm(_one_step, 2, config, make)
    assert [(message, told) for message, _, told in found] == [("", [])] * 2
    assert words in found[0][1]


def _loop(config, change):
    """Take one step of a plain loop."""
    runtime = msrun.init(config)
    model = runtime.shard(build("mlp"))
    if change:
        model.fc2.register_forward_hook(change)
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = (tensor.chunk(2)[runtime.coordinate["dp"]] for tensor in batches("mlp")[0])
    functional.cross_entropy(model(x), y).backward()
    try:
        update.step()
    except ModelError as error:
        return error.message
    return runtime.sharded(model).verifier.outcome


def test_layers_of_a_plain_loop():
    config = {"verify": {"modules": ["*"]}}
    assert "fc1 (Linear), fc2 (Linear), fc3 (Linear)" in run_warm(_loop, 2, config, None)[0]
    for message in run_warm(_loop, 2, config, steeper):
        assert "layer fc2 (Linear): gradients of parameters that differ: " in message


@pytest.mark.parametrize(
    ("verify", "message"),
    [
        ({"steps": 0}, r"parallel\.verify\.steps: 0 must be at least 1"),
        ({"memory": "much"}, r"parallel\.verify\.memory: .much. is no size"),
        (
            {"layers": ["a"]},
            r"parallel\.verify\.layers: is no key \(choose steps, memory, modules\)",
        ),
        ({"steps": "all"}, r"parallel\.verify\.steps: .all. is not known \(choose first_step"),
        ("all", r"parallel\.verify: .all. is not known \(choose first_step"),
    ],
)
def test_a_wrong_key_is_refused(verify, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"verify": verify})


def _unknown():
    with pytest.raises(ConfigError) as caught:
        msrun.init({"verify": {"modules": ["nowhere"]}}).shard(build("mlp"))
    return caught.value.message


def test_a_pattern_that_matches_nothing_is_refused():
    for message in run_warm(_unknown, 2):
        assert message.startswith("parallel.verify.modules: ")
        assert "nowhere" in message
