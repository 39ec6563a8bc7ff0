"""Numbers that a model computes of all its samples, beside the output that a loss function gets.

A part of the batch has other ones.  They are right in a loss that is linear in them, if they are
means; others are refused in micro-batches, and a warning between ranks.
"""

import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = pytest.mark.torch

EXPERTS = 4


def added(output, target):
    scores, number = output
    return functional.cross_entropy(scores, target) + 0.5 * number


def squared(output, target):
    scores, number = output
    return functional.cross_entropy(scores, target) + number**2


def square(p):
    return p.square().mean()


def chosen(p):
    return p[:, 0] > 0


def balance(p):
    """The loss for the balance of experts of Shazeer et al. (2017)."""
    load = p.softmax(1).sum(0)
    return load.var() / load.mean() ** 2


RIGHT = {
    "means": lambda p: 0.3 * p.mean() + square(p) + p.mean(0).sum(),
    "a mean of sums of samples": lambda p: p.square().sum(1).mean(),
    "a sum, divided by samples": lambda p: p.square().sum() / len(p),
    "a sum, divided by elements": lambda p: p.square().sum() / p.numel(),
    "a sum of losses, divided by samples": lambda p: (
        functional.cross_entropy(p, p.argmax(1), reduction="sum") / len(p)
    ),
    "means of single samples": lambda p: torch.stack([x.square().mean() for x in p]).mean(),
    "another number of each sample": lambda p: p.square().mean(1).sqrt().mean(),
}
WRONG = {
    "root": lambda p: square(p).sqrt(),
    "exponential": lambda p: p.mean().exp(),
    "product": lambda p: p[:, 0].mean() * p[:, 1].mean(),
    "quotient": lambda p: square(p) / p.abs().mean(),
    "variance of means": lambda p: p.mean(0).var(),
    "largest mean": lambda p: p.mean(0).max(),
    "norm of means": lambda p: p.mean(0).norm(),
    "angle": lambda p: functional.cosine_similarity(p.mean(0), torch.ones(EXPERTS), dim=0),
    "floor": lambda p: square(p).clamp(min=0.3),
    "square error": lambda p: functional.mse_loss(p.mean(), torch.zeros(())),
    "collected": lambda p: torch.stack([p[:, 0].mean(), p[:, 1].mean()]).var(),
    "balance of experts": balance,
    "sum": lambda p: p.square().sum(),
    "sum, divided by a constant": lambda p: p.square().sum() / 4,
    "sum over those that count": lambda p: (p[:, 1] * chosen(p)).sum() / chosen(p).sum(),
    "mean of chosen": lambda p: p[chosen(p)].square().mean(),
    "mean of chosen by their numbers": lambda p: p[torch.where(chosen(p))[0]].square().mean(),
    "factor": lambda p: p[chosen(p).nonzero()[:, 0]].sum() / len(p) * chosen(p).nonzero().shape[0],
    "targets that count": lambda p: functional.cross_entropy(p, torch.where(chosen(p), 1, -100)),
    "sum of losses": lambda p: functional.cross_entropy(p, p.argmax(1), reduction="sum"),
    "sum of errors, divided by a constant": lambda p: (
        functional.mse_loss(p, torch.zeros_like(p), reduction="sum") / 4
    ),
    "correlations": lambda p: torch.corrcoef(p.T)[0, 1],
    "distances": lambda p: functional.pdist(p).mean(),
}


def some_of_each(choose):
    """Return a function with experts that have room for some samples each."""

    def between(p):
        weight, expert = p.softmax(1).max(1)
        output = p * 1
        for number in range(EXPERTS):
            rows = choose(expert == number, weight)
            output[rows] = p[rows] * weight[rows, None] * (number + 2)
        return output.square().mean()

    return between


def in_running_order(mask, _):
    return torch.where(mask & (mask.long().cumsum(0) <= 1))[0]


def best(mask, weight):
    rows = mask.nonzero()[:, 0]
    return rows[weight[rows].topk(min(1, len(rows))).indices]


RIGHT["experts with room for all"] = some_of_each(lambda mask, _: torch.where(mask)[0])
WRONG |= {
    "experts that take the first": some_of_each(lambda mask, _: torch.where(mask)[0][:1]),
    "experts that narrow": some_of_each(
        lambda mask, _: (rows := mask.nonzero()[:, 0]).narrow(0, 0, min(len(rows), 1))
    ),
    "experts that split": some_of_each(
        lambda mask, _: mask.nonzero()[:, 0].split(1)[0] if mask.any() else mask.nonzero()[:, 0]
    ),
    "experts that count": some_of_each(in_running_order),
    "experts that take the best": some_of_each(best),
}


class Counting(nn.Module):
    """Returns scores and a number."""

    def __init__(self, number):
        super().__init__()
        self.scores, self.gate = nn.Linear(6, 5), nn.Linear(6, EXPERTS)
        self.number = number

    def forward(self, x):
        return self.scores(x), self.number(self.gate(x))


def learned(config, number, loss_fn):
    """Return losses of some steps, and weights."""
    draw = torch.Generator().manual_seed(1)
    x, target = torch.randn(8, 6, generator=draw), torch.randint(0, 5, (8,), generator=draw)
    with msrun.init(config) as rt:
        torch.manual_seed(0)
        model = rt.shard(Counting(number)).double()
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ranks, rank = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        part = [value.chunk(ranks)[rank] for value in (x.double(), target)]
        losses = [rt.step(model, optimizer, loss_fn, *part).item() for _ in range(2)]
        return torch.tensor(losses), [p.detach().clone() for p in model.parameters()]


def said(numbers, config, loss_fn):
    """Return what is said of each of some numbers, and the largest difference of the others."""
    found, gaps = {}, []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in numbers:
            number = (RIGHT | WRONG)[name]
            torch.set_default_dtype(torch.float64)
            try:
                one = learned(config, number, loss_fn)
            except (ModelError, UserWarning) as error:
                found[name] = str(error)
            else:
                other = learned({}, number, loss_fn) if "mesh" not in config else one
                gaps += [(a - b).abs().max().item() for a, b in zip(one[1], other[1], strict=True)]
            finally:
                torch.set_default_dtype(torch.float32)
    return found, max(gaps, default=0.0)


def test_means_in_a_loss_that_is_linear_in_them_are_right():
    ((found, gap),) = run_warm(said, 1, [*RIGHT], {"accumulate": 2}, added)
    assert found == {}
    assert gap < 1e-12


def test_all_others_are_refused_in_micro_batches():
    ((found, _),) = run_warm(said, 1, [*WRONG], {"accumulate": 2}, added)
    assert found.keys() == WRONG.keys()
    assert {name for name, text in found.items() if "the loss depends on" not in text} == set()
    assert "mean of chosen samples" in found["mean of chosen"]
    assert "chosen samples by their position" in found["experts that take the first"]


def test_a_loss_function_that_is_not_linear_in_them_is_refused():
    ((found, _),) = run_warm(said, 1, ["means"], {"accumulate": 2}, squared)
    assert "the loss depends on a mean over samples" in found["means"]


def test_ranks_warn():
    for found, _ in run_warm(said, 2, ["root", "means"], {"mesh": {"dp": 2}}, added):
        assert found.keys() == {"root"}
        assert "the loss depends on a mean over samples" in found["root"]
