"""A plan that moves shards from one dim to another sends each element once, by all-to-all."""

import copy

import pytest
import torch
from ranks import Counted, run_warm
from torch import nn

import msrun
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

BATCH, LENGTH, WIDTH = 2, 8, 8
PLAN = [
    {"match": "one", "in": [None, "tp", None], "out": [None, "tp", None]},
    {"match": "two", "params": {"weight": [None, "tp"]}, "in": [None, None, "tp"], "out": ["..."]},
]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


def square(output, target):
    return (output - target).square().mean()


def moved(ranks):
    """Return how far the step is from one process, and the all-to-alls of it."""
    torch.manual_seed(3)
    whole = Two()
    model = copy.deepcopy(whole)
    x, target = torch.randn(2, BATCH, LENGTH, WIDTH)
    rt = msrun.init({"mesh": {"tp": ranks}, "plan": PLAN})
    model = rt.shard(model)
    expected = square(whole(x), target)
    expected.backward()
    update = torch.optim.SGD(model.parameters(), lr=0.0)
    with Counted() as counts:
        loss = rt.step(model, update, square, x, target)
    gaps = [(loss - expected).abs().item()]
    there = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        gaps.append((full_tensor(param.grad) - there[name].grad).abs().max().item())
    return max(gaps), counts.calls["all_to_all_single"], counts.bytes["all_to_all_single"]


def test_a_plan_moves_shards_by_all_to_all():
    whole = BATCH * LENGTH * WIDTH * 4

    for worst, calls, sent in run_warm(moved, 2, 2):
        assert worst < 1e-6
        assert (calls, sent) == (2, 2 * whole // 2)  # forward and backward, a shard each
