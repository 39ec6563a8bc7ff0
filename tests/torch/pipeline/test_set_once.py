"""What the first call of a forward sets for later ones: no matter, if they are the same."""

import pytest
import torch
from pipelines import CPU, pipeline, train_step
from ranks import run_warm
from torch import nn
from torch.nn import functional

from msrun.errors import UsageError
from msrun.parallel.pipeline.plan import plan_split
from msrun.parallel.pipeline.split_model import split_model

pytestmark = pytest.mark.torch

STAGES = {"a": 0, "b": 1}


class Two(nn.Module):
    """Two layers; a subclass says what is between them."""

    mask = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0
        self.kept = []


class FlagsOnce(Two):
    """As transformers does with hooks for outputs."""

    def forward(self, x):
        if not hasattr(self, "is_ready"):
            self.is_ready = True
            self.kept.append("hook")
        return self.b(self.a(x))


class OtherValue(Two):
    """The first call computes with another number."""

    def forward(self, x):
        factor = 2.0 if self.calls == 0 else 3.0
        self.calls = 1
        return self.b(self.a(x) * torch.tensor(factor))


class OtherMode(Two):
    """The first call has no gradient."""

    def forward(self, x):
        is_first, self.calls = self.calls == 0, 1
        with torch.set_grad_enabled(not is_first):
            h = self.a(x)
        return self.b(h)


class Caches(Two):
    """Later calls read a tensor of the first."""

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.arange(8)
        return self.b(self.a(x) * self.mask)


class CountsToTwo(Two):
    def forward(self, x):
        self.calls = min(self.calls + 1, 2)
        return self.b(self.a(x))


def differences():
    """Train beside one process; return how far losses and weights are."""
    whole, part = FlagsOnce(), None
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    part = split_model(FlagsOnce(), pipeline(STAGES), torch.distributed.group.WORLD, CPU, (x,))
    updates = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, part)]
    off = []
    for _ in range(2):
        for update in updates:
            update.zero_grad()
        loss = functional.cross_entropy(whole(x), torch.arange(8))
        loss.backward()
        found = train_step(part, [x], torch.arange(8), functional.cross_entropy)
        off.append(abs(found.item() - loss.item()))
        for update in updates:
            update.step()
    weights = dict(whole.named_parameters())
    off += [(p - weights[n]).detach().abs().max().item() for n, p in part.named_parameters()]
    return max(off)


def test_a_flag_that_the_first_call_sets_changes_nothing():
    assert max(run_warm(differences, 2)) < 1e-6


@pytest.mark.parametrize(
    ("kind", "name"),
    [(OtherValue, "calls"), (OtherMode, "calls"), (Caches, "mask"), (CountsToTwo, "calls")],
)
def test_a_first_call_unlike_later_ones_is_refused(kind, name):
    with pytest.raises(UsageError) as caught:
        plan_split(kind(), pipeline(STAGES), 2, (torch.randn(8, 8),))

    sentence = f"parallel.pipeline.stages: the forward of {kind.__name__} sets {name}, and is"
    assert str(caught.value).startswith(sentence)
