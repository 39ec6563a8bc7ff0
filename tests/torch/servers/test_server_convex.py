"""Asynchronous SGD on servers reaches the optimum of a convex problem, within a known distance."""

import functools
import math

import pytest
import torch
from ranks import run_warm
from server_jobs import serving
from server_tensors import Case, TensorChaos
from torch import nn
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch

SAMPLES, ITEMS, IN_A_BAG = 96, 12, 3
STEPS = 80
RATE, DECAY = 0.2, 0.97
# Of the way from the first loss to the smallest one that there is, this much may be left.
LEFT_MAX = 0.01
STALENESSES = [1, 4, math.inf]


class Regression(nn.Module):
    """Predicts a number by a sum of weights of items, and one of no item: least squares."""

    def __init__(self):
        super().__init__()
        self.items = nn.EmbeddingBag(ITEMS, 1, mode="sum", sparse=True)
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.items.weight)

    def forward(self, items):
        return self.items(items)[:, 0] + self.bias


@functools.cache
def problem():
    """Return bags of items and values, which no weights predict exactly."""
    draw = torch.Generator().manual_seed(3)
    items = torch.randint(0, ITEMS, (SAMPLES, IN_A_BAG), generator=draw)
    weights = torch.randn(ITEMS, generator=draw)
    noise = torch.randn(SAMPLES, generator=draw)
    return items, weights[items].sum(1) + 0.5 * noise + 1


def part(rank, ranks):
    return [each.tensor_split(ranks)[rank] for each in problem()]


@functools.cache
def smallest_loss():
    """Return the mean squared error of the weights that a direct solver finds."""
    items, values = problem()
    counts = functional.one_hot(items, ITEMS).sum(1).double()
    matrix = torch.cat([counts, torch.ones(SAMPLES, 1)], 1)
    best = torch.linalg.lstsq(matrix, values.double()[:, None]).solution[:, 0]
    return functional.mse_loss(matrix @ best, values.double()).item()


def left(weight, bias):
    """Return how much of the way from the first loss to the smallest one is left."""
    items, values = problem()
    loss = functional.mse_loss(weight[items].sum((1, 2)) + bias, values).item()
    first = values.square().mean().item()
    return (loss - smallest_loss()) / (first - smallest_loss())


class LeastSquares(Case):
    """The problem on a virtual network: each worker has a part of the samples, in every step."""

    def __init__(self):
        super().__init__(lambda m: torch.optim.SGD(m.parameters(), lr=RATE), decay=DECAY)

    def build(self):
        return Regression()

    def batch(self, clock, part=0, parts=1):  # noqa: ARG002 - all steps have all samples
        items, values = (each.tensor_split(parts)[part] for each in problem())
        return (items,), values

    def loss_of(self, model, inputs, labels):
        return functional.mse_loss(model(*inputs), labels, reduction="sum") / SAMPLES

    def looked_up(self, inputs):
        return {"items.weight": inputs[0].flatten()}


@pytest.mark.parametrize("staleness", STALENESSES)
def test_workers_that_do_not_wait_for_each_other_reach_the_optimum(staleness):
    """Servers and workers are killed meanwhile."""
    odds = {"kills": 0.2, "losses": 0.1, "doubles": 0.2, "delay": 0.5, "pace": 1.0}
    chaos = TensorChaos(
        LeastSquares(), servers=2, workers=3, steps=STEPS, staleness=staleness, **odds
    )
    chaos.run()
    world = chaos.world

    assert left(world.weights["items.weight"], world.weights["bias"]) < LEFT_MAX
    assert 0 < max(world.lags) <= staleness
    assert world.kills["server"] > 1
    assert world.kills["worker"] > 1


def learn(staleness):
    """Train on real servers by a plain loop; return how much is left."""
    rt = msrun.init({"servers": {"params": ["*"], "sync": {"staleness": staleness}}})
    model = rt.shard(Regression())
    # Each rank's gradient is the mean of its samples, and a step of its own.
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE / rt.world_size)
    optimizer = rt.optimizer(optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    items, values = part(rt.rank, rt.world_size)
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.mse_loss(model(items), values).backward()
        optimizer.step()
        schedule.step()
    rt.barrier()
    weights = rt.state_dict(model)
    rt.close()
    return left(weights["items.weight"], weights["bias"]) if rt.is_main else 0


def test_ranks_that_do_not_wait_for_each_other_reach_the_optimum(tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch, 2, 2):
        found = run_warm(learn, 2, 4)

    assert max(found) < LEFT_MAX
