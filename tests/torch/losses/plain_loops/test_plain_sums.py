"""Sums and numbers of a rank's samples in plain loops, in whatever way the script writes them."""

import warnings

import pytest
import torch
from ranks import run_warm
from test_counted_losses import build, data

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch


def log_probs(output, y):
    return output.log_softmax(1).gather(1, y[:, None])[:, 0]


def negated(output, y, _):
    (-log_probs(output, y).sum()).backward()


def subtracted(output, y, _):
    (0.1 - log_probs(output, y).sum()).backward()


def by_gradient(output, y, _):
    losses = -log_probs(output, y)
    losses.backward(torch.ones_like(losses))


def by_autograd(output, y, _):
    torch.autograd.backward(-log_probs(output, y).sum())


def by_autograd_of_several(output, y, _):
    """A list of losses, one of which is no mean."""
    losses = -log_probs(output, y)
    torch.autograd.backward([losses.mean(), losses.sum()])


def by_autograd_of_samples(output, y, _):
    losses = -log_probs(output, y)
    torch.autograd.backward([losses], [torch.ones_like(losses)])


def by_autograd_of_means(output, y, _):
    losses = -log_probs(output, y)
    torch.autograd.backward([losses.mean(), losses], [None, torch.full_like(losses, 1 / len(y))])


def scaled(output, y, _):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(-log_probs(output, y).sum()).backward()


def by_scaled_gradient(output, y, _):
    losses = -log_probs(output, y)
    losses.backward(torch.full_like(losses, 0.5))


def above_baseline(output, y, _):
    """REINFORCE: the reward of a class is its number."""
    rewards = y.double()
    (-log_probs(output, y) * (rewards - rewards.mean())).mean().backward()


def above_baseline_of_all(output, y, mean):
    rewards = y.double()
    (-log_probs(output, y) * (rewards - mean(rewards.mean()))).mean().backward()


def by_gradient_of_mean(output, y, _):
    losses = -log_probs(output, y)
    losses.backward(torch.full_like(losses, 1 / len(losses)))


def divided(output, y, mean):
    count = mean(torch.tensor(float(len(y))))
    (-log_probs(output, y).sum() / count).backward()


def divided_together(output, y, _):
    """Divide two sums, one of which has a factor, by the samples, as a variational autoencoder."""
    ((0.1 * output.square().sum() - log_probs(output, y).sum()) / len(y)).backward()


def over_pixels(output, y, _):
    ((0.1 * output.square().sum() - log_probs(output, y).sum()) / 784).backward()


def apart(output, *_):
    """Push samples away from each other."""
    (-torch.cdist(output[:, :3], output[:, :3]).mean()).backward()


def apart_by_autograd(output, *_):
    torch.autograd.backward([-torch.cdist(output[:, :3], output[:, :3]).mean()])


def trained(rt, backward):
    """Return weights after a few steps, or what was refused, and the warnings."""
    model = rt.shard(build())
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for x, y in data(ignored=False):
                part = [tensor.chunk(rt.world_size)[rt.rank] for tensor in (x, y)]
                update.zero_grad()
                backward(model(part[0]), part[1], rt.mean_over_data)
                update.step()
        except ModelError as error:
            return error.message, []
    said = [str(each.message) for each in caught if "msrun" in str(each.message)]
    return [full_tensor(param.detach()) for param in model.parameters()], said


def job(backward):
    return trained(msrun.init({}), backward)


SUM = (
    "the loss of this loop is a sum over a part of the batch ({}), and ranks average their "
    "gradients: one process has 2 times as much"
)


@pytest.mark.parametrize(
    ("backward", "name"),
    [
        (negated, "sum"),
        (subtracted, "sum"),
        (by_gradient, "a loss of each sample"),
        (by_autograd, "sum"),
        (by_autograd_of_several, "sum"),
        (by_autograd_of_samples, "a loss of each sample"),
    ],
)
def test_sums_of_ranks_are_refused(backward, name):
    assert run_warm(job, 2, backward) == [(SUM.format(name), [])] * 2


@pytest.mark.parametrize(
    ("backward", "said"),
    [
        (scaled, ["is a sum over a part of the batch (sum) times -4, and ranks average"]),
        (over_pixels, ["is a sum over a part of the batch (sum) times 0.00127551, and ranks"]),
        (
            by_scaled_gradient,
            ["is a sum over a part of the batch (a loss of each sample) times 0.5"],
        ),
        (  # of a line in the first step, and of the values that ranks have
            above_baseline,
            [
                "depends on a mean over samples (test_plain_sums.py, line",
                "depends on a mean of a part of the batch, 1.25 on rank 0 and 4.5 on rank 1",
            ],
        ),
        (apart, ["depends on pairs of samples (cdist) of a part of the batch"]),
        (apart_by_autograd, ["depends on pairs of samples (cdist) of a part of the batch"]),
    ],
)
def test_what_is_of_a_part_of_the_batch_is_a_warning(backward, said):
    for _, found in run_warm(job, 2, backward):
        assert len(found) == len(said)
        assert all(text in told for text, told in zip(said, found, strict=True))


@pytest.mark.parametrize(
    "backward",
    [
        above_baseline_of_all,
        by_gradient_of_mean,
        by_autograd_of_means,
        divided,
        divided_together,
    ],
)
def test_what_all_ranks_have_is_right(backward):
    expected, _ = run_warm(job, 1, backward)[0]

    for found, said in run_warm(job, 2, backward):
        assert said == []
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
