"""Plans that the runtime does by itself compute what one process does, without an executor."""

from __future__ import annotations

import contextlib
import functools
import io
import math

import pytest
import torch
from auto_models import GPT, MODELS, Llama, Perceptron
from auto_plans import megatron, samples, save_plan, vocabulary
from ranks import Counted, run_warm
from torch import nn
from torch.nn import functional

import msrun


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Wide(nn.Module):
    """A perceptron of pairs of layers, in which styles fit."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return functional.mse_loss(x, y)


class Gated(nn.Module):
    """Two layers take what no module makes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.gate, self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, y):
        h = torch.tanh(self.first(x))
        return functional.mse_loss(self.down(functional.gelu(self.gate(h)) * self.up(h)), y)


class Tied(GPT):
    """Its vocabulary is cut in embedding and head, which are one parameter."""


class Counting(Perceptron):
    """What it returns depends on how many samples a rank has."""

    def forward(self, x, y):
        return super().forward(x, y) * x.shape[0]


class Summing(Perceptron):
    def forward(self, x, y):
        for layer in self.layers:
            x = functional.relu(layer(x))
        return (x - y).square().sum() / 16


class Dropping(GPT):
    def __init__(self):
        super().__init__(dropout=0.5)


KINDS = {
    "wide": (Wide, MODELS["perceptron"][1]),
    "gated": (Gated, MODELS["perceptron"][1]),
    "gpt": (GPT, MODELS["gpt"][1]),
    "tied": (Tied, MODELS["gpt"][1]),
    "llama": (Llama, MODELS["llama"][1]),
    "counting": (Counting, MODELS["perceptron"][1]),
    "summing": (Summing, MODELS["perceptron"][1]),
    "dropping": (Dropping, MODELS["gpt"][1]),
}
STEPS = 4

pytestmark = pytest.mark.torch


def model(name):
    torch.manual_seed(0)
    return KINDS[name][0]().double()


def batches(name, count):
    torch.manual_seed(1)
    found = [KINDS[name][1]() for _ in range(count)]
    return [[x.double() if x.is_floating_point() else x for x in batch] for batch in found]


def train(config, name, folder=None, *, start=0, stop=STEPS):
    """Return losses, weights, what it ran on, and the collectives of a step.

    Some steps also compare replicas, such as the first; the least are those of the plan.
    """
    rt = msrun.init(config)
    parts, index = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    local = [[x.chunk(parts)[index] for x in batch] for batch in batches(name, STEPS)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        net = rt.shard(model(name), sample=local[0])
    optimizer = rt.optimizer(torch.optim.AdamW(net.parameters(), lr=0.01))
    if start:
        assert rt.load(net, optimizer, path=folder) == start
    losses, calls = [], []
    for batch in local[start:stop]:
        with Counted() as counted:
            losses.append(rt.step(net, optimizer, inside, *batch, batch[-1]).item())
        calls.append(counted.calls.total())
    if folder and not start:
        rt.save(net, optimizer, step=stop, path=folder)
    weights = {key: whole(param) for key, param in net.named_parameters()}
    with torch.no_grad():
        losses.append(net(*local[0]).item())
    return losses, weights, said.getvalue(), min(calls)


def inside(loss, _):
    return loss


def whole(param):
    return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()


def auto(path, name, mesh, **wanted):
    """Return the configuration of a plan that is made of what is `wanted`."""
    save_plan(path, model(name), batches(name, 1)[0], mesh, **wanted)
    return {"mode": "auto", "mesh": mesh, "plan": str(path)}


@functools.cache
def alone(name):
    """Return what one process finds."""
    return run_warm(train, 1, {"mesh": {"dp": 1}}, name)[0]


def assert_as_one_process(name, config, *, runs_on):
    """Train with `config` and compare; return the collectives of a step."""
    want, weights, *_ = alone(name)
    found = run_warm(train, math.prod(config["mesh"].values()), config, name)
    assert found[0][2] == f"parallel.mode: auto runs on {runs_on}\n"
    for losses, own, _, _ in found:
        assert losses == pytest.approx(want, rel=1e-10)
        for key, weight in weights.items():
            assert float((own[key] - weight).norm() / weight.norm()) < 1e-10, key
    return found[0][3]


STORED = {"whole": "R", "state-cut": "Z"}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["wide", "gpt", "llama"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stored", STORED)
def test_data_parallel_is_the_runtimes_own(name, ranks, stored, tmp_path):
    config = auto(tmp_path / "plan.json", name, {"dp": ranks}, stored=STORED[stored])
    calls = assert_as_one_process(name, config, runs_on="data parallel")
    # Buckets and units instead of parameters, of which each model has 8 at least.
    assert calls <= {"whole": 4, "state-cut": 10}[stored]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "divides"), [("wide", megatron), ("gpt", megatron)])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=["tp", "dp-tp"])
def test_modules_divided_by_styles_are_the_runtimes_own(name, divides, mesh, tmp_path):
    config = auto(tmp_path / "plan.json", name, mesh, divides=divides)
    calls = assert_as_one_process(name, config, runs_on="styles")
    # Two of each pair of layers, and the buckets.
    assert calls <= {"wide": 4, "gpt": 8}[name] + 4 * ("dp" in mesh)


def gated(module, packet, choices):
    """Have the gate cut like the layer beside it."""
    if module == "gate":
        return "n"
    return "d1" if packet == "mul" else megatron(module, packet, choices)


def test_layers_of_one_tensor_that_no_module_makes(tmp_path):
    config = auto(tmp_path / "plan.json", "gated", {"tp": 2}, divides=gated)
    calls = assert_as_one_process("gated", config, runs_on="styles")
    # The sum of the rows, and the gradient of what both columns take.
    assert calls <= 3


def test_styles_beside_state_in_parts(tmp_path):
    config = auto(tmp_path / "p.json", "wide", {"dp": 2, "tp": 2}, stored="Z", divides=megatron)
    assert_as_one_process("wide", config, runs_on="styles")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=["tp", "dp-tp"])
def test_a_vocabulary_that_is_cut_for_embedding_and_head(mesh, tmp_path):
    config = auto(tmp_path / "plan.json", "tied", mesh, divides=vocabulary)
    assert_as_one_process("tied", config, runs_on="styles")


@pytest.mark.parametrize("name", ["counting", "summing"])
def test_what_depends_on_the_number_of_samples_is_left_to_the_executor(name, tmp_path):
    config = auto(tmp_path / "plan.json", name, {"dp": 2})
    assert_as_one_process(name, config, runs_on="executor")


@pytest.mark.slow
def test_other_patterns_are_left_to_the_executor(tmp_path):
    config = auto(tmp_path / "plan.json", "llama", {"tp": 2}, divides=megatron)
    assert_as_one_process("llama", config, runs_on="executor")


@pytest.mark.slow
def test_dropout_is_left_to_the_executor(tmp_path):
    config = auto(tmp_path / "plan.json", "dropping", {"dp": 2})
    found = run_warm(train, 2, config, "dropping")
    assert found[0][2] == "parallel.mode: auto runs on executor\n"


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["whole", "state-cut"])
def test_checkpoints_go_on_under_the_executor_and_back(stored, tmp_path):
    want, *_ = alone("gpt")
    one = auto(tmp_path / "one.json", "gpt", {"dp": 2}, stored=STORED[stored])
    other = auto(tmp_path / "other.json", "gpt", {"tp": 2}, divides=samples)
    for number, (first, second) in enumerate(((one, other), (other, one))):
        folder = str(tmp_path / f"checkpoint{number}")
        (_, _, before, _), _ = run_warm(functools.partial(train, stop=2), 2, first, "gpt", folder)
        found = run_warm(functools.partial(train, start=2), 2, second, "gpt", folder)
        assert {before, found[0][2]} == {
            f"parallel.mode: auto runs on {by}\n" for by in ("data parallel", "executor")
        }
        for losses, *_ in found:
            assert losses == pytest.approx(want[2:], rel=1e-10)


@pytest.mark.parametrize("stored", STORED)
def test_micro_batches_are_summed_before_ranks_reduce(stored, tmp_path):
    path = tmp_path / "plan.json"
    config = auto(path, "wide", {"dp": 2}, stored=STORED[stored], microbatches=2)
    calls = assert_as_one_process("wide", config, runs_on="data parallel")
    assert calls <= {"whole": 5, "state-cut": 12}[stored]
