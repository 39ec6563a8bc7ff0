"""Losses with gradients that the script takes: equal to one process, or refused on all ranks."""

import copy
import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = pytest.mark.torch

SAMPLES, WIDTH, CLASSES = 8, 8, 6
CONFIGS = {
    "dp 2": (2, {}),
    "dp 2, accumulate 2": (2, {"accumulate": 2}),
}
MEAN = "a gradient by the samples of a part of the batch"
SHARED = "a gradient by what all samples share of a part of the batch"


def slope(value, x, **options):
    return torch.autograd.grad(value, x, create_graph=True, **options)[0]


def leaf(x):
    return x.detach().clone().requires_grad_()


def of_sum(model, x):
    """Return a penalty on the slope of each sample, by the sum of all outputs."""
    x = leaf(x)
    return slope(model.head(x).sum(), x).square().sum(1).mean()


def of_norm(model, x):
    """As critics of images have it, between two batches."""
    x = (0.3 * x + 0.7 * x.flip(1)).requires_grad_()
    return (slope(model.head(x).sum(), x).norm(dim=1) - 1).square().mean()


def of_rows(model, x):
    x = leaf(x)
    output = model.head(x)
    return slope(output, x, grad_outputs=torch.ones_like(output)).square().mean()


def of_hidden(model, x):
    hidden = model.first(x)
    return slope(model.last(hidden).sum(), hidden).square().mean()


def of_stack(model, x):
    """Return a penalty by outputs of which nobody knows that they have samples in dim 0."""
    x = leaf(x)
    return slope(torch.stack([model.head(x), model.head(2 * x)]).sum(), x).square().mean()


def added(model, x):
    """Return a sum of means of slopes, as forces of atoms have it."""
    x = leaf(x)
    force = -slope(model.head(x).square().sum(), x)
    return functional.mse_loss(force, x.detach())


def signed(model, x):
    """Return the loss of inputs that a mean moved, each by the same length."""
    moved = leaf(x)
    (found,) = torch.autograd.grad(model.head(moved).square().mean(), moved)
    return model.head(x + 0.1 * found.sign()).square().mean()


def one_sample(model, x):
    """Return a loss of weights that moved by the gradient of one sample."""
    losses = []
    for row in x:
        step = slope(model.head(row).square().mean(), model.first.weight)
        moved = model.first.weight - 0.1 * step
        losses.append(functional.linear(row, moved, model.first.bias).square().mean())
    return torch.stack(losses).mean()


def long_samples(model, x):
    """As meta-learning has tasks, each with as many rows as the part has samples, by chance."""
    tasks, weight = x[:, None].expand(-1, len(x), -1), model.first.weight
    slopes = [slope(model.head(task).square().mean(), weight) for task in tasks.unbind()]
    slopes += [slope(model.head(tasks[i]).square().mean(), weight) for i in range(len(x))]
    return torch.stack([each.square().sum() for each in slopes]).mean()


def of_mean(model, x):
    x = leaf(x)
    return slope(model.head(x).mean(), x).square().sum(1).mean()


def of_cross_entropy(model, x):
    x = leaf(x)
    labels = torch.arange(len(x)) % CLASSES
    return slope(functional.cross_entropy(model.head(x), labels), x).square().sum()


def by_weights(model, x):
    return slope(model.head(x).square().mean(), model.first.weight).square().sum()


def by_sum_and_weights(model, x):
    return 0.01 * slope(model.head(x).square().sum(), model.first.weight).square().mean()


def by_scale(model, x):
    """Return the penalty of invariant risk minimization."""
    scale = torch.ones((), dtype=x.dtype, requires_grad=True)
    return slope((model.head(x) * scale).square().mean(), scale).square()


def by_shift(model, x):
    """As wide as the batch has samples, by chance."""
    shift = torch.zeros(WIDTH, dtype=x.dtype, requires_grad=True)
    return slope(model.head(x + shift).sum(), shift).square().mean()


def soft_targets(model, x):
    targets = torch.full((len(x), CLASSES), 1 / CLASSES, dtype=x.dtype)
    return functional.kl_div(model.head(x).log_softmax(1), targets, reduction="batchmean")


def of_batch_mean(model, x):
    x = leaf(x)
    return slope(soft_targets(model, x), x).square().mean()


def by_batch_mean_and_weights(model, x):
    return slope(2 * soft_targets(model, x), model.first.weight).square().mean()


def by_margins_and_weights(model, x):
    """By a mean that torch's losses alone know."""
    output = model.head(x)
    loss = functional.triplet_margin_loss(output, 2 * output, output.flip(1))
    return slope(loss, model.first.weight).square().mean()


def of_losses(model, x):
    """By the loss of each sample."""
    x = leaf(x)
    targets = torch.full((len(x), CLASSES), 1 / CLASSES, dtype=x.dtype)
    losses = functional.kl_div(model.head(x).log_softmax(1), targets, reduction="none")
    return slope(losses.sum(), x).square().mean()


def each_loss(model, x):
    targets = torch.full((len(x), CLASSES), 1 / CLASSES, dtype=x.dtype)
    return functional.kl_div(model.head(x).log_softmax(1), targets, reduction="none").sum(1)


def of_picked_losses(model, x):
    x = leaf(x)
    losses = each_loss(model, x)
    picked = [losses[index] for index in range(len(losses))]
    return slope(torch.stack(picked).mean(), x).square().sum()


def of_picked_sum(model, x):
    x = leaf(x)
    return slope(torch.stack(list(each_loss(model, x))).sum(), x).square().sum(1).mean()


def by_each_row_and_weights(model, x):
    losses = [model.head(row).square().mean() for row in x]
    return slope(torch.stack(losses).mean(), model.first.weight).square().sum()


def of_joined(model, x):
    """By a mean of what two parts of each sample make."""
    x = leaf(x)
    joined = torch.cat([x[:, :2], 2 * x[:, 2:]], dim=1)
    return slope(model.head(joined).square().mean(), x).square().sum()


def by_stacked_and_weights(model, x):
    output = model.head(x)
    both = torch.stack([output, 2 * output], dim=1)
    return slope(both.square().mean(), model.first.weight).square().sum()


def of_mean_times_samples(model, x):
    x = leaf(x)
    return slope(model.head(x).square().mean() * len(x), x).square().sum(1).mean()


def moved_by_mean_times_samples(model, x):
    """Return the loss of inputs that an adversary moved, whose cross entropy is a sum."""
    moved = leaf(x)
    loss = functional.cross_entropy(model.head(moved), torch.zeros(len(x), dtype=torch.long))
    (found,) = torch.autograd.grad(len(x) * loss, moved)
    return model.head(x + 0.1 * found).square().mean()


def of_twice_the_mean(model, x):
    x = leaf(x)
    return slope(2 * model.head(x).square().mean(), x).square().sum(1).mean()


def of_ignored_and_samples(model, x):
    """By a mean over other counts in each part, times samples."""
    x = leaf(x)
    labels = torch.where(x[:, 0] > 0, 0, -100)
    return slope(functional.cross_entropy(model.head(x), labels) * len(x), x).square().mean()


def by_samples_and_weights(model, x):
    return slope(model.head(x).square().mean() * len(x), model.first.weight).square().sum()


RIGHT = [of_sum, of_norm, of_rows, of_hidden, of_stack, added, signed, one_sample, of_losses]
RIGHT += [of_picked_sum, long_samples]
# Right in a plain loop, where the first step alone is looked at.
BY_SAMPLES = [of_mean_times_samples, moved_by_mean_times_samples]
WRONG = {
    of_mean_times_samples: MEAN,
    moved_by_mean_times_samples: MEAN,
    of_twice_the_mean: MEAN,
    of_ignored_and_samples: MEAN,
    by_samples_and_weights: SHARED,
    of_mean: MEAN,
    of_cross_entropy: MEAN,
    by_weights: SHARED,
    by_sum_and_weights: SHARED,
    by_scale: SHARED,
    by_shift: SHARED,
    of_batch_mean: MEAN,
    by_batch_mean_and_weights: SHARED,
    by_margins_and_weights: SHARED,
    of_picked_losses: MEAN,
    by_each_row_and_weights: SHARED,
    of_joined: MEAN,
    by_stacked_and_weights: SHARED,
}


class Penalized(nn.Module):
    """Returns its loss, with a penalty; or its output, with the penalty in the loss function."""

    def __init__(self, penalty=None):
        super().__init__()
        self.penalty = penalty
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def head(self, x):
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x, labels=None):
        if labels is None:
            return self.head(x)
        loss = functional.cross_entropy(self.head(x), labels)
        return loss + self.penalty(self, x) if self.training else loss


def train(penalty, config=None):
    """Return losses and the last weights; in one process without a configuration."""
    torch.manual_seed(0)
    model = Penalized(penalty).double()
    x, y = torch.randn(SAMPLES, WIDTH, dtype=torch.float64), torch.arange(SAMPLES) % CLASSES
    rt, mine = None, slice(None)
    if config is not None:
        rt = msrun.init(config)
        size, own = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        mine = slice(own * SAMPLES // size, (own + 1) * SAMPLES // size)
        model = rt.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        if rt is None:
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            optimizer.step()
        else:
            loss = rt.step(model, rt.optimizer(optimizer), {"x": x[mine], "labels": y[mine]})
        losses.append(loss.item())
    return losses, [param.detach().tolist() for param in model.parameters()]


def answers(config):
    """Return how far losses and weights of each penalty are off, or why it is refused."""
    found = {}
    for penalty in (*RIGHT, *WRONG):
        try:
            losses, weights = train(penalty, config)
        except ModelError as error:
            found[penalty.__name__] = error.message
            continue
        losses_alone, weights_alone = train(penalty)
        pairs = [(losses, losses_alone), *zip(weights, weights_alone, strict=True)]
        gaps = [
            (torch.tensor(own) - torch.tensor(other)).abs().max().item() for own, other in pairs
        ]
        found[penalty.__name__] = max(gaps)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_they_are_those_of_one_process_or_refused(name):
    ranks, config = CONFIGS[name]
    found = run_warm(answers, ranks, config)

    assert found[0] == found[1]
    wrong = {
        penalty.__name__: found[0][penalty.__name__]
        for penalty, said in WRONG.items()
        if said not in str(found[0][penalty.__name__])
    }
    off = {
        penalty.__name__: found[0][penalty.__name__]
        for penalty in RIGHT
        if found[0][penalty.__name__] != pytest.approx(0, abs=1e-9)
    }
    assert (wrong, off) == ({}, {})


def looped(penalties):
    """Return what a plain loop is told of each penalty, and how far its weights are off."""
    found = {}
    for penalty in penalties:
        torch.manual_seed(0)
        model = Penalized(penalty).double()
        x, y = torch.randn(SAMPLES, WIDTH, dtype=torch.float64), torch.arange(SAMPLES) % CLASSES
        alone = copy.deepcopy(model)
        alone(x, y).backward()
        rt = msrun.init({})
        model = rt.shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(x.chunk(2)[rt.rank], y.chunk(2)[rt.rank]).backward()
            optimizer.step()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        gap = max((own - (each - each.grad)).abs().max().item() for own, each in pairs)
        found[penalty.__name__] = [str(each.message) for each in caught] or gap
        rt.close()
    return found


def test_a_plain_loop_may_multiply_a_mean_by_the_samples():
    wrong = [of_twice_the_mean, of_ignored_and_samples, by_samples_and_weights]
    for found in run_warm(looped, 2, [*BY_SAMPLES, *wrong]):
        assert [found[each.__name__] for each in BY_SAMPLES] == [pytest.approx(0, abs=1e-9)] * 2
        for each in wrong:
            assert WRONG[each] in str(found[each.__name__])
