"""Losses of a plain loop: those of one process, or a sentence before the optimizer steps."""

import contextlib
import functools

import pytest
import torch
from ranks import run_warm
from test_counted_losses import COMPOSED, EXACT, PLAN, build, data, one_process
from torch import nn
from torch.export import export
from torch.fx import symbolic_trace
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

CROSS_ENTROPY = functional.cross_entropy
# name -> ranks, configuration.
CONFIGS = {
    "dp 2": (2, {}),
    "zero 3": (2, {"optimizer": {"zero": 3}}),
    "zero 1": (2, {"optimizer": {"zero": 1}}),
    "dp 2 x tp 2": (4, {"mesh": {"dp": 2, "tp": 2}, "plan": PLAN}),
}
END = "; in one process all elements of the batch weigh the same, and no weight was changed"
SUM = (
    "the loss of this loop is a sum over a part of the batch ({name}), and ranks average their "
    "gradients: one process has 2 times as much"
)


def plain_loop(rt, loss_fn, *, ignored=True):
    """Return by how much weights differ from those of one process."""
    _, weights = one_process(loss_fn, ignored=ignored, max_norm=None)
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9))
    count, share = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    for x, y in data(ignored=ignored):
        part = [t.chunk(count)[share] for t in (x, y)]
        update.zero_grad()
        loss_fn(model(part[0]), part[1]).backward()
        update.step()
    pairs = model.named_parameters()
    return max((full_tensor(p.detach()) - weights[name]).abs().max().item() for name, p in pairs)


def told(rt, run, *args, **options):
    """Return what `run` returns, or what was refused."""
    try:
        return run(rt, *args, **options)
    except ModelError as error:
        return error.message
    finally:
        rt.close()


def each_loss(config, names, *, ignored):
    losses = EXACT | COMPOSED
    return {
        name: told(msrun.init(config), plain_loop, losses[name], ignored=ignored) for name in names
    }


def outcomes(name, losses, *, ignored=True):
    """Return what the first rank says of each loss; others refuse the same losses."""
    ranks, config = CONFIGS[name]
    run = functools.partial(each_loss, ignored=ignored)
    of_ranks = run_warm(run, ranks, {"mesh": {"dp": -1}, **config}, list(losses))
    refused = [{loss for loss, found in of.items() if isinstance(found, str)} for of in of_ranks]
    assert refused == [refused[0]] * ranks
    return of_ranks[0]


# Means of which other targets count on each rank; what the first step says.
UNEVEN = [
    "ignored",
    "ignored by a module",
    "class weights",
    "nll",
    "masked",
    "of chosen",
    "written",
]
UNEVEN += ["masked with a floor", "masked with an offset", "chunks added up in place", "in slots"]
UNEVEN += ["stacked chunks", "with a penalty", "two means"]
EVEN = ["probabilities", "chunks by samples", "mean of squares"]
SUMS = ["sum", "sum by a module", "sum at the end", "sum of chunks"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.few(1)
def test_means_over_other_counts_are_refused(name):
    found = outcomes(name, UNEVEN)
    other = 2 if "tp" in name else 1
    said = f"the loss of this loop divides cross_entropy by 2 on rank 0 and by 3 on rank {other}"

    assert found["ignored"] == found["ignored by a module"] == said + END
    assert [loss for loss in UNEVEN if not str(found[loss]).endswith(END)] == []


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.few(2)
def test_means_over_equal_counts_are_those_of_one_process(name):
    found = outcomes(name, [*EVEN, *UNEVEN[:1]], ignored=False)

    assert found == dict.fromkeys(found, pytest.approx(0, abs=1e-12))


def test_sums_are_refused_where_ranks_average():
    found = outcomes("dp 2", SUMS)

    assert found["sum"] == SUM.format(name="cross_entropy")
    assert found["sum by a module"] == SUM.format(name="mse_loss")
    assert {text.partition(" (")[0] for text in found.values()} == {SUM.partition(" (")[0]}


def test_sums_are_those_of_one_process_where_ranks_add_up():
    config = {"reduce": {"op": "sum"}}
    [found, _] = run_warm(functools.partial(each_loss, ignored=True), 2, config, SUMS)

    assert found == dict.fromkeys(SUMS, pytest.approx(0, abs=1e-12))


def train(rt, make, loss_of, batches, *, parts=1):
    """Train a model in a plain loop; return the weights."""
    model = rt.shard(make())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    count, share = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    for batch in batches:
        update.zero_grad()
        pieces = list(zip(*(t.chunk(count)[share].chunk(parts) for t in batch), strict=True))
        for number, piece in enumerate(pieces):
            with contextlib.nullcontext() if number == parts - 1 else rt.no_sync(model):
                (loss_of(model, *piece, rt.mean_over_data) / parts).backward()
        update.step()
    return [full_tensor(param.detach()) for param in model.parameters()]


def trained_alone(model, loss_of, batches):
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        update.zero_grad()
        loss_of(model, *batch, lambda value: value).backward()
        update.step()
    return [param.detach() for param in model.parameters()]


def job(function, *args):
    """Call `function` of a runtime of two data-parallel ranks; return what it returns or says."""
    return told(msrun.init({"mesh": {"dp": -1}}), function, *args)


def equal(found, expected):
    for own in found:
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


class OwnLoss(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, x, labels):
        output = self.net(x)
        return {"loss": CROSS_ENTROPY(output, labels), "logits": output}


def own_loss(model, x, y, _):
    return model(x, labels=y)["loss"]


def test_models_that_return_their_loss_are_seen():
    run = functools.partial(job, train, OwnLoss, own_loss)

    said = "the loss of this loop divides cross_entropy by 2 on rank 0 and by 3 on rank 1"
    assert run_warm(run, 2, data(ignored=True)) == [said + END] * 2
    equal(
        run_warm(run, 2, data(ignored=False)),
        trained_alone(OwnLoss(), own_loss, data(ignored=False)),
    )


def by_all(model, x, y, mean_over_data):
    """Divide by what counts on all ranks, as the hint of the refusal has it."""
    return CROSS_ENTROPY(model(x), y, reduction="sum") / mean_over_data((y != -100).sum())


def test_a_sum_over_the_count_of_all_ranks_is_that_of_one_process():
    batches = data(ignored=True)[:-1] * 3

    equal(run_warm(job, 2, train, build, by_all, batches), trained_alone(build(), by_all, batches))


def with_number(model, x, y, _):
    return CROSS_ENTROPY(model(x), y, reduction="sum") / (y != -100).sum().item()


def test_numbers_of_the_script_are_compared_too():
    [found, _] = run_warm(job, 2, train, build, with_number, data(ignored=True))

    said = "an element of cross_entropy weighs 0.5 in the loss of this loop on rank 0 and 0.333333 "
    assert found == said + "on rank 1" + END


def plain(model, x, y, _):
    return CROSS_ENTROPY(model(x), y)


def late(step):
    """Return batches of which each rank has as many targets that count until `step`."""
    found = [(x, y.clamp(min=0)) for x, y in data(ignored=False)] * 6
    for number, (x, y) in enumerate(found):
        target = y.clone()
        target[[0, 4]] = -100
        target[1] = -100 if number + 1 == step else y[1]
        found[number] = x, target
    return found


@pytest.mark.parametrize("step", [2, 6, 11])
def test_counts_that_follow_from_the_data_are_compared_at_every_step(step):
    said = "the loss of this loop divides cross_entropy by 2 on rank 0 and by 3 on rank 1"
    assert run_warm(job, 2, train, build, plain, late(step)) == [said + END] * 2


def test_each_backward_pass_of_a_step_is_compared():
    run = functools.partial(job, functools.partial(train, parts=2))
    batches = data(ignored=False)

    equal(run_warm(run, 2, build, plain, batches), trained_alone(build(), plain, batches))
    batches[1][1][3] = -100
    said = "the loss of this loop divides cross_entropy by 1 on rank 0 and by 2 on rank 1"
    assert run_warm(run, 2, build, plain, batches) == [said + END] * 2


def contrastive(model, x, *_):
    output = functional.normalize(model(x), dim=1)
    return CROSS_ENTROPY(output @ output.T, torch.arange(len(x)))


def warned(rt, *args):
    with pytest.warns(UserWarning, match="msrun") as caught:
        train(rt, *args)
    return [str(each.message).split(": ")[1] for each in caught]


def test_losses_over_the_batch_are_a_warning():
    said = (
        "the loss compares the 4 samples of this part of the batch with each other, and not with "
        "those of other ranks and micro-batches"
    )
    assert run_warm(job, 2, warned, build, contrastive, data(ignored=False)) == [[said]] * 2


def scaled(model, x, y, _):
    return CROSS_ENTROPY(model(x), y, reduction="sum") * 0.01


def test_a_sum_times_a_number_is_a_warning():
    said = (
        "the loss of this loop is a sum over a part of the batch (cross_entropy) times 0.01, and "
        "ranks average their gradients"
    )
    assert run_warm(job, 2, warned, build, scaled, data(ignored=False)) == [[said]] * 2


def in_closures(rt, *, calls_inside):
    """Train one step, whose optimizer runs the backward pass; return how weights changed."""
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = (tensor.chunk(2)[rt.rank] for tensor in data(ignored=True)[0])
    before = model.up.weight.detach().clone()
    output = None if calls_inside else model(x)

    def closure():
        loss = CROSS_ENTROPY(model(x) if calls_inside else output, y)
        loss.backward()
        return loss

    with pytest.raises(ModelError, match="the loss of this loop divides cross_entropy"):
        update.step(closure)
    return (model.up.weight - before).abs().max().item()


@pytest.mark.parametrize("calls_inside", [True, False])
def test_a_backward_pass_in_a_closure_is_seen(calls_inside):
    run = functools.partial(job, functools.partial(in_closures, calls_inside=calls_inside))

    assert run_warm(run, 2) == [0.0, 0.0]


def traced_between(rt):
    """Call a model, trace another one, and train the first; return its weights."""
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = (tensor.chunk(2)[rt.rank] for tensor in data(ignored=False)[0])
    output = model(x)
    symbolic_trace(build())
    export(build(), (x,))
    CROSS_ENTROPY(output, y).backward()
    update.step()
    return [full_tensor(param.detach()) for param in model.parameters()]


def test_models_may_be_traced_between_a_call_and_its_backward_pass():
    found = run_warm(job, 2, traced_between)

    equal(found, trained_alone(build(), plain, data(ignored=False)[:1]))


class Other(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def in_modes(model, x, y, _):
    """Call the model inside of modes that end before the loss is computed, and in one after."""
    with torch.device("cpu"), Other():
        output = model(x)
    with torch.device("cpu"), Other():
        return CROSS_ENTROPY(output, y)


def stacks(rt):
    """Return the modes that are left behind a loop, and behind a call without a backward pass."""
    weights = train(rt, build, in_modes, data(ignored=False))
    left = [type(mode).__name__ for mode in _get_current_function_mode_stack()]
    other = rt.shard(build())
    other(data(ignored=False)[0][0])
    del other
    return weights, left


def test_modes_of_a_script_end_as_they_began():
    for weights, left in run_warm(job, 2, stacks):
        assert left == []
        equal([weights], trained_alone(build(), plain, data(ignored=False)))


def adversaries(rt):
    """Train two models by turns, as of a GAN, each by an optimizer; return their weights."""
    one, other = rt.shard(build()), rt.shard(build())
    updates = [rt.optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (one, other)]
    return by_turns(one, other, updates, rt.layout.size("dp"), rt.rank)


def by_turns(one, other, updates, count, share):
    for batch in data(ignored=False):
        x, y = (tensor.chunk(count)[share] for tensor in batch)
        made = one(x)
        updates[1].zero_grad()
        (CROSS_ENTROPY(other(x), y) + CROSS_ENTROPY(other(made[:, :6].detach()), y)).backward()
        updates[1].step()
        updates[0].zero_grad()
        CROSS_ENTROPY(other(made[:, :6]), y).backward()
        updates[0].step()
    models = (one, other)
    return [full_tensor(param.detach()) for model in models for param in model.parameters()]


def test_models_of_several_optimizers_train_as_in_one_process():
    models = [build(), build()]
    updates = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    equal(run_warm(job, 2, adversaries), by_turns(*models, updates, 1, 0))


def with_both(rt):
    """Train by `rt.step`, with a call of the model between steps, whose loss nobody uses."""
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in data(ignored=True):
        part = [t.chunk(2)[rt.rank] for t in (x, y)]
        CROSS_ENTROPY(model(part[0]), part[1])
        rt.step(model, update, CROSS_ENTROPY, *part)
    return [full_tensor(param.detach()) for param in model.parameters()]


def test_rt_step_counts_beside_calls_of_the_script():
    batches = data(ignored=True)

    equal(run_warm(job, 2, with_both), trained_alone(build(), plain, batches))
