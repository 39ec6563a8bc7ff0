"""Stages of a plan: outputs that the loss does not use have no gradient, as in one process."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

# Which samples use the second output in each step: of each micro-batch, or of the second ones.
USED = (slice(0), slice(None), slice(2, None, 4), slice(0), slice(3, None, 4))


class Two(nn.Module):
    """Two outputs, that of the side from the first stage on."""

    def __init__(self):
        super().__init__()
        self.stem, self.side = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mains = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.sides = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        main, side = self.stem(x), self.side(x).relu()
        for one, other in zip(self.mains, self.sides, strict=True):
            main, side = torch.tanh(one(main)), torch.tanh(other(side))
        return main, side


def loss_fn(output, target):
    (main, side), uses = output, target >= 8
    if uses.any():
        main = torch.where(uses[:, None], main + side, main)
    return functional.cross_entropy(main, target % 8)


def batches():
    generator = torch.Generator().manual_seed(1)
    for rows in USED:
        target = torch.arange(8)
        target[rows] += 8
        yield torch.randn(8, 8, generator=generator, dtype=torch.float64), target


def build():
    torch.manual_seed(0)
    return Two().double()


def update_of(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.5)


def train_alone():
    """Return weights, and names of the parameters without a gradient, after each step."""
    model = build()
    update = update_of(model.parameters())
    found = []
    for x, target in batches():
        update.zero_grad()
        loss_fn(model(x), target).backward()
        update.step()
        named = dict(model.named_parameters())
        weights = {name: param.detach().clone() for name, param in named.items()}
        found.append((weights, {name for name, param in named.items() if param.grad is None}))
    return found


def train(config):
    """Train this rank's part beside one process, and return what differs."""
    rt = msrun.init(config)
    share, count = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    model = rt.shard(build(), sample=[next(batches())[0].chunk(count)[share]])
    update = rt.optimizer(update_of(model.parameters()))
    wrong = []
    for step, ((x, target), alone) in enumerate(zip(batches(), train_alone(), strict=True)):
        part = x.chunk(count)[share], target.chunk(count)[share]
        rt.step(model, update, loss_fn, *part)
        for name, param in model.named_parameters():
            if (param.grad is None) != (name in alone[1]):
                wrong.append((step, name, "has no gradient" if param.grad is None else "has one"))
            off = (full_tensor(param.detach()) - alone[0][name]).abs().max().item()
            if off > 1e-9:
                wrong.append((step, name, off))
    return wrong


def config(mode, mesh):
    pipeline = {"stages": "auto", "microbatches": 2, "schedule": "1f1b"}
    return {"mesh": mesh, "pipeline": pipeline, **({"mode": mode} if mode else {})}


@pytest.mark.parametrize(
    ("mode", "mesh"),
    [
        ("auto", {"pp": 2}),
        pytest.param(None, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("auto", {"pp": 2, "dp": 2}, marks=pytest.mark.slow),
        pytest.param("auto", {"pp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_an_output_that_the_loss_does_not_use_has_no_gradient(mode, mesh):
    world = 4 if len(mesh) > 1 else 2
    assert run_warm(train, world, config(mode, mesh)) == [[]] * world
