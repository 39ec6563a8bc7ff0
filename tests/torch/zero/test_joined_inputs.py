"""Under ZeRO, what the loss of a step does not depend on has no gradient, as in one process."""

import contextlib

import pytest
import torch
from ranks import assert_equal_curves, run_warm
from test_grid import zero
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = pytest.mark.torch

STEPS, SAMPLES, WIDTH = 4, 8, 8
LEVELS = {f"zero {level}": zero(level) for level in (1, 2, 3)}
LEVELS["zero 3, small ones replicated"] = {"optimizer": {"zero": 3, "threshold": "100"}}
LEVELS["zero 3, recompute"] = {**zero(3), "recompute": {"modules": ["layers.*"]}}


class Gated(nn.Module):
    """Takes a value that only some calls use; a unit of ZeRO has both inputs in one step."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, context, gate):
        hidden = torch.tanh(self.linear(hidden))
        return hidden + context if gate else hidden


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.context = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Gated() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x, gate):
        hidden, context = self.encode(x), self.context(x)
        for layer in self.layers:
            hidden = layer(hidden, context, bool(gate.max()))
        return self.head(hidden)


def gates(pattern):
    """Return, of each step, a flag for each half of the batch."""
    return {
        "in some steps": [(1, 1), (0, 0), (0, 0), (1, 1)],
        "in one half of the batch": [(1, 0), (0, 1), (1, 1), (0, 0)],
        "never": [(0, 0)] * STEPS,
        "always in one half": [(1, 0), (0, 1)] * 2,
    }[pattern]


def train(config, pattern, accumulate=1, loop="rt.step"):
    """Return the losses and the weights after some steps with momentum and decay."""
    torch.manual_seed(0)
    rt = msrun.init({**config, "accumulate": accumulate})
    model = rt.shard(Network().double())
    optimizer = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5))
    losses = []
    for step, flags in enumerate(gates(pattern)):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 4, (SAMPLES,), generator=generator)
        gate = torch.tensor(flags).repeat_interleave(SAMPLES // 2)
        share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
        x, y, gate = (value.chunk(count)[share] for value in (x, y, gate))
        if loop == "plain":
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x, gate), y)
            loss.backward()
            optimizer.step()
            losses.append(rt.mean_over_data(loss).item())
        else:
            losses.append(rt.step(model, optimizer, functional.cross_entropy, x, gate, y).item())
    return losses, {name: value.tolist() for name, value in rt.state_dict(model).items()}


def assert_equal(found, expected):
    assert_equal_curves([losses for losses, _ in found], expected[0])
    for name, value in expected[1].items():
        assert (torch.tensor(found[0][1][name]) - torch.tensor(value)).abs().max() < 1e-6, name


@pytest.mark.few(1)
@pytest.mark.parametrize("pattern", ["in some steps", "in one half of the batch", "never"])
def test_what_a_step_does_not_use_is_left_alone(pattern):
    expected = run_warm(train, 1, {}, pattern, 2)[0]
    for config in LEVELS.values():
        assert_equal(run_warm(train, 2, config, pattern), expected)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_nor_in_micro_batches(level):
    expected = run_warm(train, 1, {}, "in one half of the batch", 4)[0]

    assert_equal(run_warm(train, 2, LEVELS[level], "in one half of the batch", 2), expected)


def test_a_plain_loop_with_a_use_on_some_rank_is_right():
    expected = run_warm(train, 1, {}, "always in one half", 2)[0]

    assert_equal(run_warm(train, 2, zero(1), "always in one half", 1, "plain"), expected)


def refused(pattern):
    with pytest.raises(ModelError) as caught:
        train(zero(1), pattern, 1, "plain")
    return caught.value.message


def test_a_plain_loop_without_a_use_is_refused():
    sentence = (
        "parallel.optimizer.zero: the loss does not depend on context.bias, context.weight in this "
        "step, but their gradients are zeros: a module takes what they computed and does not use it"
    )

    assert run_warm(refused, 2, "never") == [sentence] * 2


class Spare(nn.Module):
    """Has a layer that it leaves out in some steps."""

    is_used = True

    def __init__(self):
        super().__init__()
        self.spare, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.last(torch.tanh(self.spare(x)) if self.is_used else x)


def train_in_parts(config, parts):
    """Return the losses of a plain loop that differentiates its batch in parts."""
    torch.manual_seed(0)
    rt = msrun.init(config)
    blocks = [Spare().double(), Spare().double()]
    model = rt.shard(nn.Sequential(*blocks))
    optimizer = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
        blocks[0].is_used = step != 1
        optimizer.zero_grad()
        total = torch.zeros(())
        pairs = zip(
            x.chunk(count)[share].chunk(parts), y.chunk(count)[share].chunk(parts), strict=True
        )
        for part, (own, target) in enumerate(pairs, 1):
            loss = functional.mse_loss(model(own), target) / parts
            with contextlib.nullcontext() if part == parts else rt.no_sync(model):
                loss.backward()
            total = total + loss.detach()
        optimizer.step()
        losses.append(rt.mean_over_data(total).item())
    return losses


@pytest.mark.few(1)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_layer_that_no_part_of_a_step_uses_is_left_alone(level):
    expected = run_warm(train_in_parts, 1, {}, 1)[0]

    assert_equal_curves(run_warm(train_in_parts, 2, zero(level), 2), expected)
