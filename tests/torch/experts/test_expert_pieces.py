"""Experts with many rows compute in two pieces, and the rows of one travel beside the other."""

import copy
import datetime as dt

import pytest
import torch
import torch.distributed as dist
from ranks import Counted, run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.experts.dispatch import PIECES_FROM
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

WIDTH, CHOICES = 2048, 2
# Of a rank, so that the pairs of its rows are as many bytes as make two pieces.
ROWS = PIECES_FROM // (4 * WIDTH * CHOICES)
RULE = {"match": "experts", "style": "experts", "axis": "ep"}


class Experts(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.num_experts, self.calls, self.watch = experts, [], None
        self.up = nn.Parameter(torch.randn(experts, 4, WIDTH) / 40)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, 4) / 4)

    def forward(self, x, index, weights):
        self.calls.append((self.num_experts, len(x)))
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            rows, place = torch.where(index == expert)
            y = functional.linear(x[rows], self.up[expert]).tanh()
            y = functional.linear(y, self.down[expert]) * weights[rows, place, None]
            out = out.index_add(0, rows, y.to(out.dtype))
        if self.watch and out.requires_grad:
            self.watch()
            out.register_hook(lambda _: self.watch())
        return out


class Mixture(nn.Module):
    """Routes rows; with a `limit` they have the first of so many experts, or are dropped."""

    def __init__(self, experts=4, limit=None):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, experts), Experts(experts)
        self.limit = limit

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(CHOICES)
        if self.limit:
            index = index.where(index < self.limit, self.gate.out_features)
        return x + self.experts(x, index, weights)


def build(experts, limit):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Mixture(experts, limit)


def batches(ranks, steps=2):
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(2, ranks * ROWS, WIDTH, generator=draw) for _ in range(steps)]


def difference(config, experts=4, limit=None):
    """Return how far training is from one process, the calls of experts, and collectives."""
    model = build(experts, limit)
    whole = copy.deepcopy(model)
    plain = torch.optim.SGD(whole.parameters(), lr=1.0)
    rt = msrun.init(config | {"plan": [RULE]})
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    share, count = rt.coordinate["dp"], rt.layout.size("dp")
    gaps = []
    for x, target in batches(count):
        plain.zero_grad()
        expected = functional.mse_loss(whole(x), target)
        expected.backward()
        plain.step()
        model.experts.calls.clear()
        part = [tensor.chunk(count)[share] for tensor in (x, target)]
        with Counted() as counted:
            loss = rt.step(model, update, functional.mse_loss, *part)
        gaps.append(abs(loss.item() - expected.item()))
    there = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        for found, wanted in ((param, there[name]), (param.grad, there[name].grad)):
            gaps.append((full_tensor(found.detach()) - wanted).abs().max().item())
    return max(gaps), model.experts.calls, counted.calls["all_to_all_single"]


CASES = {
    "two pieces": ({"mesh": {"ep": 2}}, 4, None),
    "an uneven number": ({"mesh": {"ep": 2}}, 6, None),
    "copies and zero": ({"mesh": {"dp": 2, "ep": 2}, "optimizer": {"zero": 3}}, 4, None),
    # Rank 1 gets no row, and rank 0 has some for its first piece alone.
    "rows for one expert": ({"mesh": {"ep": 2}}, 4, 1),
    "recomputed": ({"mesh": {"ep": 2}, "recompute": {"modules": ["experts"]}}, 4, None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(1)
def test_pieces_train_as_one_process(case):
    config, experts, limit = CASES[case]
    own, ranks = experts // 2, torch.Size(config["mesh"].values()).numel()
    found = run_warm(difference, ranks, config, experts, limit)

    for worst, calls, sent in found:
        assert worst < 2e-6
        assert {size for size, _ in calls} <= {own - own // 2, own // 2}
        # Numbers; rows and results of two pieces, and their gradients.
        assert sent == (1 + 4) * (2 if "recompute" in config else 1) + 4


def few(config):
    """Return the calls of experts with rows of fewer bytes, and with one rank's that are enough."""
    rt = msrun.init(config | {"plan": [RULE]})
    model = rt.shard(build(4, None)).eval()
    found = []
    with torch.no_grad():
        for rows in (ROWS // 2, ROWS if rt.rank else 8):
            model(torch.randn(8, WIDTH))  # it tries the experts
            model.experts.calls.clear()
            model(torch.randn(rows, WIDTH))
            found.append([size for size, _ in model.experts.calls])
    return found


def test_ranks_agree_on_pieces_by_the_largest_of_them():
    assert run_warm(few, 2, {"mesh": {"ep": 2}}) == 2 * [[[2], [1, 1]]]


def second_gradients(config, build):
    """Return how far gradients of gradients are from those of one process, or what is said."""
    whole = build()
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    rt = msrun.init({"mesh": {"ep": 2}, "plan": [RULE]} | config)
    model = rt.shard(copy.deepcopy(whole))
    found = []
    for each, given in ((whole, x.flatten(0, 1)), (model, x[rt.rank])):
        rows = given.clone().requires_grad_()
        try:
            [first] = torch.autograd.grad(each(rows).square().sum(), rows, create_graph=True)
        except ModelError as error:
            return error.message
        [second] = torch.autograd.grad(first.square().sum(), rows)
        found.append((first.detach(), second))
    pairs = [(alone.chunk(2)[rt.rank], own) for alone, own in zip(*found, strict=True)]
    return max(((alone - own).abs().max() / alone.abs().max()).item() for alone, own in pairs)


def grouped():
    return build(4, None)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).max(-1)
        y = x
        for number, expert in enumerate(self.experts):
            [rows] = torch.where(index == number)
            y = y.index_add(0, rows, expert(x[rows]).tanh() * weights[rows, None])
        return y


@pytest.mark.parametrize("make", [grouped, Listed])
def test_gradients_of_gradients_are_refused_where_gradients_have_a_factor(make):
    sentence = (
        "gradients of gradients (create_graph=True) through experts over ep would not be those of "
        "one process"
    )
    assert run_warm(second_gradients, 2, {}, make) == [sentence] * 2


def test_gradients_of_gradients_that_are_added_are_right():
    config = {"reduce": {"op": "sum"}}
    assert max(run_warm(second_gradients, 2, config, grouped)) < 1e-5


# By the number of an exchange, the first being numbers alone, what rank 0 has to have begun before
# rank 1 joins: its first piece and its second, the gradients of its second and of its first.
LATE = {3: 1, 4: 2, 7: 3, 8: 4}


class Delayed:
    """Lets what one piece sends leave rank 1 only once rank 0 computes the other one.

    Args:
        path: Of a file that both ranks see.
    """

    def __init__(self, path):
        self.store, self.begun, self.computed, self.waited = dist.FileStore(path, 2), 0, 0, 0

    def compute(self):
        self.computed += 1
        if dist.get_rank() == 0:
            self.store.set(str(self.computed), "")

    def dispatch(self, func, _, args, kwargs):
        if "all_to_all_single" in func.name():
            self.begun += 1
            if dist.get_rank() == 1 and self.begun in LATE:
                self.store.wait([str(LATE[self.begun])], dt.timedelta(seconds=30))
                self.waited += 1
        return func(*args, **kwargs)


def overlapped(path):
    """Return how often rank 1 waited for rank 0, and the exchanges and pieces of the step."""
    rt = msrun.init({"mesh": {"ep": 2}, "plan": [RULE]})
    model = rt.shard(build(4, None))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    part = [tensor.chunk(2)[rt.rank] for tensor in batches(2, steps=1)[0]]
    rt.step(model, update, functional.mse_loss, *part)  # it tries the experts
    delayed = Delayed(path)
    model.experts.watch = delayed.compute
    with torch_compat.dispatching(delayed.dispatch):
        rt.step(model, update, functional.mse_loss, *part)
    return delayed.waited, delayed.begun, delayed.computed


def test_rows_and_gradients_of_a_piece_travel_while_the_other_computes(tmp_path):
    assert run_warm(overlapped, 2, str(tmp_path / "store")) == [(0, 9, 4), (4, 9, 4)]
