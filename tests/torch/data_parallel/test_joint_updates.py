"""Optimizers that update a parameter by others are refused where ranks have these apart."""

import pytest
import torch
from ranks import assert_equal_curves, batches, build, run_warm
from test_grid import MLP, zero
from torch.nn import functional

import msrun
from msrun.errors import UsageError

pytestmark = pytest.mark.torch

STAGES = {"mesh": {"pp": 2}, "pipeline": {"stages": "auto", "microbatches": 2}}
MIXED = {"mesh": {"tp": 2}, "plan": MLP}


class Own(torch.optim.Optimizer):
    """Momentum, as a library may write it."""

    def __init__(self, params, lr=0.05, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})
        self.rates = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self):
        for group, rate in zip(self.param_groups, self.chosen_rates(), strict=False):
            for param in group["params"]:
                if param.grad is not None:
                    kept = self.state[param].setdefault("kept", self.first(param))
                    kept.mul_(group["beta"]).add_(param.grad)
                    param.sub_(kept, alpha=float(rate))

    def chosen_rates(self):
        return [group["lr"] for group in self.param_groups]

    def first(self, param):
        return torch.zeros_like(param)


class Clipping(Own):
    """It clips all gradients together."""

    def step(self):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        super().step()


class Drawing(Own):
    """What it keeps begins with random numbers."""

    def first(self, param):
        return torch.randn_like(param)


class Counting(Own):
    """It has its rates beside its groups."""

    def chosen_rates(self):
        return self.rates


class Adding(Own):
    """It adds one number up for all parameters."""

    def chosen_rates(self):
        total = torch.zeros(())
        for group in self.param_groups:
            for param in group["params"]:
                total.add_(param.grad.square().sum())
        return [0.1 / (1 + total.item()) for _ in self.param_groups]


def learned(config, kind):
    """Return losses, or what is refused of the first step."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    before = [param.detach().clone() for param in network.parameters()]
    update = runtime.optimizer(kind(network.parameters()))
    torch.manual_seed(3)
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    parts = [[tensor.chunk(count)[share] for tensor in batch] for batch in batches("mlp")]
    try:
        return [
            runtime.step(network, update, functional.cross_entropy, *part).item() for part in parts
        ]
    except UsageError as error:
        same = map(torch.equal, before, network.parameters())
        return error.message.partition(",")[0], all(same)


BY_OTHERS = "{} updates parameters by others"
IN_GROUPS = "{} updates parameters by others of their group"
OF_SHARDS = (
    "{} cannot update sharded parameters: it needs an operation of plain and sharded tensors "
    "together"
)


@pytest.mark.parametrize(
    ("config", "kind", "sentence"),
    [
        (STAGES, Clipping, BY_OTHERS),
        (STAGES, Drawing, BY_OTHERS),
        (STAGES, Adding, BY_OTHERS),
        (MIXED, Drawing, IN_GROUPS),
        (MIXED, Counting, IN_GROUPS),
        (zero(1), Adding, OF_SHARDS),
    ],
)
def test_what_needs_the_parameters_of_others_is_refused(config, kind, sentence):
    for message, is_unchanged in run_warm(learned, 2, config, kind):
        assert message == sentence.format(kind.__name__)
        assert is_unchanged


@pytest.mark.parametrize(
    ("config", "kind"),
    [(STAGES, Own), (STAGES, Counting), (MIXED, Own), (zero(1), Clipping)],
)
def test_others_learn_what_they_learn_in_one_process(config, kind):
    expected = run_warm(learned, 1, {}, kind)[0]

    assert_equal_curves(run_warm(learned, 2, config, kind), expected)
