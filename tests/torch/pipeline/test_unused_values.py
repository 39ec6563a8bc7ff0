"""Values that cross stages and are not used by the loss: no gradient, as in one process."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

STEPS = 5
# Which samples use the value beside the main path in each step.
USED = ("none", "all", "some", "none", "one")


class Fold(nn.Module):
    """Two values in, two values out: one step of autograd may join them."""

    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, main, side):
        return torch.tanh(self.main(main)), torch.tanh(self.side(side))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, main, side, use):
        rows = (use > 0).nonzero().squeeze(-1)
        if len(rows):
            main = main.index_add(0, rows, side[rows])
        return self.linear(main)


class Aside(nn.Module):
    """Computes a value in the first stage that the last one uses in some samples only."""

    def __init__(self):
        super().__init__()
        self.stem, self.side = nn.Linear(8, 8), nn.Linear(8, 8)
        self.folds = nn.ModuleList([Fold() for _ in range(4)])
        self.head = Head()

    def forward(self, x, use):
        main, side = self.stem(x), self.side(x).relu()
        for fold in self.folds:
            main, side = fold(main, side)
        return self.head(main, side, use)


class Tied(Aside):
    """What the loss may not use has a weight of two stages."""

    def __init__(self):
        super().__init__()
        self.folds[3].side.weight = self.side.weight


class Narrow(nn.Module):
    """One value crosses, and its stage may get no gradient at all."""

    def __init__(self):
        super().__init__()
        self.stem, self.head, self.own = nn.Linear(8, 8), Head(), nn.Linear(8, 8)

    def forward(self, x, use):
        return self.head(self.own(x), self.stem(x), use)


KINDS = {"aside": Aside, "tied": Tied, "narrow": Narrow}
PLACES = {
    "aside": {"stem": 0, "side": 0, "folds.[01]": 0, "folds.[23]": 1, "head": 1},
    "narrow": {"stem": 0, "head": 1, "own": 1},
}
PLACES["tied"] = PLACES["aside"]


def batches(samples):
    """Return the batches of `samples`, in which all ranks or only the last one use the value."""
    generator = torch.Generator().manual_seed(1)
    for kind in USED:
        x = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
        use = torch.full((samples,), 1.0 if kind == "all" else -1.0)
        if kind == "some":  # of each rank the second of two micro-batches
            use.view(-1, 2, 4)[:, 1] = 1.0
        if kind == "one":
            use[7::8] = 1.0
            use[:8] = -1.0
            use[-1] = 1.0
        yield x, use, torch.arange(samples) % 4


def build(kind):
    torch.manual_seed(0)
    return KINDS[kind]().double()


def update_of(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.5)


def train_alone(kind, data):
    """Return weights, and names of the parameters without a gradient, after each step."""
    model = build(kind)
    update = update_of(model.parameters())
    found = []
    for x, use, target in data:
        update.zero_grad()
        functional.cross_entropy(model(x, use), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        update.step()
        named = list(model.named_parameters(remove_duplicate=False))
        weights = {name: param.detach().clone() for name, param in named}
        found.append((weights, {name for name, param in named if param.grad is None}))
    return found


def train(kind, config, samples, schedule="1f1b"):
    """Train this rank's part beside one process, and return what differs."""
    places = PLACES[kind]
    if schedule in ("interleaved", "zbv"):
        where = {"interleaved": ([0, 0], [1, 0], [0, 1], [1, 1])}
        where["zbv"] = ([0, 0], [1, 0], [1, 1], [0, 1])
        names = ("stem", "side", "folds.0"), ("folds.1",), ("folds.2",), ("folds.3", "head")
        pairs = zip(names, where[schedule], strict=True)
        places = {name: place for group, place in pairs for name in group}
    pipeline = {"stages": places, "microbatches": 2, "schedule": schedule}
    data = list(batches(samples))
    alone = train_alone(kind, data)
    rt = msrun.init({"pipeline": pipeline, **config})
    model = rt.shard(build(kind), sample=data[0][:2])
    update = rt.optimizer(update_of(model.parameters()))
    share, count = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    wrong = []
    for step, (batch, (weights, without)) in enumerate(zip(data, alone, strict=True)):
        x, use, target = (part.chunk(count)[share] for part in batch)
        rt.step(model, update, functional.cross_entropy, x, use, target, max_norm=0.5)
        for name, param in model.named_parameters(remove_duplicate=False):
            if (param.grad is None) != (name in without):
                wrong.append((step, name, "has no gradient" if param.grad is None else "has one"))
            off = (full_tensor(param.detach()) - weights[name]).abs().max().item()
            if off > 1e-9:
                wrong.append((step, name, off))
    return wrong


STAGES = {"mesh": {"pp": 2}}
# Under data parallelism one rank may use what the other does not.
ZERO = [
    {"mesh": {"pp": 2, "dp": 2}, "optimizer": {"zero": level, "threshold": 0}} for level in range(4)
]


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zbv"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_loss_does_not_use_has_no_gradient(kind, schedule):
    if kind == "narrow" and schedule in ("interleaved", "zbv"):
        pytest.skip("it has two parts")

    assert run_warm(train, 2, kind, STAGES, 8, schedule) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", ZERO)
def test_data_parallel_ranks_agree_about_it(config, kind):
    assert run_warm(train, 4, kind, config, 16) == [[]] * 4
