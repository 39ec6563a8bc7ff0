"""Hooks that a script puts on the result of `rt.shard`: run as in one process, or refused there."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = pytest.mark.torch

KINDS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)
PARTS = 4
NOT_AS_IN_ONE = ", so a hook on it would not run as in one process"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.down(functional.relu(self.up(x)))


class Body(nn.Module):
    """Its own forward is divided."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.tail = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.body, self.head = nn.Linear(16, 16), Body(), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


def staged(schedule="1f1b", **others):
    places = [[0, 0], [1, 0], [1, 1], [0, 1]] if schedule == "zbv" else [0, 0, 1, 1]
    names = [f"body.blocks.{index}" for index in range(4)]
    stages = {"stem": places[0]} | dict(zip(names, places, strict=True))
    stages["body.tail.0"] = places[3]
    stages |= {"body.tail.1": places[3], "head": places[3]}
    pipeline = {"stages": stages, "microbatches": PARTS, "schedule": schedule}
    return {"mesh": {"pp": 2}, "pipeline": pipeline, **others}


def refused(config, kind, where):
    model = msrun.init(config).shard(Whole(), sample=(torch.ones(8, 16),))
    parts = dict(model.named_modules())
    if where not in parts:
        return None
    with pytest.raises(ModelError) as caught:
        getattr(parts[where], kind)(lambda *_: None)
    return caught.value.message


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["", "body"])
def test_hooks_on_what_is_divided_are_refused_when_they_are_set(kind, where):
    expected = f"parallel.pipeline: no stage calls {where or 'Whole'} as a whole" + NOT_AS_IN_ONE
    assert run_warm(refused, 2, staged(), kind, where) == [expected] * 2


AUTO = {
    "mode": "auto",
    "mesh": {"pp": 2},
    "pipeline": {"stages": "auto", "microbatches": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(2)
def test_hooks_on_modules_that_a_searched_plan_does_not_call_are_refused(kind):
    uncalled = "parallel.mode: auto runs a plan, which does not call "
    found = run_warm(refused, 2, AUTO, kind, "body.blocks.0")
    assert {*found} - {None} == {uncalled + "body.blocks.0" + NOT_AS_IN_ONE}
    assert all(text.startswith(uncalled) for text in run_warm(refused, 2, AUTO, kind, ""))


def run_with_hooks(config):
    """Return, for each hook of this rank's blocks, how often it ran and the sum that it saw."""
    runtime = msrun.init(config)
    model = runtime.shard(Whole())
    seen = {}

    def note(name, scale, value):
        count, total = seen.get(name, (0, 0.0))
        seen[name] = count + 1, total + scale * float(value.detach().double().sum())

    parts = PARTS if "pipeline" in config else 1
    for name, part in model.named_modules():
        if type(part) is Block:
            part.register_forward_pre_hook(lambda _, args, n=name: note(f"{n} pre", 1, args[0]))
            part.register_forward_hook(lambda _, __, out, n=name: (note(n, 1, out), out * 1.5)[1])
            part.register_full_backward_pre_hook(
                lambda _, grads, n=name: note(f"{n} back pre", 1, grads[0])
            )
            part.register_full_backward_hook(
                lambda _, grads, __, n=name: (note(f"{n} back", 1, grads[0]), (grads[0] * 2,))[1]
            )
    optimizer = runtime.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        batch = torch.randn(8, 16, requires_grad=False), torch.randint(0, 10, (8,))
        losses.append(runtime.step(model, optimizer, functional.cross_entropy, *batch).item())
    with torch.no_grad():
        losses.append(model(torch.ones(8, 16)).sum().item())
    return losses, {name: (count / parts, total) for name, (count, total) in seen.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zbv"])
def test_hooks_on_modules_with_a_stage_run_once_a_micro_batch(schedule):
    losses, expected = run_warm(run_with_hooks, 1, {})[0]
    found = run_warm(run_with_hooks, 2, staged(schedule))
    seen = {}
    for own, of_rank in found:
        assert own == pytest.approx(losses, rel=1e-5)
        seen |= of_rank
    assert seen.keys() == expected.keys()
    for name, (_, total) in expected.items():
        assert seen[name][1] == pytest.approx(total, rel=1e-4, abs=1e-5), name
