"""Gradients of parameters that all ranks have, where each rank computes on samples of its own."""

import pytest
import torch
from field_models import HALVES, ROWS, RULE, WIDTH, batches
from ranks import Counted, run_warm
from torch import nn
from torch.nn import Parameter, functional

import msrun
from msrun.parallel.summands.late import LateSums

pytestmark = pytest.mark.torch

# Ranks compare their batches and replicas in the first step, and not in the second.
FLOAT, STEPS = 4, 2
TP4 = {"mesh": {"tp": 4}, "plan": [RULE]}


class Tied(nn.Module):
    """Layers behind a table: one is used twice, and a factor also by itself."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(sum(ROWS), WIDTH)
        self.up, self.twice = nn.Linear(len(ROWS) * WIDTH, 16), nn.Linear(16, 16)
        self.factor = nn.Parameter(torch.full((16,), 1.5))
        self.down = nn.Linear(16, 3, bias=False)

    def forward(self, ids):
        x = torch.relu(self.up(self.table(ids).flatten(1)))
        x = self.twice(torch.relu(self.twice(x))) * self.factor
        return self.down(x + self.factor.square())


def build():
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Tied()


def trained(config, *, has_hooks=False):
    """Return the parameters after some steps, and what hooks and a step's collectives were."""
    rt = msrun.init(config)
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=0.02))
    seen = []
    if has_hooks:
        model.up.bias.register_hook(lambda gradient: seen.append(gradient.clone()))
        model.up.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    for pair in batches(STEPS):
        part = [tensor.chunk(count)[share] for tensor in pair]
        with Counted() as counted:
            rt.step(model, update, functional.cross_entropy, *part)
    values = {name: p.detach() for name, p in model.named_parameters() if name != "table.weight"}
    sums = {kind: (n, counted.bytes[kind]) for kind, n in counted.calls.items()}
    rt.close()
    return values, seen, sums


def hooked(config):
    return trained(config, has_hooks=True)


def one_process():
    model = build()
    update, seen = torch.optim.AdamW(model.parameters(), lr=0.02), []
    for ids, target in batches(STEPS):
        update.zero_grad()
        functional.cross_entropy(model(ids), target).backward()
        seen += [model.up.bias.grad.clone()] * 2
        update.step()
    return dict(model.named_parameters()), seen


# Others are of each micro-batch: the loss, the count of one that is a mean, and the gradient of
# what is computed of the factor alone.
@pytest.mark.parametrize(
    ("accumulate", "others"), [(1, (3, FLOAT * (2 + 16))), (2, (4, 2 * FLOAT * (1 + 16)))]
)
def test_a_step_adds_them_up_in_one_all_reduce(accumulate, others):
    """However many micro-batches it has."""
    expected, _ = one_process()
    elements = sum(p.numel() for name, p in expected.items() if name != "table.weight")
    for found, _, sums in run_warm(trained, 4, TP4 | {"accumulate": accumulate}):
        assert sums["allreduce_"] == (1, FLOAT * elements)
        assert sums["all_reduce"] == others
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name].detach(), atol=1e-5, rtol=1e-5)


def test_hooks_of_the_script_see_complete_gradients():
    _, expected = one_process()
    for _, seen, _ in run_warm(hooked, 4, TP4):
        assert len(seen) == len(expected)
        for one, other in zip(seen, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_data_parallel_ranks_beside_them_get_the_sums_as_well():
    expected, _ = one_process()
    config = {"mesh": {"dp": 2, "tp": 2}, "plan": [HALVES]}
    for found, _, _ in run_warm(trained, 4, config):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name].detach(), atol=1e-5, rtol=1e-5)


class _Keeps(torch.autograd.Function):
    """Notes whether a summand may wait in the pass that comes by."""

    @staticmethod
    def forward(ctx, x, keep):
        ctx.keep = keep
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.keep()
        return gradient, None


class _Nested(torch.autograd.Function):
    """Differentiates by itself in its backward pass."""

    @staticmethod
    def forward(ctx, x, inside):
        ctx.inside = inside
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            leaf = torch.ones(2, requires_grad=True)
            torch.autograd.grad(_Keeps.apply(leaf, ctx.inside).sum(), leaf)
        return gradient, None


def kept():
    """Return which summands waited: of the step's pass, of one inside of it, of others."""
    late, found = LateSums(), {}
    group = torch.distributed.group.WORLD
    param, hooked = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    hooked.register_hook(lambda gradient: gradient)

    def note(name, of=param):
        return lambda: found.update({name: late.keep(of, torch.ones(2), group)})

    def run(name):
        x = torch.ones(2, requires_grad=True)
        x = _Keeps.apply(_Keeps.apply(x, note(name)), note(f"{name}, hooked", hooked))
        total = _Nested.apply(x, note(f"{name}, inside")).sum()
        late.begin(total)
        total.backward()

    with late.open(2):
        run("step")
    waited = param.grad.tolist(), hooked.grad
    run("loop")
    return found, waited


def test_only_the_pass_of_a_step_lets_summands_wait():
    for found, waited in run_warm(kept, 2):
        assert [name for name, is_kept in found.items() if is_kept] == ["step"]
        assert len(found) == 6
        assert waited == ([2.0, 2.0], None)
