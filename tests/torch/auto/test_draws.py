"""Operators that draw random numbers in mode auto: their numbers do not depend on the plan."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from auto_plans import drawn
from ranks import run_warm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.auto.execute import Executor
from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.search.cost.topology import PRESETS
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.problem import Setting

pytestmark = pytest.mark.torch

SAMPLES, WIDTH = 8, 16


def written_apart(x):
    noise = torch.empty(x.shape[0], 1, dtype=x.dtype)
    noise.normal_()
    return x + noise


def viewed_noise(x):
    noise = torch.zeros_like(x)
    noise[:, 4:].uniform_(-1, 1)
    return x + noise


def heads(x):
    return x.view(2, 4, 4, 4).transpose(1, 2)


def attended(x, **options):
    q = heads(x)
    attend = functional.scaled_dot_product_attention
    return attend(q, q, q, dropout_p=0.5, **options).transpose(1, 2).reshape(x.shape)


def masked(x):
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    seen[1] = False
    return attended(x, attn_mask=seen)


def grouped(x):
    q, k = heads(x), heads(x)[:, ::2]
    attend = functional.scaled_dot_product_attention
    y = attend(q, k, k, dropout_p=0.5, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).reshape(x.shape)


def between(mean, deviation):
    return torch.distributions.Normal(mean, deviation, validate_args=False).rsample()


def images(x):
    return x.view(SAMPLES, 4, 2, 2)


def filled(x):
    """Add numbers that methods wrote into new tensors."""
    fills = {
        "uniform_": (-1, 1),
        "normal_": (),
        "exponential_": (),
        "cauchy_": (),
        "log_normal_": (),
        "geometric_": (0.3,),
        "random_": (5,),
        "bernoulli_": (0.3,),
    }
    for name, args in fills.items():
        x = x + getattr(torch.empty_like(x), name)(*args).clamp(-3, 3)
    return x


def of_shapes(x):
    count = x.shape[0]
    x = x + torch.rand(count, 1) + torch.randn(x.shape, dtype=x.dtype) * torch.rand(WIDTH)
    x = x * torch.randint(1, 5, (count, 1)) + torch.randint(5, (count, 1))
    return (
        x + torch.normal(1.0, 2.0, size=(count, 1)) + torch.randn(count, 1)[torch.randperm(count)]
    )


F = functional
# Compared with torch, too.
CALLS = {
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "dropout in place": lambda x: F.dropout(x * 1, 0.5, training=True, inplace=True),
    "all dropped": lambda x: x + F.dropout(x, 1.0, training=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "channels": lambda x: F.dropout2d(images(x), 0.5, training=True).reshape(x.shape),
    "alpha channels": lambda x: F.feature_alpha_dropout(images(x), 0.5, training=True).flatten(1),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "bernoulli by tensor": lambda x: x * torch.empty_like(x).bernoulli_(x.detach().sigmoid()),
    "alike": lambda x: x * torch.rand_like(x) + torch.randn_like(x) * torch.randint_like(x, 2, 5),
    "normal of means": lambda x: x + torch.normal(x, 1.0),
    "normal of tensors": lambda x: x + torch.normal(x, x.exp()) + torch.normal(0.5, x.exp()),
    "gumbel": F.gumbel_softmax,
    "hard gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "attention": attended,
    "causal attention": lambda x: attended(x, is_causal=True),
    "masked attention": masked,
    "grouped attention": grouped,
    "poisson": lambda x: x * torch.poisson(x.exp()),
    "binomial": lambda x: x * torch.binomial(torch.full_like(x, 5), x.detach().sigmoid()),
    "gamma": lambda x: torch._standard_gamma(x.exp()),
    "gaussian": lambda x: between(x, 1.0),
}
OTHERS = {
    "in place": lambda x: F.rrelu_(
        F.alpha_dropout(x * 1, 0.4, training=True, inplace=True), training=True
    ),
    "of shapes": of_shapes,
    "filled": filled,
    "written apart": written_apart,
    "written to a view": viewed_noise,
    "multinomial": lambda x: x * torch.multinomial(x.softmax(-1), 1),
    "gaussian of columns": lambda x: x + between(x[:, :1], x.exp()),
}
ALL = CALLS | OTHERS


class Drawing(nn.Module):
    """Draws between two linear modules."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.name = name

    def forward(self, x, y):
        return functional.mse_loss(self.down(ALL[self.name](self.up(x))), y)


def batch():
    torch.manual_seed(1)
    return [torch.randn(SAMPLES, WIDTH).double() for _ in range(2)]


def under_plans(name, sizes):
    """Return losses and gradients of two steps under plans that were drawn."""
    inputs = batch()
    traced = trace(Drawing(name).double(), inputs)
    setting = Setting(sizes=sizes, topology=PRESETS["cpu"])
    problem = build(traced.program, setting)
    rules = {node.name: node.rule for node in problem.nodes}
    mesh = init_device_mesh("cpu", sizes)
    numbers = np.random.default_rng(3)
    found = []
    for _ in range(1 if sizes == (1,) else 2):
        plan = drawn(problem, numbers)
        net = Drawing(name).double()
        run = Executor(net, traced, rules, plan, setting=setting, mesh=mesh, seed=7)
        losses = []
        for _ in range(2):
            loss = run(*inputs)
            loss.backward()
            losses.append(loss.item())
        found.append((losses, [whole(param.grad).tolist() for param in net.parameters()]))
    return found


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


ON_TWO_AXES = ("channels", "alike", "masked attention")


@pytest.mark.parametrize(
    ("name", "sizes"), [*((name, (2,)) for name in ALL), *((name, (2, 2)) for name in ON_TWO_AXES)]
)
@pytest.mark.few(11)
def test_numbers_do_not_depend_on_the_plan(name, sizes):
    ((want, *_),) = run_warm(under_plans, 1, name, (1,))
    assert want[0][0] != want[0][1] or name == "all dropped"
    ranks = run_warm(under_plans, math.prod(sizes), name, sizes)
    for found in (plan for plans in ranks for plan in plans):
        assert found[0] == pytest.approx(want[0], rel=1e-9)
        for one, other in zip(found[1], want[1], strict=True):
            assert np.allclose(one, other, rtol=1e-8, atol=1e-10)


# Against torch: the same distribution, the same gradients, the same evaluation.


class Alone(nn.Module):
    """One call on a parameter."""

    def __init__(self, name, x):
        super().__init__()
        self.x, self.name = nn.Parameter(x), name

    def forward(self):
        return ALL[self.name](self.x)


def on_one_rank(net, seed):
    setting = Setting(sizes=(1,), topology=PRESETS["cpu"])
    traced = trace(net, ())
    problem = build(traced.program, setting)
    rules = {node.name: node.rule for node in problem.nodes}
    plan = {node.name: (0,) for node in problem.nodes}
    mesh = init_device_mesh("cpu", (1,))
    return Executor(net, traced, rules, plan, setting=setting, mesh=mesh, seed=seed)


def moments(name, *, has_plan):
    """Return what many runs come to: mean, deviation, and the mean of the gradient."""
    torch.manual_seed(5)
    net = Alone(name, torch.randn(SAMPLES, WIDTH).double())
    run = on_one_rank(net, 3) if has_plan else net
    found = []
    for _ in range(RUNS):
        net.zero_grad()
        out = run()
        (out * torch.linspace(0.1, 1, WIDTH)).sum().backward()
        gradient = net.x.grad
        found.append(torch.stack([out, whole(gradient)]).detach())
    both = torch.stack(found).float()
    return both.mean((0, 2, 3)).tolist(), both.std((0, 2, 3)).tolist()


RUNS = 100


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.few(8)
def test_numbers_are_distributed_as_those_of_torch(name):
    ((means, deviations),) = run_warm(partial(moments, name, has_plan=True), 1)
    want, widths = moments(name, has_plan=False)
    for found, other, width in zip(means, want, widths, strict=True):
        assert found == pytest.approx(other, abs=0.06 * width + 1e-9)
    assert deviations == pytest.approx(widths, rel=0.06, abs=1e-9)


# In training, by configuration.


class Sampling(nn.Module):
    """Two blocks that drop weights of attention, slopes and channels, and draw in evaluation too.

    Args:
        is_noisy: Whether it draws in evaluation.
    """

    def __init__(self, *, is_noisy):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([SamplingLayer(is_noisy=is_noisy) for _ in range(2)])

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(x, y)


class SamplingLayer(nn.Module):
    def __init__(self, *, is_noisy):
        super().__init__()
        self.up, self.down, self.is_noisy = nn.Linear(16, 16), nn.Linear(16, 16), is_noisy
        self.slope, self.drop = nn.RReLU(), nn.AlphaDropout(0.2)
        self.channels = nn.Dropout1d(0.2)

    def forward(self, x):
        h = self.drop(self.slope(self.up(x)))
        q = h.unflatten(-1, (4, 4)).transpose(1, 2)
        rate = 0.3 if self.training else 0.0
        h = functional.scaled_dot_product_attention(q, q, q, dropout_p=rate)
        h = self.channels(h.transpose(1, 2).flatten(2))
        if self.is_noisy:
            h = h + 0.1 * torch.randn_like(h)
        return x + self.down(h)


def learned(config, folder="", *, is_noisy=False):
    """Return the losses of three steps and an evaluation, the last two steps after a checkpoint."""
    rt = msrun.init({"mode": "auto", **config})
    parts, index = rt.layout.axes.get("dp", 1), rt.coordinate.get("dp", 0)
    torch.manual_seed(1)
    batches = [[torch.randn(8, 4, 16).chunk(parts)[index] for _ in range(2)] for _ in range(3)]
    torch.manual_seed(2)
    net = rt.shard(Sampling(is_noisy=is_noisy), sample=batches[0])
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    losses = []
    start = rt.load(net, optimizer, path=folder) if folder and Path(folder).exists() else 0
    for number, (x, y) in enumerate(batches[start:], start):
        losses.append(rt.step(net, optimizer, lambda loss, _: loss, x, y, y).item())
        if folder and number == 0:
            rt.save(net, optimizer, step=1, path=folder)
    net.eval()
    if "accumulate" not in config and "pipeline" not in config:
        losses.append(rt.mean_over_data(net(*batches[0]).detach()).item())
    return losses


ONE = {"mesh": {"dp": 1}}


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {"mesh": {"dp": 2}}),
        (2, {"mesh": {"tp": 2}}),
        (4, {"mesh": {"dp": 2, "tp": 2}}),
    ],
)
def test_models_that_draw_learn_what_one_rank_does(ranks, config):
    (want,) = run_warm(learned, 1, ONE)
    for found in run_warm(learned, ranks, config):
        assert found == pytest.approx(want[: len(found)], abs=1e-5)


def test_stages_draw_what_micro_batches_of_one_rank_do():
    (want,) = run_warm(learned, 1, ONE | {"accumulate": 2})
    pipeline = {"stages": "auto", "microbatches": 2}
    for found in run_warm(learned, 2, {"mesh": {"pp": 2}, "pipeline": pipeline}):
        assert found == pytest.approx(want[: len(found)], abs=1e-5)


def test_numbers_of_evaluation_are_new_ones_on_all_ranks():
    noisy = partial(learned, is_noisy=True)
    (want,) = run_warm(noisy, 1, ONE)
    for found in run_warm(noisy, 2, {"mesh": {"tp": 2}}):
        assert found == pytest.approx(want, abs=1e-5)


def test_numbers_go_on_from_a_checkpoint(tmp_path):
    folder = str(tmp_path / "checkpoint")
    (want, _) = run_warm(learned, 2, {"mesh": {"tp": 2}}, folder)
    for ranks, config in ((1, ONE), (2, {"mesh": {"dp": 2}})):
        for found in run_warm(learned, ranks, config, folder):
            assert found == pytest.approx(want[1:], abs=1e-5)


def test_evaluation_draws_no_numbers_that_training_alone_does():
    torch.manual_seed(1)
    batch = [torch.randn(8, 4, 16) for _ in range(2)]
    (*_, found), trained = run_warm(evaluated, 1, batch)[0]
    net = Sampling(is_noisy=False).eval()
    net.load_state_dict(trained)
    assert found == pytest.approx(net(*batch).item(), abs=1e-6)


def evaluated(batch):
    rt = msrun.init({"mode": "auto", **ONE})
    net = rt.shard(Sampling(is_noisy=False), sample=batch)
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    losses = [rt.step(net, optimizer, lambda loss, _: loss, *batch, batch[1]).item()]
    net.eval()
    state = {name: whole(x).detach() for name, x in net.named_parameters()}
    return [*losses, net(*batch).item()], state


# What is refused.

OWN = torch.Generator()
REFUSED = {
    "native_dropout": (lambda x: torch.native_dropout(x, 0.5, True)[0], "native_dropout"),  # noqa: FBT003
    "own generator": (
        lambda x: x + torch.rand(x.shape, generator=OWN),
        "rand with a generator of its own",
    ),
    "generator in place": (
        lambda x: x + torch.empty(x.shape).normal_(generator=OWN),
        "normal_ with a generator of its own",
    ),
}


class Refusing(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.up, self.name = nn.Linear(WIDTH, WIDTH), name

    def forward(self, x, y):
        return functional.mse_loss(REFUSED[self.name][0](self.up(x)), y)


def refused(name):
    rt = msrun.init({"mode": "auto", "mesh": {"tp": 2}})
    with pytest.raises(UsageError) as caught:
        rt.shard(Refusing(name), sample=[torch.randn(8, WIDTH) for _ in range(2)])
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_msrun_does_not_draw_are_refused_with_a_way_out(name):
    for message, hint in run_warm(refused, 2, name):
        assert message == f"parallel.mode: auto cannot run {REFUSED[name][1]}, as the model does"
        assert hint
