"""A shared expert beside 3-D experts computes while rows travel to them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from delayed_rows import Delayed
from mixtures import RULE, WIDTH, Experts, Mixture
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.experts.later import later, postponed
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

STEPS = 4


class NotedExperts(Experts):
    def __init__(self):
        super().__init__()
        self.order = []

    def forward(self, x, index, weights):
        self.order.append("experts")
        return super().forward(x, index, weights)


class Rows(Mixture):
    """Gives the shared expert the rows of the others; notes in which order they run."""

    def __init__(self):
        super().__init__(NotedExperts)
        self.shared.register_forward_pre_hook(lambda *_: self.experts.order.append("shared"))


class OwnInput(Rows):
    """Gives the shared expert its own input, as DeepSeek's models do."""

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        weights, index = self.route(rows)
        return self.experts(rows, index, weights).view_as(x) + self.shared(x)


class Before(Rows):
    """Calls the shared expert before the others, as Qwen's models do."""

    def __init__(self):
        super().__init__()
        self.gate.register_forward_pre_hook(lambda *_: self.experts.order.append("gate"))

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        shared = self.looked_at(self.shared(rows))
        weights, index = self.route(rows)
        return (self.experts(rows, index, weights) + shared).view_as(x)

    def looked_at(self, shared):
        return shared


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x * 2

    @staticmethod
    def backward(_, gradient):
        return gradient * 2


class Looked(Before):
    """Gives the output of the shared expert to a function of autograd first."""

    def looked_at(self, shared):
        return Doubled.apply(shared)


class Halved(Before):
    """Looks at the output of the shared expert first from the second call on."""

    calls = 0

    def looked_at(self, shared):
        self.calls += 1
        if self.calls > 1:
            shared /= 2
            assert shared.shape[-1] == WIDTH
        return shared


class Behind(Rows):
    """Gives the shared expert what the others return."""

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        weights, index = self.route(rows)
        return (rows + self.shared(self.experts(rows, index, weights))).view_as(x)


class Fickle(Rows):
    """Calls the shared expert otherwise from the second call on."""

    calls = 0

    def forward(self, x):
        rows = x.reshape(-1, WIDTH) * 1
        weights, index = self.route(rows)
        out = self.experts(rows, index, weights)
        self.calls += 1
        return (out + (self.shared(rows) if self.calls == 1 else self.other(rows))).view_as(x)

    def other(self, rows):
        return self.shared(rows * 2)


class Frozen(Fickle):
    """Has no gradients of the shared expert then."""

    def other(self, rows):
        with torch.no_grad():
            return self.shared(rows)


class Writing(Fickle):
    """Writes into the rows then, which only an evaluation may."""

    def other(self, rows):
        rows += 1
        return self.shared(rows)


def build(make):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), make())


def batches(ranks):
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(2, 4 * ranks, 3, WIDTH, generator=draw) for _ in range(STEPS)]


def difference(config, make):
    """Return how far training is from one process, and in which order experts ran in each step."""
    model = build(make)
    whole = copy.deepcopy(model)
    plain = torch.optim.SGD(whole.parameters(), lr=0.5)
    order = model[1].experts.order
    rt = msrun.init(config | {"plan": [RULE]})
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    share, count = rt.coordinate["dp"], rt.layout.size("dp")
    gaps, orders = [], []
    for x, target in batches(count):
        plain.zero_grad()
        expected = functional.mse_loss(whole(x), target)
        expected.backward()
        plain.step()
        order.clear()
        part = [tensor.chunk(count)[share] for tensor in (x, target)]
        gaps.append(abs(rt.step(model, update, functional.mse_loss, *part) - expected).detach())
        orders.append(" ".join(key for key, _ in itertools.groupby(order)))
    there = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        gaps.append((full_tensor(param.detach()) - there[name]).abs().max())
    return float(max(gaps)), orders


EARLY, LATE = "shared experts", "experts shared"
TWO = {"mesh": {"ep": 2}}
AGAIN = {"recompute": {"modules": ["1"]}}
ZERO = {"optimizer": {"zero": 3, "modules": ["*.shared"]}}
# Configuration, mixture, and the order in the first step, which shows what can be early, and later.
CASES = {
    "rows": (TWO, Rows, LATE, EARLY),
    "own input": (TWO, OwnInput, LATE, EARLY),
    "copies and zero": ({"mesh": {"dp": 2, "ep": 2}, **ZERO}, OwnInput, LATE, EARLY),
    "recomputed": ({**TWO, **AGAIN}, OwnInput, f"{LATE} {LATE}", f"{EARLY} {EARLY}"),
    "micro-batches": (
        {**TWO, **AGAIN, "accumulate": 2},
        Rows,
        " ".join([LATE] * 4),
        " ".join([EARLY] * 4),
    ),
    "before": (TWO, Before, "shared gate experts", "gate shared experts"),
    "before, copies and zero": (
        {"mesh": {"dp": 2, "ep": 2}, **ZERO},
        Before,
        "shared gate experts",
        "gate shared experts",
    ),
    "before, recomputed": (
        {**TWO, **AGAIN},
        Before,
        "shared gate experts shared gate experts",
        "gate shared experts gate shared experts",
    ),
    "before, looked at": (TWO, Looked, "shared gate experts", "shared gate experts"),
    "before, looked at later": (TWO, Halved, "shared gate experts", "shared gate experts"),
    "only experts recomputed": (
        {**TWO, "recompute": {"modules": ["1.experts"]}},
        OwnInput,
        "experts shared experts",
        "experts shared experts",
    ),
    "behind": (TWO, Behind, LATE, LATE),
    "another input": (TWO, Fickle, LATE, f"{EARLY} shared"),
    "without gradients": (TWO, Frozen, LATE, f"{EARLY} shared"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(5)
def test_training_equals_one_process(name):
    config, make, first, later = CASES[name]
    ranks = 4 if "dp" in config["mesh"] else 2
    for worst, orders in run_warm(difference, ranks, config, make):
        assert worst < 2e-6
        assert orders == [first] + [later] * (STEPS - 1)


def evaluated(make, context):
    """Return how far evaluations are from one process."""
    whole = build(make)
    rt = msrun.init(TWO | {"plan": [RULE]})
    model = rt.shard(copy.deepcopy(whole)).eval()
    gaps = []
    with context():
        for x, _ in batches(2):
            part = x.chunk(2)[rt.rank]
            gaps.append((model(part) - whole(part)).abs().max().item())
    return max(gaps)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_rows_that_are_written_before_the_shared_expert_count(context):
    assert max(run_warm(evaluated, 2, Writing, context)) < 2e-6


def kept_graphs():
    """Return in which order experts ran with graphs that are recomputed late, and alive until."""
    rt = msrun.init(TWO | AGAIN | {"plan": [RULE]})
    model = build(OwnInput)
    order = model[1].experts.order
    model = rt.shard(model)
    losses, found = [], []

    def ran():
        found.append(" ".join(key for key, _ in itertools.groupby(order)))
        order.clear()

    for x, target in batches(2)[:2]:
        losses.append(functional.mse_loss(model(x.chunk(2)[rt.rank]), target.chunk(2)[rt.rank]))
        ran()
    while losses:
        losses.pop().backward()
        ran()
    losses.append(model(batches(2)[0][0]).sum())
    ran()
    losses.pop().backward()
    ran()
    return found


def test_a_graph_is_recomputed_in_the_order_in_which_it_was_made():
    assert run_warm(kept_graphs, 2) == [[LATE] * 4 + [EARLY] * 2] * 2


def overlapped(make, path):
    """Return how often rank 1 waited for the shared expert of rank 0."""
    rt = msrun.init(TWO | {"plan": [RULE]})
    model = build(make)
    delayed = Delayed(path)
    delayed.watch(model[1])
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, target = torch.randn(2, 4, 3, WIDTH)
    rt.step(model, update, functional.mse_loss, x, target)  # it shows the shared expert
    delayed.begun = delayed.beside = 0
    with torch_compat.dispatching(delayed.dispatch):
        rt.step(model, update, functional.mse_loss, x, target)
    return delayed.waited, delayed.begun


@pytest.mark.parametrize("make", [Rows, OwnInput, Before])
def test_a_shared_expert_runs_while_rows_travel_and_while_their_gradients_do(tmp_path, make):
    found = run_warm(overlapped, 2, make, str(tmp_path / "store"))
    assert found == [(0, 5), (2, 5)]


def test_a_later_tensor_is_computed_as_it_was_called():
    shared, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = later(postponed(shared, x), x)
    with torch.no_grad():
        assert (found.dtype, type(found)) == (torch.bfloat16, torch.Tensor)
    found.sum().backward()
    assert shared.bias.grad.tolist() == [2.0] * WIDTH


def test_a_later_tensor_of_what_was_written_is_refused():
    x = torch.randn(2, WIDTH)
    found = later(postponed(nn.Identity(), x), x)
    x += 1
    with pytest.raises(ModelError, match="the input of a shared expert was written in place"):
        found.sum()
