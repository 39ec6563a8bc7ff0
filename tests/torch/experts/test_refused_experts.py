"""Experts that cannot be shared out are refused by name, on every rank, before training."""

import pytest
import torch
from mixtures import EXPERTS, RULE, WIDTH, Experts, Language, Mixture, texts, token_loss
from ranks import run_warm
from torch import nn

import msrun
from msrun.errors import UsageError

pytestmark = pytest.mark.torch


class Normalising(Experts):
    """Divides the weights of a token by their sum, which is the business of the router."""

    def forward(self, x, index, weights):
        return super().forward(x, index, weights / weights.sum(-1, keepdim=True))


class Crowded(Experts):
    """Drops tokens of an expert that has more than its part."""

    def forward(self, x, index, weights):
        chosen = nn.functional.one_hot(index.flatten(), self.num_experts)
        place = (chosen.cumsum(0) * chosen).sum(-1).view_as(index)
        return super().forward(x, index, weights * (place <= len(x) / self.num_experts))


class Fixed(Experts):
    """Knows how many experts there are."""

    def forward(self, x, index, weights):
        return sum(
            (x @ self.gate_up_proj[e].T)[:, :WIDTH] * (weights * (index == e)).sum(-1, keepdim=True)
            for e in range(EXPERTS)
        )


class Narrow(Experts):
    def forward(self, x, index, weights):
        return super().forward(x, index, weights)[:, 1:]


class Beside(Experts):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)


class Unlike(Mixture):
    """Gives its experts the shares of all, and no choice."""

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        return self.experts(rows, self.gate(rows).softmax(-1)).view_as(x)


class Listed(nn.Module):
    """Experts as a list that no forward calls."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])


OF = "layers.0.mlp.experts of style experts over ep"
APART = (
    f"{OF}: what it computes of a token depends on other tokens, or on its other experts, which "
    "are on other ranks"
)
FIXED = (
    f"{OF}: its forward asks for an expert of another rank: index 2 is out of bounds for dimension "
    "0 with size 2"
)
NARROW = f"{OF} returns (4, 7) for tokens of (4, 8): it has to return as many, of the same width"
BESIDE = f"{OF} has parameters in norm, which belong to no expert, or to one alone"
UNLIKE = (
    f"{OF} was called with (24, 8), (24, 4); it takes tokens (rows, width), their experts "
    "(rows, k), and the weights of these (rows, k)"
)
LISTED = (
    "layers.0.mlp.experts of style experts over ep: layers.0.mlp has no forward of its own that "
    "could call its members"
)
CASES = {
    "normalising": (lambda: Mixture(Normalising), APART),
    "crowded": (lambda: Mixture(Crowded), APART),
    "fixed": (lambda: Mixture(Fixed), FIXED),
    "narrow": (lambda: Mixture(Narrow), NARROW),
    "beside": (lambda: Mixture(Beside), BESIDE),
    "unlike": (Unlike, UNLIKE),
    "listed": (Listed, LISTED),
}


def said(cases, options):
    """Return what is said of each case, on this rank."""
    rt = msrun.init({"mesh": {"ep": 2}, "plan": [RULE], **options})
    found = {}
    for name in cases:
        torch.manual_seed(3)
        model = Language(CASES[name][0] if name in CASES else Mixture)
        with pytest.raises(UsageError) as caught:
            train(rt, model)
        found[name] = caught.value.message
    return found


def train(rt, model):
    model = rt.shard(model)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    part = [tensor.chunk(2)[rt.rank] for tensor in texts(1)[0]]
    rt.step(model, update, token_loss, *part)


def test_experts_that_are_not_a_sum_of_their_own_are_refused():
    expected = {name: sentence for name, (_, sentence) in CASES.items()}

    for found in run_warm(said, 2, list(CASES), {}):
        assert found == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"reduce": {"exclude": ["*.down_proj"]}},
            (
                "parallel.reduce.exclude: layers.0.mlp.experts.down_proj is of experts that ranks "
                "share, so no rank has its own (leave it out)"
            ),
        ),
        (
            {"checkpoint": {"dir": "no", "strategy": "strategy.json"}},
            (
                "parallel.checkpoint.strategy: the experts of layers.0.mlp.experts are shared over "
                "ranks of dp, which a strategy file cannot say"
            ),
        ),
        (
            {"mesh": {"ep": 2}, "plan": [{**RULE, "match": "*.inner"}]},
            (
                "parallel.plan[0].style: experts over ep is for a module that has the weights of "
                "all experts in 3-D parameters, not layers.0.inner (Linear)"
            ),
        ),
    ],
)
def test_what_does_not_fit_experts_is_refused(options, sentence):
    assert run_warm(said, 2, ["any"], options) == [{"any": sentence}] * 2


def idle():
    """Return what a rank says whose loss depends on nothing; the other one gets no further."""
    rt = msrun.init({"mesh": {"ep": 2}, "plan": [RULE]})
    model = rt.shard(Language())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    part = [tensor.chunk(2)[rt.rank] for tensor in texts(1)[0]]

    def loss(output, target):
        return token_loss(output.detach(), target)

    with pytest.raises(UsageError) as caught:
        rt.step(model, update, loss, *part)
    return caught.value.message


def test_a_loss_that_trains_nothing_is_refused_before_others_wait():
    assert run_warm(idle, 2) == [
        f"the loss of rank {rank} depends on no parameter that is trained, and the experts of "
        "other ranks wait for its tokens"
        for rank in range(2)
    ]
