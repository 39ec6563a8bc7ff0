"""`optimizer`, `recompute` and `reduce` beside mode auto are kept, and the rest is searched."""

from __future__ import annotations

import contextlib
import io
from functools import partial

import pytest
import torch
from auto_models import GPT, MODELS, Perceptron
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.local import local_part

pytestmark = pytest.mark.torch

MESH = {"dp": 2, "tp": 2}
ZERO = {"optimizer": {"zero": 2, "threshold": 200}}
AGAIN = {"recompute": {"modules": ["blocks.*"]}}
SUM = {"reduce": {"op": "sum", "fuse": "module"}}


def train(name, config, *, rate=0.1):
    """Return losses, the bytes of the optimizer's state, what was printed, and recomputations."""
    text = io.StringIO()
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = MODELS[name][0]()
    torch.manual_seed(1)
    steps = [MODELS[name][1]() for _ in range(3)]
    sample = steps[0]
    if config["mesh"] != "auto":
        sample = [x[: len(x) // rt.layout.size("dp")] for x in sample]
    with contextlib.redirect_stdout(text):
        net = rt.shard(net, sample=sample)
    parts, index = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    batches = [[x.chunk(parts)[index] for x in step] for step in steps]
    runs = []
    block = getattr(net, "blocks", getattr(net, "layers", [None]))[0]
    if block is not None:
        inner = next(part for part in block.modules() if isinstance(part, nn.Linear))
        inner.register_forward_hook(lambda *_: runs.append(1))
    optimizer = rt.optimizer(torch.optim.AdamW(net.parameters(), lr=rate / 100))
    losses = [
        rt.step(net, optimizer, lambda out, _: out, *both, both[1]).item() for both in batches
    ]
    state = sum(
        local_part(x).nbytes
        for one in optimizer.state.values()
        for x in one.values()
        if isinstance(x, torch.Tensor)
    )
    return losses, state, text.getvalue(), len(runs)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param("gpt", {"mesh": {"dp": 4}, **ZERO}, marks=pytest.mark.slow),
        ("gpt", {"mesh": MESH, **ZERO, **AGAIN}),
        pytest.param("llama", {"mesh": MESH, **AGAIN, "memory": "1GiB"}, marks=pytest.mark.slow),
        ("llama", {"mesh": MESH, "optimizer": {"zero": 3}, **AGAIN, "search": "propagation"}),
        ("perceptron", {"mesh": {"tp": 2, "dp": 2}, "optimizer": {"zero": 1}}),
        ("gpt", {"mesh": "auto", "optimizer": {"zero": 1}, **AGAIN}),
        (
            "gpt",
            {
                "mesh": MESH,
                **ZERO,
                **AGAIN,
                "reduce": {"exclude": []},
                "plan": [{"match": "blocks.*.up", "style": "colwise"}],
            },
        ),
    ],
)
@pytest.mark.few(3)
def test_what_the_user_decides_is_kept_and_learns_what_one_process_does(name, config):
    ((want, whole, _, ran),) = run_warm(partial(train, name), 1, {"mesh": {"dp": 1}})
    for rank, found in enumerate(run_warm(partial(train, name), 4, {"mode": "auto", **config})):
        losses, state, text, runs = found
        assert losses == pytest.approx(want, abs=2e-5)
        if rank == 0:
            assert "runs on data parallel" in text or "runs on styles" in text
        if "optimizer" in config and config["mesh"] != "auto":
            assert state < 0.65 * whole
        if "recompute" in config:
            assert runs == 2 * ran


def masks(config):
    """Return what a rank's dropout left of ones."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = rt.shard(GPT(dropout=0.5), sample=[x[:2] for x in MODELS["gpt"][1]()])
    kept = []
    net.blocks[0].drop.register_forward_hook(lambda _, __, out: kept.append((out == 0).tolist()))
    net(*[x[:2] for x in MODELS["gpt"][1]()])
    return kept[0]


def test_dropout_beside_decisions_is_that_of_the_runtime():
    (a, b, c, d) = run_warm(masks, 4, {"mode": "auto", "mesh": MESH, "optimizer": {"zero": 1}})
    assert (a, c) == (b, d)
    assert a != c


class Flipping(nn.Module):
    """Pairs samples with each other, so no rank can run it with its own."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x, y):
        return functional.mse_loss(self.up(x) + self.up(x).flip(0), y)


def refused(config, net):
    rt = msrun.init(config)
    with pytest.raises(UsageError) as caught:
        rt.shard(net(), sample=MODELS["perceptron"][1]())
    return caught.value.message


def test_a_model_without_a_plan_for_the_runtime_is_refused():
    config = {"mode": "auto", "mesh": {"dp": 2}, "optimizer": {"zero": 1}}
    for sentence in run_warm(refused, 2, config, Flipping):
        assert sentence.startswith(
            "parallel.optimizer: beside mode auto it needs a plan of modules"
        )


def test_memory_that_no_plan_of_the_decisions_fits_is_refused():
    config = {"mode": "auto", "mesh": {"dp": 2}, "optimizer": {"zero": 1}, "memory": "4KiB"}
    for sentence in run_warm(refused, 2, config, Perceptron):
        assert sentence.startswith("parallel.memory: no plan fits; the smallest takes")
