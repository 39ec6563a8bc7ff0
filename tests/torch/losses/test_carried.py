"""Micro-batches of a model that keeps what it computed: refused if the next one needs it."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = [
    pytest.mark.torch,
    # The output of a recurrent layer is a view, which nothing here writes.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

WIDTH, TOKENS, SAMPLES = 8, 5, 8


class Keeping(nn.Module):
    """A recurrent layer, and what a subclass keeps of its calls."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.kept = None

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


class StateOfTheLastCall(Keeping):
    def forward(self, x):
        h, state = self.cells(x, self.kept)
        self.kept = tuple(part.detach() for part in state)
        return self.head(h[:, -1])


class ScaledByTheLastCall(Keeping):
    def forward(self, x):
        h = self.cells(x)[0][:, -1]
        before = 1.0 if self.kept is None else self.kept
        self.kept = h.detach().abs().amax() + 1
        return self.head(h / before)


class CentredByABuffer(Keeping):
    """As a script's own running mean, which is used in training."""

    def forward(self, x):
        h = self.cells(x)[0][:, -1]
        shift = self.seen
        self.kept = shift * 0.9 + h.detach().mean(0) * 0.1
        self.seen = self.kept
        return self.head(h - shift)


class Outputs(Keeping):
    """For a plot, and a sum that nothing needs."""

    def forward(self, x):
        h = super().forward(x)
        self.kept = h if self.kept is None else self.kept + h.sum()
        return h


class Placed(Keeping):
    """Keeps a table of the type and the form of its input."""

    def forward(self, x):
        if self.kept is None:
            self.kept = torch.arange(TOKENS).to(x)[:, None] * x.new_full((TOKENS, WIDTH), 0.1)
        return super().forward(x + self.kept)


class KeepingLoss(nn.Module):
    """Keeps the mean of its last outputs, and pulls the next ones to it."""

    kept = 0.0

    def forward(self, output, target):
        loss = functional.cross_entropy(output, target) + (output - self.kept).square().mean()
        self.kept = output.detach().mean(0)
        return loss


class AveragingLoss(nn.Module):
    """Has a running mean in a buffer, which it updates in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, output, target):
        loss = functional.cross_entropy(output - self.centre, target)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(output.mean(0), alpha=0.1)
        return loss


class ScalingLoss(nn.Module):
    """Divides by the last value."""

    last = 1.0

    def forward(self, output, target):
        loss = functional.cross_entropy(output, target)
        scaled, self.last = loss / self.last, loss.item()
        return scaled


class ListingLoss(nn.Module):
    """Keeps its outputs for a plot."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def forward(self, output, target):
        self.outputs.append(output.detach())
        return functional.cross_entropy(output, target)


def trained(config, kind, loss_fn=functional.cross_entropy):
    """Return the losses of two steps, or what refuses them."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, TOKENS, WIDTH), torch.arange(SAMPLES) % 3
    model = rt.shard(kind())
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    share, parts = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    own = [part.chunk(parts)[share] for part in (x, y)]
    try:
        return [rt.step(model, optimizer, loss_fn, *own).item() for _ in range(2)]
    except ModelError as error:
        return error.message
    finally:
        rt.close()


CONFIGS = {
    "one rank": (1, {"accumulate": 2}),
    "dp": (2, {"accumulate": 2}),
    "zero 3": (2, {"accumulate": 2, "optimizer": {"zero": 3}}),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("ranks", "config"), CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", [StateOfTheLastCall, ScaledByTheLastCall])
def test_what_another_micro_batch_computed_is_refused(kind, ranks, config):
    for said in run_warm(trained, ranks, config, kind):
        assert said.startswith(
            "the loss of a micro-batch depends on what the model computed from another (test_carr"
        )


@pytest.mark.sampled
@pytest.mark.parametrize(("ranks", "config"), CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", [Keeping, Outputs, Placed])
def test_what_a_model_keeps_and_does_not_need_is_right(kind, ranks, config):
    alone = run_warm(trained, 1, {}, kind)[0]
    for losses in run_warm(trained, ranks, config, kind):
        assert losses == pytest.approx(alone, rel=1e-6)


def test_one_micro_batch_may_continue_from_the_last_step():
    assert len(run_warm(trained, 1, {}, StateOfTheLastCall)[0]) == 2


def test_a_buffer_that_each_call_changes_is_refused_by_its_name():
    said = run_warm(trained, 1, {"accumulate": 2}, CentredByABuffer)[0]
    assert said.startswith("parallel.accumulate: each of 2 micro-batches changes seen")


# name of a loss -> what the sentence begins with.
LOSSES = {
    KeepingLoss: "the loss of a micro-batch depends on what the model computed from another",
    AveragingLoss: "the loss of a micro-batch depends on what the model computed from another",
    ScalingLoss: "the loss multiplies a mean by a number that other parts of the batch have",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_loss_keeps_and_needs_is_refused(loss):
    assert run_warm(trained, 1, {"accumulate": 2}, Keeping, loss())[0].startswith(LOSSES[loss])


def test_what_a_loss_keeps_and_does_not_need_is_right():
    alone = run_warm(trained, 1, {}, Keeping)[0]
    found = run_warm(trained, 1, {"accumulate": 2}, Keeping, ListingLoss())[0]
    assert found == pytest.approx(alone, rel=1e-6)
