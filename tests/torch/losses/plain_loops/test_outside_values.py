"""What scripts keep of samples for later losses: a warning, unless it is of all ranks."""

import warnings

import pytest
import torch
from ranks import run_warm
from test_counted_losses import build, data
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch


class Own:
    """Keeps what it gets of this rank."""

    def __init__(self, rt):
        self.rt = rt

    def mean(self, x):
        return x.mean()

    def rows(self, x):
        return x


class All(Own):
    """Keeps what it gets of all ranks."""

    def mean(self, x):
        return self.rt.mean_over_data(x.mean())

    def rows(self, x):
        return self.rt.gather(x)


def rewarded(model, keeps):
    """REINFORCE above a running mean of rewards."""
    baseline = 0.0

    def loss_of(x, y):
        nonlocal baseline
        logs = model(x).log_softmax(1).gather(1, y[:, None])[:, 0]
        rewards = y.double()
        advantages = rewards - baseline
        baseline = 0.9 * baseline + 0.1 * keeps.mean(rewards).item()
        return -(advantages * logs).mean()

    return loss_of


def queued(model, keeps):
    """MoCo: the negatives of a sample are keys of earlier batches."""
    queue = torch.ones(24, 10, dtype=torch.double)

    def loss_of(x, y):
        nonlocal queue
        features = functional.normalize(model(x), dim=1)
        keys = functional.normalize(model(x + 1).detach(), dim=1)
        positive = (features * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, features @ queue.clone().T], 1)
        queue = torch.cat([queue, keeps.rows(keys)])[-24:]
        return functional.cross_entropy(logits, torch.zeros_like(y))

    return loss_of


def one_by_one(model, _):
    """Numbers of single samples are others on each rank, and right."""

    def loss_of(x, y):
        output = model(x)
        scales = (1 + x.abs().mean(1)).tolist()
        losses = [
            (row * scale - place).square().mean()
            for row, scale, place in zip(output, scales, y, strict=True)
        ]
        return torch.stack(losses).mean()

    return loss_of


def trained(loop, kind):
    """Return the weights after three steps, and the warnings."""
    rt = msrun.init({})
    model = rt.shard(build())
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = loop(model, kind(rt))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in data(ignored=False):
            part = [tensor.chunk(rt.world_size)[rt.rank] for tensor in (x, y)]
            update.zero_grad()
            loss_of(*part).backward()
            update.step()
    said = [str(each.message) for each in caught if "msrun" in str(each.message)]
    return [param.detach() for param in model.parameters()], said


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (rewarded, "meet a number that ranks have others of, in sub (test_outside_values.py, line"),
        (queued, "meet a matrix that ranks have others of, in matmul (test_outside_values.py, "),
    ],
)
def test_what_is_of_earlier_samples_of_a_rank_is_a_warning(loop, words):
    for _, said in run_warm(trained, 2, loop, Own):
        assert [words in text for text in said] == [True]


@pytest.mark.parametrize("loop", [rewarded, queued, one_by_one])
def test_what_is_of_earlier_samples_of_all_ranks_is_right(loop):
    expected, _ = run_warm(trained, 1, loop, All)[0]

    for found, said in run_warm(trained, 2, loop, All):
        assert said == []
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def above_baseline(keeps):
    baseline = 0.0

    def loss_of(output, target):
        nonlocal baseline
        rewards = (output.argmax(1) == target).double()
        losses = functional.cross_entropy(output, target, reduction="none")
        advantages = rewards - baseline
        baseline = 0.9 * baseline + 0.1 * keeps.mean(output.detach()).item()
        return (advantages * losses).mean()

    return loss_of


def against_queue(keeps):
    queue = torch.ones(24, 10, dtype=torch.double)

    def loss_of(output, target):
        nonlocal queue
        features = functional.normalize(output, dim=1)
        logits = torch.cat([features.amax(1, keepdim=True), features @ queue.T], 1)
        queue = torch.cat([queue, keeps.rows(features.detach())])[-24:]
        return functional.cross_entropy(logits, torch.zeros_like(target))

    return loss_of


def stepped(loss, kind, config):
    """Return the weights after three steps, and the warnings."""
    rt = msrun.init(config)
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of = loss(kind(rt))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in data(ignored=False):
            part = [tensor.chunk(rt.world_size)[rt.rank] for tensor in (x, y)]
            rt.step(model, update, loss_of, *part)
    said = [str(each.message) for each in caught if "samples meet" in str(each.message)]
    return [param.detach() for param in model.parameters()], said


@pytest.mark.parametrize(("ranks", "config"), [(2, {}), (1, {"accumulate": 2})])
@pytest.mark.parametrize(
    ("loss", "words"), [(above_baseline, "a number that"), (against_queue, "a matrix that")]
)
def test_a_step_whose_loss_keeps_what_is_of_its_part_warns(loss, words, ranks, config):
    parts = "ranks" if ranks > 1 else "micro-batches"
    for _, (text,) in run_warm(stepped, ranks, loss, Own, config):
        assert f"meet {words} {parts} have others of, in" in text
        assert "(test_outside_values.py, line" in text


@pytest.mark.parametrize("loss", [above_baseline, against_queue])
def test_a_step_whose_loss_keeps_what_is_of_all_ranks_is_right(loss):
    expected, _ = run_warm(stepped, 1, loss, All, {})[0]

    for found, said in run_warm(stepped, 2, loss, All, {}):
        assert said == []
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
