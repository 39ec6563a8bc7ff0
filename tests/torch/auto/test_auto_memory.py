"""Predicted memory is what ranks have, under the best plan and under plans drawn at random."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from msrun.parallel.auto.execute import Executor
from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.local import local_part
from msrun.parallel.search.cost.topology import PRESETS
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.eliminate import solve
from msrun.parallel.search.solve.problem import Edge, Problem, Setting

pytestmark = pytest.mark.torch

WIDTH, BATCH, PLANS = 128, 64, 6


class Net(nn.Module):
    """Blocks of a norm, two layers and a skip."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.ups = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2)])
        self.downs = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x, y):
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(functional.gelu(up(norm(x))))
        return functional.mse_loss(x, y)


def drawn(problem, rng):
    """Return the best plan when costs are noise."""
    edges = [
        Edge(
            edge.source,
            edge.target,
            np.where(np.isinf(edge.seconds), np.inf, rng.random(edge.seconds.shape)),
        )
        for edge in problem.edges
    ]
    return solve(Problem(nodes=list(problem.nodes), edges=edges))[1]


def kept_bytes(net, run, batch):
    """Return the bytes of parameters, gradients, and what backward finds kept."""
    kept = {}

    def note(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    owned = [local_part(param) for param in net.parameters()]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = run(*batch)
    for part in (*owned, *batch):
        kept.pop(part.untyped_storage().data_ptr(), None)
    loss.backward()
    gradients = [local_part(param.grad) for param in net.parameters()]
    return sum(part.nbytes for part in (*owned, *gradients)) + sum(kept.values())


def predictions(sizes):
    """Return predicted over real bytes of each plan, on this rank."""
    torch.manual_seed(0)
    batch = (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
    traced = trace(Net(), batch)
    setting = Setting(sizes=sizes, topology=PRESETS["cpu"], state_bytes=0)
    problem = build(traced.program, setting)
    rng = np.random.default_rng(3)
    mesh = init_device_mesh("cpu", sizes)
    rules = {node.name: node.rule for node in problem.nodes}
    found = []
    for plan in (solve(problem)[1], *(drawn(problem, rng) for _ in range(PLANS))):
        chosen = {
            node.name: tuple(node.rows[at].tolist())
            for node, at in zip(problem.nodes, plan, strict=True)
        }
        net = Net()
        run = Executor(net, traced, rules, chosen, setting=setting, mesh=mesh, seed=0)
        found.append(problem.memory(plan) / kept_bytes(net, run, batch))
    return found


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_predicted_memory_is_within_a_seventh_of_what_is_kept(sizes):
    for ratios in run_ranks(predictions, 4, sizes):
        assert all(0.85 < ratio < 1.15 for ratio in ratios), ratios
