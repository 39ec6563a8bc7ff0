"""Operators and recomputed functions between stages, which a recording calls again."""

import warnings

import pytest
import torch
from pipelines import pipeline
from ranks import run_warm
from torch import nn
from torch.utils.checkpoint import checkpoint

import msrun
from msrun.errors import UsageError
from msrun.parallel.pipeline.plan import plan_split

pytestmark = pytest.mark.torch


class Powers(nn.Module):
    """Computes powers between its modules, by operators of tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x) ** 2
        y **= 2
        return (self.second(y) - x) ** 2


class Checkpoints(Powers):
    """Recomputes what is between its modules."""

    def forward(self, x):
        y = checkpoint(lambda x: self.first(x).sin() * x, x, use_reentrant=False)
        return checkpoint(lambda y: self.second(y).cos(), y, use_reentrant=False)


class Codes(Powers):
    """Reads a buffer between its modules that has the name of an attribute of torch's graphs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("code", torch.linspace(0.5, 1.0, 6))

    def forward(self, x):
        return self.second(self.first(x) * self.code) - self.code


def off_by(kind):
    """Return how far the loss and the gradients of one step are off."""
    torch.manual_seed(0)
    whole = kind().double()
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = whole(x).mean()
    expected.backward()
    layers = [name for name, layer in whole.named_modules() if type(layer) is nn.Linear]
    stages = dict(zip(layers, range(2), strict=True))
    runtime = msrun.init({"mesh": {"pp": 2}, "pipeline": {"stages": stages, "microbatches": 2}})
    torch.manual_seed(0)
    part = runtime.shard(kind().double(), sample=[x])
    update = runtime.optimizer(torch.optim.SGD(part.parameters(), lr=0.0))
    loss = runtime.step(part, update, lambda o, _: o.mean(), x, x)
    gaps = [
        (param.grad - whole.get_parameter(name).grad).abs().max().item()
        for name, param in part.named_parameters()
    ]
    return max(*gaps, abs(loss.item() - expected.item()))


@pytest.mark.parametrize("kind", [Powers, Checkpoints, Codes])
def test_what_runs_between_stages_is_that_of_one_process(kind):
    assert max(run_warm(off_by, 2, kind)) < 1e-12


def _scaled_tanh(x):
    return x * torch.tanh(x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it is deprecated, and in many models
    scripted = torch.jit.script(_scaled_tanh)


class Scripted(Powers):
    """Calls a function of TorchScript between its modules."""

    def forward(self, x):
        return self.second(scripted(self.first(x)))


class ScriptedInPart(Powers):
    """Calls it in a function, so that forward does not name it."""

    def forward(self, x):
        return self.second(_in_part(self.first(x)))


def _in_part(x):
    return scripted(x)


@pytest.mark.parametrize(
    ("kind", "caller"), [(Scripted, Scripted.forward), (ScriptedInPart, _in_part)]
)
def test_a_function_of_torchscript_between_stages_is_refused_by_name(kind, caller):
    with pytest.raises(UsageError) as caught:
        plan_split(kind(), pipeline({"first": 0, "second": 1}), 2, (torch.randn(4, 6),))

    assert "forward calls scripted, a function of torch.jit.script" in str(caught.value)
    line = caller.__code__.co_firstlineno + 1
    assert f"(test_recorded_operators.py, line {line})" in str(caught.value)


class OwnCall(Powers):
    """Says in `__call__` what its forward gets."""

    def __call__(self, x):
        return super().__call__(x * 0.5)


class Around(nn.Module):
    """Has such a model as a part, which is divided."""

    def __init__(self):
        super().__init__()
        self.part = OwnCall()

    def forward(self, x):
        return self.part(x) * 2


def test_a_model_with_a_call_of_its_own_is_refused():
    with pytest.raises(UsageError, match="OwnCall has a __call__ of its own, and is divided"):
        plan_split(OwnCall(), pipeline({"first": 0, "second": 1}), 2, (torch.randn(4, 6),))


def test_a_part_with_a_call_of_its_own_is_divided_as_its_code_says():
    assert max(run_warm(off_by, 2, Around)) < 1e-12
