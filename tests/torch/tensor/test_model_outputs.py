"""What a model under a plan returns keeps its type, and holds plain tensors."""

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from ranks import run_warm
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch


class Named(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    logits: Tensor
    hidden: Tensor
    names: tuple[str, ...] = ("a",)


class Output(dict):
    """A mapping with attributes, as transformers has it."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def mapped(logits, hidden):
    output = Output()
    output["logits"], output["hidden"] = logits, hidden
    return output


def nested(logits, hidden):
    return Record(logits, [{"hidden": hidden}])


def spaced(logits, hidden):
    return SimpleNamespace(logits=logits, hidden=hidden)


KINDS = {"named": Named, "record": Record, "mapping": mapped, "nested": nested, "space": spaced}


class Returning(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.up, self.head = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x):
        hidden = self.up(x).relu()
        return KINDS[self.kind](self.head(hidden), hidden)


def loss_of(output, target):
    return functional.cross_entropy(output.logits, target)


PLAN = [{"match": "up", "style": "colwise"}, {"match": "head", "style": "vocab"}]


def trained(kind, config):
    """Return the losses of two steps, and the logits and types of an evaluation."""
    rt = msrun.init(config)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = rt.shard(Returning(kind))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(4, 4, generator=draw), torch.arange(4)
    losses = [rt.step(model, update, loss_of, x, y).item() for _ in range(2)]
    with torch.no_grad():
        output = model(x)
    hidden = output.hidden[0]["hidden"] if kind == "nested" else output.hidden
    assert not isinstance(output.logits, DTensor)
    assert not isinstance(hidden, DTensor)
    assert hidden.shape == (4, 8)
    return losses, output.logits.tolist(), type(output).__name__


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_any_type_train_and_evaluate_as_in_one_process(kind):
    expected, logits, name = run_warm(trained, 1, kind, {})[0]
    for losses, found, kept in run_warm(trained, 2, kind, {"mesh": {"tp": 2}, "plan": PLAN}):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert torch.allclose(torch.tensor(found), torch.tensor(logits), atol=1e-6)
        assert kept == name


def features(config, where, *, is_before, in_step):
    """Train with a penalty on what a hook keeps of a layer, of before or after `rt.shard`."""
    rt = msrun.init(config)
    torch.manual_seed(1)
    model = nn.Sequential()
    model.up, model.act, model.down = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)
    kept = []

    def keep(*seen):
        kept.append(seen[-1])

    if is_before:
        model.get_submodule(where).register_forward_hook(keep)
    model = rt.shard(model)
    if not is_before:
        model.get_submodule(where).register_forward_hook(keep)

    def loss_fn(output, target):
        penalty = (kept[-1].mean(1) - output.mean(1)).abs().mean()
        return functional.cross_entropy(output, target) + penalty

    update = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.linspace(-1, 1, 16).view(4, 4), torch.arange(4)
    losses = []
    for _ in range(3):
        if in_step:
            loss = rt.step(model, update, loss_fn, x, target)
        else:
            update.zero_grad()
            loss = loss_fn(model(x), target)
            loss.backward()
            update.step()
        losses.append(loss.item())
    return losses


FEATURE_PLAN = [{"match": "up", "style": "colwise"}, {"match": "down", "style": "rowwise"}]


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(
    ("where", "in_step", "parts"),
    [("up", True, 1), ("act", True, 2), ("down", True, 2), ("down", False, 1)],
)
def test_what_a_hook_keeps_is_part_of_the_loss(where, in_step, parts, is_before):
    config = {"mesh": {"tp": 2}, "plan": FEATURE_PLAN, "accumulate": parts}
    [expected] = run_warm(partial(features, is_before=is_before, in_step=in_step), 1, {}, where)

    found = run_warm(partial(features, is_before=is_before, in_step=in_step), 2, config, where)
    assert found == [pytest.approx(expected, abs=1e-6)] * 2
