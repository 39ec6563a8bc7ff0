"""Random numbers of Python and numpy: equal on ranks with the same samples and layers."""

import random

import numpy as np
import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.exchange.generators import (
    numpy_state,
    python_state,
    set_numpy_state,
    set_python_state,
)

pytestmark = pytest.mark.torch

PLAN = [{"match": "*.0", "style": "colwise"}, {"match": "*.2", "style": "rowwise"}]
TP = {"mesh": {"tp": 2}, "plan": PLAN}


class Dropping(nn.Module):
    """Drops one block by a number of Python, and one by a number of numpy."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.one, self.other = blocks
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.one(x) if random.random() < 0.5 else x
        x = x + self.other(x) if np.random.random() < 0.5 else x  # noqa: NPY002
        return self.head(x)


def _losses(config):
    runtime = msrun.init(config)
    np.random.seed(runtime.rank)  # noqa: NPY002
    torch.manual_seed(0)
    model = runtime.shard(Dropping())
    update = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    return [runtime.step(model, update, functional.mse_loss, x, y).item() for _ in range(6)]


def test_layers_are_dropped_on_all_ranks_that_share_them():
    [expected] = run_warm(_losses, 1, {})
    assert len({round(loss, 9) for loss in expected}) > 1
    for losses in run_warm(_losses, 2, TP):
        assert losses == pytest.approx(expected)


def _numbers(mesh):
    runtime = msrun.init({"mesh": mesh, "plan": PLAN} if "tp" in mesh else {"mesh": mesh})
    np.random.seed(runtime.rank)  # noqa: NPY002
    runtime.shard(Dropping())
    return random.random(), float(np.random.random())  # noqa: NPY002


def test_data_parallel_ranks_keep_the_numbers_of_the_script():
    own = run_warm(_numbers, 4, {"dp": 4})
    assert len(set(own)) == 4
    assert run_warm(_numbers, 4, {"dp": 2, "tp": 2}) == [own[0], own[0], own[2], own[2]]


def test_states_come_back_from_tensors():
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        random.gauss(0, 1)
        states = python_state(), numpy_state()
        drawn = random.gauss(0, 1), random.random(), np.random.random()  # noqa: NPY002
        set_python_state(states[0])
        set_numpy_state(states[1])
        assert (random.gauss(0, 1), random.random(), np.random.random()) == drawn  # noqa: NPY002
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
