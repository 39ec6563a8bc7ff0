"""Models that are cut into stages in tests, and the training of one stage beside one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import MODELS, OPTIMIZERS, batches, build
from torch import nn
from torch.nn import functional

from msrun.parallel.config import Pipeline
from msrun.parallel.losses.terms import TallyRanks
from msrun.parallel.pipeline.split_model import split_model

CPU = torch.device("cpu")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")


class Deep(nn.Module):
    """Eight equal layers in a list, which are called in a loop."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(8)])

    def forward(self, x):
        for layer in self.layers:
            x = functional.relu(layer(x))
        return x


class Skips(nn.Module):
    """Values cross several stages; some belong to no module."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.c = nn.Linear(16, 16)
        self.d = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)
        self.shift = nn.Parameter(torch.full((16,), 0.1))
        self.register_buffer("factor", torch.full((16,), 0.5))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x, gain=None):
        count, keep = x.shape[0], (x > -1).view(-1, 16)
        h = self.a(torch.where(keep, x, 0.5)) + self.shift
        y = self.relu(self.b(h))
        z = self.c(y).view(count, 4, 4)
        w = self.d(z.flatten(1) * self.factor + torch.tensor(0.25))
        if gain is not None:
            w = w * gain
        left, right = torch.where(keep, w + h, h).chunk(2, -1)
        return self.head(torch.cat([right, left], -1) + self.shift)


class Alike(nn.Module):
    """Three layers with one weight."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.c = nn.Linear(16, 16)
        self.b.weight = self.c.weight = self.a.weight

    def forward(self, batch):
        return self.c(self.b(self.a(batch["x"])).relu()) + batch["x"]


class Total(nn.Module):
    """Its gradient is one number seen many times, without memory for each."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x.sum(1, keepdim=True) * self.weight


class Traps(nn.Module):
    """What torch's separate gradients of weights do not expect: views, sums, a path of its own."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.total = Total()
        self.own = nn.Linear(16, 16)
        self.e = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        y = self.total(self.a(x)).view(-1, 4, 4).flatten(1)
        return self.head(self.e(y.T.T) + self.own(x).view(-1, 16))


class Routed(nn.Module):
    """Runs only with values, as its second module asks for one."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.route = Route()
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(functional.relu(self.route(self.a(x))))


class Route(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (2.0 if float(self.linear.bias.detach().sum()) > 0 else 3.0)


MODELS |= {
    "deep": (Deep, functional.cross_entropy),
    "skips": (Skips, functional.cross_entropy),
    "traps": (Traps, functional.cross_entropy),
    "alike": (Alike, functional.cross_entropy),
    "routed": (Routed, functional.cross_entropy),
}
# What is cut where, in execution order, with eight parts at least.
UNITS = {
    "deep": [f"layers.{index}" for index in range(8)],
    "transformer": ["embed position", *[f"layers.{index}" for index in range(6)], "norm head"],
}
OPTIONS = {"transformer": {"layers": 6}}


def stages(model, schedule, degree):
    """Return `pipeline.stages` that divides the units of `model` evenly."""
    segments = 1 if schedule in ("gpipe", "1f1b") else 2
    places = [(stage, segment) for segment in range(segments) for stage in range(degree)]
    if schedule in ("zbv", "dualpipev"):
        places[degree:] = reversed([(stage, 1) for stage in range(degree)])
    units = UNITS[model]
    return {
        name: places[index * len(places) // len(units)]
        for index, unit in enumerate(units)
        for name in unit.split()
    }


def pipeline(where, schedule="1f1b", microbatches=4):
    return Pipeline(stages=where, schedule=schedule, microbatches=microbatches)


def split(model, settings, group=None, sample=None, network=None):
    """Return this rank's part of a model that is equal on all ranks."""
    network = network or build(model, **OPTIONS.get(model, {}))
    return split_model(network, settings, group or dist.group.WORLD, CPU, sample)


def begin_step(part, inputs, target, loss_fn):
    """Run forward and backward; return the losses, and with them what is left to do."""
    ranks = TallyRanks(group=None, weight=1.0, op="mean", device=CPU)
    tally = part.train_step(inputs, target, loss_fn, ranks)
    tally.combine()
    return tally


def train_step(part, inputs, target, loss_fn):
    """Compute all gradients but those of tied weights; return the loss."""
    return begin_step(part, inputs, target, loss_fn).finish(part.parameters)


def train_stages(part, data, loss_fn, optimizer="sgd"):
    """Train this rank's part on each batch; return the losses."""
    update = OPTIMIZERS[optimizer](part.parameters())
    losses = []
    for x, y in data:
        update.zero_grad()
        losses.append(train_step(part, [x], y, loss_fn).item())
        part.reduce_tied()
        update.step()
    return losses


def train_whole(model, data, optimizer="sgd", network=None):
    """Train in one process; return the losses and the model."""
    network = network or build(model, **OPTIONS.get(model, {}))
    update = OPTIMIZERS[optimizer](network.parameters())
    losses = []
    for x, y in data:
        update.zero_grad()
        loss = MODELS[model][1](network(x), y)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses, network


def largest_difference(part, network):
    """Return how far the parameters of `part` are from those of the same name in `network`."""
    whole = dict(network.named_parameters(remove_duplicate=False))
    pairs = [(param, whole[name]) for name, param in part.named_parameters()]
    return max((float((a - b).detach().abs().max()) for a, b in pairs), default=0.0)


def data_of(model, sizes):
    """Return one batch of each size."""
    return [batches(model, size, 1)[0] for size in sizes]
