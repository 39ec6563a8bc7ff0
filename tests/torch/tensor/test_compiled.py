"""Compiled models under a plan: right, compiled where no rule is inside, or refused by name."""

import copy

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError

pytestmark = [
    pytest.mark.torch,
    # Of torch, while it compiles.
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

PLAN = [{"match": "up", "style": "colwise"}, {"match": "head", "style": "vocab"}]


class Breaks(nn.Module):
    """Has modules with a rule, and what no compiler follows between them."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x):
        scale = float(x.detach().abs().amax())  # the compiler stops here
        return self.head(self.up(x).relu()) / (1 + scale)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = Breaks(), nn.LayerNorm(4)

    def forward(self, x):
        return self.inner(self.norm(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.head = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.head(self.up(self.norm(x)).relu())


def trained(how, config):
    """Return the losses of two steps of a model that is compiled."""
    rt = msrun.init(config)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Block()
    if how == "model before":
        model.compile(backend="aot_eager")
    if how == "module before":
        model.norm.compile(backend="aot_eager")
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if how == "model after":
        model.compile(backend="aot_eager")
    if how == "module after":
        model.up.compile(backend="aot_eager")
    x, y = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)), torch.arange(4)
    losses = []
    for _ in range(2):
        if how == "function after":
            update.zero_grad()
            loss = functional.cross_entropy(torch.compile(model, backend="aot_eager")(x), y)
            loss.backward()
            update.step()
        else:
            loss = rt.step(model, update, functional.cross_entropy, x, y)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "how", ["model before", "module before", "model after", "module after", "function after"]
)
def test_a_compiled_model_trains_as_in_one_process(how):
    expected = run_warm(trained, 1, "", {})[0]
    for losses in run_warm(trained, 2, how, {"mesh": {"tp": 2}, "plan": PLAN}):
        assert losses == pytest.approx(expected, abs=1e-6)


def around_a_break(how, config):
    """Return the losses of two steps of a model of which a part with a break is compiled."""
    rt = msrun.init(config)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Outer()
    if how == "before":
        model.inner.compile(backend="aot_eager")
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if how == "in place":
        model.inner.compile(backend="aot_eager")
    if how == "replaced":
        model.inner = torch.compile(model.inner, backend="aot_eager")
    if how == "copied":
        copy.deepcopy(model.inner)
    x, y = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)), torch.arange(4)
    return [rt.step(model, update, functional.cross_entropy, x, y).item() for _ in range(2)]


@pytest.mark.parametrize("how", ["before", "in place", "replaced", "copied"])
def test_a_compiled_part_with_rules_inside_runs_as_written(how):
    plan = [{"match": "inner.up", "style": "colwise"}, {"match": "inner.head", "style": "vocab"}]
    expected = run_warm(around_a_break, 1, "", {})[0]
    for losses in run_warm(around_a_break, 2, how, {"mesh": {"tp": 2}, "plan": plan}):
        assert losses == pytest.approx(expected, abs=1e-6)


def refused():
    rt = msrun.init({"mesh": {"tp": 2}, "plan": PLAN})
    with pytest.raises(UsageError) as caught:
        rt.shard(torch.compile(Block(), backend="eager"))
    return caught.value.message


def test_what_torch_compile_returns_is_refused():
    for sentence in run_warm(refused, 2):
        assert sentence.startswith("parallel.plan: rt.shard got what torch.compile returned")
