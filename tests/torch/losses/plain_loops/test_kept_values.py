"""Statistics that a model or a loss keeps in an attribute for later steps."""

import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch


def mean_of_rank(_, x):
    return x


def mean_of_all(rt, x):
    return rt.mean_over_data(x)


class Keeping(nn.Module):
    """A model that keeps something of its samples in an attribute that is no buffer.

    Args:
        kind: What it keeps.
        mean: Returns what is kept of a mean over the samples of a rank.
    """

    def __init__(self, kind, mean):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.kind, self.mean = kind, mean
        self.kept = torch.eye(5) if kind == "codes" else torch.zeros(() if kind == "number" else 5)
        self.steps = torch.arange(5.0)

    def forward(self, x):
        hidden = self.first(x) + self.steps
        with torch.no_grad():
            kept, found = self.kept.clone(), self.mean(self.statistic(hidden))
            if self.kind == "written":
                self.kept.mul_(0.9).add_(found, alpha=0.1)
            else:
                self.kept = 0.9 * self.kept + 0.1 * found
        return self.last(self.met(hidden, kept))

    def statistic(self, hidden):
        if self.kind == "codes":
            return hidden.T @ hidden / len(hidden)
        return hidden.mean() if self.kind == "number" else hidden.mean(0)

    def met(self, hidden, kept):
        if self.kind == "codes":
            return hidden @ kept.T
        return hidden if self.kind == "nothing" else hidden - kept.to(hidden)


class Centred:
    """A loss that subtracts a running mean of outputs, as DINO's does."""

    def __init__(self, mean):
        self.mean = mean
        self.centre = torch.zeros(1, 3)

    def __call__(self, output, target):
        loss = functional.cross_entropy(output - self.centre, target)
        found = self.mean(output.detach().mean(0, keepdim=True))
        self.centre = 0.9 * self.centre + 0.1 * found
        return loss


def trained(kind, mean, loop, config):
    """Return the losses of four steps, and the warnings."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    mean_of = lambda x: mean(rt, x)  # noqa: E731 - it has the runtime
    of_loss = kind == "loss"
    model = rt.shard(Keeping("nothing" if of_loss else kind, mean_of))
    loss_of = Centred(mean_of) if of_loss else functional.cross_entropy
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    update = rt.optimizer(update) if loop == "step" else update
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            draw = torch.Generator().manual_seed(step)
            batch = torch.randn(8, 6, generator=draw), torch.randint(3, (8,), generator=draw)
            x, y = (tensor.chunk(rt.world_size)[rt.rank] for tensor in batch)
            if loop == "step":
                losses.append(float(rt.step(model, update, loss_of, x, y)))
            else:
                update.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                update.step()
                losses.append(float(rt.mean_over_data(loss.detach())))
    return losses, [str(each.message) for each in caught if "samples meet" in str(each.message)]


KINDS = {"vector": "tensor", "number": "number", "written": "tensor", "codes": "matrix"}
KINDS |= {"loss": "matrix"}


@pytest.mark.parametrize("loop", ["step", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_kept_of_a_ranks_samples_is_a_warning(kind, loop):
    for _, said in run_warm(trained, 2, kind, mean_of_rank, loop, {}):
        assert said
        assert all(f"samples meet a {KINDS[kind]} that ranks have others of, in" in x for x in said)
        assert "(test_kept_values.py, line" in said[0]


@pytest.mark.parametrize("loop", ["step", "plain"])
@pytest.mark.parametrize("kind", [*KINDS, "nothing"])
def test_what_was_kept_of_all_samples_is_right(kind, loop):
    expected, _ = run_warm(trained, 1, kind, mean_of_all, loop, {})[0]

    for losses, said in run_warm(trained, 2, kind, mean_of_all, loop, {}):
        assert said == []
        assert losses == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "config", [{"optimizer": {"zero": 3}}, {"recompute": {"modules": ["first"]}}]
)
def test_it_is_a_warning_beside_other_techniques(config):
    for _, said in run_warm(trained, 2, "vector", mean_of_rank, "step", config):
        assert len(said) == 1


class Scaled:
    """Another library's number, of which tensors know nothing."""

    def __radd__(self, x):
        return x * 2


class Odd(nn.Module):
    """Maps a function over what it keeps, and adds what is no tensor."""

    def __init__(self):
        super().__init__()
        self.layer, self.codes, self.number = nn.Linear(6, 3), torch.eye(3), Scaled()

    def forward(self, x):
        hidden = self.layer(x) + self.number
        near = torch.vmap(lambda code: (hidden - code).square().sum(1))(self.codes)
        return hidden - near.min(0).values[:, None]


def odd():
    rt = msrun.init({})
    torch.manual_seed(0)
    model = rt.shard(Odd())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.ones(8, 6).chunk(rt.world_size)[rt.rank], torch.zeros(8 // rt.world_size).long()
    return [float(rt.step(model, update, functional.cross_entropy, x, y)) for _ in range(3)]


def test_values_without_a_number_are_left_alone():
    (expected,) = run_warm(odd, 1)

    for losses in run_warm(odd, 2):
        assert losses == pytest.approx(expected, abs=1e-6)
