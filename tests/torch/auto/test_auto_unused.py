"""Outputs that the loss does not use have no gradient under a plan, as in one process."""

import math

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

# Which samples use the second output in each step: of each micro-batch, or of the second ones.
# The last two are of one data-parallel rank alone.
USED = (
    slice(0),
    slice(None),
    slice(2, None, 4),
    slice(0),
    slice(3, None, 4),
    slice(6, None),
    slice(0, 4),
)


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


def plain_step(_, model, update, loss_fn, x, target):
    """Train as a script does."""
    update.zero_grad()
    loss_fn(model(x), target).backward()
    update.step()


def train(config, step_of=None):
    """Train this rank's part beside one process, and return what differs."""
    found_alone = train_alone()
    rt = msrun.init(config)
    step_of = step_of or (lambda rt, *args: rt.step(*args))
    share, count = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    model = rt.shard(build(), sample=[next(batches())[0].chunk(count)[share]])
    update = rt.optimizer(update_of(model.parameters()))
    wrong = []
    for step, ((x, target), alone) in enumerate(zip(batches(), found_alone, strict=True)):
        part = x.chunk(count)[share], target.chunk(count)[share]
        step_of(rt, model, update, loss_fn, *part)
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


@pytest.mark.parametrize(
    ("axes", "options", "step_of"),
    [
        ({"dp": 2}, {}, None),
        ({"dp": 2}, {}, plain_step),
        pytest.param({"dp": 2}, {"accumulate": 2}, None, marks=pytest.mark.slow),
        pytest.param({"dp": 4}, {}, None, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, {}, None, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, {}, plain_step, marks=pytest.mark.slow),
    ],
)
def test_ranks_may_use_other_outputs(axes, options, step_of):
    world = math.prod(axes.values())
    found = run_warm(train, world, {"mode": "auto", "mesh": axes, **options}, step_of)
    assert found == [[]] * world


def constant_loss(output, target):
    """Return a loss that depends on no output where no target is 8 or more."""
    main = output[0] if target.max() >= 8 else output[0].detach()
    return functional.cross_entropy(main, target % 8)


def train_apart(config, steps):
    """Train with losses that depend on nothing on some ranks; return weights, and what is said."""
    rt = msrun.init(config)
    share, count = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    x = next(batches())[0].chunk(count)[share]
    model = rt.shard(build(), sample=[x])
    update = rt.optimizer(update_of(model.parameters()))
    for trains in steps:
        target = torch.arange(8).chunk(count)[share] + 8 * (share in trains)
        try:
            rt.step(model, update, constant_loss, x, target)
        except msrun.ModelError as error:
            said = error.message
            break
    else:
        said = ""
    return {n: full_tensor(p.detach()) for n, p in model.named_parameters()}, said


@pytest.mark.parametrize(
    ("axes", "pipeline"),
    [
        ({"dp": 2}, {}),
        pytest.param(
            {"pp": 2, "dp": 2},
            {"pipeline": {"stages": "auto", "microbatches": 2}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_loss_may_depend_on_no_output(axes, pipeline):
    world = math.prod(axes.values())
    config = {"mode": "auto", "mesh": axes, **pipeline}
    found = run_warm(train_apart, world, config, [[1], [0], [0, 1], []])
    model = build()
    update = update_of(model.parameters())
    x, _ = next(batches())
    for rows in (slice(4, 8), slice(0, 4), slice(0, 8)):
        update.zero_grad()
        losses = functional.cross_entropy(model(x)[0], torch.arange(8), reduction="none")
        (losses[rows].sum() / 8).backward()
        update.step()
    want = dict(model.named_parameters())
    for weights, said in found:
        assert said == "the loss of no rank depends on a parameter that is trained"
        for name, weight in weights.items():
            torch.testing.assert_close(weight, want[name].detach(), rtol=0, atol=1e-9)


def calls_of(rt, model, x, uses):
    """Return what the backward pass of two calls raises on a rank that uses so many."""
    first, second = model(x)[0], model(x * 0.5)[0]
    losses = [first.square().mean(), second.square().mean()]
    try:
        sum(losses[2 - uses[rt.rank] :]).backward()
    except msrun.RanksDisagreeError as error:
        return error.message
    return ""


def gradients_of_calls(axes):
    """Return refusals of calls that one rank does not use, and gradients where each uses one."""
    rt = msrun.init({"mode": "auto", "mesh": axes})
    share, count = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    x = next(batches())[0].chunk(count)[share]
    model = rt.shard(build(), sample=[x])
    said = [calls_of(rt, model, x, uses) for uses in ((1, 2), (2, 1))]
    model.zero_grad()
    said.append(calls_of(rt, model, x, (2, 2)))
    two = {n: full_tensor(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    said.append(calls_of(rt, model, x, (1, 1)))
    one = {n: full_tensor(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return said, two, one


@pytest.mark.parametrize("axes", [{"dp": 2}])
def test_ranks_that_use_other_numbers_of_calls_are_refused(axes):
    x = next(batches())[0]
    model = build()
    wanted = []
    for factors in ((1.0, 0.5), (0.5,)):
        model.zero_grad()
        sum(model(x * factor)[0].square().mean() for factor in factors).backward()
        named = model.named_parameters()
        wanted.append({name: p.grad.clone() for name, p in named if p.grad is not None})
    for said, two, one in run_warm(gradients_of_calls, 2, axes):
        for text, ranks in zip(said[:2], ((0, 1), (1, 0)), strict=True):
            assert text == (
                f"parallel.mode: auto: the loss of rank {ranks[0]} depends on 1 of 2 calls of the "
                f"model, and that of rank {ranks[1]} on 2; ranks run their backward steps together"
            )
        assert said[2:] == ["", ""]
        for found, want in zip((two, one), wanted, strict=True):
            for name, gradient in want.items():
                torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-9)
