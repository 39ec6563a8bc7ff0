"""`verify`: a step that is not that of one process is an error; others train as without it."""

import functools
import warnings

import pytest
import torch
from ranks import MODELS, OPTIMIZERS, batches, build, run_warm
from torch import nn
from torch.nn import functional
from verified_models import (
    TP,
    Adapted,
    Drawing,
    Noisy,
    WrongDrawing,
    not_verified,
    of_samples,
)

import msrun
from msrun.errors import ConfigError, ModelError
from msrun.parallel.config_file import parse_config
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

STAGES = {"embed": 0, "position": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}
PIPELINE = {"stages": STAGES, "microbatches": 2}
# name -> ranks, configuration, model.
CONFIGS = {
    "one rank, accumulate": (1, {"accumulate": 2}, "transformer"),
    "dp": (2, {}, "transformer"),
    "dp, batch norm": (2, {}, "conv"),
    "dp 4, accumulate": (4, {"accumulate": 2}, "transformer"),
    "zero 1": (2, {"optimizer": {"zero": 1}}, "transformer"),
    "zero 2, threshold": (2, {"optimizer": {"zero": 2, "threshold": 200}}, "transformer"),
    "zero 3": (2, {"optimizer": {"zero": 3}}, "transformer"),
    "zero 3, offload": (2, {"optimizer": {"zero": 3, "offload": True}}, "conv"),
    "zero 3, narrow": (2, {"optimizer": {"zero": 3, "dtype": "bfloat16"}}, "mlp"),
    "recompute": (2, {"recompute": {"modules": ["layers.*"]}}, "transformer"),
    "tp": (2, {"mesh": {"tp": 2}, "plan": TP}, "transformer"),
    "dp x tp, zero 1": (
        4,
        {"mesh": {"dp": 2, "tp": 2}, "plan": TP, "optimizer": {"zero": 1}},
        "transformer",
    ),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": PIPELINE}, "transformer"),
    "pp x dp": (4, {"mesh": {"pp": 2, "dp": 2}, "pipeline": PIPELINE}, "transformer"),
    "auto": (2, {"mode": "auto", "mesh": {"dp": 2}}, "mlp"),
}


def _train(config, name, *, loss_fn=None, dropout=0.0, is_on_meta=False, steps=3):
    """Train under `config`; return losses and how many steps were verified."""
    runtime = msrun.init(config)
    options = {"dropout": dropout} if dropout else {}
    torch.manual_seed(5)
    if is_on_meta:
        with runtime.init_on_meta():
            model = build(name, **options)
    else:
        model = build(name, **options)
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.axes.get("dp", 1)
    parts = [[t.chunk(count)[share] for t in batch] for batch in batches(name, steps=steps)]
    sample = [parts[0][0]] if config.get("mode") == "auto" else None
    model = runtime.shard(model, sample)
    update = runtime.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in parts:
            loss = runtime.step(model, update, loss_fn or MODELS[name][1], x, y)
            losses.append(loss.item())
    verifier = runtime.sharded(model).verifier
    told = not_verified(caught)
    return losses, verifier.verified if verifier else 0, told


# Verified in CI with dropout, or beside something else.
AT_NIGHT = ("dp", "zero 1", "tp", "pp")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c in AT_NIGHT)) for c in CONFIGS]
)
@pytest.mark.few(5)
def test_a_right_step_is_verified(case):
    ranks, config, model = CONFIGS[case]
    found = run_warm(_train, ranks, config | {"verify": 2}, model)
    assert [(verified, told) for _, verified, told in found] == [(2, [])] * ranks
    plain = run_warm(_train, ranks, config, model)
    assert [losses for losses, _, _ in found] == [losses for losses, _, _ in plain]


def test_a_model_made_on_meta_is_verified():
    config = {"optimizer": {"zero": 3}, "verify": "first_step"}
    found = run_warm(functools.partial(_train, is_on_meta=True), 2, config, "transformer")
    assert [(verified, told) for _, verified, told in found] == [(1, [])] * 2


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {}),
        (2, {"optimizer": {"zero": 3}}),
        (2, {"dropout": "exact"}),
        (2, {"mesh": {"tp": 2}, "plan": TP}),
        (2, {"recompute": {"modules": ["layers.*"]}}),
        (2, {"mesh": {"pp": 2}, "pipeline": PIPELINE}),
    ],
)
def test_dropout_is_verified_and_training_goes_on_as_without(ranks, config):
    train = functools.partial(_train, dropout=0.3)
    found = run_warm(train, ranks, config | {"verify": 1}, "transformer")
    assert [(verified, told) for _, verified, told in found] == [(1, [])] * ranks
    plain = run_warm(train, ranks, config, "transformer")
    assert [losses for losses, _, _ in found] == [losses for losses, _, _ in plain]


class Recorded(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 10)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x):
        if self.training:
            self.seen.copy_(x.detach().mean(0))
        return self.layer(x)


class Ranked(nn.Linear):
    """Computes something else on another rank."""

    def forward(self, x):
        return super().forward(x) * (1.0 + torch.distributed.get_rank())


class Talking(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        torch.distributed.all_reduce(torch.zeros(1))
        return y


class MeanOfKept(torch.autograd.Function):
    """Is the mean of some losses, as a fused function has it: no watch sees what it divides by."""

    @staticmethod
    def forward(ctx, losses, kept):
        weights = kept.numpy() / kept.numpy().sum()
        ctx.weights = torch.from_numpy(weights)
        return losses.new_tensor(losses.detach().numpy() @ weights)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.weights, None


def divided_by_hand(output, target):
    """Is the mean over some targets, whose count only the script knows."""
    losses = functional.cross_entropy(output, target, reduction="none")
    return MeanOfKept.apply(losses, (target > 2).to(losses.dtype))


def _refused(config, make, loss_fn):
    runtime = msrun.init(config)
    model = runtime.shard(make())
    weights = [full_tensor(param.detach()).clone() for param in model.parameters()]
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = (t.chunk(2)[runtime.coordinate["dp"]] for t in batches("mlp")[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            runtime.step(model, update, loss_fn, x, y)
            message = ""
        except ModelError as error:
            message = error.message
            for param, weight in zip(model.parameters(), weights, strict=True):
                assert torch.equal(full_tensor(param.detach()), weight)
    return message, not_verified(caught)


@pytest.mark.sampled
@pytest.mark.parametrize("config", [{}, {"optimizer": {"zero": 3}}], ids=["dp", "zero 3"])
@pytest.mark.parametrize(
    ("make", "loss_fn", "cause"),
    [
        (
            functools.partial(nn.Linear, 16, 10),
            divided_by_hand,
            "not the mean of the losses of its parts",
        ),
        (of_samples, functional.cross_entropy, "1 (Centred) computes from all samples"),
        (Recorded, functional.cross_entropy, "forward writes seen"),
        (functools.partial(Ranked, 16, 10), functional.cross_entropy, "depend on the rank"),
    ],
)
def test_a_wrong_step_is_refused_with_its_cause(config, make, loss_fn, cause):
    found = run_warm(_refused, 2, config | {"verify": 1}, make, loss_fn)
    for message, told in found:
        assert message.startswith("step 1 is not that of one process: ")
        assert cause in message
        assert told == []


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (functools.partial(Noisy, 16, 10), "draws random numbers other than dropout"),
        (functools.partial(Talking, 16, 10), "calls allreduce, in which all ranks take part"),
    ],
)
def test_a_step_that_cannot_be_verified_says_so(make, reason):
    found = run_warm(_refused, 2, {"verify": 1}, make, functional.cross_entropy)
    assert [message for message, _ in found] == ["", ""]
    assert [len(told) for _, told in found] == [1, 0]
    assert "nothing was verified in step 1" in found[0][1][0]
    assert reason in found[0][1][0]


@pytest.mark.parametrize("make", [Drawing, Adapted])
@pytest.mark.parametrize("config", [{}, {"accumulate": 2}], ids=["dp", "accumulate"])
def test_numbers_that_change_nothing_are_no_obstacle(config, make):
    found = run_warm(
        _refused,
        2,
        config | {"verify": 1},
        functools.partial(make, 16, 10),
        functional.cross_entropy,
    )
    assert found == [("", [])] * 2


def test_an_error_beside_numbers_that_change_nothing_is_found():
    make = functools.partial(WrongDrawing, 16, 10)
    for message, told in run_warm(_refused, 2, {"verify": 1}, make, functional.cross_entropy):
        assert message.startswith("step 1 is not that of one process: ")
        assert "depend on the rank" in message
        assert told == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"verify": -1}, "verify: -1 must be at least 0"),
        ({"verify": 1, "mode": "manual"}, "mode manual divides work in the script"),
        ({"verify": 1, "reduce": {"op": "sum"}}, "reduce.op sum gives gradients"),
        ({"verify": 1, "batch_norm": "local"}, "batch_norm local gives each rank"),
        ({"verify": "always"}, "parallel.verify"),
    ],
)
def test_what_one_process_does_not_compute_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(config)


class Scaled(nn.Sequential):
    """Multiplies its output by a number that a script may set."""

    def __init__(self):
        super().__init__(nn.Linear(16, 8), nn.Linear(8, 10))
        self[1].scale = 1.0
        self.handle = self[1].register_forward_hook(lambda layer, _, output: output * layer.scale)


def halve(*args):
    return args[-1] * 0.5


def halve_inputs(module, args, kwargs):  # noqa: ARG001 - a hook with names
    return (args[0] * 0.5,), kwargs


def of_modules(model):
    """Have hooks of all kinds on the last layer, as far as this stage has it, and remove one."""
    layer = dict(model.named_modules()).get("1")
    if layer is not None:
        layer.register_forward_hook(halve)
        layer.register_forward_pre_hook(halve_inputs, with_kwargs=True)
        layer.register_full_backward_hook(lambda *args: (args[1][0] * 0.5,))
        layer.register_forward_hook(halve).remove()


def of_gradients(model):
    weight = dict(model.named_parameters()).get("1.weight")
    if weight is not None:
        weight.register_hook(halve)


def of_attributes(model):
    layer = dict(model.named_modules()).get("1")
    if layer is not None:
        layer.scale = 0.5


def removed(model):
    model.handle.remove()
    model[1].scale = 3.0


def _changed(config, change):
    """Train three steps of a model that the script changes after `rt.shard` and the first step."""
    runtime = msrun.init({"verify": 3} | config)
    torch.manual_seed(0)
    model = runtime.shard(Scaled())
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    count, share = runtime.layout.axes.get("dp", 1), runtime.coordinate.get("dp", 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index, (x, y) in enumerate(batches("mlp", steps=3)):
            if index < 2:  # once more after the first step
                change(model)
            own = (x.chunk(count)[share], y.chunk(count)[share])
            runtime.step(model, update, functional.cross_entropy, *own)
    return runtime.sharded(model).verifier.verified, not_verified(caught)


_STAGES = {"mesh": {"pp": 2}, "pipeline": {"stages": {"0": 0, "1": 1}, "microbatches": 2}}


@pytest.mark.sampled
@pytest.mark.parametrize("config", [{}, {"optimizer": {"zero": 3}}], ids=["dp", "zero 3"])
@pytest.mark.parametrize("change", [of_modules, of_gradients, of_attributes, removed])
def test_what_the_script_changes_after_shard_counts_in_one_process(config, change):
    assert run_warm(_changed, 2, config, change) == [(3, [])] * 2


def test_attributes_of_other_stages_count_in_one_process():
    assert run_warm(_changed, 2, _STAGES, of_attributes) == [(3, [])] * 2


@pytest.mark.parametrize("change", [of_gradients, of_modules])
def test_hooks_of_other_stages_cannot_be_verified(change):
    (verified, told), other = run_warm(_changed, 2, _STAGES, change)
    assert (verified, other) == (0, (0, []))
    assert "nothing was verified in step 1: the script changed the hooks of 1" in told[0]


def test_first_step_is_one_step():
    assert parse_config({"verify": "first_step"}).verify == 1
    assert parse_config({"verify": "3"}).verify == 3


class WithLoss(nn.Module):
    """Returns its own loss of a batch by name, as the models of transformers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 10)

    def forward(self, x, labels, scale=1.0):
        logits = self.layer(x) * scale
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def _other_forms(form):
    """Train one verified step of another form; return whether it was verified."""
    config = {"accumulate": 2} if form == "own loss" else {}
    runtime = msrun.init(config | {"verify": 1})
    torch.manual_seed(0)
    share = runtime.coordinate["dp"]
    x, y = batches("mlp")[0]
    if form == "own loss":
        model = runtime.shard(WithLoss())
        y[:5] = -100
        part = {"x": x.chunk(2)[share], "labels": y.chunk(2)[share], "scale": 2.0}
        step = [part]
    elif form == "gathered":
        model = runtime.shard(nn.Linear(16, 10))
        part = x.chunk(2)[share]

        def contrastive(output, target):
            assert target is None
            everything = runtime.gather(output)
            labels = torch.arange(len(output)) + len(output) * runtime.coordinate["dp"]
            return functional.cross_entropy(output @ everything.T, labels)

        step = [contrastive, part, None]
    elif form == "penalty":
        model = runtime.shard(nn.Linear(16, 10))

        def penalised(output, target):
            squares = sum(param.square().sum() for param in model.parameters())
            return functional.cross_entropy(output, target) + 0.01 * squares

        step = [penalised, x.chunk(2)[share], y.chunk(2)[share]]
    else:
        model = runtime.shard(nn.Linear(16, 10))
        model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        step = [functional.cross_entropy, x.chunk(2)[share], y.chunk(2)[share]]
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    runtime.step(model, update, *step)
    return runtime.sharded(model).verifier.verified


@pytest.mark.parametrize("form", ["own loss", "gathered", "penalty", "hook"])
def test_other_forms_of_a_step_are_verified(form):
    assert run_warm(_other_forms, 2, form) == [1, 1]


def _uneven():
    runtime = msrun.init({"verify": 3})
    model = runtime.shard(nn.Linear(16, 10))
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batches("mlp")[0]
    dataset = torch.utils.data.TensorDataset(x[:13], y[:13])
    for part in runtime.loader(dataset, batch_size=4):
        runtime.step(model, update, functional.cross_entropy, *part)
    return runtime.sharded(model).verifier.verified


def test_an_uneven_last_batch_is_verified():
    assert run_warm(_uneven, 2) == [2, 2]


def _padded_apart():
    runtime = msrun.init({"verify": 1})
    model = runtime.shard(nn.Linear(4, 4))
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(2, 3 + runtime.rank, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime.step(model, update, functional.mse_loss, x, x.clone())
    return not_verified(caught)


def test_batches_of_other_lengths_are_not_verified():
    told, silent = run_warm(_padded_apart, 2)
    assert "shape (2, 3, 4) on one rank and (2, 4, 4) on another" in told[0]
    assert silent == []


def _unknown_optimizer():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime = msrun.init({"verify": 1})
        model = runtime.shard(nn.Linear(16, 10))
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches("mlp")[:2]:
            functional.cross_entropy(model(x), y).backward()
            update.step()
        runtime.close()
    return not_verified(caught)


def test_a_plain_loop_of_an_unknown_optimizer_says_that_nothing_was_verified():
    told, silent = run_warm(_unknown_optimizer, 2)
    assert len(told) == 1
    assert "nothing was verified: no step trained a model" in told[0]
    assert silent == []


def _off():
    runtime = msrun.init({})
    return runtime.sharded(runtime.shard(nn.Linear(2, 2))).verifier


def test_without_the_key_there_is_no_verifier():
    assert run_warm(_off, 2) == [None, None]


class InternallyNarrow(nn.Module):
    """Computes a part in float32, whatever its parameters are, as norms of transformers do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 10)
        self.scale = nn.Parameter(torch.randn(64))

    def forward(self, x):
        h = self.up(x).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.scale.float())
        return self.down(h.double())


def _internally_narrow(config):
    runtime = msrun.init({**config, "verify": 1})
    torch.manual_seed(0)
    model = runtime.shard(InternallyNarrow().double())
    optimizer = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y = torch.randn(32, 16).double(), torch.randint(0, 10, (32,))
        runtime.step(model, optimizer, functional.cross_entropy, x, y)
    return runtime.sharded(model).verifier.verified


@pytest.mark.parametrize("config", [{}, {"accumulate": 4}])
def test_float64_that_computes_a_part_in_less_rounds_as_that(config):
    assert run_warm(_internally_narrow, 2, config) == [1, 1]
