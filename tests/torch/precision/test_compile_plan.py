"""`compile` of modules under a plan: the compiled guard computes as one process does."""

import functools
import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    # Of torch, while it compiles.
    pytest.mark.filterwarnings("ignore"),
]

WIDTH = 8
PLAN = [
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]
CONFIG = {"mesh": {"tp": 2}, "plan": PLAN, "compile": {"modules": ["layers.*"]}}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.inner(self.up(self.norm(x))))

    def inner(self, x):
        return functional.gelu(x)


class Mixing(Layer):
    """Computes what divided tensors alone have wrong, or refuse."""

    def inner(self, x):
        scale = torch.arange(2.0 * WIDTH)
        y = x.cumsum(-1) / (1 + scale) + functional.layer_norm(x, [2 * WIDTH])
        return y * torch.cat([x, x.flip(-1)], -1).unflatten(-1, (2, -1)).std(-2).softmax(-1)


class Branching(Layer):
    """Takes another way through its code when a script says so."""

    is_mixed = False

    def inner(self, x):
        return x.cumsum(-1).tanh() if self.is_mixed else functional.gelu(x)


class Several(Layer):
    """Returns divided tensors, one of which nobody uses."""

    def forward(self, x):
        hidden = self.inner(self.up(self.norm(x)))
        return x + self.down(hidden), hidden, hidden.sin()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.cumsum(-1) ** 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (2 * x.cumsum(-1) * gradient).flip(-1).cumsum(-1).flip(-1)


class Own(Layer):
    def inner(self, x):
        return Square.apply(x)


class Writing(Layer):
    def inner(self, x):
        return x.tanh().add(1).mul_(2)


class Breaking(Layer):
    def inner(self, x):
        return functional.gelu(x) if float(x.detach().sum()) > 0 else x


class Model(nn.Module):
    def __init__(self, *kinds):
        super().__init__()
        self.layers = nn.ModuleList([kind() for kind in kinds])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        for layer in self.layers:
            result = layer(x)
            x = result[0] if isinstance(result, tuple) else result
        return self.head(x)


def trained(kinds, config, sizes=(4, 4, 4)):
    """Return losses and gradients of steps, how many graphs were made, breaks, and warnings."""
    torch._dynamo.reset()
    counters.clear()
    draw = torch.Generator().manual_seed(4)
    with msrun.init(config) as rt, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.random.fork_rng():
            torch.manual_seed(2)
            model = Model(*kinds)
        model = rt.shard(model)
        update = rt.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        losses = []
        for index, size in enumerate(sizes):
            if index == len(sizes) - 1:
                for layer in model.layers:
                    layer.is_mixed = True
            x, y = torch.randn(size, 3, WIDTH, generator=draw), torch.ones(size, dtype=torch.long)
            losses.append(rt.step(model, update, loss_of, x, y).item())
            losses.append(evaluated(model, x, y))
        weights = [full_tensor(each).sum().item() for each in model.parameters()]
    said = [str(each.message) for each in caught if "uncompiled" in str(each.message)]
    stats = counters["stats"]["unique_graphs"]
    return losses, weights, stats, dict(counters["graph_break"]), said


def loss_of(output, y):
    return functional.cross_entropy(output[:, 0], y)


@torch.no_grad()
def evaluated(model, x, y):
    model.eval()
    loss = loss_of(model(x), y).item()
    model.train()
    return loss


@functools.cache
def pair(*kinds, sizes=(4, 4, 4)):
    """Return what one process and each of two ranks found."""
    (alone,) = run_warm(trained, 1, kinds, {}, sizes)
    return alone, run_warm(trained, 2, kinds, CONFIG, sizes, timeout=300)


def assert_equal(alone, of_rank):
    assert of_rank[0] == pytest.approx(alone[0], abs=2e-5)
    assert of_rank[1] == pytest.approx(alone[1], abs=2e-4)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kinds", "sizes", "graphs"),
    [
        ((Layer, Layer, Layer), (4, 4, 4), 3),  # training of the first, of others, evaluation
        ((Mixing,), (4, 4, 4), 2),
        ((Branching,), (4, 4, 4, 4), 4),
        ((Layer,), (4, 4, 6), 4),
        ((Several,), (4, 4, 4), 2),
    ],
    ids=["equal layers", "mixing functions", "a later branch", "a later shape", "unused results"],
)
def test_compiled_modules_train_as_one_process(kinds, sizes, graphs):
    alone, ranks = pair(*kinds, sizes=sizes)
    for of_rank in ranks:
        assert_equal(alone, of_rank)
        assert of_rank[2:] == (graphs, {}, [])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Own, "autograd_function_apply gets a divided tensor"),
        (Writing, "writes to a divided tensor"),
        (Breaking, "Could not guard on data-dependent expression"),
    ],
    ids=["an autograd function", "a write", "a break"],
)
def test_what_the_compiler_does_not_follow_runs_uncompiled(kind, reason):
    alone, ranks = pair(kind, kind)
    for of_rank in ranks:
        assert_equal(alone, of_rank)
        (sentence,) = of_rank[4]
        assert sentence.startswith("msrun: layers.0 and modules like it run uncompiled: ")
        assert reason in sentence
