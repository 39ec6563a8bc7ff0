"""Places of samples in a whole batch, and losses that only some ranks can combine."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch


class Graph(nn.Module):
    """Nodes that get the sum of their neighbours."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x, edges):
        h = self.inner(x)
        near = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        return self.head(functional.relu(h + near))


def train_graph(config):
    rt = msrun.init(config)
    torch.manual_seed(3)
    model = rt.shard(Graph())
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(8, 6), torch.arange(8) % 4
    edges = torch.randint(0, 4, (2, 10))  # in the range of a micro-batch, too
    try:
        rt.step(model, optimizer, functional.cross_entropy, x, edges, y)
    except msrun.ModelError as error:
        return error.message
    return ""


def test_micro_batches_take_no_samples_by_places_in_the_batch():
    assert "samples by their position" in run_warm(train_graph, 1, {"accumulate": 2})[0]


def test_the_graph_of_a_rank_is_its_own():
    assert run_warm(train_graph, 2, {}) == ["", ""]


def train_by_count(config):
    rt = msrun.init(config)
    torch.manual_seed(3)
    model = rt.shard(nn.Linear(6, 4))
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(4, 6), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 2]])[rt.rank]

    def loss(output, target):  # on the first rank all count
        losses = functional.cross_entropy(output, target, reduction="none")
        return losses.sum() / (target > 0).sum().item()

    try:
        rt.step(model, optimizer, loss, x, y)
    except msrun.ModelError as error:
        return error.message
    return ""


def test_all_ranks_refuse_a_number_that_is_that_of_the_samples_on_one():
    for message in run_warm(train_by_count, 2, {}):
        assert "may mean a mean or a sum" in message


class Scaled(nn.Module):
    def forward(self, x):
        import numpy as np

        return x / np.sqrt(4.0)


def train_scaled():
    rt = msrun.init(
        {"mesh": {"pp": 2}, "pipeline": {"stages": {"0": 0, "2": 1}, "microbatches": 2}}
    )
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), Scaled(), nn.Linear(8, 4))
    model = rt.shard(model, (torch.randn(8, 6),))
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return rt.step(
        model, optimizer, functional.cross_entropy, torch.ones(8, 6), torch.arange(8) % 4
    ).item()


def test_numbers_of_numpy_go_between_stages():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), Scaled(), nn.Linear(8, 4))
    expected = functional.cross_entropy(model(torch.ones(8, 6)), torch.arange(8) % 4).item()
    assert run_warm(train_scaled, 2) == [pytest.approx(expected)] * 2
