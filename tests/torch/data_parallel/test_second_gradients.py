"""Gradients of gradients, as penalties on gradients need them: those of one process, or refused."""

import warnings

import pytest
import torch
from ranks import OPTIMIZERS, STEPS, assert_equal_curves, run_ranks, run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError

pytestmark = pytest.mark.torch

BATCH = 8
LAYERS = [
    {"match": "up", "style": "colwise"},
    {"match": "down", "style": "rowwise"},
    {"match": "head", "style": "vocab"},
]
BY_HAND = [
    {"match": "up", "params": {"weight": ["tp", None], "bias": ["tp"]}, "in": ["..."]},
    {"match": "down", "params": {"weight": [None, "tp"]}, "out": ["tp", None]},
    {"match": "norm", "in": ["tp", None], "out": ["tp", None]},
    {"match": "head", "params": {"weight": [None, None]}, "in": ["tp", None], "out": [None, None]},
]


class Network(nn.Module):
    """Layers whose second derivatives are not zero."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 6)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.down(torch.tanh(self.up(x))))))


def penalized(config):
    """Return the losses with a penalty on the gradient of the input, averaged over copies."""
    runtime = msrun.init(config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network, inputs, target = Network(), torch.randn(BATCH, 8), torch.randint(0, 6, (BATCH,))
    network = runtime.shard(network)
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    copies, copy = runtime.layout.size("dp"), runtime.coordinate.get("dp", 0)
    own = slice(copy * BATCH // copies, (copy + 1) * BATCH // copies)
    losses = []
    # The script has the gradient of each sample, from that of the mean.
    warnings.filterwarnings("ignore", "msrun: the loss depends on a gradient by the samples")
    warnings.filterwarnings("ignore", "msrun: the loss depends on the number of samples")
    for _ in range(STEPS):
        x = inputs[own].clone().requires_grad_()
        loss = functional.cross_entropy(network(x), target[own])
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        of_samples = gradient * len(x)
        loss = loss + of_samples.square().sum(1).mean()
        update.zero_grad()
        loss.backward()
        update.step()
        mean = msrun.parallel.collectives.all_reduce(loss.detach(), "dp") if copies > 1 else loss
        losses.append(mean.item() / copies)
    return losses


@pytest.mark.parametrize(
    "config",
    [
        {"mesh": {"dp": 2}},
        {"mesh": {"tp": 2}, "plan": LAYERS},
        {"mesh": {"tp": 2}, "plan": BY_HAND},
        {"mesh": {"tp": 2}, "plan": LAYERS, "recompute": {"modules": ["up", "norm"]}},
    ],
)
@pytest.mark.few(2)
def test_they_are_those_of_one_process(config):
    alone = run_warm(penalized, 1, {})[0]

    assert_equal_curves(run_warm(penalized, 2, config), alone)


def refused(level):
    with pytest.raises(UsageError) as caught:
        penalized({"mesh": {"dp": 2}, "optimizer": {"zero": level}})
    return caught.value.message


@pytest.mark.parametrize("level", [1, 2, 3])
def test_divided_optimizers_refuse_them(level):
    sentence = (
        "parallel.optimizer.zero: gradients of gradients (create_graph=True) need "
        "replicated parameters"
    )
    assert run_ranks(refused, 2, level) == [sentence, sentence]
