"""What a script recomputes by itself in a divided model: as in one process, or refused."""

import io
import warnings

import pytest
import torch
from ranks import OPTIMIZERS, assert_equal_curves, batches, run_ranks, run_warm
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import msrun
from msrun.errors import UsageError

pytestmark = pytest.mark.torch

COLUMNS_AND_ROWS = [{"match": "up", "style": "colwise"}, {"match": "down", "style": "rowwise"}]


class Repeated(nn.Module):
    """Recomputes by itself what needs the guard: a dropout, and a function that runs whole."""

    is_reentrant = False

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(32, 10)

    def body(self, x):
        return self.down(torch.tanh(self.drop(self.up(x)).cumsum(-1) / 8))

    def forward(self, x):
        x = x.detach().requires_grad_()
        return checkpoint(self.body, x, use_reentrant=self.is_reentrant)


class RepeatedWithin(Repeated):
    """Recomputes a part of what it recomputes apart."""

    def body(self, x):
        hidden = checkpoint(self.up, x, use_reentrant=False)
        return self.down(self.drop(self.up(x) + hidden))


class RepeatedReentrant(Repeated):
    is_reentrant = True


def repeated(kind, config, is_by_hand):
    warnings.simplefilter("ignore")  # it says what runs whole
    runtime = msrun.init(config)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = kind()
    network = runtime.shard(network)
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    losses = []
    for x, y in batches("mlp"):
        if is_by_hand:
            update.zero_grad()
            loss = functional.cross_entropy(network(x), y)
            loss.backward()
            update.step()
        else:
            loss = runtime.step(network, update, functional.cross_entropy, x, y)
        losses.append(loss.item())
        torch.save(network, io.BytesIO())
    return losses, network.up(torch.ones(1, 16)).detach().cumsum(-1)


@pytest.mark.sampled
@pytest.mark.parametrize("is_by_hand", [True, False])
@pytest.mark.parametrize("kind", [Repeated, RepeatedReentrant, RepeatedWithin])
def test_what_a_script_recomputes_by_itself_is_that_of_one_process(kind, is_by_hand):
    alone, part = run_warm(repeated, 1, kind, {"seed": 5}, is_by_hand)[0]
    config = {"seed": 5, "mesh": {"tp": 2}, "plan": COLUMNS_AND_ROWS}
    found = run_warm(repeated, 2, kind, config, is_by_hand)

    assert_equal_curves([losses for losses, _ in found], alone)
    for _, own in found:  # a part of the model that is called apart gives whole tensors
        torch.testing.assert_close(own, part)


class RepeatedParts(Repeated):
    """Recomputes functions of what a planned module has made, such as a dropout."""

    function = staticmethod(functional.dropout)

    def forward(self, x):
        hidden = checkpoint(self.function, self.up(x), use_reentrant=self.is_reentrant)
        return self.down(hidden)


class RepeatedPartsReentrant(RepeatedParts):
    is_reentrant = True


class RepeatedActivation(RepeatedParts):
    function = staticmethod(functional.gelu)


@pytest.mark.parametrize("is_by_hand", [True, False])
def test_what_is_right_on_parts_may_be_recomputed_apart(is_by_hand):
    alone, _ = run_warm(repeated, 1, RepeatedActivation, {}, is_by_hand)[0]
    config = {"mesh": {"tp": 2}, "plan": COLUMNS_AND_ROWS}
    found = run_warm(repeated, 2, RepeatedActivation, config, is_by_hand)

    assert_equal_curves([losses for losses, _ in found], alone)


class RepeatedLayers(Repeated):
    """Recomputes layers that no rule names, of what a planned module has made."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))

    def forward(self, x):
        return self.down(checkpoint_sequential(self.layers, 2, self.up(x), use_reentrant=False))


def repeated_refused(kind, config, is_by_hand):
    with pytest.raises(UsageError) as caught:
        repeated(kind, config, is_by_hand=is_by_hand)
    return caught.value.message


@pytest.mark.sampled
@pytest.mark.parametrize("is_by_hand", [True, False])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(RepeatedParts, "dropout"), (RepeatedPartsReentrant, "dropout"), (RepeatedLayers, "linear")],
)
def test_what_a_script_would_recompute_unguarded_is_refused(kind, name, is_by_hand):
    config = {"mesh": {"tp": 2}, "plan": COLUMNS_AND_ROWS}
    sentence = (
        f"torch.utils.checkpoint would run {name} of a divided tensor again without msrun, and get "
        "something else"
    )
    assert run_ranks(repeated_refused, 2, kind, config, is_by_hand) == [sentence, sentence]
