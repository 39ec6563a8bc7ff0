"""Clipping: the norm that is returned is that of the whole model in one process.

In float64, where a sum that somebody takes in less precision shows.
"""

import functools

import pytest
import torch
from ranks import MODELS, batches, build, run_warm
from test_grid import DP, DP_TP, LAYERS, TP, TURNS, V, pp, zero
from torch import nn

import msrun

pytestmark = pytest.mark.torch

MODEL, LOSS = "transformer", MODELS["transformer"][1]
MAX_NORM = 0.1
SEQUENCE = [
    {"match": "layers.*.norm2", "params": {}, "in": [None, "tp", None], "out": [None, "tp", None]},
    *(rule for rule in LAYERS if rule["match"].endswith(("up", "down"))),
]
# Ranks, then the configuration.
CASES = {
    "dp": (2, DP),
    "accumulate": (2, {"accumulate": 2}),
    "zero1": (2, zero(1)),
    "zero3": (2, zero(3)),
    "zero1, accumulate": (2, zero(1) | {"accumulate": 2}),
    "zero3, offload": (2, zero(3, offload=True)),
    "sequence": (2, TP | {"plan": SEQUENCE}),
    "pp": (2, pp()),
    "pp interleaved": (2, pp(TURNS, "interleaved")),
    "zero3, threshold": (4, zero(3, threshold=512)),
    "zero2 in copies": (4, zero(2, shard_size=2)),
    "tp": (4, TP | {"plan": LAYERS}),
    "dp x tp": (4, DP_TP),
    "dp x tp, zero3": (4, DP_TP | zero(3)),
    "pp x tp": (4, pp() | {"mesh": {"pp": 2, "tp": 2}, "plan": LAYERS}),
    "pp x dp zbv, zero3": (4, pp(V, "zbv") | zero(3)),
    "pp x dp x tp, zero1": (
        8,
        pp() | {"mesh": {"pp": 2, "dp": 2, "tp": 2}, "plan": LAYERS} | zero(1),
    ),
}


def norm(config):
    """Return the norm of the gradients of a step, and of what clipping left of them."""
    runtime = msrun.init(config)
    network = runtime.shard(build(MODEL).double())
    update = runtime.optimizer(torch.optim.SGD(network.parameters(), lr=0.0))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    batch = [part.chunk(count)[share] for part in batches(MODEL, steps=1)[0]]
    runtime.step(network, update, LOSS, *batch)
    return [runtime.clip_grad_norm_(network, MAX_NORM).item() for _ in range(2)]


def norms(configs):
    """Return the norms under each, all in one process group as of `ranks.Curves`."""
    found = []
    for config in configs:
        found.append(norm(config))
        msrun.init().close()
    return found


@functools.cache
def plain_norm():
    network = build(MODEL).double()
    x, y = batches(MODEL, steps=1)[0]
    LOSS(network(x), y).backward()
    return nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM).item()


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_the_norm_is_that_of_one_process(ranks):
    cases = {name: config for name, (count, config) in CASES.items() if count == ranks}
    assert plain_norm() > 2 * MAX_NORM
    for found in run_warm(norms, ranks, list(cases.values())):
        for name, (before, after) in zip(cases, found, strict=True):
            assert before == pytest.approx(plain_norm(), rel=1e-12), name
            assert after == pytest.approx(MAX_NORM, rel=1e-4), name


class Spare(nn.Module):
    """Its second part trains nothing: all that it holds is for a branch that is never taken."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 10)
        self.act = nn.ReLU()
        self.spare = nn.Linear(10, 10)

    def forward(self, x):
        return self.act(self.a(x))


def spare():
    torch.manual_seed(1)
    return Spare().double()


def spare_batch():
    x, y = batches("mlp", steps=1)[0]
    return x.double(), y


def norm_beside_spare(config):
    """Return the norm, and whether this rank has a gradient."""
    runtime = msrun.init(config)
    network = runtime.shard(spare())
    update = runtime.optimizer(torch.optim.SGD(network.parameters(), lr=0.0))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    batch = [part.chunk(count)[share] for part in spare_batch()]
    runtime.step(network, update, nn.functional.cross_entropy, *batch)
    found = runtime.clip_grad_norm_(network, MAX_NORM).item()
    return found, any(param.grad is not None for param in network.parameters())


@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (4, {}), (4, zero(1)), (4, zero(3))])
def test_a_stage_may_have_no_gradient_at_all(ranks, options):
    network = spare()
    x, y = spare_batch()
    nn.functional.cross_entropy(network(x), y).backward()
    expected = nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM).item()

    found = run_warm(norm_beside_spare, ranks, pp({"a": 0, "act": 1, "spare": 1}) | options)

    assert [has_any for _, has_any in found] == [True] * (ranks // 2) + [False] * (ranks // 2)
    assert [norm for norm, _ in found] == pytest.approx([expected] * ranks, rel=1e-12)
