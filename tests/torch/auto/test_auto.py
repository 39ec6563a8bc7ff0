"""Plans of the search, and plans drawn at random, compute what one process does."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from auto_models import GPT, MODELS, GPTBlock
from auto_plans import drawn
from ranks import run_warm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.auto.execute import Executor
from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.local import local_part
from msrun.parallel.search.cost.topology import PRESETS
from msrun.parallel.search.graph.repeat import find_blocks
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.eliminate import solve
from msrun.parallel.search.solve.problem import Setting

PLANS = 2

pytestmark = pytest.mark.torch


def batch(name):
    return tuple(x.double() if x.is_floating_point() else x for x in MODELS[name][1]())


def model(name):
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def alone(name):
    """Return loss and gradients of one process."""
    net = model(name)
    torch.manual_seed(1)
    loss = net(*batch(name))
    loss.backward()
    return loss.item(), {key: param.grad for key, param in net.named_parameters()}


def run_plans(name, sizes):
    """Return the largest relative error of loss and gradients, of each plan."""
    mesh = init_device_mesh("cpu", sizes)
    want_loss, want = alone(name)
    torch.manual_seed(1)
    inputs = batch(name)
    traced = trace(model(name), inputs)
    setting = Setting(sizes=sizes, topology=PRESETS["cpu"])
    problem = build(traced.program, setting)
    best = solve(problem)[1]
    rng = np.random.default_rng(sum(map(ord, name)) + len(sizes))
    plans = [
        {n.name: tuple(n.rows[at].tolist()) for n, at in zip(problem.nodes, best, strict=True)},
        *(drawn(problem, rng) for _ in range(PLANS)),
    ]
    rules = {node.name: node.rule for node in problem.nodes}
    # What is nothing but rounding, such as a gradient of keys' biases, counts by the largest.
    least = 1e-3 * max(float(gradient.norm()) for gradient in want.values())
    errors = []
    for plan in plans:
        net = model(name)
        run = Executor(net, traced, rules, plan, setting=setting, mesh=mesh, seed=0)
        loss = run(*inputs)
        loss.backward()
        error = abs(loss.item() - want_loss) / abs(want_loss)
        for key, param in net.named_parameters():
            got = param.grad.full_tensor()
            scale = max(float(want[key].norm()), least)
            error = max(error, float((got - want[key]).norm()) / scale)
        errors.append(error)
    return errors


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_plans_compute_what_one_process_does(name, sizes):
    for errors in run_warm(run_plans, math.prod(sizes), name, sizes):
        assert len(errors) == PLANS + 1
        assert max(errors) < 1e-10, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_plans_on_three_axes_compute_what_one_process_does(name):
    for errors in run_warm(run_plans, 8, name, (2, 2, 2)):
        assert max(errors) < 1e-10, errors


CONFIGS = [
    {"mesh": {"dp": 2}},
    {"mesh": {"tp": 2}, "search": "recursive_programming"},
    {"mesh": {"dp": 2, "tp": 2}},
    {
        "mesh": {"dp": 2, "tp": 2},
        "search": "sharding_propagation",
        "plan": [{"match": "blocks.0.up", "style": "colwise"}],
    },
]


def train(config, *, loss_inside):
    """Return the losses of a few steps, and what became of the weights."""
    rt = msrun.init({"mode": "auto", **config})
    torch.manual_seed(0)
    net = Outside() if not loss_inside else MODELS["gpt"][0]()
    torch.manual_seed(1)
    parts, index = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    batches = [[x.chunk(parts)[index] for x in MODELS["gpt"][1]()] for _ in range(3)]
    sample = batches[0] if loss_inside else batches[0][:1]
    net = rt.shard(net, sample=sample)
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for x, y in batches:
        inputs = (x, y) if loss_inside else (x,)
        loss_fn = (lambda out, _: out) if loss_inside else by_class
        losses.append(rt.step(net, optimizer, loss_fn, *inputs, y, max_norm=1.0).item())
    weights = {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()
        for name, param in net.named_parameters()
    }
    shapes = {name: tuple(local_part(param).shape) for name, param in net.named_parameters()}
    return losses, weights, shapes


class Outside(nn.Module):
    """A model that leaves its loss to whoever calls it."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([GPTBlock(0.0) for _ in range(3)])
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_class(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("config", "loss_inside"),
    [
        (CONFIGS[0], False),
        (CONFIGS[1], True),
        (CONFIGS[1], False),
        (CONFIGS[2], True),
        (CONFIGS[2], False),
    ],
    ids=["dp", "tp", "tp-outside", "dp-tp", "dp-tp-outside"],
)
@pytest.mark.few(3)
def test_training_learns_what_one_process_does(config, loss_inside):
    size = math.prod(config["mesh"].values())
    ((want, weights, _),) = run_warm(
        partial(train, loss_inside=loss_inside), 1, {"mesh": {"dp": 1}}
    )
    for losses, found, _ in run_warm(partial(train, loss_inside=loss_inside), size, config):
        assert losses == pytest.approx(want, abs=1e-6)
        for name, weight in weights.items():
            assert torch.allclose(found[name], weight, atol=2e-5), name


def test_wishes_are_kept():
    config = CONFIGS[3]
    ((want, _, _),) = run_warm(partial(train, loss_inside=True), 1, {"mesh": {"dp": 1}})
    for losses, _, shapes in run_warm(partial(train, loss_inside=True), 4, config):
        assert losses == pytest.approx(want, rel=1e-6)
        # Over dp, parameters are free.
        assert shapes["blocks.0.up.weight"][0] in (16, 32)


def half(config, folder, *, is_second, dropout=0.0):
    """Return the losses of the last two of four steps, after a checkpoint or without one."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = GPT(layers=4, dropout=dropout, ignored=-100)
    torch.manual_seed(1)
    parts, index = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    batches = [[x.chunk(parts)[index] for x in MODELS["gpt"][1]()] for _ in range(4)]
    torch.manual_seed(2 + is_second)
    net = rt.shard(net, sample=batches[0])
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    if is_second:
        assert rt.load(net, optimizer, path=folder) == 2
        return [rt.step(net, optimizer, inside, x, y, y).item() for x, y in batches[2:]]
    losses = []
    for number, (x, y) in enumerate(batches):
        if number == 2:
            rt.save(net, optimizer, step=2, path=folder)
        losses.append(rt.step(net, optimizer, inside, x, y, y).item())
    return losses[2:]


def inside(loss, _):
    return loss


def test_a_checkpoint_of_one_plan_goes_on_under_another(tmp_path):
    folder = str(tmp_path / "checkpoint")
    first = {"mode": "auto", "mesh": {"dp": 2, "tp": 2}}
    want = run_warm(partial(half, is_second=False), 4, first, folder)[0]
    for config in ({"mode": "auto", "mesh": {"tp": 2}}, {"mesh": {"dp": 2}}):
        (found, _) = run_warm(partial(half, is_second=True), 2, config, folder)
        assert found == pytest.approx(want, abs=1e-6)


def test_dropout_goes_on_from_a_checkpoint_of_any_plan(tmp_path):
    folder = str(tmp_path / "checkpoint")
    first = {"mode": "auto", "mesh": {"tp": 2}, "accumulate": 2}
    train = partial(half, dropout=0.5)
    want = run_warm(partial(train, is_second=False), 2, first, folder)[0]
    pipeline = {"stages": "auto", "microbatches": 2}
    for ranks, config in (
        (2, first),
        (1, {"mode": "auto", "mesh": {"dp": 1}, "accumulate": 2}),
        (2, {"mode": "auto", "mesh": {"pp": 2}, "pipeline": pipeline}),
    ):
        for found in run_warm(partial(train, is_second=True), ranks, config, folder):
            assert found == pytest.approx(want, abs=1e-6)


def dropped(sizes):
    """Return the losses of a model that drops, in training and then in evaluation."""
    torch.manual_seed(1)
    inputs = batch("gpt")
    torch.manual_seed(0)
    net = GPT(dropout=0.5).double()
    traced = trace(net, inputs)
    setting = Setting(sizes=sizes, topology=PRESETS["cpu"])
    problem = build(traced.program, setting)
    plan = drawn(problem, np.random.default_rng(5))
    rules = {node.name: node.rule for node in problem.nodes}
    mesh = init_device_mesh("cpu", sizes)
    run = Executor(net, traced, rules, plan, setting=setting, mesh=mesh, seed=7)
    losses = [run(*inputs).item() for _ in range(2)]
    net.eval()
    return [*losses, run(*inputs).item()]


def test_what_is_dropped_does_not_depend_on_the_plan():
    (want,) = run_warm(dropped, 1, (1,))
    assert len(set(want)) == 3
    for losses in run_warm(dropped, 4, (2, 2)):
        assert losses == pytest.approx(want, rel=1e-10)


def recomputed(sizes):
    """Return losses, gradients and kept bytes of two steps, without recomputation and with."""
    torch.manual_seed(1)
    inputs = batch("gpt")
    torch.manual_seed(0)
    traced = trace(GPT(layers=3, dropout=0.5).double(), inputs)
    blocks = find_blocks(traced.program)
    setting = Setting(sizes=sizes, topology=PRESETS["cpu"])
    problem = build(traced.program, setting, cuts=blocks.cuts)
    plan = drawn(problem, np.random.default_rng(5))
    rules = {node.name: node.rule for node in problem.nodes}
    mesh = init_device_mesh("cpu", sizes)
    found = []
    for given in (None, blocks):
        torch.manual_seed(0)
        net = GPT(layers=3, dropout=0.5).double()
        run = Executor(net, traced, rules, plan, setting=setting, mesh=mesh, seed=7, blocks=given)
        losses, kept = [], {}
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(partial(note, kept), lambda x: x):
                loss = run(*inputs)
            loss.backward()
            losses.append(loss.item())
        gradients = [whole(param.grad) for param in net.parameters()]
        found.append((losses, gradients, sum(kept.values())))
    return found


def note(kept, x):
    kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return x


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def test_recomputed_blocks_keep_less_and_learn_the_same():
    for kept, again in run_warm(recomputed, 4, (2, 2)):
        assert kept[0] == again[0]
        assert kept[0][0] != kept[0][1]
        for one, other in zip(kept[1], again[1], strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)
        assert again[2] < 0.5 * kept[2]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.LSTM(16, 16, num_layers=2, dropout=0.5)

    def forward(self, x, y):
        return functional.mse_loss(self.up(x)[0], y)


def refused(config, sample, model=MODELS["perceptron"][0]):
    torch.manual_seed(0)
    with pytest.raises(UsageError) as caught:
        msrun.init({"mode": "auto", **config}).shard(model(), sample=sample)
    return caught.value.message


def test_what_cannot_be_searched_is_one_sentence():
    x, y = MODELS["perceptron"][1]()
    (said,) = run_warm(refused, 1, {}, None)
    assert said == "parallel.mode: auto needs a batch to trace the model with"
    said, other = run_warm(refused, 2, {"mesh": {"dp": 2}, "memory": "1KiB"}, (x, y))
    assert said == other
    assert said.startswith("parallel.memory: no plan fits; the smallest takes")
    (said,) = run_warm(refused, 1, {}, (x, y), Recurrent)
    assert said == "parallel.mode: auto cannot run lstm with dropout, as up does"
    (said,) = run_warm(refused, 1, {}, (x,))
    assert said.startswith("search: the forward of Perceptron cannot be traced")
