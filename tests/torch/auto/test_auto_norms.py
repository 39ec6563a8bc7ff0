"""Batch norms under `mode: auto` take the statistics of the global batch, and keep those of one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.auto.execute import Executor
from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.search.cost.topology import PRESETS
from msrun.parallel.search.graph.repeat import find_blocks
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.eliminate import solve
from msrun.parallel.search.solve.problem import Edge, Problem, Setting

pytestmark = pytest.mark.torch

STEPS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        return x + functional.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    """Images to classes; with `rate` an executor runs it, since it drops."""

    def __init__(self, rate):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.frozen, self.head = nn.BatchNorm1d(4), nn.Linear(4, 8)
        self.rate = rate

    def forward(self, x, y=None):
        h = functional.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            h = block(h)
        h = functional.dropout(h.mean((2, 3)), self.rate, training=self.training)
        logits = self.head(self.frozen(h))
        return logits if y is None else functional.cross_entropy(logits, y)


def made(rate):
    torch.manual_seed(0)
    net = Net(rate).double()
    net.frozen.eval()
    return net


def images():
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS, 8, 3, 8, 8, generator=numbers, dtype=torch.float64)
    # Ranks see other samples, also by their statistics.
    return x * torch.arange(1.0, 9.0).view(1, 8, 1, 1, 1), torch.arange(STEPS * 8).view(-1, 8) % 8


def train(rate, config):
    """Return losses, whole parameters and buffers, and what evaluation gives."""
    net, rt = made(rate), msrun.init(config)
    (xs, ys), count, share = images(), rt.layout.axes.get("dp", 1), rt.coordinate.get("dp", 0)
    net = rt.shard(net, sample=(xs[0].chunk(count)[share],))
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    losses = []
    for x, y in zip(xs, ys, strict=True):
        part = x.chunk(count)[share], y.chunk(count)[share]
        losses.append(rt.step(net, optimizer, functional.cross_entropy, *part).item())
    # As `net.eval()` and `net.train()` do, but for what was frozen.
    before = [buffer.clone() for buffer in net.buffers()]
    net.eval()
    with torch.no_grad():
        said = net(xs[1].chunk(count)[share])
    tensors = [*net.parameters(), *net.buffers()]
    assert all(map(torch.equal, before, net.buffers()))
    whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in tensors]
    return losses, [x.detach() for x in whole], said, share


@pytest.mark.parametrize("rate", [0.0, 1e-12], ids=["as data parallel", "by the executor"])
def test_a_model_of_batch_norms_learns_and_evaluates_as_in_one_process(rate):
    ((losses, tensors, said, _),) = run_warm(train, 1, rate, {})
    for found in run_warm(train, 2, rate, {"mode": "auto", "mesh": {"dp": 2}}):
        assert found[0] == pytest.approx(losses, rel=1e-9)
        for ours, theirs in zip(found[1], tensors, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10)
        assert torch.allclose(found[2], said.chunk(2)[found[3]], rtol=1e-8, atol=1e-10)


def refused(config):
    with pytest.raises(UsageError) as caught:
        msrun.init({"mode": "auto", **config}).shard(made(0.0), sample=(images()[0][0],))
    return caught.value.message


def test_micro_batches_and_stages_are_refused_or_never_chosen():
    two = run_warm(refused, 2, {"mesh": {"dp": 2}, "accumulate": 2})
    assert set(two) == {"parallel.accumulate: with 2 micro-batches norm sees one of them at a time"}
    least = run_warm(refused, 2, {"mesh": "auto", "memory": "60KiB"})
    for said in least:
        assert said.startswith("parallel.memory: no plan fits")


def drawn(problem, rng):
    """Return a plan at random: the best when costs are."""
    edges = [
        Edge(e.source, e.target, np.where(np.isinf(e.seconds), np.inf, rng.random(e.seconds.shape)))
        for e in problem.edges
    ]
    chosen = solve(Problem(nodes=list(problem.nodes), edges=edges))[1]
    pairs = zip(problem.nodes, chosen, strict=True)
    return {node.name: tuple(node.rows[at].tolist()) for node, at in pairs}


def learned(net, forward):
    xs, ys = images()
    for x, y in zip(xs, ys, strict=True):
        forward(x, y).backward()
    gradients = [
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()
    ]
    return [*gradients, *(buffer.clone() for buffer in net.buffers())]


def run_plans(sizes, recomputes=0):
    """Return what some plans choose for batch norms, and their largest error."""
    traced = trace(made(0.0), tuple(part[0] for part in images()))
    setting = Setting(sizes=sizes, topology=PRESETS["cpu"])
    problem = build(traced.program, setting)
    rules = {node.name: node.rule for node in problem.nodes}
    blocks = find_blocks(traced.program) if recomputes else None
    assert not recomputes or blocks
    mesh, rng = init_device_mesh("cpu", sizes), np.random.default_rng(5)
    net = made(0.0)
    want, choices, error = learned(net, net), set(), 0.0
    for _ in range(4):
        net, plan = made(0.0), drawn(problem, rng)
        run = Executor(net, traced, rules, plan, setting=setting, mesh=mesh, seed=0, blocks=blocks)
        for found, right in zip(learned(net, run), want, strict=True):
            error = max(error, float((found - right).abs().max() / (right.abs().max() + 1e-3)))
        norms = [s.name for s in traced.program.steps if s.packet == "batch_norm"]
        choices |= {tuple(rules[n].choices[at].name for at in plan[n]) for n in norms if n in plan}
    return choices, error


@pytest.mark.parametrize("recomputes", [0, 1], ids=["saved", "recomputed"])
def test_any_plan_computes_the_statistics_of_the_batch(recomputes):
    for choices, error in run_warm(run_plans, 2, (2,), recomputes):
        assert choices == {("R",), ("b",), ("c",)}
        assert error < 1e-9


@pytest.mark.slow
def test_any_plan_on_two_axes_computes_the_statistics_of_the_batch():
    for choices, error in run_warm(run_plans, 4, (2, 2)):
        assert {("b", "b"), ("b", "c"), ("c", "b")} <= choices
        assert error < 1e-9
