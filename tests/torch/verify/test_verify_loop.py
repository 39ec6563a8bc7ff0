"""`verify` of a plain loop: one call of the model is compared from its outputs' gradients on."""

import copy
import functools
import warnings

import pytest
import torch
from ranks import MODELS, OPTIMIZERS, batches, build, run_warm
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from verified_models import TP, Noisy, not_verified, of_samples

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

# name -> ranks, configuration, model, dropout.
CONFIGS = {
    "one rank": (1, {}, "transformer", 0.3),
    "dp": (2, {}, "transformer", 0.0),
    "dp, dropout": (2, {}, "transformer", 0.3),
    "dp, exact dropout": (2, {"dropout": "exact"}, "transformer", 0.3),
    "dp, batch norm": (2, {}, "conv", 0.0),
    "zero 1": (2, {"optimizer": {"zero": 1}}, "transformer", 0.0),
    "zero 2": (2, {"optimizer": {"zero": 2}}, "conv", 0.0),
    "zero 3": (2, {"optimizer": {"zero": 3}}, "transformer", 0.0),
    "zero 3, dropout": (2, {"optimizer": {"zero": 3}}, "transformer", 0.3),
    "zero 3, offload": (2, {"optimizer": {"zero": 3, "offload": True}}, "conv", 0.0),
    "recompute": (2, {"recompute": {"modules": ["layers.*"]}}, "transformer", 0.0),
    "tp": (2, {"mesh": {"tp": 2}, "plan": TP}, "transformer", 0.3),
    "dp x tp": (4, {"mesh": {"dp": 2, "tp": 2}, "plan": TP}, "transformer", 0.0),
}


def _train(config, name, dropout):
    """Train by a plain loop; return losses, final weights, and how many steps were verified."""
    runtime = msrun.init(config)
    torch.manual_seed(5)
    model = runtime.shard(build(name, **({"dropout": dropout} if dropout else {})))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.axes.get("dp", 1)
    update = runtime.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in batches(name, steps=3):
            loss = MODELS[name][1](model(x.chunk(count)[share]), y.chunk(count)[share])
            update.zero_grad()
            loss.backward()
            runtime.clip_grad_norm_(model, 0.01)
            update.step()
            losses.append(loss.item())
    state = [full_tensor(value.detach()).tolist() for value in model.state_dict().values()]
    verifier = runtime.sharded(model).verifier
    return (losses, state), verifier.verified if verifier else 0, not_verified(caught)


# Verified in CI with dropout.
AT_NIGHT = ("dp", "zero 3")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c in AT_NIGHT)) for c in CONFIGS]
)
@pytest.mark.few(5)
def test_a_right_loop_is_verified_and_trains_as_without(case):
    ranks, config, model, dropout = CONFIGS[case]
    found = run_warm(_train, ranks, config | {"verify": 2}, model, dropout)
    assert [(verified, told) for _, verified, told in found] == [(2, [])] * ranks
    plain = run_warm(_train, ranks, config, model, dropout)
    assert [state for state, _, _ in found] == [state for state, _, _ in plain]


class Counting(nn.Module):
    """Counts the samples of a rank, which are equally many on all."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 10)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return self.layer(x)


class OfRank(torch.autograd.Function):
    """Is right forward; backward depends on the rank."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004 - torch passes it
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004 - torch passes it
        return gradient * (1.0 + torch.distributed.get_rank())


class WrongBackward(nn.Linear):
    def forward(self, x):
        return OfRank.apply(super().forward(x))


class WithLoss(nn.Module):
    """Returns its own loss, a mean over targets that are no padding."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 10)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class SequenceFirst(nn.Linear):
    def forward(self, x):
        return super().forward(x.unsqueeze(1)).transpose(0, 1)


def _step(config, make, form):
    """Take one step of a plain loop; return what was said, raised and verified."""
    runtime = msrun.init(config)
    torch.manual_seed(0)
    model = runtime.shard(make())
    weights = [full_tensor(param.detach()).clone() for param in model.parameters()]
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = (t.chunk(2)[runtime.coordinate["dp"]].clone() for t in batches("mlp")[0])
    message = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        form(runtime, model, x, y)
        try:
            update.step()
        except ModelError as error:
            message = f"{error.message} hint: {error.hint}"
            for param, weight in zip(model.parameters(), weights, strict=True):
                assert torch.equal(full_tensor(param.detach()), weight)
    return message, not_verified(caught), runtime.sharded(model).verifier.verified


def plain(runtime, model, x, y):  # noqa: ARG001 - one form of several
    functional.cross_entropy(model(x), y).backward()


def transposed(runtime, model, x, y):  # noqa: ARG001 - one form of several
    functional.cross_entropy(model(x)[0], y).backward()


def own(runtime, model, x, y):  # noqa: ARG001 - one form of several
    (model(x=x, labels=y)["loss"] * 8.0).backward()


def own_padded(runtime, model, x, y):
    y[: 2 + runtime.rank * 4] = -100
    loss = model(x, y)["loss"]
    # Which no watch of plain loops sees.
    run = torch.autograd.Variable._execution_engine.run_backward
    run((loss,), (torch.ones_like(loss),), False, False, (), True, True)  # noqa: FBT003 - of torch


def penalised(runtime, model, x, y):  # noqa: ARG001 - one form of several
    """Add what is no gradient of the outputs."""
    loss = functional.cross_entropy(model(x), y)
    (loss + sum(param.square().sum() for param in model.parameters())).backward()


def accumulated(runtime, model, x, y):
    half = len(x) // 2
    with runtime.no_sync(model):
        functional.cross_entropy(model(x[:half]), y[:half]).backward()
    functional.cross_entropy(model(x[half:]), y[half:]).backward()


def written_over(runtime, model, x, y):  # noqa: ARG001 - one form of several
    """Write in place what the step used, as a script that reuses buffers does."""
    output = model(x)
    functional.cross_entropy(output.div_(2.0), y).backward()
    x.zero_()


def autocast(runtime, model, x, y):  # noqa: ARG001 - one form of several
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    functional.cross_entropy(output.float(), y).backward()


def siamese(runtime, model, x, y):  # noqa: ARG001 - one form of several
    (model(x) - model(x.flip(1))).square().mean().backward()


def recurrent(runtime, model, x, y):  # noqa: ARG001 - one form of several
    model(model(x)).square().mean().backward()


def recomputed(runtime, model, x, y):  # noqa: ARG001 - one form of several
    functional.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()


def scaled(runtime, model, x, y):  # noqa: ARG001 - one form of several
    """Scale the loss and unscale and clip the gradients by torch's own means."""
    (functional.cross_entropy(model(x), y) * 65536.0).backward()
    for param in model.parameters():
        param.grad.div_(65536.0)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def backward_twice(runtime, model, x, y):  # noqa: ARG001 - one form of several
    loss = functional.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def with_frozen_norm(runtime, model, x, y):
    model.eval()
    model[0].requires_grad_(False)  # noqa: FBT003 - torch takes it so
    plain(runtime, model, x, y)


def evaluated(runtime, model, x, y):
    """Call the model without gradients, and a copy of it, before and after."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        model(torch.zeros(3, 16))
    plain(runtime, model, x, y)
    other(x[:2]).sum().backward()
    with torch.no_grad():
        model(torch.zeros(3, 16))


def around(runtime, model, x, y):  # noqa: ARG001 - one form of several
    """Use the weights without calling the model."""
    functional.cross_entropy(functional.linear(x, model.weight, model.bias), y).backward()


def compiled(runtime, model, x, y):
    plain(runtime, torch.compile(model, backend="eager"), x, y)


def normed():
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


LINEAR = functools.partial(nn.Linear, 16, 10)
CONFIG_OF = {"dp": {"verify": 1}, "zero 3": {"verify": 1, "optimizer": {"zero": 3}}}


@pytest.mark.sampled
@pytest.mark.parametrize("config", CONFIG_OF)
@pytest.mark.parametrize(
    ("make", "form", "cause"),
    [
        (of_samples, plain, "1 (Centred) computes from all samples"),
        (Counting, plain, "forward writes seen"),
        (functools.partial(WrongBackward, 16, 10), plain, "depend on the rank"),
        (WithLoss, own_padded, "not the mean of the losses of its parts; no weight was changed "),
    ],
)
def test_a_wrong_loop_is_refused_with_its_cause(config, make, form, cause):
    found = run_warm(_step, 2, CONFIG_OF[config], make, form)
    for message, told, verified in found:
        assert message.startswith("step 1 is not that of one process: ")
        assert cause in message
        assert (told, verified) == ([], 0)
    if form is own_padded:
        assert "hint: train with rt.step" in found[0][0]


@pytest.mark.sampled
@pytest.mark.parametrize("config", CONFIG_OF)
@pytest.mark.parametrize(
    ("make", "form"),
    [
        (WithLoss, own),
        (LINEAR, penalised),
        (LINEAR, accumulated),
        (LINEAR, written_over),
        (LINEAR, autocast),
        (LINEAR, siamese),
        (functools.partial(nn.Linear, 16, 16), recurrent),
        (LINEAR, recomputed),
        (LINEAR, scaled),
        (LINEAR, backward_twice),
        (normed, with_frozen_norm),
    ],
)
def test_other_right_loops_are_verified(config, make, form):
    found = run_warm(_step, 2, CONFIG_OF[config], make, form)
    assert found == [("", [], 1)] * 2


def test_other_calls_of_the_model_and_of_copies_change_nothing():
    assert run_warm(_step, 2, {"verify": 1}, LINEAR, evaluated) == [("", [], 1)] * 2


class Rebinding(nn.Linear):
    """Binds another tensor to the name of its buffer, as running averages do."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.scale = self.scale * 0.9
        return super().forward(x) * self.scale


def _rebound(config, dropout):
    """Return losses of a plain loop, or with dropout of steps that are compared without it."""
    runtime = msrun.init(config)
    torch.manual_seed(0)
    model = runtime.shard(nn.Sequential(nn.Dropout(dropout), Rebinding(16, 10)))
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for x, y in batches("mlp", steps=2):
        own = [t.chunk(2)[runtime.rank] for t in (x, y)]
        if dropout:
            loss = runtime.step(model, update, functional.cross_entropy, *own)
        else:
            update.zero_grad()
            loss = functional.cross_entropy(model(own[0]), own[1])
            loss.backward()
            update.step()
        losses.append(loss.item())
    return losses, model[1].scale.item()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_buffer_that_forward_binds_anew_is_put_back(dropout):
    without = run_warm(_rebound, 2, {}, dropout)
    assert run_warm(_rebound, 2, {"verify": 1}, dropout) == without


@pytest.mark.parametrize("config", CONFIG_OF)
def test_a_step_with_zeros_is_none(config):
    """A script takes it before the first, to have the state of the optimizer."""
    assert run_warm(_step_after_zeros, 2, CONFIG_OF[config]) == [(0, [], 1)] * 2


def _step_after_zeros(config):
    """Return what a step with zeros verified and said, and what the next one verified."""
    runtime = msrun.init(config)
    torch.manual_seed(0)
    model = runtime.shard(nn.Linear(16, 10))
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    verifier = runtime.sharded(model).verifier
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        update.step()
        before = verifier.verified
        plain(runtime, model, *(t.chunk(2)[runtime.rank] for t in batches("mlp")[0]))
        update.step()
    return before, not_verified(caught), verifier.verified


@pytest.mark.parametrize(
    ("make", "form", "reason"),
    [
        (functools.partial(Noisy, 16, 10), plain, "draws random numbers other than dropout"),
        (
            functools.partial(SequenceFirst, 16, 10),
            transposed,
            "which has no dim of samples",
        ),
        (LINEAR, around, "backward reached no output of a call of the model"),
        (LINEAR, compiled, "as in a compiled or wrapped one"),
    ],
)
def test_a_loop_that_cannot_be_verified_says_so(make, form, reason):
    found = run_warm(_step, 2, {"verify": 1}, make, form)
    assert [(message, verified) for message, _, verified in found] == [("", 0)] * 2
    assert [len(told) for _, told, _ in found] == [1, 0]
    assert "nothing was verified" in found[0][1][0]
    assert reason in found[0][1][0]


def _uneven(form):
    """Train on a loader whose last batch is uneven, weighted as a plain loop must."""
    runtime = msrun.init({"verify": 3})
    torch.manual_seed(0)
    model = runtime.shard(WithLoss())
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batches("mlp")[0]
    dataset = torch.utils.data.TensorDataset(x[:13], y[:13])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for part, labels in runtime.loader(dataset, batch_size=4):
            output = model(part, labels)
            loss = output["loss"]
            if form == "script":
                loss = functional.cross_entropy(output["logits"], labels)
            (loss * runtime.batch_weight).backward()
            update.step()
            update.zero_grad()
    return runtime.sharded(model).verifier.verified, not_verified(caught)


def test_an_uneven_last_batch_is_verified():
    assert run_warm(_uneven, 2, "script") == [(2, [])] * 2


def test_an_uneven_last_batch_of_a_model_that_returns_its_loss_is_not_verified():
    (verified, told), other = run_warm(_uneven, 2, "model")
    assert (verified, other) == (1, (1, []))
    assert "nothing was verified in step 2: ranks have other values of a tensor of" in told[0]


def _two_models():
    """Train a generator and a discriminator, which the generator's step goes through."""
    runtime = msrun.init({"verify": 1})
    torch.manual_seed(0)
    makes, judges = runtime.shard(nn.Linear(16, 16)), runtime.shard(nn.Linear(16, 1))
    update_m = runtime.optimizer(torch.optim.SGD(makes.parameters(), lr=0.1))
    update_j = runtime.optimizer(torch.optim.SGD(judges.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, _ in batches("mlp", steps=2):
            part = x.chunk(2)[runtime.rank]
            made = makes(part)
            judges(made).mean().backward()
            update_m.step()
            update_j.zero_grad()
            (judges(made.detach()).mean() - judges(part).mean()).backward()
            update_j.step()
            update_m.zero_grad()
    return [runtime.sharded(model).verifier.verified for model in (makes, judges)]


def test_each_of_two_models_is_verified():
    assert run_warm(_two_models, 2) == [[1, 1]] * 2


def _waits():
    """Return for which models a script of `msrun verify` waits once the first has stepped."""
    runtime = msrun.init({"verify": 1})
    torch.manual_seed(0)
    teacher = runtime.shard(nn.Linear(16, 16).requires_grad_(requires_grad=False))
    makes, judges = runtime.shard(nn.Linear(16, 16)), runtime.shard(nn.Linear(16, 1))
    update = runtime.optimizer(torch.optim.SGD(makes.parameters(), lr=0.1))
    runtime.optimizer(torch.optim.SGD(judges.parameters(), lr=0.1))
    judges.requires_grad_(requires_grad=False)
    judges(makes(torch.randn(4, 16))).mean().backward()
    update.step()
    return [not runtime.sharded(model).verifier.is_over for model in (teacher, makes, judges)]


def test_a_judge_that_is_frozen_meanwhile_is_waited_for():
    assert run_warm(_waits, 2) == [[False, False, True]] * 2


def _outcome(verify):
    runtime = msrun.init({"verify": verify})
    model = runtime.shard(nn.Linear(16, 10))
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = (t.chunk(2)[runtime.rank] for t in batches("mlp")[0])
    plain(runtime, model, x, y)
    update.step()
    verifier = runtime.sharded(model).verifier
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    return verifier.outcome if verifier else "", hooks


def test_the_verdict_says_what_was_compared():
    (outcome, hooks), _ = run_warm(_outcome, 2, 1)
    assert outcome.startswith(
        "step 1 equals one process: outputs of one call of the model, 2 gradients and 0 buffers"
    )
    assert outcome.endswith("the loss function of the script was not compared")
    assert hooks == run_warm(_outcome, 2, 0)[0][1]  # later steps cost nothing
